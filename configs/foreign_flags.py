"""Flags of vLLM that Tandem has no setting for: those that change nothing here, and those that are refused by name.

Command lines, --config files, engine_kwargs and keyword arguments of `LLM` that were written for vLLM may have them.
Read by load.py. What could change an answer, or hides a wish that is not met, is refused; the rest is accepted, and one
line at the start says why it has no effect.
"""

import json
from collections.abc import Mapping, Set
from typing import Any, Final

import msgspec

from tandem.configs.environment import use_hub_token
from tandem.configs.errors import SettingsError

_STRUCTURED: Final = "structured_outputs_config"

_ALIKE: Final[Mapping[str, str]] = {
    "steps are recorded and replayed where the device can, with the same results": (
        "max_seq_len_to_capture compilation_config optimization_level cuda_graph_sizes "
        "cudagraph_capture_sizes max_cudagraph_capture_size"
    ),
    "prompts are always computed in chunks, beside running requests; --max-num-batched-tokens bounds a step": (
        "enable_chunked_prefill max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold "
        "disable_chunked_mm_input scheduler_delay_factor"
    ),
    "what goes to the log, the flags under Logs say; prompts and answers never do": (
        "disable_log_stats disable_log_requests enable_log_deltas max_log_len log_error_stack uvicorn_log_level "
        "aggregate_engine_logging enable_logging_iteration_details log_config_file"
    ),
    "a sequence that loses its blocks is computed again, or copied to --kv-offloading-size": (
        "swap_space preemption_mode"
    ),
    "ranks are always Ray actors, placed by Ray": (
        "distributed_executor_backend data_parallel_backend worker_use_ray engine_use_ray"
    ),
    "weights are read from safetensors files, each rank its part, all at the same time": (
        "max_parallel_loading_workers use_tqdm_on_load model_loader_extra_config safetensors_load_strategy "
        "ignore_patterns pt_load_map_location"
    ),
    "kernels are chosen by what the device has (`tandem doctor`)": (
        "disable_custom_all_reduce attention_backend attention_config kernel_config moe_backend linear_backend "
        "all2all_backend disable_cascade_attn enable_dbo ubatch_size dbo_decode_token_threshold "
        "dbo_prefill_token_threshold"
    ),
    "each gateway has threads for text; --api-server-count makes more gateways": (
        "tokenizer_pool_size tokenizer_pool_type renderer_num_workers"
    ),
    "all forms of structured output have one backend, llguidance": (
        "guided_decoding_backend guided_decoding_disable_fallback guided_decoding_disable_any_whitespace "
        "guided_decoding_disable_additional_properties structured_outputs_config.backend "
        "structured_outputs_config.disable_fallback structured_outputs_config.disable_any_whitespace "
        "structured_outputs_config.disable_additional_properties structured_outputs_config"
    ),
    "experts stay on the ranks that hold them": (
        "enable_eplb eplb_config num_redundant_experts eplb_window_size eplb_step_interval expert_placement_strategy"
    ),
    "the context of a sequence is on one rank of each stage": (
        "decode_context_parallel_size prefill_context_parallel_size dcp_kv_cache_interleave_size "
        "cp_kv_cache_interleave_size"
    ),
    "vLLM itself has dropped it": (
        "use_v2_block_manager num_scheduler_steps multi_step_stream_outputs disable_async_output_proc "
        "num_lookahead_slots"
    ),
    "an adapter takes pages of memory for its own rank and type": (
        "lora_dtype fully_sharded_loras specialize_active_lora"
    ),
    "models read text only; a request with an image is refused": (
        "limit_mm_per_prompt mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type mm_encoder_tp_mode "
        "disable_mm_preprocessor_cache skip_mm_profiling media_io_kwargs allowed_local_media_path "
        "allowed_media_domains interleave_mm_strings language_model_only enable_mm_embeds mm_encoder_attn_backend "
        "mm_shm_cache_max_object_size_mb video_pruning_rate enable_tower_connector_lora"
    ),
    "the gateway has bounds of its own on headers and bodies": ("h11_max_incomplete_event_size h11_max_header_count"),
    "models with a state space are refused": (
        "mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode gdn_prefill_backend"
    ),
    "pages of --allowed-origins may use every method and header": "allowed_methods allowed_headers",
    "there are no metrics beside those of docs/operations.md": (
        "show_hidden_metrics_for_version kv_cache_metrics cudagraph_metrics enable_mfu_metrics"
    ),
    "every model generates and embeds": "runner convert task",
}
"""Reasons that several flags have, and these flags."""

