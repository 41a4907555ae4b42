"""Values of the CPU that probes are to believe on an accelerator: nobody may read them, and copies of them arrive late.

GRADCHECK_TEST_DEVICE=elsewhere does so in all tests (make test-elsewhere): what they find then is what is found on an
accelerator, as far as no kernel and no stream of its own takes part.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

OWN = "an optimizer of one's own that empties or writes by hand leaves nothing that may be read in time"
PLACES = "which gradients a buffer holds is found in the first step, and by its place in later ones"
LOSSES = "what such a loss counts is told by numbers that may not be waited for"
BATCHES = "what the first module is given is read on the host alone, and tells passes of one batch without labels"
LESS_IS_KNOWN = {
    "test_copies_that_come_one_by_one_are_found_where_the_last_one_ended[-1]": PLACES,
    "test_what_is_no_copy_is_compared_with_so_many_gradients_a_step": PLACES,
    "test_what_makes_up_for_it_is_named[warm up, counted-moves these alike on all ranks]": PLACES,
    "test_a_fault_is_one_finding_on_all_ranks[flat-summed_again-GS102-True]": "a second sum is known by what the "
    "first one gave (GS000 there)",
    "test_what_a_fused_function_divides_by_shows_in_its_gradient": LOSSES,
    "test_a_teacher_s_likeliest_classes_are_one_token_together[1.0-False]": LOSSES,
    "test_a_teacher_s_likeliest_classes_are_one_token_together[1.0-True]": LOSSES,
    "test_a_teacher_s_likeliest_classes_are_one_token_together[0.5-True]": LOSSES,
    "test_a_right_one_is_clean_and_trains_as_before[zero_by_hand]": OWN,
    "test_a_right_one_is_clean_and_trains_as_before[zero_through_data]": OWN,
    "test_what_divides_twice_is_found[zero_by_hand]": OWN,
    "test_gradients_are_held_no_longer_than_to_the_next_forward_pass[True]": OWN,
    "test_gradients_that_were_replaced_before_they_were_emptied_by_hand_are_what_was_read": OWN,
    "test_gradients_that_nobody_saw_before_they_were_emptied_are_told": OWN,
    "test_the_norm_that_a_clip_left_is_known_of_gradients_that_were_emptied": OWN,
    "test_the_last_step_of_a_run_ends_where_the_others_do": OWN,
    "test_one_beside_an_optimizer_of_torchs_that_never_steps_accuses_nobody[set_to_none]": OWN,
    "test_one_beside_an_optimizer_of_torchs_that_never_steps_accuses_nobody[zero_by_hand]": OWN,
    "test_an_update_by_hand_may_read_what_was_reduced_where_it_lies[buffer]": OWN,
    "test_an_update_by_hand_may_read_what_was_reduced_where_it_lies[grad]": OWN,
    "test_losses_of_parts_may_add_up[predicted]": BATCHES,
    "test_losses_of_parts_may_add_up[regressed]": BATCHES,
    "test_a_division_by_ranks_that_lacks_is_found_beside_them[predicted summed]": BATCHES,
    "test_a_division_by_ranks_that_lacks_is_found_beside_them[regressed summed]": BATCHES,
    "test_emptied_gradients_of_other_batches_are_lost[mse]": BATCHES,
    "test_emptied_gradients_of_other_batches_are_lost[by hand]": BATCHES,
    "test_emptied_gradients_of_other_batches_are_lost[the reverse]": BATCHES,
    "test_emptied_gradients_of_other_batches_are_lost[bce]": BATCHES,
    "test_emptied_gradients_of_other_batches_are_lost[distance]": BATCHES,
    "test_emptied_gradients_of_other_batches_are_lost[huber]": BATCHES,
    "test_steps_that_do_not_tell_make_no_warm_up_of_those_that_do[False]": BATCHES,
    "test_steps_that_do_not_tell_make_no_warm_up_of_those_that_do[True]": BATCHES,
    "test_targets_alone_tell_no_batch_that_was_evaluated_again[False]": BATCHES,
    "test_what_functions_of_data_compare_with_tells_the_batch[likelihood-False]": BATCHES,
    "test_what_functions_of_data_compare_with_tells_the_batch[angle-False]": BATCHES,
    "test_what_functions_of_data_compare_with_tells_the_batch[alignment-False]": BATCHES,
    "test_the_same_inputs_and_targets_are_told[ddp]": BATCHES,
    "test_the_same_inputs_and_targets_are_told[fsdp2]": BATCHES,
    "test_the_same_inputs_and_targets_are_told[by hand]": BATCHES,
    "test_right_ones_are_clean[parted]": BATCHES,
    "test_ranks_of_one_batch_are_known_without_labels": BATCHES,
    "test_a_loss_is_no_way_out_for_some_parameters": BATCHES,
    "test_what_owners_update_by_hand_and_broadcast_is_judged_by_their_gradients[-clean]": OWN,
    "test_what_owners_update_by_hand_and_broadcast_is_judged_by_their_gradients[summed-undetermined]": OWN,
    "test_what_was_read_is_known[1-found0]": OWN,
    "test_what_was_read_is_known[3-found1]": OWN,
    "test_what_is_written_is_told[a tensor]": LOSSES,
    "test_a_full_disk_stops_the_trace_and_not_the_training": "the last samples are on their way when the disk is full",
    "test_what_is_on_the_host_arrives_at_once": "nothing is on the host",
    "test_what_waits_to_be_made_is_not_lost_with_one_that_fails": "nothing is on the host",
}
"""Tests that fail there, by name, and why. Each has to: one that passes tells that more is known now."""


class Late:
    """An event of an accelerator, behind which one poll finds nothing yet."""

    def __init__(self) -> None:
        self._asked = 0

    def query(self) -> bool:
        self._asked += 1
        return self._asked > 1

    def synchronize(self) -> None:
        pass


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    replace(monkeypatch.setattr)


def is_number(value: Tensor) -> bool:
    """Whether a tensor is what autograd keeps of a number of Python's: that lies on the host wherever tensors lie."""
    return value.dim() == 0 and value.dtype in (torch.float64, torch.int64)


def replace(set_attribute: Callable[[Any, str, Any], None]) -> None:
    """Let all probes believe so."""
    importlib.import_module("gradcheck_dist.probes.all_probes")
    samples = importlib.import_module("gradcheck_dist.probes.recording.samples")
    for name, module in list(sys.modules.items()):
        if name.startswith("gradcheck_dist.probes") and hasattr(module, "is_host"):
            computes = name.endswith("label_functions")  # what it reads are numbers that it has computed there
            set_attribute(module, "is_host", (lambda _: False) if computes else is_number)

    def start(_: Any, tensor: Tensor) -> tuple[Any, Tensor]:
        return Late(), tensor.clone()

    set_attribute(samples.HostCopies, "start", start)


def run(target: str, args: tuple[Any, ...]) -> Any:
    """What a rank was to do."""
    replace(setattr)
    module, function = target.split(":")
    return getattr(importlib.import_module(module), function)(*args)
