"""Flags of vLLM that Tandem has no setting for: those that change nothing here, and those that are refused by name.

Command lines, --config files, engine_kwargs and keyword arguments of `LLM` that were written for vLLM may have them.
Read by load.py. What could change an answer, or hides a wish that is not met, is refused; the rest is accepted, and one
line at the start says why it has no effect.
"""

from collections.abc import Mapping, Set
from typing import Any, Final

from tandem.configs.errors import SettingsError

_GRAPHS = "steps are recorded and replayed where the device can, with the same results"
_RAY = "ranks are always Ray actors, placed by Ray"
_CHUNKS = "prompts are always computed in chunks, beside running requests; --max-num-batched-tokens bounds a step"
_LOGS = "what goes to the log, --log-level says; prompts and answers never do"
_TEXT_ONLY = "models read text only; a request with an image is refused"
_KERNELS = "kernels are chosen by what the device has (`tandem doctor`)"
_LOADING = "weights are read from safetensors files, each rank its part, all at the same time"
_GRAMMARS = "all forms of structured output have one backend, llguidance"
_OLD = "vLLM itself has dropped it"
_METRICS = "there are no metrics beside those of docs/operations.md"
_ADAPTERS = "an adapter takes pages of memory for its own rank and type"
_TUNING = "it tunes a mechanism of vLLM's engine"
_TASKS = "every model generates and embeds"

