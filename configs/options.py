"""The one table of what can be set: each row is a command-line flag, a `--config` key and an `engine_kwargs` key.

Names are vLLM's where vLLM has the thing. A row says where its value lives in ServiceSettings, its type and its range,
so the command line, files and Ray Serve arguments are checked by the same lines. What is not here does not exist.
"""

import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from configs.schema import Device, DType, KVCacheDType

Check = Callable[[Any], bool]


class Option(NamedTuple):
    """One setting. `path` is the dotted place in ServiceSettings; `rule` is the words of `check`; `kind` its type."""

    name: str
    path: str
    kind: Any
    group: str
    help: str
    check: Check | None = None
    rule: str = ""
    aliases: tuple[str, ...] = ()
    size: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


class NotSizeError(ValueError):
    """A string that does not name a whole number with an optional k/m/g (decimal) or K/M/G (binary) suffix."""


def parse_size(text: str) -> int:
    """'4096', '32k' = 32000, '32K' or '32KiB' = 32768; likewise m, g, t and M, G, T."""
    number = text.strip().removesuffix("iB").removesuffix("B").removesuffix("b")
    factors = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    factor = factors.get(number[-1:], 1)
    digits = number[:-1] if number[-1:] in factors else number
    try:
        value = float(digits) * factor
        whole = int(value)
    except (ValueError, OverflowError) as error:  # "x", "nan"; "inf"
        raise NotSizeError(text) from error
    if value != whole:
        raise NotSizeError(text)
    return whole


def at_least(low: float) -> Check:
    return lambda value: bool(value >= low)


def _port(value: int) -> bool:
    return 1 <= value <= 65535


def _metric_name(value: str) -> bool:
    return re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", value) is not None


MODEL, PARALLEL, CACHE, STEP, LORA, HTTP, MACHINE, COORDINATION = (
    "Model",
    "Parallelism",
    "KV cache",
    "Scheduling",
    "Adapters",
    "HTTP",
    "Machine",
    "Coordination",
)

