"""What to do now, in one sentence."""

from __future__ import annotations

from gradcheck_dist.diagnosis.audits.exchanges import VERIFY
from gradcheck_dist.diagnosis.audits.unequal_losses import ONE_LOSS, ONE_WEIGHT
from gradcheck_dist.diagnosis.audits.verified import SUMMAND
from gradcheck_dist.diagnosis.audits.vocabulary import NO_DISTRIBUTION
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.diagnosis.losses.elements import DECLARE
from gradcheck_dist.diagnosis.losses.marked import ASIDE, ON_THE_WAY
from gradcheck_dist.diagnosis.losses.terms_apart import NO_COUNT_TELLS
from gradcheck_dist.diagnosis.open_cases.own_parameters import ONE_SEED
from gradcheck_dist.diagnosis.open_cases.stepped_again import AGAIN
from gradcheck_dist.diagnosis.steps.changed_in import LINES
from gradcheck_dist.diagnosis.steps.hand_clip import AS_EVER
from gradcheck_dist.diagnosis.steps.lone import ALONE
from gradcheck_dist.diagnosis.steps.never_read import NEVER_READ
from gradcheck_dist.diagnosis.steps.open_steps import FEW_SAMPLES, NOT_FINITE, PARTS, UNCOUNTED, UNREADABLE
from gradcheck_dist.diagnosis.steps.thrown_away import OR_LOST
from gradcheck_dist.diagnosis.steps.unfollowed import NOT_ATTACHED
from gradcheck_dist.diagnosis.steps.waiting import SELDOM
from gradcheck_dist.diagnosis.weights.cells import TOO_FEW
from gradcheck_dist.diagnosis.words import OF_THE_DATA
from gradcheck_dist.ledger.transit import OF_OTHERS, SOME_ALONE
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
SAYS = {
    NOT_EMPTIED: "Call optimizer.zero_grad() after every scaler.step(), also where it skips the step.",
    ALL_SKIPPED: "Record later steps, when the loss scale has come down: --steps 10:13 records these three.",
    FORBIDDEN: "Make the traces readable (chmod a+rX), or judge the run as the user who recorded it.",
    UNREADABLE: "Copy that file again from where it was recorded, or record again; under coverage stands what is wrong "
    "with it.",
    "the trace of rank": BRING,
    "whose trace is missing": BRING,
    "what it reads is not known": "Make the optimizer's tensors from the model's parameters after their values are "
    "final, and record again.",
    ONE_LOSS: "Compute the loss of one batch on one process, and on these ranks: all numbers are to be the same.",
    ONE_WEIGHT: "Multiply and divide the loss by the same numbers on all ranks of one model.",
    NO_DISTRIBUTION: "Compute the loss of one batch from whole logits, by F.cross_entropy, and by this function on "
    "these ranks: numbers and gradients are to be the same. The maximum has to be all-reduced with MAX, the sum of "
    "exponentials with SUM.",
    OF_OTHERS: "Look at the order in which microbatches, or several tensors of one, are sent back, and to which output "
    "each gradient is given.",
    SOME_ALONE: "Give all of these gradients to backward, each with its output; hand on what is to be a constant "
    "without requires_grad.",
    NO_COUNT_TELLS: "Nothing to do where these passes are meant to weigh the term apart (a source or a task each); "
    "else multiply it by one coefficient on all ranks and in all passes. gradcheck_dist.mark_loss(..., term=, "
    "coefficient=) on the term tells what is meant.",
    ALONE: "Nothing to do where that is meant; else build the same parameters on all of these ranks, and reduce each "
    "over all of them, with zeros where a rank has no gradient.",
    NEVER_READ: "Give these parameters to an optimizer, or freeze them (requires_grad_(False)); where theirs steps "
    "less often, record until it does: --steps 0:9 records nine steps.",
    SELDOM: "Look whether these gradients are divided by the number of their passes; recorded once with all optimizers "
    "stepping together, all is judged.",
    AS_EVER: "Compare the number that these lines divide by in this step with the tokens of all its passes and ranks.",
    LINES: "Look whether what these lines do is meant; recorded once without them, all the rest is judged.",
    AGAIN: "Step each optimizer once after the passes whose gradients it reads, and record again.",
    NOT_FINITE: "Look what makes these gradients infinite (a division by a count that is zero, an overflow), and "
    "record steps in which they are finite.",
    DECLARE: "Declare what is meant: `gradcheck diagnose RUN --objective NAME` judges the same records, NAME being "
    "microbatch-mean, rank-token-mean, sequence-mean or global-token-mean.",
    "or these passes are lost": "Nothing to do where these passes evaluate the step's batch once more; else call "
    "zero_grad() once a step, behind optimizer.step() or before the first pass.",
    OR_LOST: "Nothing to do where these gradients are meant for something else (torch.autograd.grad leaves .grad "
    "alone, and then all is judged); else call zero_grad() once a step, behind optimizer.step() or before its passes.",
    "averages of parameters": "Nothing to do where parameters are meant to be averaged; else reduce gradients.",
    NOT_ATTACHED: "Assign what was reduced before the optimizer steps (param.grad = ...), also on ranks whose batch "
    "did not reach the parameter.",
    SUMMAND: "Where these are copies, add after the sum over the ranks what every rank holds whole, or all-reduce its "
    "gradient; shards are to begin with values of their own.",
    VERIFY: "Run `gradcheck run --verify -- COMMAND`: it holds every module's backward against central differences.",
    ONE_SEED: "Draw experts from a seed of their own on each expert-parallel rank, and record again.",
    OF_THE_DATA: "Nothing to do where the loss is meant to be scaled so; recorded once with a division by the tokens "
    "of the step in its place, all the rest is judged.",
    PARTS: "Add up sums over the parts' tokens, and divide once, by the tokens of all; where parts are to weigh alike, "
    "`--objective sequence-mean` declares that.",
    UNCOUNTED: "Where the loss is computed in chunks, record once with a loss that goes backward through the whole "
    "model in one pass; else compare these parameters' gradients with those of one process.",
    ASIDE: f"Let backward go through what mark_loss returns: {ON_THE_WAY}.",
    "in an order that is not known": "Let that function give the ranks' parts one after the other, as all_gather and "
    "torch.cat do, and record again; or compare these parameters' gradients with those of one process.",
    FEW_SAMPLES: LARGER_SAMPLE,
    "and is damaged: ": "Copy that rank's trace again from where it was recorded, or record again.",
    "mark_loss": "Add mark_loss where the loss is computed and record again.",
}
"""By what stands in a reason, the first that does."""


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
    return "Record a whole optimizer step and judge again."