FOREIGN: Final[Mapping[str, str]] = {
    "max_seq_len_to_capture": _GRAPHS,
    "compilation_config": _GRAPHS,
    "optimization_level": _GRAPHS,
    "cuda_graph_sizes": _GRAPHS,
    "cudagraph_capture_sizes": _GRAPHS,
    "max_cudagraph_capture_size": _GRAPHS,
    "enable_chunked_prefill": _CHUNKS,
    "max_num_partial_prefills": _CHUNKS,
    "max_long_partial_prefills": _CHUNKS,
    "long_prefill_token_threshold": _CHUNKS,
    "disable_chunked_mm_input": _CHUNKS,
    "scheduler_delay_factor": _CHUNKS,
    "disable_log_stats": _LOGS,
    "disable_log_requests": _LOGS,
    "enable_log_requests": _LOGS,
    "enable_log_deltas": _LOGS,
    "max_log_len": _LOGS,
    "log_error_stack": _LOGS,
    "uvicorn_log_level": _LOGS,
    "disable_uvicorn_access_log": _LOGS,
    "disable_access_log_for_endpoints": _LOGS,
    "aggregate_engine_logging": _LOGS,
    "enable_logging_iteration_details": _LOGS,
    "swap_space": "a sequence that loses its blocks is computed again, or copied to --kv-offloading-size",
    "preemption_mode": "a sequence that loses its blocks is computed again, or copied to --kv-offloading-size",
    "distributed_executor_backend": _RAY,
    "data_parallel_backend": _RAY,
    "worker_use_ray": _RAY,
    "engine_use_ray": _RAY,
    "max_parallel_loading_workers": _LOADING,
    "use_tqdm_on_load": _LOADING,
    "model_loader_extra_config": _LOADING,
    "safetensors_load_strategy": _LOADING,
    "ignore_patterns": _LOADING,
    "pt_load_map_location": _LOADING,
    "disable_custom_all_reduce": _KERNELS,
    "attention_backend": _KERNELS,
    "attention_config": _KERNELS,
    "kernel_config": _KERNELS,
    "moe_backend": _KERNELS,
    "linear_backend": _KERNELS,
    "all2all_backend": _KERNELS,
    "disable_cascade_attn": _KERNELS,
    "enable_dbo": _KERNELS,
    "enable_eplb": "experts stay on the ranks that hold them",
    "scheduling_policy": "the priority of a request always counts, then fairness between tenants, then who came first",
    "async_scheduling": "two steps are always in flight",
    "stream_interval": "tokens are streamed as they come",
    "tokenizer_mode": "tokenizer.json is read, in Rust",
    "tokenizer_pool_size": "each gateway has threads for text; --api-server-count makes more gateways",
    "tokenizer_pool_type": "each gateway has threads for text; --api-server-count makes more gateways",
    "renderer_num_workers": "each gateway has threads for text; --api-server-count makes more gateways",
    "disable_frontend_multiprocessing": "gateways and groups are always processes of their own",
    "config_format": "config.json is read",
    "model_impl": "a family is a row of data for one decoder, equal to transformers",
    "code_revision": "Python files of a model are never run",
    "guided_decoding_backend": _GRAMMARS,
    "guided_decoding_disable_fallback": _GRAMMARS,
    "guided_decoding_disable_any_whitespace": _GRAMMARS,
    "guided_decoding_disable_additional_properties": _GRAMMARS,
    "prefix_caching_hash_algo": "blocks are found by a hash of their own",
    "kv_offloading_backend": "--kv-offloading-size has one backend, the host-tier process",
    "kv_sharing_fast_prefill": _TUNING,
    "calculate_kv_scales": "a quantized KV cache has a scale per token and head, made when it is written",
    "decode_context_parallel_size": "the context of a sequence is on one rank of each stage",
    "prefill_context_parallel_size": "the context of a sequence is on one rank of each stage",
    "use_v2_block_manager": _OLD,
    "num_scheduler_steps": _OLD,
    "multi_step_stream_outputs": _OLD,
    "disable_async_output_proc": _OLD,
    "num_lookahead_slots": _OLD,
    "lora_extra_vocab_size": "an adapter that brings tokens of its own is refused when it is loaded",
    "lora_dtype": _ADAPTERS,
    "fully_sharded_loras": _ADAPTERS,
    "specialize_active_lora": _ADAPTERS,
    "limit_mm_per_prompt": _TEXT_ONLY,
    "mm_processor_kwargs": _TEXT_ONLY,
    "mm_processor_cache_gb": _TEXT_ONLY,
    "mm_processor_cache_type": _TEXT_ONLY,
    "mm_encoder_tp_mode": _TEXT_ONLY,
    "disable_mm_preprocessor_cache": _TEXT_ONLY,
    "skip_mm_profiling": _TEXT_ONLY,
    "media_io_kwargs": _TEXT_ONLY,
    "allowed_local_media_path": _TEXT_ONLY,
    "allowed_media_domains": _TEXT_ONLY,
    "interleave_mm_strings": _TEXT_ONLY,
    "language_model_only": _TEXT_ONLY,
    "enable_prompt_tokens_details": "usage always has them",
    "enable_server_load_tracking": "/load always has it",
    "enable_request_id_headers": "every answer has x-request-id",
    "enable_tokenizer_info_endpoint": "/tokenizer_info is always there",
    "h11_max_incomplete_event_size": "the gateway has bounds of its own on headers and bodies",
    "h11_max_header_count": "the gateway has bounds of its own on headers and bodies",
    "chat_template_content_format": "messages are given to a template in the form that it reads",
    "response_role": "answers are the assistant's",
    "logprobs_mode": "logprobs are those of the model, before sampling parameters",
    "show_hidden_metrics_for_version": _METRICS,
    "kv_cache_metrics": _METRICS,
    "cudagraph_metrics": _METRICS,
    "enable_mfu_metrics": _METRICS,
    "runner": _TASKS,
    "convert": _TASKS,
    "task": _TASKS,
    "fail_on_environ_validation": "no variable of vLLM is read",
}
"""Flags without an effect, with underscores, and why. A value that is none of NEUTRAL is refused."""