OPTIONS: tuple[Option, ...] = (
    Option("served_model_name", "engine.model.served_model_name", tuple[str, ...], MODEL,
           "Name(s) clients use for the model; repeat for more. Default: MODEL as given."),
    Option("tokenizer", "engine.model.tokenizer", str, MODEL, "Folder or hub id. Default: the model's."),
    Option("revision", "engine.model.revision", str, MODEL, "Branch, tag or commit of a hub model."),
    Option("dtype", "engine.model.dtype", DType, MODEL, "Type of weights and activations."),
    Option("max_model_len", "engine.model.max_model_len", int, MODEL,
           "Longest prompt + output in tokens. Default: the model's.", at_least(1), "at least 1", size=True),
    Option("load_format", "engine.model.load_format", Literal["safetensors", "dummy"], MODEL,
           "dummy: random weights, for measuring without a checkpoint."),
    Option("seed", "engine.model.seed", int, MODEL, "Seed of dummy weights.", at_least(0), "at least 0"),
    Option("chat_template", "engine.model.chat_template", str, MODEL,
           "A Jinja file. Default: the tokenizer's."),
    Option("trust_remote_code", "engine.model.trust_remote_code", bool, MODEL,
           "Accept a model folder that ships Python files (they are never run)."),
    Option("hf_overrides", "engine.model.hf_overrides", dict[str, Any], MODEL,
           "JSON object laid over the model's config.json."),
    Option("tensor_parallel_size", "engine.parallel.tensor_parallel_size", int, PARALLEL,
           "Ranks that share each layer.", at_least(1), "at least 1", ("-tp",)),
    Option("pipeline_parallel_size", "engine.parallel.pipeline_parallel_size", int, PARALLEL,
           "Stages that share the layers.", at_least(1), "at least 1", ("-pp",)),
    Option("data_parallel_size", "engine.parallel.data_parallel_size", int, PARALLEL,
           "Number of groups: whole copies of the model.", at_least(1), "at least 1", ("-dp",)),
    Option("kv_cache_dtype", "engine.cache.kv_cache_dtype", KVCacheDType, CACHE,
           "Type that KV is stored in. int8 and fp8_e4m3 (or fp8), with a scale per token and head, take about half "
           "the bytes of bfloat16. auto: the model's dtype."),
    Option("gpu_memory_utilization", "engine.cache.gpu_memory_utilization", float, CACHE,
           "Share of each GPU for weights and KV (GPU only).", lambda v: 0 < v <= 1, "above 0 and at most 1"),
    Option("kv_cache_memory_bytes", "engine.cache.kv_cache_memory_bytes", int, CACHE,
           "KV bytes of each rank, e.g. 2G. Default: sized from free memory.", at_least(1), "at least 1", size=True),
    Option("num_gpu_blocks_override", "engine.cache.num_blocks", int, CACHE,
           "Number of KV blocks, whatever the memory. Fewer than one context takes shorten answers: the start says so.",
           at_least(1), "at least 1"),
    Option("block_size", "engine.cache.block_size", int, CACHE, "Tokens in a KV block.",
           lambda v: 1 <= v <= 256 and v & (v - 1) == 0, "a power of two up to 256"),
    Option("enable_prefix_caching", "engine.cache.enable_prefix_caching", bool, CACHE,
           "Reuse the KV of prompts that begin alike."),
    Option("kv_offloading_size", "engine.cache.kv_offloading_gib", float, CACHE,
           "GiB of host memory of each group for KV that leaves the device. Default: none.",
           lambda v: v > 0, "above 0"),
    Option("kv_disk_path", "engine.cache.kv_disk_path", str, CACHE,
           "Folder for KV below host memory; survives restarts. Needs --kv-offloading-size."),
    Option("kv_disk_size", "engine.cache.kv_disk_gib", float, CACHE,
           "GiB of disk of each group under --kv-disk-path.", lambda v: v > 0, "above 0"),
    Option("kv_eviction", "engine.cache.kv_eviction", Literal["lru", "cost"], CACHE,
           "What leaves host memory first: least recently used, or cheapest to compute again."),
    Option("max_num_seqs", "engine.scheduler.max_num_seqs", int, STEP, "Sequences in one step.",
           at_least(1), "at least 1"),
    Option("max_num_batched_tokens", "engine.scheduler.max_num_batched_tokens", int, STEP, "Tokens in one step.",
           at_least(1), "at least 1", size=True),
    Option("max_num_queued_reqs", "engine.scheduler.max_num_queued_reqs", int, STEP,
           "Requests a group lets wait; beyond, 429 to tenants that have their part.", at_least(1), "at least 1"),
    Option("max_num_queued_tokens", "engine.scheduler.max_num_queued_tokens", int, STEP,
           "Prompt tokens a group lets wait. Default: no limit.", at_least(1), "at least 1", size=True),
    Option("queue_timeout", "gateway.queue_timeout_s", float, STEP,
           "Seconds a request may wait for its first step; beyond, 503. Default: no bound.",
           lambda v: v > 0, "above 0; without it there is no bound"),
    Option("max_itl_ms", "engine.scheduler.max_itl_ms", float, STEP,
           "Keep a step below this many milliseconds by sizing prompt chunks. Default: no bound.",
           lambda v: v > 0, "above 0"),
    Option("step_log", "engine.step_log", str, STEP,
           "File that gets every step's plan, one JSON line each; of each group served: NAME-GROUP.SUFFIX beside it."),
    Option("enable_lora", "engine.lora.enable_lora", bool, LORA, "Serve LoRA adapters beside the model."),
    Option("lora_modules", "adapters.modules", tuple[str, ...], LORA,
           "name=path of a PEFT folder served from the start; repeat for more.",
           lambda v: all("=" in m.strip("=") for m in v), "name=path"),
    Option("max_loras", "engine.lora.max_loras", int, LORA, "Distinct adapters in one step.",
           at_least(1), "at least 1"),
    Option("max_lora_rank", "engine.lora.max_lora_rank", int, LORA, "Highest rank that is taken.",
           lambda v: 1 <= v <= 512, "from 1 to 512"),
    Option("max_cpu_loras", "engine.lora.max_cpu_loras", int, LORA, "Adapters each rank keeps in host memory.",
           at_least(1), "at least 1"),
    Option("lora_memory_bytes", "engine.lora.memory_bytes", int, LORA,
           "Device bytes of each rank for adapters, e.g. 512M; memory follows each one's true rank. Default: room for "
           "--max-loras of --max-lora-rank on every linear layer.", at_least(1), "at least 1", size=True),
    Option("lora_root", "adapters.roots", tuple[str, ...], LORA,
           "Folder(s) that adapters may be loaded from at run time. Default: the parents of --lora-modules."),
    Option("lora_watch_dir", "adapters.watch_dir", str, LORA,
           "Each PEFT folder that appears in this folder is served under its name."),
    Option("device", "engine.device.device", Device, MACHINE, "cpu or cuda. Default: cuda when there is one."),
    Option("cpu_threads", "engine.device.cpu_threads", int, MACHINE,
           "Threads of each rank on CPU. Default: cores / ranks on the node.", at_least(1), "at least 1"),
    Option("cpu_offload_gb", "engine.device.cpu_offload_gib", float, MACHINE,
           "GiB of each rank's weights that live in host memory and stream through the device, layer by layer.",
           lambda v: 0 <= v < 2**20, "at least 0"),
    Option("host", "gateway.host", str, HTTP, "Address to listen on."),
    Option("port", "gateway.port", int, HTTP, "Port to listen on.", _port, "from 1 to 65535"),
    Option("api_server_count", "gateway.num_gateways", int, HTTP,
           "Gateways: HTTP processes that share the port and the work of tokenizing and streaming.",
           lambda v: 1 <= v <= 64, "from 1 to 64"),
    Option("api_key", "gateway.api_keys", tuple[str, ...], HTTP, "Key(s) clients must send. Default: open."),
    Option("admin_api_key", "gateway.admin_keys", tuple[str, ...], HTTP,
           "Key(s) for /admin and loading adapters. Default: without any key at all, open on loopback only; "
           "under `serve run` closed."),
    Option("state_dir", "gateway.state_dir", str, HTTP,
           "Folder for the usage journal and a copy of tenants and adapters' list, taken up by the next start. "
           "Default: a private one, gone with the service; with --redis-url once Redis has every row."),
    Option("usage_days", "gateway.usage_days", int, HTTP,
           "Days that usage rows are kept, in Redis and in --state-dir.", lambda v: 1 <= v <= 366, "from 1 to 366"),
    Option("shutdown_timeout", "shutdown_timeout_s", float, HTTP,
           "Seconds that requests in flight get to finish on shutdown.", at_least(0), "at least 0"),
    Option("metrics_prefix", "gateway.metrics_prefix", str, HTTP,
           "What metric names begin with, before a colon; vllm: as vLLM's dashboards expect.",
           _metric_name, "letters, digits, _ and :, and no digit first"),
    Option("redis_url", "redis.url", str, COORDINATION,
           "redis://, rediss:// or unix:// URL. Default: a private server is started."),
    Option("redis_timeout_ms", "redis.timeout_ms", float, COORDINATION,
           "Milliseconds that a request waits for Redis before it goes on without.", lambda v: 0 < v <= 10_000,
           "above 0, up to 10000"),
)  # fmt: skip


def option_named(name: str) -> Option | None:
    """The row with this name, spelled with dashes or underscores."""
    wanted = name.replace("-", "_")
    return next((option for option in OPTIONS if option.name == wanted), None)
