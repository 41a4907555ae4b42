"""The vocabulary is frozen: a field that is renamed or gone needs a new SCHEMA_VERSION, a new one needs a line here."""

from __future__ import annotations

import typing

from gradcheck_dist import events

REDUCED = (
    "seq t_ns step site mean_weight num_factors reduced_by compares num_reduced num_rows reduced_weight num_elements "
    "element_min element_max element_share num_rows_used whole hooks_factor hooks_site "
    "divided_by"
)
FROZEN = {
    "loss": (
        "loss_id term coefficient op reduction num_tokens num_labels label_hash value requires_grad dtype "
        "num_weighted_tokens inputs_hash targets_hash called_from seq t_ns step site"
    ),
    "loss_gradient": (
        "loss_id accumulation_step microbatch weight weight_min weight_max num_tokens stage other_losses computed "
        "label_share multipliers divisors sum_before num_samples sample_weight sample_spread shortest_sample "
        f"longest_sample beside_weights num_kept batch_of_one of_means part_of class_scale logits num_picked numbers "
        f"{REDUCED}"
    ),
    "backward": (
        "accumulation_step microbatch stage sync params duration_ns returned first_of_forward onto_itself inputs_hash "
        "unsynced seq t_ns step site"
    ),
    "stage_gradient": "accumulation_step microbatch side shape dtype values stage forward seq t_ns step site",
    "exchange": (
        "function group index accumulation_step microbatch input_counts output_counts values dtype collectives lost "
        "defined_at params put_back stopped operation of_leaf shifted seq t_ns step site"
    ),
    "attention_backward": (
        "function group index accumulation_step microbatch values counts dtype defined_at seq t_ns step site"
    ),
    "root_value": "accumulation_step microbatch value seq t_ns step site",
    "added_by_function": "accumulation_step microbatch params values seq t_ns step site",
    "tokens": "accumulation_step microbatch values loss_id seq t_ns step site",
    "handed_on": "accumulation_step microbatch multiple passes seq t_ns step site",
    "loss_backward": "function accumulation_step microbatch values dtype defined_at group seq t_ns step site",
    "head_backward": "function accumulation_step microbatch values dtype defined_at params seq t_ns step site",
    "loss_term": f"accumulation_step microbatch ordinal op weight stage attached {REDUCED}",
    "reduce": (
        "impl op group params wrapper accumulation_step microbatch pre_divide post_divide premul hook "
        "replicate_group replicate_op all_reduced root dtype scheduled channel seq t_ns step site"
    ),
    "scale_grads": "divisor params stage accumulation_step seq t_ns step site",
    "grad_write": "params factor op seq t_ns step site",
    "zero_grad": "params set_to_none seq t_ns step site",
    "amp_scale": "scale seq t_ns step site",
    "amp_unscale": "scale params found_inf kept in_step seq t_ns step site",
    "clip": "params max_norm norm_type total_norm coefficient partial norm_dtype repeated used_up seq t_ns step site",
    "clip_value": "params clip_value seq t_ns step site",
    "gradient_norm": "params seq t_ns step site",
    "optimizer_step": (
        "optimizer params lr hyperparameters grads_missing groups unreached inside numbers called repeated "
        "seq t_ns step site"
    ),
    "pipeline_step": (
        "schedule num_microbatches scale_grads group stages num_stages accumulation_step seq t_ns step site"
    ),
    "gradient_check": (
        "module module_type target name outcome shape observed numerical error factor precision group reason "
        "call num_calls function defined_at called_at hands_on at_its_word meant seq t_ns step site"
    ),
    "not_checked": "module what name reason seq t_ns step site",
    "recompute": "params seq t_ns step site",
    "replaced_parameters": "params seq t_ns step site",
    "broken_tie": "params in_one_memory seq t_ns step site",
    "stale_parameters": "params num_changed node in_autocast of_copies unmoved seq t_ns step site",
    "left_unreduced": "params over_shards seq t_ns step site",
    "metric": "name value seq t_ns step site",
    "step_end": "duration_s probe_s num_events num_rows num_norms num_passes num_before seq t_ns step site",
    "param_update": "params counts values seq t_ns step site",
    "replica": "fingerprint after num_steps_later exchanged params counts values seq t_ns step site",
    "probe_status": "probe active reason seq t_ns step site",
    "probe_error": "probe message count seq t_ns step site",
    "unrecorded": "num_passes first_step num_steps seq t_ns step site",
    "run_end": "reason seq t_ns step site",
    "header": (
        "schema_version tool_version rank world_size pid started_unix_s torch_version device_type command "
        "objective axes sample_size columns agent_pid same_data"
    ),
    "param": (
        "id name shape dtype num_positions stage placements wrapper requires_grad fingerprint sampled_every start "
        "looked_up partitioned expert"
    ),
    "param_set": "id params",
    "param_values": "params counts values after exchanges exchanged_with",
    "plan": "id param num_values positions partial partial_over partial_mean offset extent",
    "wrapper": "id impl name group shard_group replicate_group site",
    "named_group": "name group",
    "samples": "step rows dtype values",
    "norms": "step seq rows values",
    "step_shape": "id events",
    "step_columns": "shape first_step num_steps first_seqs numbers",
}


def vocabulary() -> dict[str, str]:
    kinds = typing.get_args(events.AnyRecord)
    return {str(kind.__struct_config__.tag): " ".join(kind.__struct_fields__) for kind in kinds}


def test_the_version_is_the_one_that_is_frozen_here() -> None:
    assert events.SCHEMA_VERSION == 1


def test_no_event_lost_or_renamed_a_field() -> None:
    now = vocabulary()
    for kind, fields in FROZEN.items():
        assert kind in now
        assert set(fields.split()) <= set(now[kind].split()), kind


def test_every_field_is_written_down_here() -> None:
    assert vocabulary() == FROZEN
