"""The frozen settings of everything Tandem starts: one engine, one service.

Built once by configs/load.py (from flags, a YAML file or a Ray Serve `args` mapping), then passed down; nothing here
is computed from the machine or the model, and nothing is changed afterwards. None means "not given: decide from the
model or the machine", never -1 or "". Values are checked where they are built; each error names the flag.
"""

from typing import Any, Literal

import msgspec

DType = Literal["auto", "bfloat16", "float16", "float32"]
KVCacheDType = Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "int8"]
Device = Literal["cpu", "cuda"]
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which checkpoint, and how it is read. `model` is a folder or a hub id; the launcher resolves it to a folder."""

    model: str
    served_model_name: tuple[str, ...] = ()
    tokenizer: str | None = None
    revision: str | None = None
    dtype: DType = "auto"
    max_model_len: int | None = None
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    chat_template: str | None = None
    trust_remote_code: bool = False
    hf_overrides: dict[str, Any] = {}
    seed: int = 0


class ParallelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ranks of one group (tensor x pipeline) and the number of groups."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1

    @property
    def ranks_per_group(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size


class CacheSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The paged KV cache. Device sizes are bytes per rank, `num_blocks` overrides them; host and disk sizes are GiB per
    group, summed over its ranks, None: no such tier.

    kv_cache_dtype auto: the model's dtype; fp8: fp8_e4m3.
    """

    kv_cache_dtype: KVCacheDType = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    kv_offloading_gib: float | None = None
    kv_disk_path: str | None = None
    kv_disk_gib: float | None = None
    kv_eviction: Literal["lru", "cost"] = "lru"


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one step may hold and what may wait. `max_itl_ms` bounds a step by its measured speed."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_num_queued_reqs: int = 1024
    max_num_queued_tokens: int | None = None
    max_itl_ms: float | None = None
    async_scheduling: bool = True


class LoraSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """LoRA adapters of one group. max_loras: distinct ones in one step. memory_bytes: of each rank's device, in pages
    that follow each adapter's true rank; None: room for max_loras of max_lora_rank on every linear layer.
    max_cpu_loras: how many each rank keeps in host memory."""

    enable_lora: bool = False
    max_loras: int = 8
    max_lora_rank: int = 16
    max_cpu_loras: int = 64
    memory_bytes: int | None = None


class DeviceSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """None as device: cuda when torch sees one, else cpu. None as threads: cores // ranks on the node.
    cpu_offload_gib: how much less of its weights each rank holds on the device; the rest is in host memory."""

    device: Device | None = None
    cpu_threads: int | None = None
    cpu_offload_gib: float = 0.0


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that one group (coordinator and ranks) is built from."""

    model: ModelSettings
    parallel: ParallelSettings = ParallelSettings()
    cache: CacheSettings = CacheSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    device: DeviceSettings = DeviceSettings()
    lora: LoraSettings = LoraSettings()
    step_log: str | None = None


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP side. Caps are the contract's; a cap that is exceeded is a 400 (413 for the body). state_dir: for the
    usage journal and a copy of the tenants and of the list of adapters; None: they end with the service, or with Redis
    if that is later.
    queue_timeout_s: how long a request may wait for its first step; None: for ever."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    state_dir: str | None = None
    usage_days: int = 30
    num_gateways: int = 1
    queue_timeout_s: float | None = None
    max_body_bytes: int = 8 * 2**20
    max_json_depth: int = 64
    max_choices: int = 128
    max_logprobs: int = 20
    max_stop_strings: int = 4
    max_stop_chars: int = 256
    max_logit_bias: int = 300
    max_tools: int = 128
    max_messages: int = 2048
    metrics_prefix: str = "tandem"

    @property
    def is_local(self) -> bool:
        """A gateway that listens on `host` is reached from its own machine only."""
        return self.host in LOOPBACK


class AdapterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where adapters come from. modules: name=path, listed at start. roots: folders that adapters may be loaded from at
    run time; empty: the parents of modules. watch_dir: each folder in it is an adapter named after it."""

    modules: tuple[str, ...] = ()
    roots: tuple[str, ...] = ()
    watch_dir: str | None = None


class RedisSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """None as url: the launcher starts a private server on a unix socket and fills it in. timeout_ms: of what requests
    wait for."""

    url: str | None = None
    timeout_ms: float = 50.0


class ServiceSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole service: engine settings shared by all groups, the gateway, Redis, and Serve's own deployment options."""

    engine: EngineSettings
    gateway: GatewaySettings = GatewaySettings()
    redis: RedisSettings = RedisSettings()
    adapters: AdapterSettings = AdapterSettings()
    autoscaling_config: dict[str, Any] | None = None
    shutdown_timeout_s: float = 30.0
