"""The settings of a service and of its engines, as frozen structs.

configs/load.py builds them from flags, a YAML file or a Ray Serve `args` mapping, and checks every value. They are as
the user gave them: None stands for a setting that is decided later, from the model or the machine.
"""

from typing import Any, Literal, NamedTuple

import msgspec

from tandem.configs.limits import Ports, parse_ports

DType = Literal["auto", "bfloat16", "float16", "float32"]
KVCacheDType = Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "int8"]
Quantization = Literal[
    "int8",
    "w8a8",
    "int4",
    "w4a8",
    "nf4",
    "fp8",
    "auto-round",
    "auto_awq",
    "auto_gptq",
    "awq",
    "awq_marlin",
    "bitsandbytes",
    "compressed-tensors",
    "fbgemm_fp8",
    "gguf",
    "gpt_oss_mxfp4",
    "gptq",
    "gptq_marlin",
    "inc",
    "modelopt",
    "modelopt_fp4",
    "mxfp4",
]
"""Names of AT_LOAD (parallel/quantization/weight_plan.py), and of NAMES (workers/models/spec/weights/)."""
Device = Literal["cpu", "cuda"]
Auth = Literal["required", "open"]
SpecDecodeMetrics = Literal["none", "summary", "detailed"]
ToolCallParser = Literal[
    "hermes",
    "qwen3_coder",
    "llama3_json",
    "pythonic",
    "mistral",
    "deepseek_v3",
    "deepseek_v31",
    "granite",
    "openai",
]
"""Names of TOOL_FORMATS (workers/text/format_list.py)."""
ReasoningParser = Literal["deepseek_r1", "qwen3", "granite", "openai_gptoss"]
"""Names of REASONING_FORMATS there."""
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
RecordMode = Literal["redacted", "full"]
NGRAM_TOKENS = 5
BatchingPolicyName = Literal["continuous", "dynamic", "static"]
RoutingPolicyName = Literal["joint", "least-tokens", "adapter", "prefix", "session", "p2c", "round-robin"]
"""Names of POLICIES (cluster/routing/policies/policy_names.py)."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The checkpoint and how it is read."""

    model: str  # a folder or a hub id; the launcher resolves it to a folder
    served_model_name: tuple[str, ...] = ()
    tokenizer: str | None = None
    revision: str | None = None
    tokenizer_revision: str | None = None  # None: that of the model, if it is its own
    dtype: DType = "auto"
    quantization: Quantization | None = None  # how weights are held, or what a checkpoint has; None: as it has them
    batch_invariant: bool = False  # logits of a sequence have the same bits whatever else is computed with it
    enforce_eager: bool = False  # no step is captured and replayed
    max_model_len: int | None = None
    load_format: Literal["safetensors", "gguf", "dummy"] = "safetensors"
    chat_template: str | None = None
    trust_remote_code: bool = False
    hf_overrides: dict[str, Any] = {}
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] = {}
    pooler_config: dict[str, Any] = {}
    seed: int | None = None  # of dummy weights (None: 0), and of the requests of an LLM that have none (None: random)
    draft: "ModelSettings | None" = None  # the model that guesses tokens for this one, of --speculative-config


class ParallelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ranks of one group (tensor x pipeline) and the number of groups."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False  # each rank of a stage holds whole experts
    devices_per_node: int | None = None  # None: a stage fits a node
    label_selector: dict[str, str] = {}  # Ray's labels of nodes that groups may be on; empty: all
    port_range: str | None = None  # FIRST-LAST, at which the service's processes listen for each other; None: any ports

    @property
    def ranks_per_group(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ports(self) -> Ports:
        """`port_range`, read."""
        return parse_ports(self.port_range)


class CacheSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The paged KV cache. Device sizes are bytes per rank; host and disk sizes are GiB per group, over all its ranks,
    and None where the tier is off."""

    kv_cache_dtype: KVCacheDType = "auto"  # auto: the model's dtype; fp8: fp8_e4m3
    block_size: int = 16
    num_blocks: int | None = None  # overrides both device sizes
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    kv_events: bool = True  # gateways are told of the prefixes that a group has
    disable_hybrid_kv_cache_manager: bool = False  # layers with a window keep all tokens, as others do
    kv_offloading_gib: float | None = None
    kv_disk_path: str | None = None
    kv_disk_gib: float | None = None
    kv_eviction: Literal["lru", "cost"] = "lru"


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one step and of a group's queue."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    by_device: tuple[str, ...] = ()  # the sizes above that no flag gave, until platform_facts.sized() has set them
    max_num_queued_reqs: int = 1024
    max_num_queued_tokens: int | None = None
    max_itl_ms: float | None = None  # milliseconds of a step, held by sizing prefill chunks
    async_scheduling: bool = True
    batching_policy: BatchingPolicyName = "continuous"
    batching_max_delay_ms: float = 50.0  # how long a dynamic batch that is not full waits for more
    grammar_timeout_s: float = 10.0  # how long a grammar may take to compile


class LoraSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """LoRA adapters of one group."""

    enable_lora: bool = False
    max_loras: int = 8  # distinct ones in one step
    max_lora_rank: int = 16
    max_cpu_loras: int = 64  # those that each rank keeps in host memory
    # Device memory of each rank, in pages. None: enough for max_loras of max_lora_rank on every linear layer.
    memory_bytes: int | None = None


class DeviceSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The device of the ranks."""

    device: Device | None = None  # None: cuda when torch sees one, else cpu
    cpu_threads: int | None = None  # None: the cores divided by the ranks that have them, as these come and go
    cpu_offload_gib: float = 0.0  # GiB of weights that each rank keeps in host memory instead of on the device
    tune: bool = True  # tiles of kernels are those that are fastest on the device, which a first start measures

    @property
    def chosen(self) -> Device:
        """`device`, once it has been chosen (cluster/deploy/preflight.py)."""
        assert self.device is not None, "the device is not chosen yet"
        return self.device


class SuffixLimits(NamedTuple):
    """The keys suffix_decoding_* of SpeculativeSettings, with vLLM's defaults."""

    max_tree_depth: int = 24
    max_cached_requests: int = 10000
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1


class SpeculativeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speculative decoding, the object of --speculative-config, with vLLM's keys."""

    method: str  # one of DRAFT_METHODS (configs/options.py), each with its own keys
    num_speculative_tokens: int  # the most drafts of a row in a step
    # The most and fewest last tokens of a sequence that method "ngram" looks for in it. As in vLLM, 5 each if neither
    # is given, else the other's value.
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    # Of method "suffix" (SuffixLimits has the defaults): the most tokens that a match and the guesses behind it have;
    # recent answers that are kept; guesses for each matched token; the least share of the matches that agree on one
    suffix_decoding_max_tree_depth: int | None = None
    suffix_decoding_max_cached_requests: int | None = None
    suffix_decoding_max_spec_factor: float | None = None
    suffix_decoding_min_token_prob: float | None = None
    # The model of method "draft_model": a folder or a hub id, its revision, how its weights are held
    model: str | None = None
    revision: str | None = None
    quantization: Quantization | None = None
    draft_tensor_parallel_size: int | None = None  # 1: the draft runs whole, on one rank of the group

    @property
    def lookup_range(self) -> tuple[int, int]:
        """(fewest, most) tokens to look for."""
        fewest, most = self.prompt_lookup_min, self.prompt_lookup_max
        if fewest is None:
            fewest = NGRAM_TOKENS if most is None else most
        return fewest, fewest if most is None else most

    @property
    def suffix_limits(self) -> SuffixLimits:
        """The keys suffix_decoding_*, with vLLM's defaults."""
        given = ((name, getattr(self, f"suffix_decoding_{name}")) for name in SuffixLimits._fields)
        return SuffixLimits(**{name: value for name, value in given if value is not None})


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one group: its coordinator and its ranks."""

    model: ModelSettings
    parallel: ParallelSettings = ParallelSettings()
    cache: CacheSettings = CacheSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    device: DeviceSettings = DeviceSettings()
    lora: LoraSettings = LoraSettings()
    speculative: SpeculativeSettings | None = None
    step_log: str | None = None  # path of the file for every step's plan
    # path of the file for whole rows of log probabilities of scored prompts, which no flag names (workers/evaluation/)
    scored_rows: str | None = None

    @property
    def max_drafts(self) -> int:
        """The most drafts of a sequence in one step."""
        return 0 if self.speculative is None else self.speculative.num_speculative_tokens

    @property
    def steps_in_flight(self) -> int:
        """The most plans that are in flight at once."""
        stages = self.parallel.pipeline_parallel_size
        return stages if stages > 1 else 2 if self.scheduler.async_scheduling else 1

    @property
    def most_samples(self) -> int:
        """The most tokens that one step samples."""
        scheduler = self.scheduler
        return min(scheduler.max_num_seqs * (1 + self.max_drafts), scheduler.max_num_batched_tokens)


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP side."""

    # The port and who may use it
    host: str = "127.0.0.1"
    port: int = 8000
    num_gateways: int = 1
    label_selector: dict[str, str] = {}  # Ray's labels of nodes that gateways may be on; empty: all
    auth: Auth | None = (
        None  # None: `open` where the gateway itself listens on loopback and has no key, else `required`
    )
    allowed_origins: tuple[str, ...] = ()
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    # 0: no certificate of clients is asked for, 1: one that is sent is checked, 2: it is required.
    ssl_cert_reqs: int | None = None  # None: 2 with ssl_ca_certs, else 0
    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    metrics_keys: tuple[str, ...] = ()
    # The folder for the usage journal, a copy of the tenants and the adapter list, and under `tandem serve` the data of
    # the private Redis. None: they end with the service, or with Redis if that is later.
    state_dir: str | None = None
    # Seconds for its streams when another gateway takes its place (ServiceSettings.replaced_s)
    drain_timeout_s: float = 600.0
    routing_policy: RoutingPolicyName = "joint"  # how a request's group is chosen
    usage_days: int = 30
    usage_rows: int = 1_000_000
    # Limits of a request. Above one it gets 400, or the status at its line.
    queue_timeout_s: float | None = None  # seconds that it may wait for its first step (503); None: no limit
    max_body_bytes: int = 8 * 2**20  # 413
    max_bodies_bytes: int = 256 * 2**20  # of all requests whose answers have not begun (503)
    max_json_depth: int = 64
    max_choices: int = 128
    max_logprobs: int = 20  # -1: the vocabulary's size, which a gateway puts in its place
    max_stop_strings: int = 32
    max_stop_chars: int = 256
    max_logit_bias: int = 300
    max_tools: int = 128
    max_messages: int = 2048
    max_grammar_bytes: int = 64 * 2**10
    max_grammar_choices: int = 1024
    max_regex_chars: int = 4096
    max_template_kwargs_bytes: int = 16 * 2**10
    max_text_bytes: int | None = None  # None: 1 MiB, or 8 bytes for each token of the context if that is more
    max_answer_bytes: int = 64 * 2**20  # roughly what an answer that is not streamed may take in memory (413)
    disable_fastapi_docs: bool = False  # no /openapi.json, and no /docs
    disable_ui: bool = False  # no pages for a browser: no /, no /docs
    enable_force_include_usage: bool = False  # every stream ends with its usage
    strict_fields: bool = False  # refuse fields that cannot change an answer, in place of naming them as ignored
    # Answers
    otlp_traces_endpoint: str | None = None  # None: no traces
    metrics_prefix: str = "tandem"
    sse_keep_alive_s: float | None = None  # silence before a comment, also before the first event; None: only after it
    per_request_spec_decode_metrics: SpecDecodeMetrics = "none"  # what they report of their draft tokens
    enable_auto_tool_choice: bool = False  # the model itself may decide to call a tool
    tool_call_parser: ToolCallParser | None = None  # how it writes calls; None: as the chat template says, if it does
    trust_request_chat_template: bool = False  # a chat body may bring its own
    reasoning_parser: ReasoningParser | None = None  # how it writes its thinking; None: that is content
    response_store_ttl_s: int = 3600  # how long one can be named as previous_response_id; 0: none is stored
    response_store_bytes: int = 32 * 2**20  # of one tenant's stored ones, compressed
    idempotency_ttl_s: int = 3600  # how long an Idempotency-Key is known; 0: none is taken
    idempotency_bytes: int = 64 * 2**20  # of one tenant's answers with a key, compressed
    # Files and batches
    files_ttl_s: int = 30 * 86400  # how long a file is kept; 0: there are neither files nor batches
    max_file_bytes: int = 512 * 2**20  # 413
    files_bytes: int = 2 * 2**30  # of one tenant's files together (413)
    max_batch_lines: int = 50_000

    @property
    def is_local(self) -> bool:
        """True when `host` is a loopback address, which only this machine can reach."""
        return self.host in LOOPBACK

    def text_budget(self, max_model_len: int) -> int:
        """Bytes of text that one request may have rendered and tokenized."""
        return self.max_text_bytes or max(2**20, 8 * max_model_len)

    def is_open(self, *, listens_itself: bool) -> bool:
        """True when requests need no key as long as there is no tenant. listens_itself: the gateway opens `host`;
        otherwise the address is that of Serve's proxy."""
        if self.api_keys or self.admin_keys:
            return False
        return self.auth == "open" or (self.auth is None and listens_itself and self.is_local)


class AdapterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sources of adapters."""

    modules: tuple[str, ...] = ()  # name=path of those served from the start
    roots: tuple[str, ...] = ()  # folders that they may be loaded from at run time; empty: the parents of modules
    watch_dir: str | None = None  # a folder whose folders are adapters, named alike


class RedisSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Redis of a service."""

    url: str | None = None  # None: the launcher starts a private server on a unix socket and sets its URL
    timeout_ms: float = 50.0  # the longest that a request waits for Redis


class LogSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The log files of a service."""

    level: LogLevel = "info"
    dir: str | None = None  # None: the user's folder on each machine (configs/environment.py)
    format: LogFormat = "text"
    enable_log_requests: bool = False  # a line for each request that has ended
    disable_uvicorn_access_log: bool = False  # no line for each HTTP answer
    disable_access_log_for_endpoints: str | None = None  # paths, with commas: answers without such a line
    record_mib: int = 0  # MiB of each group's last steps that it keeps in memory, to be replayed; 0: none
    record: RecordMode = "redacted"  # what of it is written to a file: all, or nothing that has token ids


class ServiceSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole service: the engine settings of all groups, the gateways, Redis, adapters and Serve's autoscaling."""

    engine: EngineSettings
    gateway: GatewaySettings = GatewaySettings()
    redis: RedisSettings = RedisSettings()
    adapters: AdapterSettings = AdapterSettings()
    logs: LogSettings = LogSettings()
    autoscaling_config: dict[str, Any] | None = None
    max_surge_percent: int | None = (
        None  # groups of a new version beside those of the old one; None: as nodes have room
    )
    shutdown_timeout_s: float = 30.0
    without_effect: tuple[str, ...] = ()  # a line for each flag of vLLM that was given and changes nothing here

    @property
    def replaced_s(self) -> float:
        """Seconds that streams have to end when another version takes over: never less than at the service's end."""
        return max(self.gateway.drain_timeout_s, self.shutdown_timeout_s)