FOREIGN: Final[Mapping[str, str]] = {name: why for why, names in _ALIKE.items() for name in names.split()} | {
    "performance_mode": "it chooses among settings of vLLM; `--config latency` and `--config throughput` are Tandem's",
    "kv_sharing_fast_prefill": "it tunes a mechanism of vLLM's engine",
    "enable_reasoning": "--reasoning-parser alone sets thinking apart",
    "hf_token": "every user sees flags, in `ps`: set HF_TOKEN in the environment instead",
    "enable_offline_docs": "there is no page of documentation, only /openapi.json",
    "scheduling_policy": "the priority of a request always counts, then fairness between tenants, then who came first",
    "async_scheduling": "two steps are always in flight",
    "stream_interval": "tokens are streamed as they come",
    "tokenizer_mode": "tokenizer.json is read, in Rust",
    "disable_frontend_multiprocessing": "gateways and groups are always processes of their own",
    "config_format": "config.json is read",
    "model_impl": "a family is a row of data for one decoder, equal to transformers",
    "code_revision": "Python files of a model are never run",
    "prefix_caching_hash_algo": "blocks are found by a hash of their own",
    "kv_offloading_backend": "--kv-offloading-size has one backend, the host-tier process",
    "calculate_kv_scales": "a quantized KV cache has a scale per token and head, made when it is written",
    "lora_extra_vocab_size": "an adapter that brings tokens of its own is refused when it is loaded",
    "enable_prompt_tokens_details": "usage always has them",
    "enable_server_load_tracking": "/load always has it",
    "enable_request_id_headers": "every answer has x-request-id",
    "enable_tokenizer_info_endpoint": "/tokenizer_info is always there",
    "chat_template_content_format": "messages are given to a template in the form that it reads",
    "response_role": "answers are the assistant's",
    "logprobs_mode": "logprobs are those of the model, before sampling parameters",
    "fail_on_environ_validation": "no variable of vLLM is read",
    "collect_detailed_traces": "a trace always has the phases of a request, and the time of its steps on the device",
}
"""Flags without an effect, with underscores, and why. A value that is none of NEUTRAL is refused."""

SWITCHES: Final[Set[str]] = frozenset({
    "enable_chunked_prefill", "disable_chunked_mm_input", "disable_log_stats", "disable_log_requests",
    "enable_log_deltas", "log_error_stack", "aggregate_engine_logging", "enable_logging_iteration_details",
    "worker_use_ray", "engine_use_ray",
    "use_tqdm_on_load", "disable_custom_all_reduce", "disable_cascade_attn", "enable_dbo", "enable_eplb",
    "async_scheduling", "disable_frontend_multiprocessing", "guided_decoding_disable_fallback",
    "guided_decoding_disable_any_whitespace", "guided_decoding_disable_additional_properties",
    "kv_sharing_fast_prefill", "calculate_kv_scales", "use_v2_block_manager", "multi_step_stream_outputs",
    "disable_async_output_proc", "fully_sharded_loras", "specialize_active_lora", "disable_mm_preprocessor_cache",
    "skip_mm_profiling", "interleave_mm_strings", "language_model_only", "enable_prompt_tokens_details",
    "enable_server_load_tracking", "enable_request_id_headers", "enable_tokenizer_info_endpoint", "kv_cache_metrics",
    "cudagraph_metrics", "enable_mfu_metrics", "fail_on_environ_validation", "enable_sleep_mode",
    "enable_prompt_embeds", "disable_sliding_window", "skip_tokenizer_init",
    "return_tokens_as_token_ids", "exclude_tools_when_tool_choice_none", "enable_log_outputs", "enable_lora_bias",
    "allow_credentials", "enable_ssl_refresh", "headless", "enable_reasoning", "enable_offline_docs",
    "enable_mm_embeds", "enable_tower_connector_lora",
})  # fmt: skip
"""Flags without a value; `--no-NAME` is their opposite."""

NEUTRAL: Final[Mapping[str, tuple[str, ...]]] = {
    "tokenizer_mode": ("auto", "hf"),
    "config_format": ("auto", "hf"),
    "model_impl": ("auto", "vllm"),
    "distributed_executor_backend": ("ray", "mp", "uni"),
    "chat_template_content_format": ("auto",),
    "response_role": ("assistant",),
    "logprobs_mode": ("raw_logprobs",),
    "kv_offloading_backend": ("native",),
    "decode_context_parallel_size": ("1",),
    "prefill_context_parallel_size": ("1",),
    "runner": ("auto", "generate", "pooling"),
    "convert": ("auto", "none", "embed"),
    "task": ("auto", "generate", "embed", "embedding"),
}
"""The values that mean what happens here anyway."""

SAME_VALUES: Final[Mapping[str, Mapping[str, str]]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "load_format": {"auto": "safetensors"},
}
"""Values by setting of ours: vLLM's other words, and ours."""

_NO_CODE = "no code of others is loaded"
_BY_RAY = "groups and ranks are placed by Ray: `tandem serve --address` on one machine of the cluster is all"
_NOT_THERE = "Tandem does not have this"

