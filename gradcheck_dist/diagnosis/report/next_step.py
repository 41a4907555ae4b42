"""What to do now, in one sentence."""

from __future__ import annotations

from gradcheck_dist.diagnosis.audits.exchanges import VERIFY
from gradcheck_dist.diagnosis.audits.unequal_losses import ONE_LOSS, ONE_WEIGHT
from gradcheck_dist.diagnosis.audits.verified import NOTHING_VERIFIED, SUMMAND
from gradcheck_dist.diagnosis.audits.vocabulary import NO_DISTRIBUTION
from gradcheck_dist.diagnosis.audits.whole_gradients import WHOLE_ON_EACH
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.diagnosis.losses.elements import DECLARE
from gradcheck_dist.diagnosis.losses.marked import ASIDE, ON_THE_WAY
from gradcheck_dist.diagnosis.losses.several_losses import AS_OFTEN
from gradcheck_dist.diagnosis.losses.summed_again import ADDED_AGAIN
from gradcheck_dist.diagnosis.losses.terms_apart import NO_COUNT_TELLS
from gradcheck_dist.diagnosis.open_cases.own_parameters import NO_SEED, OFF, ONE_SEED, UNSEEN
from gradcheck_dist.diagnosis.open_cases.parted_heads import PARTED
from gradcheck_dist.diagnosis.open_cases.stepped_again import AGAIN
from gradcheck_dist.diagnosis.open_cases.unread import OTHER_PARTS
from gradcheck_dist.diagnosis.open_cases.unsummed_ties import MAYBE_TIED
from gradcheck_dist.diagnosis.steps.alternatives import MADE_ANEW
from gradcheck_dist.diagnosis.steps.averaged_beside import AVERAGED
from gradcheck_dist.diagnosis.steps.changed_in import LINES
from gradcheck_dist.diagnosis.steps.computed_behind import NOT_THEIRS
from gradcheck_dist.diagnosis.steps.drift import DRIFTED, SET_APART
from gradcheck_dist.diagnosis.steps.earlier_gradients import PUT_THERE
from gradcheck_dist.diagnosis.steps.hand_clip import AS_EVER
from gradcheck_dist.diagnosis.steps.lone import ALONE
from gradcheck_dist.diagnosis.steps.never_read import ELSEWHERE, NEVER_READ
from gradcheck_dist.diagnosis.steps.open_steps import (
    BLIND,
    FEW_SAMPLES,
    NO_AUTOGRAD,
    NONE_ASKED_FOR,
    NOT_FINITE,
    OF_THEIR_OWN,
    PARTS,
    UNCOUNTED,
    UNMADE,
    UNREADABLE,
)
from gradcheck_dist.diagnosis.steps.thrown_away import LEFT_OVER, OR_LOST
from gradcheck_dist.diagnosis.steps.uncounted_beside import BESIDE
from gradcheck_dist.diagnosis.steps.unfollowed import NOT_ATTACHED
from gradcheck_dist.diagnosis.steps.waiting import SELDOM
from gradcheck_dist.diagnosis.weights.cells import COUNTED_AGAIN, TOO_FEW
from gradcheck_dist.diagnosis.words import OF_THE_DATA
from gradcheck_dist.events import TRAIN_AT_ONCE
from gradcheck_dist.ledger.transit import NO_GRADIENT, SOME_ALONE
from gradcheck_dist.trace.store import FORBIDDEN

