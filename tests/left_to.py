"""Tests that `make test` leaves to `make parity` and `make chaos`: each is a variant of one that stays, or shows with a
service what tests without one show too, and takes long for it. What tests cost: docs/decisions/048-what-tests-cost.md.

A name is the beginning of a test's id, without `tests/`.
"""

from typing import Final

PARITY: Final[tuple[str, ...]] = (
    "distributed/test_kv_tiers.py::test_offload_on_gives_the_tokens_of_offload_off[bloom]",
    "distributed/test_kv_tiers.py::test_offload_on_gives_the_tokens_of_offload_off[gpt2]",
    "distributed/test_kv_tiers.py::test_offload_on_gives_the_tokens_of_offload_off[llama-mqa-biased]",
    "distributed/test_kv_tiers.py::test_offload_on_gives_the_tokens_of_offload_off[mistral-window]",
    "distributed/test_kv_tiers.py::test_offload_on_gives_the_tokens_of_offload_off[qwen2",
    "distributed/test_kv_tiers.py::test_offload_on_gives_the_tokens_of_offload_off[smollm3]",
    "distributed/test_local_executor.py::test_kv_01_fifty_growing_requests_on_32_blocks[tp2]",
    "distributed/test_local_executor.py::test_kv_01_fifty_growing_requests_on_32_blocks[tp2pp2]",
    "distributed/test_local_executor.py::test_tp_and_pp_equal_one_rank[tp2-",
    "distributed/test_lora_ranks.py::test_ranks_write_what_one_rank_writes[1-3]",
    "distributed/test_memory_faults.py::test_the_group_goes_on[pp2]",
    "distributed/test_memory_faults.py::test_the_group_goes_on[tp2]",
    "distributed/test_streamed_ranks.py::test_ranks_with_streamed_layers_give_the_text_of_a_resident_one[pp2]",
    "parity/test_beam_search.py::test_tokens_and_scores_are_those_of_transformers[one-2",
    "parity/test_beam_search.py::test_tokens_and_scores_are_those_of_transformers[one-5",
    "parity/test_beam_search.py::test_tokens_and_scores_are_those_of_transformers[two-2",
    "parity/test_embeddings.py::test_a_step_without_memory_is_taken_back[1-2",
    "parity/test_embeddings.py::test_a_step_without_memory_is_taken_back[2-1",
    "parity/test_embeddings.py::test_chunks_beside_rows_that_generate[1-1-False]",
    "parity/test_embeddings.py::test_chunks_beside_rows_that_generate[1-2-False]",
    "parity/test_embeddings.py::test_chunks_beside_rows_that_generate[2-1-False]",
    "parity/test_half_precision_text.py::test_tiny_checkpoints_write_what_transformers_writes[bloom-fp16]",
    "parity/test_half_precision_text.py::test_tiny_checkpoints_write_what_transformers_writes[gpt2-fp16]",
    "parity/test_half_precision_text.py::test_tiny_checkpoints_write_what_transformers_writes[llama",
    "parity/test_half_precision_text.py::test_tiny_checkpoints_write_what_transformers_writes[qwen3-untied-fp16]",
    "parity/test_half_precision_text.py::test_tiny_checkpoints_write_what_transformers_writes[smollm3-fp16]",
    "parity/test_kv_groups.py::test_texts_from_a_small_pool_are_those_of_transformers[all",
    "parity/test_lora_engine.py::test_rows_write_what_they_write_alone_merged[few at once]",
    "parity/test_lora_engine.py::test_rows_write_what_they_write_alone_merged[offload]",
    "parity/test_lora_engine.py::test_rows_write_what_they_write_alone_merged[preemption]",
    "parity/test_lora_engine.py::test_rows_write_what_they_write_alone_merged[room for all]",
    "parity/test_lora_logits.py::test_ranks_equal_one_rank[llama-gqa",
    "parity/test_prompt_logprobs.py::test_memory_that_runs_out_repeats_nothing[1-2-False]",
    "parity/test_prompt_logprobs.py::test_memory_that_runs_out_repeats_nothing[2-1-True]",
    "parity/test_speculation.py::test_a_stream_that_another_group_resumes[bfloat16]",
    "parity/test_speculation.py::test_drafts_are_accepted_and_refused[bfloat16]",
    "parity/test_speculation.py::test_drafts_are_accepted_and_refused[preemption]",
    "parity/test_speculation.py::test_drafts_are_accepted_and_refused[small chunks]",
    "parity/test_speculation.py::test_drafts_change_no_token[bfloat16]",
    "parity/test_speculation.py::test_drafts_change_no_token[preemption]",
    "parity/test_speculation.py::test_drafts_change_no_token[small chunks]",
    "parity/test_streamed_text.py::test_a_model_of_twice_the_device_writes_the_same_text[llama-gqa",
    "parity/test_structured_output.py::test_the_texts_are_those_of_an_undisturbed_engine[drafts]",
    "parity/test_structured_output.py::test_the_texts_are_those_of_an_undisturbed_engine[swap and drafts]",
    "unit/engine/test_engine_outputs.py::test_random_workloads_equal_the_oracle[async]",
    "unit/engine/test_engine_outputs.py::test_random_workloads_equal_the_oracle[pp2]",
    "unit/engine/test_fairness.py::test_tn_06_a_flood_leaves_the_other_tenant_its_first_tokens[pp4",
    "unit/engine/test_tiers_engine.py::test_random_workloads_equal_the_oracle[async]",
    "unit/engine/test_tiers_engine.py::test_random_workloads_equal_the_oracle[pp2]",
    "unit/graphs/test_cuda_graphs.py::test_replays_equal_eager_steps[adapters]",
    "unit/graphs/test_cuda_graphs.py::test_replays_equal_eager_steps[drafts]",
    "unit/graphs/test_cuda_graphs.py::test_replays_equal_eager_steps[late]",
    "unit/graphs/test_drafts_in_flight.py::test_replays_with_drafts_in_flight_equal_eager_steps[qwen3-2-samplings0]",
    "unit/graphs/test_replaying_ranks.py::test_replays_equal_eager_steps[adapters-grammar]",
    "unit/graphs/test_replaying_ranks.py::test_replays_equal_eager_steps[tp4]",
    "unit/kernels/test_triton_latents.py::test_in_the_interpreter",
    "unit/rank/test_out_of_memory_ranks.py::test_a_rank_that_runs_out_in_a_replayed_step_launches_it_on_padding[before",
    "unit/rank/test_out_of_memory_ranks.py::test_a_rank_that_runs_out_in_a_replayed_step_launches_it_on_padding[in the",
    "unit/rank/test_out_of_memory_ranks.py::test_any_rank_that_replays_may_run_out_at_any_operation",
    "unit/rank/test_out_of_memory_ranks.py::test_ranks_that_know_different_outcomes_choose_one_capture[prompt_ranks0]",
    "unit/rank/test_out_of_memory_ranks.py::test_ranks_that_replay_and_learn_late_stay_in_step[0]",
    "unit/rank/test_out_of_memory_ranks.py::test_ranks_that_replay_say_the_same[tp4",
    "unit/tools/test_gpu_run.py::test_all_stages_run_on_a_cpu",
    "unit/tuning/test_model_uses.py::test_in_the_interpreter",
)
CHAOS: Final[tuple[str, ...]] = (
    "integration/one_service/test_service.py::test_a_gateway_that_is_told_to_end_finishes_its_streams",
    "integration/one_service/test_service.py::test_a_group_that_is_told_to_end_hands_its_streams_over",
    "integration/one_service/test_service.py::test_a_rank_that_dies_while_nothing_runs_is_noticed",
    "integration/one_service/test_service.py::test_a_rank_that_freezes_while_nothing_runs_is_noticed",
    "integration/one_service/test_service.py::test_all_ranks_slowed_down_by_stops_shorter_than_the_bound_are_left_alone",
    "integration/test_adapters.py::test_a_group_that_is_replaced_serves_an_adapter_on_first_request",
    "integration/test_adapters.py::test_a_reload_under_running_streams",
    "integration/test_adapters.py::test_sixty_adapters_by_zipf_where_the_devices_have_room_for_four",
    "integration/test_failover_ranks.py::test_no_request_is_lost[seeded",
    "integration/test_failover_ranks.py::test_no_request_is_lost[structured output-last stage-decode]",
    "integration/test_failover_requests.py",
    "integration/test_frozen_group.py",
    "integration/test_packaging.py::test_offline_ranks_come_from_the_wheel",
)


def mark_of(nodeid: str) -> str | None:
    """The mark of a test that `make test` leaves out; None for all others."""
    name = nodeid.removeprefix("tests/")
    if name.startswith(PARITY):
        return "parity"
    return "chaos" if name.startswith(CHAOS) else None