SWITCHES: Final[Set[str]] = frozenset({
    "enable_chunked_prefill", "disable_chunked_mm_input", "disable_log_stats", "disable_log_requests",
    "enable_log_requests", "enable_log_deltas", "log_error_stack", "disable_uvicorn_access_log",
    "aggregate_engine_logging", "enable_logging_iteration_details", "worker_use_ray", "engine_use_ray",
    "use_tqdm_on_load", "disable_custom_all_reduce", "disable_cascade_attn", "enable_dbo", "enable_eplb",
    "async_scheduling", "disable_frontend_multiprocessing", "guided_decoding_disable_fallback",
    "guided_decoding_disable_any_whitespace", "guided_decoding_disable_additional_properties",
    "kv_sharing_fast_prefill", "calculate_kv_scales", "use_v2_block_manager", "multi_step_stream_outputs",
    "disable_async_output_proc", "fully_sharded_loras", "specialize_active_lora", "disable_mm_preprocessor_cache",
    "skip_mm_profiling", "interleave_mm_strings", "language_model_only", "enable_prompt_tokens_details",
    "enable_server_load_tracking", "enable_request_id_headers", "enable_tokenizer_info_endpoint", "kv_cache_metrics",
    "cudagraph_metrics", "enable_mfu_metrics", "fail_on_environ_validation", "enable_sleep_mode",
    "enable_prompt_embeds", "disable_sliding_window", "skip_tokenizer_init",
    "return_tokens_as_token_ids", "exclude_tools_when_tool_choice_none", "enable_force_include_usage",
    "enable_log_outputs", "enable_lora_bias", "allow_credentials", "disable_fastapi_docs", "enable_ssl_refresh",
    "headless",
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
    "hf_token": "set HF_TOKEN in the environment instead: every user sees flags, in `ps`",
    "download_dir": "set HF_HUB_CACHE to that folder in the environment instead, or give MODEL as a folder",
    "root_path": "let the proxy in front take the path away; routes begin with /",
    "otlp_traces_endpoint": _NOT_THERE,
    "collect_detailed_traces": _NOT_THERE,
    "kv_transfer_config": _NOT_THERE,
    "kv_events_config": _NOT_THERE,
    "ec_transfer_config": _NOT_THERE,
    "enable_sleep_mode": _NOT_THERE,
    "enable_prompt_embeds": _NOT_THERE,
    "enable_lora_bias": _NOT_THERE,
    "default_mm_loras": _NOT_THERE,
    "rope_scaling": """give --hf-overrides '{"rope_scaling": {...}}' instead""",
    "rope_theta": """give --hf-overrides '{"rope_theta": ...}' instead""",
    "override_pooler_config": "its name is --pooler-config",
    "disable_sliding_window": "give --max-model-len instead, at most the window",
    "tokenizer_revision": "give --tokenizer the folder of that revision instead",
    "hf_config_path": "give --hf-overrides instead",
    "skip_tokenizer_init": "a gateway needs the tokenizer; a request may send token ids all the same",
    "default_chat_template_kwargs": "requests send chat_template_kwargs; or give --chat-template",
    "return_tokens_as_token_ids": "requests send return_token_ids",
    "exclude_tools_when_tool_choice_none": "leave the tools out of such requests",
    "enable_force_include_usage": "requests send stream_options.include_usage",
    "enable_log_outputs": "prompts and answers are never logged",
    "log_config_file": "give --log-level and --log-dir instead",
    "tool_parser_plugin": _NO_CODE,
    "reasoning_parser_plugin": _NO_CODE,
    "logits_processors": _NO_CODE,
    "logits_processor_pattern": _NO_CODE,
    "middleware": _NO_CODE,
    "worker_cls": _NO_CODE,
    "worker_extension_cls": _NO_CODE,
    "tool_server": "no tool is run by the service",
    "uds": "give --host 127.0.0.1 and --port instead",
    "allow_credentials": "web pages send keys in a header, never in cookies",
    "disable_fastapi_docs": "/openapi.json is always there; a proxy in front may hide it",
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
    underscores or dashes, in one of the tables. SettingsError for one that is refused, and for a value that is not
    neutral."""
    name = name.replace("-", "_")
    flag = f"--{name.replace('_', '-')}"
    if value is None or (name in REFUSED and value in (False, "", [], {}, ())):
        return None
    if name in REFUSED:
        raise SettingsError(f"vLLM's flag is not one of Tandem's: {REFUSED[name]}", flag)
    if name in NEUTRAL and str(value).lower() not in NEUTRAL[name]:
        raise SettingsError(f"{value!r} is not supported, only {' or '.join(NEUTRAL[name])}: {FOREIGN[name]}", flag)
    return f"{flag} has no effect: {FOREIGN[name]}"