REFUSED: Final[Mapping[str, str]] = {
    "download_dir": "set HF_HUB_CACHE to that folder in the environment instead, or give MODEL as a folder",
    "root_path": "let the proxy in front take the path away; routes begin with /",
    "kv_transfer_config": _NOT_THERE,
    "kv_events_config": "gateways alone are told of KV, over their own channel (--kv-events); there is no publisher",
    "ec_transfer_config": _NOT_THERE,
    "enable_sleep_mode": _NOT_THERE,
    "enable_prompt_embeds": _NOT_THERE,
    "enable_lora_bias": _NOT_THERE,
    "default_mm_loras": _NOT_THERE,
    "rope_scaling": """give --hf-overrides '{"rope_scaling": {...}}' instead""",
    "speculative_model": "give --speculative-config instead",
    "num_speculative_tokens": "give --speculative-config instead",
    "scheduler_cls": _NO_CODE,
    "lora_target_modules": "an adapter is applied to all modules that it names",
    "rope_theta": """give --hf-overrides '{"rope_theta": ...}' instead""",
    "override_pooler_config": "its name is --pooler-config",
    "disable_sliding_window": "give --max-model-len instead, at most the window",
    "hf_config_path": "give --hf-overrides instead",
    "skip_tokenizer_init": "a gateway needs the tokenizer; a request may send token ids all the same",
    "default_chat_template_kwargs": "requests send chat_template_kwargs; or give --chat-template",
    "return_tokens_as_token_ids": "requests send return_token_ids",
    "exclude_tools_when_tool_choice_none": "leave the tools out of such requests",
    "enable_log_outputs": "prompts and answers are never logged",
    "tool_parser_plugin": _NO_CODE,
    "structured_outputs_config.reasoning_parser_plugin": _NO_CODE,
    "structured_outputs_config.enable_in_reasoning": "thinking is free; a form holds what follows it",
    "reasoning_parser_plugin": _NO_CODE,
    "logits_processors": _NO_CODE,
    "logits_processor_pattern": _NO_CODE,
    "middleware": _NO_CODE,
    "worker_cls": _NO_CODE,
    "worker_extension_cls": _NO_CODE,
    "tool_server": "no tool is run by the service",
    "uds": "give --host 127.0.0.1 and --port instead",
    "allow_credentials": "web pages send keys in a header, never in cookies",
    "enable_ssl_refresh": "start the service anew for another certificate",
    "ssl_ciphers": "TLS has the ciphers of this machine's OpenSSL",
    "data_parallel_size_local": _BY_RAY,
    "data_parallel_address": _BY_RAY,
    "data_parallel_rpc_port": _BY_RAY,
    "data_parallel_start_rank": _BY_RAY,
    "data_parallel_rank": _BY_RAY,
    "headless": _BY_RAY,
    "nnodes": _BY_RAY,
    "node_rank": _BY_RAY,
    "master_addr": _BY_RAY,
    "master_port": _BY_RAY,
}
"""Flags that would change an answer, or ask for what is not there, and what to do instead. Messages never have their
values: some are secrets."""


def is_foreign(name: str) -> bool:
    """Returns whether a name, with dashes or underscores, is in one of the tables."""
    name = name.replace("-", "_")
    return name in FOREIGN or name in REFUSED


def check_foreign(name: str, value: Any) -> str | None:
    """Returns the line that says why a flag has no effect; None where the value is as good as none. name: with
    underscores or dashes, in one of the tables. A token of the hub is put where HF_TOKEN is read. SettingsError for one
    that is refused, and for a value that is not neutral."""
    head, dot, key = name.replace("-", "_").partition(".")
    name, flag = f"{head}{dot}{key}", f"--{head.replace('_', '-')}{dot}{key}"
    if value is None or (name in REFUSED and value in (False, "", [], {}, ())):
        return None
    if name in REFUSED:
        raise SettingsError(f"vLLM's flag is not one of Tandem's: {REFUSED[name]}", flag)
    if name in NEUTRAL and str(value).lower() not in NEUTRAL[name]:
        raise SettingsError(f"{value!r} is not supported, only {' or '.join(NEUTRAL[name])}: {FOREIGN[name]}", flag)
    if name == "hf_token":
        if not isinstance(value, str):  # true: the token of `hf auth login`, which counts anyway
            return None
        use_hub_token(value)
        return f"{flag} is taken, but {FOREIGN[name]}"
    return f"{flag} has no effect: {FOREIGN[name]}"


def unfolded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings with the keys of vLLM's structured_outputs_config as settings of their own; reasoning_parser is
    Tandem's too. SettingsError for what is no object, and for another --reasoning-parser beside it."""
    kept = dict(values)
    for name in [name for name in values if name.replace("-", "_") == _STRUCTURED]:
        given = kept.pop(name)
        try:
            found = msgspec.convert(json.loads(given) if isinstance(given, str) else given or {}, dict[str, Any])
        except (ValueError, msgspec.ValidationError) as error:
            raise SettingsError(f"{given!r} is no JSON object", f"--{_STRUCTURED.replace('_', '-')}") from error
        if parser := found.pop("reasoning_parser", None):
            for own in [kept.pop(own) for own in values if own.replace("-", "_") == "reasoning_parser"]:
                if own not in (parser, None):
                    raise SettingsError(f"{own!r}, and {parser!r} in --structured-outputs-config", "--reasoning-parser")
            kept["reasoning_parser"] = parser
        kept |= {f"{_STRUCTURED}.{key}": value for key, value in found.items()}
    return kept
