"""The numerical gradient check of a distributed trainer: is what backward gives the derivative of what forward does?

capture.py     in training: the outermost module calls of one microbatch, and the gradients that arrive at their outputs
run.py         before the optimizer steps: replays them, checks module by module, writes the outcomes into the trace
replay.py      one replay of an outermost call, in which every module below shows its inputs and its output gradient
calls.py       which calls of which modules that was, also in checkpoints, and which of them are kept
modules.py     the kept calls from the innermost outwards; what was not checked, with its reason
twin.py        a module as a function of copies of its parameters, without data-parallel wrappers
preserve.py    random states, plain attributes and hooks are afterwards what they were before
check.py       one module: can it be evaluated alone, and in which dtype
function.py    a module call as a number: the inner product of its outputs with the gradients that arrived there
targets.py     what of a module is perturbed: parameters, inputs, the modules below
measure.py     central differences of that number against what autograd gives, over all ranks concerned
beside.py      what is wrong at a kink, looked at beside it
attached.py    losses that a function puts into backward, by the arguments that it was given
stops.py       what detach, no_grad and collectives without a gradient give, held fixed
functions.py   each torch.autograd.Function inside differentiated alone, and taken at its word
meant.py       what else would make a wrong gradient right: a remark and no accusation
tape.py        in training: the code between modules and backward, operation by operation
outside.py     that code as a function of the modules' outputs
boundaries.py  what leaves one pipeline stage's input against what arrives at the other's output
result.py      what was found
leaves.py      what training delivered at the parameters against the replay
difference.py  the arithmetic: steps, extrapolation, error estimate, judgement
exchange.py    numbers between ranks through the rendezvous store, with a time limit and no collective
gradients.py   backward of a replay, also through checkpoint functions
inner.py       the inner products that make a module a number
observe.py     which groups communicate inside, and in which precision
place.py       the line of the model that is being evaluated
pieces.py      tensors inside of arguments and results

The model's parameters are never changed: what is perturbed are copies.
"""