ALL_SKIPPED = "no optimizer was called, and no gradient was used"
LARGER_SAMPLE = (
    "Take a larger sample: `gradcheck run --sample-size N`, or attach(sample_size=N); N of four times the ranks that a "
    "reduction goes over shows each of them."
)
NOT_EMPTIED = "nothing empties gradients where the GradScaler skips"
BRING = (
    "Ranks of another machine recorded into a folder there: copy its rank-*.trace files into this one, or give every "
    "machine the same --out on a shared file system. Otherwise record again."
)
NO_DISTRIBUTION_SAYS = (
    "Compute the loss of one batch from whole logits, by F.cross_entropy, and by this function on these ranks: numbers "
    "and gradients are to be the same. The maximum has to be all-reduced with MAX, the sum of exponentials with SUM."
)
RECORD_WHOLE = "Record a whole optimizer step and judge again."
ONCE_A_STEP = (
    "Nothing to do where these passes evaluate the step's batch once more; else call zero_grad() once a step, behind "
    "optimizer.step() or before the first pass."
)
SAYS = {
    MADE_ANEW: "Nothing to do where each rank is to train these models alone; else reduce their gradients, too. Steps "
    "of a model that is made of them are judged where they are recorded (--steps).",
    "behind the recorded steps": "Record these steps as well; where what was recorded is only a reference, these "
    "alone.",
    NOT_EMPTIED: "Call optimizer.zero_grad() after every scaler.step(), also where it skips the step.",
    ALL_SKIPPED: "Record later steps, when the loss scale has come down: --steps 10:13 records these three.",
    FORBIDDEN: "Make the traces readable (chmod a+rX), or judge the run as the user who recorded it.",
    UNREADABLE: "Copy that file again from where it was recorded, or record again; under coverage stands what is wrong "
    "with it.",
    "the trace of rank": BRING,
    "whose trace is missing": BRING,
    "what it reads is not known": "Make the optimizer's tensors from the model's parameters after their values are "
    "final, and record again.",
    COUNTED_AGAIN: "Leave it to the DTensor to add them up, without dist.all_reduce(grad.to_local()); or set "
    "param.grad to a DTensor of what was reduced that is Replicate() over these ranks.",
    ONE_LOSS: "Compute the loss of one batch on one process, and on these ranks: all numbers are to be the same.",
    ONE_WEIGHT: "Multiply and divide the loss by the same numbers on all ranks of one model.",
    NO_DISTRIBUTION: NO_DISTRIBUTION_SAYS,
    AS_OFTEN: "Call backward() once on each loss. Where one pass is only a look, ask torch.autograd.grad for its "
    "gradient, or empty .grad by zero_grad() behind it.",
    NO_GRADIENT: "Look at the order in which microbatches, or several tensors of one, are sent back, and to which "
    "output each gradient is given.",
    SOME_ALONE: "Give all of these gradients to backward, each with its output; hand on what is to be a constant "
    "without requires_grad.",
    NO_COUNT_TELLS: "Nothing to do where these passes are meant to weigh the term apart (a source or a task each); "
    "else multiply it by one coefficient on all ranks and in all passes. gradcheck_dist.mark_loss(..., term=, "
    "coefficient=) on the term tells what is meant.",
    TRAIN_AT_ONCE: "Train each model in a process of its own, or one after the other, and record again.",
    ALONE: "Nothing to do where that is meant; else build the same parameters on all of these ranks, and reduce each "
    "over all of them, with zeros where a rank has no gradient.",
    ELSEWHERE: "Nothing to do where ranks are meant to share parameters out; recorded on one rank too, which holds "
    "them whole, they are judged.",
    NEVER_READ: "Give these parameters to an optimizer, or freeze them (requires_grad_(False)); where theirs steps "
    "less often, record until it does: --steps 0:9 records nine steps.",
    SELDOM: "Where those passes train another model (a generator's, through its discriminator), empty these gradients "
    "before their own first pass. Where they are meant, look whether they are divided by the number of their passes; "
    "recorded once with all optimizers stepping together, all is judged.",
    AS_EVER: "Compare the number that these lines divide by in this step with the tokens of all its passes and ranks.",
    LINES: "Look whether what these lines do is meant; recorded once without them, all the rest is judged.",
    PUT_THERE: "Nothing to do where a line is meant to set .grad before backward (a penalty's gradient); else empty "
    "gradients after each optimizer step.",
    AGAIN: "Step each optimizer once after the passes whose gradients it reads, and record again.",
    NOT_FINITE: "Look what makes these gradients infinite (a division by a count that is zero, an overflow), and "
    "record steps in which they are finite.",
    DECLARE: "Declare what is meant: `gradcheck diagnose RUN --objective NAME` judges the same records, NAME being "
    "microbatch-mean, rank-token-mean, sequence-mean or global-token-mean.",
    ADDED_AGAIN: "Reduce each gradient once over these ranks: drop one of the two sums, and what makes up for it.",
    "or these passes are lost": ONCE_A_STEP,
    "or tokens are missing in the step": ONCE_A_STEP,
    SET_APART: "Nothing to do where each rank is to train a model of its own; else give all ranks' optimizers the same "
    "numbers.",
    OTHER_PARTS: "Empty the parts of .grad that other ranks step, and record again: then what each rank steps by is "
    "judged.",
    DRIFTED: "Record the steps that the reason names. Nothing to do where ranks are meant to train apart there.",
    LEFT_OVER: "Nothing to do where these passes belong to no step; recorded together with a step that begins behind "
    "none of them (--steps 0:3), all is judged. Else call zero_grad() once a step, behind optimizer.step() or before "
    "its passes.",
    BESIDE: "Nothing to do where these passes are meant to weigh so; else multiply their losses by one number on all "
    "ranks and in all passes. Recorded once without the losses that count tokens, they are judged alone.",
    OR_LOST: "Nothing to do where these gradients are meant for something else (torch.autograd.grad leaves .grad "
    "alone, and then all is judged); else call zero_grad() once a step, behind optimizer.step() or before its passes.",
    "averages of parameters": "Nothing to do where parameters are meant to be averaged; else reduce gradients.",
    NOT_ATTACHED: "Assign what was reduced before the optimizer steps (param.grad = ...), also on ranks whose batch "
    "did not reach the parameter.",
    SUMMAND: "Where these are copies, add after the sum over the ranks what every rank holds whole, or all-reduce its "
    "gradient; shards are to begin with values of their own.",
    VERIFY: "Run `gradcheck run --verify -- COMMAND`: it holds every module's backward against central differences.",
    NONE_ASKED_FOR: "Record steps that training reaches (--steps A:B, or attach(steps=range(A, B)); the first is 0).",
    BLIND: "Record from the first step on, or some of these steps alone (--steps): what put them out of sight "
    "(parameters that Module.to swapped, hooks that were removed) is not there yet, or behind. Functions that add to "
    "`.grad` by themselves are not followed: let them hand gradients to autograd.",
    NOTHING_VERIFIED: "The notes that begin with verify say why, module by module; where that cannot change, leave "
    "--verify out: all else is judged without it.",
    ONE_SEED: "Draw experts from a seed of their own on each expert-parallel rank, and record again.",
    OFF: "Divide the gradients of each rank's own by what they are off (all ranks send tokens there); reduce those of "
    "the others where they are copies.",
    NO_SEED: "Nothing to do where they belong to each rank's own expert or head; else reduce their gradients.",
    OF_THE_DATA: "Nothing to do where the loss is meant to be scaled so; recorded once with a division by the tokens "
    "of the step in its place, all the rest is judged.",
    UNSEEN: "Compare these parameters' gradients with those of one process on all ranks' batches; where they are too "
    "large, divide them by the number of ranks.",
    f"losses are the same: {NOT_THEIRS}": "Record once with a max_norm that no step reaches, or without the clip: all "
    "else is judged then.",
    PARTS: "Add up sums over the parts' tokens, and divide once, by the tokens of all; where parts are to weigh alike, "
    "`--objective sequence-mean` declares that.",
    UNCOUNTED: "Where the loss is computed in chunks, record once with a loss that goes backward through the whole "
    "model in one pass; else compare these parameters' gradients with those of one process.",
    ASIDE: f"Let backward go through what mark_loss returns: {ON_THE_WAY}.",
    WHOLE_ON_EACH: "Compare that gradient with one process's, of all ranks' parts; where it is right, leave it.",
    "in an order that is not known": "Let that function give the ranks' parts one after the other, as all_gather and "
    "torch.cat do, and record again; or compare these parameters' gradients with those of one process.",
    "as it updates parameters is not known": "Look whether the update divides by that number; recorded once with the "
    "division on the loss's line or on .grad in its place, all is judged.",
    UNMADE: "Record from the first step on (--steps 0:3). Gradients that are computed by hand, or by torch.func, are "
    "not judged: compare them once with those of loss.backward() on the same batch.",
    NO_AUTOGRAD: "Record from the first step on. Gradients that loss.backward() does not compute can be compared once "
    "with those that it does, on the same batch.",
    FEW_SAMPLES: LARGER_SAMPLE,
    MAYBE_TIED: "Where they are one tied matrix, sum their gradients over the stages that hold them; else draw them "
    "from seeds of their own, and record again.",
    PARTED: "Nothing to do where these are each rank's own part; else reduce their gradients as the others'.",
    OF_THEIR_OWN: "Nothing to do where each rank holds its own part of one model, and what comes back through "
    "activations is divided as is meant; else hold copies, and reduce their gradients.",
    "hold different models and share no gradient": "Nothing to do where ranks are to train models of their own, or "
    "hold parts of one; else broadcast it before the first step, and reduce gradients over all ranks.",
    "is empty (None or zeros) when the optimizer comes": "Nothing to do where these layers are to be frozen; else look "
    "what the lines behind that one do to their `.grad`.",
    "are not to count, that is meant": "Nothing to do where such ranks are not to count; else divide by all ranks.",
    "degree or count makes these numbers": "Nothing to do where these numbers are meant; else look for a hook "
    "(register_hook) on these parameters.",
    "than the clip's norm tells": "Record a step whose gradients are shorter than the clip's norm (--steps 100:103), "
    "or once with a larger norm.",
    "if it divides by this number as well": "Nothing to do where these lines divide by it, too; else divide by it in "
    "front of the clip, or multiply the norm that it clips to.",
    "are means over these ranks' own tokens": "Nothing to do where these are heads of a task each. Copies that were "
    "meant belong into the wrapped module before it is wrapped; else divide what they hold by the tokens of all ranks.",
    "set_gradient_divide_factor": "Call set_gradient_divide_factor with the number of all ranks on these modules.",
    "parts of one loss over one batch": "Nothing to do where each pass has a batch of its own; parts of one loss add "
    "up, so nothing may divide by their number.",
    "whether a batch was to be left out": "Nothing to do where that batch is to be left out; else look what multiplies "
    "its loss by zero.",
    "recorded without samples cannot be judged": "Sample some of these steps (--every N), or add mark_loss where a "
    "loss counts no tokens.",
    "clipped by hand by unlike coefficients": "Take the norm of whole gradients (full_tensor()), one on all ranks.",
    AVERAGED: "Average gradients in the place of values once (all_reduce on .grad, in front of the step) to have their "
    "weights judged.",
    "what it combines over ranks is not followed": "Compare the updates of one step with those of one process on the "
    "same batches: what is reduced inside of an optimizer's step is not seen.",
    "moved no parameter. Either": "Look what that optimizer divides by when it moves parameters; recorded with "
    "accumulation in .grad, all is judged.",
    "the negative of the loss is right": "Nothing to do where maximizing is meant and the factor is -1; else minimize "
    "the loss once to have its normalisation judged.",
    "changed inside of the backward pass": "Record once with an optimizer that steps behind backward.",
    "parameters change between backward passes": "Make no optimizer of torch.optim that the program does not step, and "
    "record again.",
    "labels are not those of the tokens": "Look how tokens and labels come together (a shift, a queue, a batch that "
    "was fetched ahead): both are to be of one pass.",
    "before any loss was seen there": "Record from a step on in which every rank has a batch (--steps N:M).",
    "masked as a whole": "Nothing to do where these sequences are meant to count; else divide by those that have a "
    "label.",
    "another multiple of exp(logit)": NO_DISTRIBUTION_SAYS,
    "none of those which left these": "Nothing to do where gradients are compressed on the way; else look what is sent "
    "and received between these stages.",
    "each should weigh is not known. `--objective sequence-mean`": "Divide by tokens, or judge with `--objective "
    "sequence-mean`.",
    "is a function of the data": "Where what multiplies is not to have a gradient, detach it and record again; else "
    "compare one step's gradients with those of one process.",
    "param.tensor_model_parallel = True": "Set `param.tensor_model_parallel = True` on each parameter that is a shard, "
    "and record again; all-reduce the gradients of those that are copies.",
    "one gradient two times": "Look whether that function runs its backward pass twice, or both accumulates and "
    "returns a gradient.",
    "start_localSGD_iter": "Record steps before it (--steps).",
    "emptied before anybody saw": "Leave gradients until the next forward pass, or empty them with zero_grad(), and "
    "record again.",
    "was replayed from a CUDA graph": "Record steps before the capture (--steps).",
    "where gradients are applied a step late": "Nothing to do where they are meant to be applied a step late; else let "
    "the last pass of a step reduce, too.",
    "follow no mean over its positions": "Nothing to do where these weights are meant; else multiply the term by one "
    "number everywhere, or make it a mean over the microbatch.",
    "whole frames are gone": "Copy that rank's trace again from where it was recorded; else record again, and let the "
    "run come to its end.",
    "and is damaged: ": "Copy that rank's trace again from where it was recorded, or record again.",
    "is no combination of the recorded contributions": "Look what makes these gradients besides backward and its "
    "reductions (noise, a running mean, what an earlier step left); recorded without that, or from the first step on, "
    "all is judged.",
    "and no record makes them so": "Print these gradients on each rank before the optimizer steps, and look for what "
    "changes them on some ranks alone.",
    "did not reach the optimizer": RECORD_WHOLE,
    "no backward pass was recorded": RECORD_WHOLE,
    "before the optimizer is not known": RECORD_WHOLE,
    "mark_loss": "Add mark_loss where the loss is computed and record again.",
}
"""By what stands in a reason, the first that does."""
OTHERWISE = "Nothing to do where what the reason names is meant; else change that, and record again."


def next_step(report: Report) -> str:
    if report.findings and report.verdict == "findings":
        return report.findings[0].fix
    if report.verdict == "clean":
        return "Nothing to fix."
    for words, step in SAYS.items():
        if any(words in reason for reason in report.reasons):
            return step
    if any(one.reason == TOO_FEW for one in report.coverage.unidentifiable):
        return LARGER_SAMPLE
    return OTHERWISE
