"""The table of all settings: each row is a command-line flag, a `--config` key and an `engine_kwargs` key.

Names are vLLM's where vLLM has the setting. A row holds the place of its value in ServiceSettings, its type and its
range, so the command line, files and Ray Serve arguments share one check (configs/load.py).
"""

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from tandem.configs.limits import parse_ports
from tandem.configs.platform_facts import LARGE_STEPS, TUNING_S, computed_as_words, invariant_words, only_on
from tandem.configs.schema import (
    Auth,
    BatchingPolicyName,
    Device,
    DType,
    KVCacheDType,
    LogFormat,
    LogLevel,
    Quantization,
    ReasoningParser,
    RecordMode,
    RoutingPolicyName,
    SpecDecodeMetrics,
    SpeculativeSettings,
    ToolCallParser,
)

Check = Callable[[Any], bool]
TOOL_PARSERS = (
    "hermes (Qwen 2.5 and Qwen3), qwen3_coder (Qwen3-Coder), llama3_json (Llama 3), pythonic (Llama 4), mistral, "
    "deepseek_v3, deepseek_v31, granite or openai (gpt-oss)"
)
"""The values of --tool-call-parser, in words."""


class Option(NamedTuple):
    """One setting."""

    name: str
    path: str  # its dotted place in ServiceSettings
    kind: Any  # the type of its value
    group: str
    help: str
    check: Check | None = None
    rule: str = ""  # `check` in words, for the error message
    aliases: tuple[str, ...] = ()
    size: bool = False  # a string such as 32k is taken too (parse_size)
    secret: bool = False  # no message shows its value; `env:NAME` and `file:PATH` stand for one (configs/secrets.py)

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def parse_size(text: str) -> int:
    """Reads a whole number with an optional suffix: k, m, g, t are decimal, K, M, G, T binary. '32k' is 32000; '32K'
    and '32KiB' are 32768. ValueError for other strings."""
    number = text.strip().removesuffix("iB").removesuffix("B").removesuffix("b")
    factors = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    factor = factors.get(number[-1:], 1)
    digits = number[:-1] if number[-1:] in factors else number
    value = float(digits) * factor
    if not value.is_integer():  # nor "inf" and "nan"
        raise ValueError(text)
    return int(value)


def at_least(low: float) -> Check:
    """Makes a check for values of `low` and above."""
    return lambda value: bool(value >= low)


def _wait(value: float) -> bool:
    return 0 <= value <= 604800


A_WEEK = "from 0 to 604800, a week"


def _port(value: int) -> bool:
    return 1 <= value <= 65535


def _port_range(value: str) -> bool:
    with suppress(ValueError):
        parse_ports(value)
        return True
    return False


def _selector(value: dict[str, str]) -> bool:
    return all(key and wanted for key, wanted in value.items())


def _origin(value: str) -> bool:
    return value == "*" or re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/?#@]+", value) is not None


def _collector(value: str) -> bool:
    return re.fullmatch(r"(?:[a-z][a-z0-9+.-]*://)?[^\s/:@]+(?::\d+)?(?:/\S*)?", value) is not None


def _paths(value: str) -> bool:
    return all(path.strip().startswith("/") for path in value.split(","))


def _metric_name(value: str) -> bool:
    return re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", value) is not None


MAX_DRAFTS = 16
MODEL_KEYS = ("model", "revision", "quantization", "draft_tensor_parallel_size")
DRAFT_METHODS: dict[str, tuple[str, ...]] = {
    "ngram": ("prompt_lookup_max", "prompt_lookup_min"),
    "suffix": (
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
    ),
    "draft_model": MODEL_KEYS,
    "eagle3": MODEL_KEYS,
    "eagle": MODEL_KEYS,
    "mtp": (),
    "medusa": MODEL_KEYS,
}
"""The methods of --speculative-config, each with its own keys: fields of SpeculativeSettings."""

MODEL, PARALLEL, CACHE, STEP, LORA, HTTP, MACHINE, COORDINATION, LOGS = (
    "Model",
    "Parallelism",
    "KV cache",
    "Scheduling",
    "Adapters",
    "HTTP",
    "Machine",
    "Coordination",
    "Logs",
)

LARGE = f"a GPU of {LARGE_STEPS.least_gib} GiB or more"
OPTIONS: tuple[Option, ...] = (
    Option("served_model_name", "engine.model.served_model_name", tuple[str, ...], MODEL,
           "Name(s) of the model in requests and answers; repeat for several. Default: MODEL as given."),
    Option("tokenizer", "engine.model.tokenizer", str, MODEL,
           "Folder or hub id of the tokenizer. Default: the model's."),
    Option("revision", "engine.model.revision", str, MODEL, "Branch, tag or commit of a hub model."),
    Option("tokenizer_revision", "engine.model.tokenizer_revision", str, MODEL,
           "Branch, tag or commit of a hub tokenizer. Default: --revision, unless --tokenizer is given."),
    Option("dtype", "engine.model.dtype", DType, MODEL,
           f"Data type of weights and activations. auto: the checkpoint's; {computed_as_words()}."),
    Option("quantization", "engine.model.quantization", Quantization, MODEL,
           "Hold the weights of linear layers and of the head in fewer bytes, made at load. int8: a byte each. int4, "
           "nf4: half a byte, by groups, and the head as int8. fp8: E4M3. w8a8, w4a8: int8 and int4, with inputs "
           "rounded too, token by token, which is faster in large steps. A checkpoint that is quantized needs no flag; "
           "the other values are vLLM's names for what it may hold, and are checked. "
           "Default: neither.", aliases=("-q",)),
    Option("batch_invariant", "engine.model.batch_invariant", bool, MODEL,
           "Compute every token alike, whatever is computed beside it: logits depend on no batch mates, chunks, "
           "prefix hits or preemptions, to the last bit. Slower. "
           f"{invariant_words()} only."),
    Option("enforce_eager", "engine.model.enforce_eager", bool, MODEL,
           "Run every step eagerly: none is captured and replayed. Slower, with the same results."),
    Option("max_model_len", "engine.model.max_model_len", int, MODEL,
           "Context length: prompt and output in tokens. Default: the model's.", at_least(1), "at least 1", size=True),
    Option("load_format", "engine.model.load_format", Literal["safetensors", "gguf", "dummy"], MODEL,
           "safetensors: weights from the checkpoint, which is GGUF where MODEL is a .gguf file, or a folder without "
           "safetensors. gguf: from the folder's GGUF file, whatever else it holds. "
           "dummy: random weights, for benchmarks without a checkpoint."),
    Option("seed", "engine.model.seed", int, MODEL,
           "Seed of the random weights of --load-format dummy, and of the seeds that LLM draws for requests. No "
           "request of a service becomes repeatable by it: send a `seed` with each.", at_least(0), "at least 0"),
    Option("chat_template", "engine.model.chat_template", str, MODEL,
           "Jinja file with the chat template, or the name of one of the model's. Default: the model's `default`, and "
           "its `tool_use` where there are tools."),
    Option("trust_remote_code", "engine.model.trust_remote_code", bool, MODEL,
           "Accept a model folder that contains Python files. They are never run."),
    Option("hf_overrides", "engine.model.hf_overrides", dict[str, Any], MODEL,
           "JSON object whose keys replace those of the model's config.json."),
    Option("generation_config", "engine.model.generation_config", str, MODEL,
           "Where defaults of sampling come from. auto: the model's generation_config.json. vllm: none but vLLM's own. "
           "Or a folder with another generation_config.json."),
    Option("override_generation_config", "engine.model.override_generation_config", dict[str, Any], MODEL,
           "JSON object whose keys replace those of generation_config.json; null takes one away."),
    Option("pooler_config", "engine.model.pooler_config", dict[str, Any], MODEL,
           "JSON object that says how embeddings are made: pooling_type LAST or MEAN, normalize true or false. "
           "Default: as sentence-transformers' files in the model's folder say, else LAST and true."),
    Option("tensor_parallel_size", "engine.parallel.tensor_parallel_size", int, PARALLEL,
           "Tensor parallelism: ranks that share each layer.", at_least(1), "at least 1", ("-tp",)),
    Option("pipeline_parallel_size", "engine.parallel.pipeline_parallel_size", int, PARALLEL,
           "Pipeline parallelism: stages that the layers are divided into.", at_least(1), "at least 1", ("-pp",)),
    Option("devices_per_node", "engine.parallel.devices_per_node", int, PARALLEL,
           "Ranks of a stage that share a node, where --tensor-parallel-size is more than a node has devices. "
           "Default: all of them.", at_least(1), "at least 1"),
    Option("label_selector", "engine.parallel.label_selector", dict[str, str], PARALLEL,
           'JSON object: labels of the nodes that groups may be placed on, as Ray selects them: {"tandem": "engine"}. '
           "Needs a Ray of several nodes.", _selector, "an object of labels and values"),
    Option("port_range", "engine.parallel.port_range", str, PARALLEL,
           "FIRST-LAST: ports at which the service's processes listen for each other, where a firewall is between "
           "nodes. Default: any that are free.", _port_range, "FIRST-LAST, with 1024 <= FIRST <= LAST <= 65535"),
    Option("data_parallel_size", "engine.parallel.data_parallel_size", int, PARALLEL,
           "Data parallelism: number of groups. Each is a copy of the model.", at_least(1), "at least 1", ("-dp",)),
    Option("enable_expert_parallel", "engine.parallel.enable_expert_parallel", bool, PARALLEL,
           "Ranks that share layers hold whole experts of a mixture, each others. Default: a part of each expert."),
    Option("kv_cache_dtype", "engine.cache.kv_cache_dtype", KVCacheDType, CACHE,
           "Data type of the KV cache. auto: the model's. int8 and fp8_e4m3 (or fp8) have a scale per token and head, "
           "and take about half the bytes of bfloat16."),
    Option("gpu_memory_utilization", "engine.cache.gpu_memory_utilization", float, CACHE,
           "Fraction of each GPU's memory for weights, activations and KV cache "
           f"({only_on('--gpu-memory-utilization')}).",
           lambda v: 0 < v <= 1, "above 0 and at most 1"),
    Option("kv_cache_memory_bytes", "engine.cache.kv_cache_memory_bytes", int, CACHE,
           "Bytes of KV cache on each rank, e.g. 2G. Default: sized from free memory.",
           at_least(1), "at least 1", size=True),
    Option("num_gpu_blocks_override", "engine.cache.num_blocks", int, CACHE,
           "Number of KV blocks, instead of as many as fit. With fewer than one context needs, long answers end early, "
           "and the start prints a warning.", at_least(1), "at least 1"),
    Option("block_size", "engine.cache.block_size", int, CACHE, "Tokens in a KV block.",
           lambda v: 1 <= v <= 256 and v & (v - 1) == 0, "a power of two up to 256"),
    Option("enable_prefix_caching", "engine.cache.enable_prefix_caching", bool, CACHE,
           "Reuse the KV of prompts that begin with the same tokens."),
    Option("kv_events", "engine.cache.kv_events", bool, CACHE,
           "Groups tell gateways of the prefixes whose KV they have, so that requests can go where theirs is. Nothing "
           "is told with --no-enable-prefix-caching."),
    Option("disable_hybrid_kv_cache_manager", "engine.cache.disable_hybrid_kv_cache_manager", bool, CACHE,
           "Keep the KV of all tokens in layers with a sliding window too. Default: blocks that no token sees any more "
           "are given back."),
    Option("kv_offloading_size", "engine.cache.kv_offloading_gib", float, CACHE,
           "GiB of host memory per group for KV that leaves the device. Default: none.",
           lambda v: 0 < v < 2**20, "above 0"),
    Option("kv_disk_path", "engine.cache.kv_disk_path", str, CACHE,
           "Folder on disk for KV that leaves host memory. It survives restarts. Needs --kv-offloading-size."),
    Option("kv_disk_size", "engine.cache.kv_disk_gib", float, CACHE,
           "GiB of disk per group in --kv-disk-path.", lambda v: 0 < v < 2**20, "above 0"),
    Option("kv_eviction", "engine.cache.kv_eviction", Literal["lru", "cost"], CACHE,
           "Blocks that leave host memory first. lru: the least recently used. cost: those that are seldom used and "
           "cheap to recompute."),
    Option("max_num_seqs", "engine.scheduler.max_num_seqs", int, STEP,
           f"Most sequences in one step; {LARGE_STEPS.max_num_seqs} on {LARGE}.", at_least(1), "at least 1"),
    Option("max_num_batched_tokens", "engine.scheduler.max_num_batched_tokens", int, STEP,
           f"Most tokens in one step; {LARGE_STEPS.max_num_batched_tokens:,} on {LARGE}, "
           f"{LARGE_STEPS.offline_tokens:,} there for LLM.", at_least(1), "at least 1", size=True),
    Option("max_num_queued_reqs", "engine.scheduler.max_num_queued_reqs", int, STEP,
           "Requests that may wait in a group. Beyond it, tenants that have their share of the queue get 429.",
           at_least(1), "at least 1"),
    Option("max_num_queued_tokens", "engine.scheduler.max_num_queued_tokens", int, STEP,
           "Prompt tokens that may wait in a group. Default: no limit.", at_least(1), "at least 1", size=True),
    Option("queue_timeout", "gateway.queue_timeout_s", float, STEP,
           "Seconds that a request may wait for its first step before it gets 503, and a running one for a group when "
           "its own is lost. Default: no limit in a queue; without a group twice the time that one takes to load, ten "
           "minutes at least where there need be none.",
           lambda v: 0 < v <= 604800, "above 0, up to 604800; without it there is no bound"),
    Option("max_itl_ms", "engine.scheduler.max_itl_ms", float, STEP,
           "Milliseconds that a step, and so the time between two tokens, should stay below. Prefill chunks are sized "
           "for it. Default: no limit.", lambda v: v > 0, "above 0"),
    Option("speculative_config", "engine.speculative", SpeculativeSettings, STEP,
           f"Speculative decoding, as a JSON object with vLLM's keys: method ({', '.join(DRAFT_METHODS)}), "
           "num_speculative_tokens; of ngram: prompt_lookup_max, prompt_lookup_min; of suffix: "
           "suffix_decoding_max_tree_depth, suffix_decoding_max_cached_requests, suffix_decoding_max_spec_factor, "
           "suffix_decoding_min_token_prob; of the others: model, revision, quantization. Default: off."),
    Option("batching_policy", "engine.scheduler.batching_policy", BatchingPolicyName, STEP,
           "Who joins running requests. continuous: whoever there is room for, in every step. static: nobody; when all "
           "have ended, those that wait are the next batch. dynamic: the same, but a batch begins when it is full or "
           "its oldest request has waited --batching-max-delay-ms."),
    Option("batching_max_delay_ms", "engine.scheduler.batching_max_delay_ms", float, STEP,
           "Milliseconds that a dynamic batch which is not full waits for more requests.",
           lambda v: 0 < v <= 1000, "above 0, up to 1000"),
    Option("grammar_timeout", "engine.scheduler.grammar_timeout_s", float, STEP,
           "Seconds that the grammar of structured output may take to compile before its requests get 400.",
           lambda v: 0 < v <= 600, "above 0, up to 600"),
    Option("step_log", "engine.step_log", str, STEP,
           "File for the plan of every step, one JSON line each. In a service, each group writes its own: "
           "NAME-GROUP.SUFFIX."),
    Option("enable_lora", "engine.lora.enable_lora", bool, LORA, "Serve LoRA adapters of the model."),
    Option("lora_modules", "adapters.modules", tuple[str, ...], LORA,
           'name=path of a PEFT folder to serve from the start, or {"name": ..., "path": ...}. Several may follow one '
           "flag."),
    Option("max_loras", "engine.lora.max_loras", int, LORA, "Maximum number of distinct adapters in one step.",
           at_least(1), "at least 1"),
    Option("max_lora_rank", "engine.lora.max_lora_rank", int, LORA, "Highest LoRA rank that an adapter may have.",
           lambda v: 1 <= v <= 512, "from 1 to 512"),
    Option("max_cpu_loras", "engine.lora.max_cpu_loras", int, LORA,
           "Maximum number of adapters that each rank keeps in host memory.", at_least(1), "at least 1"),
    Option("lora_memory_bytes", "engine.lora.memory_bytes", int, LORA,
           "Device memory of each rank for adapters, e.g. 512M. An adapter takes as much as its own rank needs. "
           "Default: enough for --max-loras adapters of --max-lora-rank on every linear layer.",
           at_least(1), "at least 1", size=True),
    Option("lora_root", "adapters.roots", tuple[str, ...], LORA,
           "Folder(s) that adapters may be loaded from at run time; repeat for several. Default: the parent folders of "
           "--lora-modules."),
    Option("lora_watch_dir", "adapters.watch_dir", str, LORA,
           "Folder to watch: each PEFT folder that appears in it is served under its name."),
    Option("device", "engine.device.device", Device, MACHINE,
           "Device of the ranks. Default: cuda if there is a GPU, else cpu."),
    Option("cpu_threads", "engine.device.cpu_threads", int, MACHINE,
           "Threads of each rank on CPU. Default: the cores of its machine or container divided by the ranks that have "
           "them, as these come and go.",
           at_least(1), "at least 1"),
    Option("cpu_offload_gb", "engine.device.cpu_offload_gib", float, MACHINE,
           "GiB of each rank's weights to keep in host memory. Every step copies them to the device, layer by layer.",
           lambda v: 0 <= v < 2**20, "at least 0"),
    Option("tune", "engine.device.tune", bool, MACHINE,
           "Compute with the tiles of kernels that are fastest on this kind of GPU, as `tandem tune` has measured, or "
           f"the first start does, in up to {TUNING_S} s. --no-tune: with the default ones ({only_on('--tune')})."),
    Option("host", "gateway.host", str, HTTP, "Address to listen on."),
    Option("port", "gateway.port", int, HTTP, "Port to listen on.", _port, "from 1 to 65535"),
    Option("gateway_label_selector", "gateway.label_selector", dict[str, str], HTTP,
           "JSON object: labels of the nodes that gateways may be placed on, in a Ray Serve file (there "
           "`label_selector` of gateway_config); those of `tandem serve` are on its own node.", _selector,
           "an object of labels and values"),
    Option("api_server_count", "gateway.num_gateways", int, HTTP,
           "Number of gateways: HTTP processes that share the port and the work of tokenization and streaming.",
           lambda v: 1 <= v <= 64, "from 1 to 64"),
    Option("routing_policy", "gateway.routing_policy", RoutingPolicyName, HTTP,
           "How a gateway chooses the group of a request. joint: load, KV, adapter, share and session in one cost. The "
           "others look at one of them: least-tokens, adapter, prefix, session; p2c: the better of two by chance; "
           "round-robin: in turn."),
    Option("ssl_certfile", "gateway.ssl_certfile", str, HTTP,
           "PEM file with the certificate of the port, and those of its issuers: the port then speaks TLS. Default: "
           "plain HTTP."),
    Option("ssl_keyfile", "gateway.ssl_keyfile", str, HTTP,
           "PEM file with the certificate's private key. Default: it is in --ssl-certfile."),
    Option("ssl_ca_certs", "gateway.ssl_ca_certs", str, HTTP,
           "PEM file with CA certificates; clients must have a certificate that one of these signed. Default: no "
           "certificate is asked for."),
    Option("ssl_cert_reqs", "gateway.ssl_cert_reqs", int, HTTP,
           "Whether clients need a certificate: 0 none is asked for, 1 one that is sent is checked, 2 they do. "
           "Default: 2 with --ssl-ca-certs, else 0.", lambda v: v in (0, 1, 2), "0, 1 or 2"),
    Option("auth", "gateway.auth", Auth, HTTP,
           "required: every request needs a key. open: none does, until there is a first key or tenant; on loopback "
           "only. Default: open where `tandem serve` listens on loopback, else required."),
    Option("api_key", "gateway.api_keys", tuple[str, ...], HTTP,
           "Key(s) that clients must send; repeat for several. env:NAME stands for the key in a variable, file:PATH "
           "for those in a file, one a line. Default: none (see --auth).", secret=True),
    Option("admin_api_key", "gateway.admin_keys", tuple[str, ...], HTTP,
           "Key(s) for /admin and for loading adapters, as in --api-key. Default: none; both are then open while "
           "`tandem serve` is, and closed under `serve run`.", secret=True),
    Option("metrics_api_key", "gateway.metrics_keys", tuple[str, ...], HTTP,
           "Key(s) for /metrics alone, as in --api-key; admin keys work there too. Default: /metrics needs no key.",
           secret=True),
    Option("allowed_origins", "gateway.allowed_origins", tuple[str, ...], HTTP,
           "Origin(s) of web pages that may use the service (CORS), such as https://chat.example; \"*\" for all. "
           "Repeat for several, or give a JSON list. Default: none.", lambda v: all(map(_origin, v)),
           "like https://chat.example or http://localhost:3000, without a path, or *"),
    Option("max_text_bytes", "gateway.max_text_bytes", int, HTTP,
           "Bytes of text, all prompts or messages together, that one request may have tokenized, e.g. 4M. Default: 1 "
           "MiB, or 8 bytes for each token of the context if that is more.", at_least(1), "at least 1", size=True),
    Option("max_grammar_bytes", "gateway.max_grammar_bytes", int, HTTP,
           "Bytes that the schema, grammar or other form of structured output in one request may have, e.g. 256K.",
           at_least(1), "at least 1", size=True),
    Option("max_logprobs", "gateway.max_logprobs", int, HTTP,
           "Log probabilities per token that a request may ask for, at most; beam search asks for two per beam. -1: as "
           "many as the vocabulary has tokens.", at_least(-1), "at least -1"),
    Option("max_answer_bytes", "gateway.max_answer_bytes", int, HTTP,
           "Bytes of memory, roughly, that an answer which is not streamed may take before it gets 413, e.g. 256M.",
           at_least(1), "at least 1", size=True),
    Option("response_store_ttl", "gateway.response_store_ttl_s", int, HTTP,
           "Seconds that an answer of /v1/responses is kept in Redis for previous_response_id. 0: none is kept.",
           lambda v: 0 <= v <= 31 * 86400, "from 0 to 2678400"),
    Option("response_store_bytes", "gateway.response_store_bytes", int, HTTP,
           "Bytes of kept responses of one tenant, compressed; beyond them the oldest go. E.g. 256M.",
           at_least(1), "at least 1", size=True),
    Option("idempotency_ttl", "gateway.idempotency_ttl_s", int, HTTP,
           "Seconds that a request with an Idempotency-Key is known in Redis, with its answer. 0: none is taken.",
           lambda v: v == 0 or 60 <= v <= 31 * 86400, "0, or from 60 to 2678400"),
    Option("idempotency_bytes", "gateway.idempotency_bytes", int, HTTP,
           "Bytes of the kept answers with an Idempotency-Key of one tenant, compressed; beyond them none is kept, "
           "e.g. 256M.", at_least(2**20), "at least 1M", size=True),
    Option("files_ttl", "gateway.files_ttl_s", int, HTTP,
           "Seconds that a file of /v1/files is kept in Redis at most. 0: there are neither files nor batches.",
           lambda v: 0 <= v <= 366 * 86400, "from 0 to 31622400"),
    Option("max_file_bytes", "gateway.max_file_bytes", int, HTTP,
           "Bytes that a file of /v1/files may have, e.g. 1G.", at_least(1), "at least 1", size=True),
    Option("files_bytes", "gateway.files_bytes", int, HTTP,
           "Bytes of all files of one tenant together, as they were sent; Redis holds them compressed. E.g. 8G.",
           at_least(1), "at least 1", size=True),
    Option("max_batch_lines", "gateway.max_batch_lines", int, HTTP,
           "Lines that the file of a batch may have.", at_least(1), "at least 1"),
    Option("state_dir", "gateway.state_dir", str, HTTP,
           "Folder for what outlives the service: the private Redis's data, the usage journal, tenants and adapters. "
           "Default: a private folder, removed when the service ends, or, with --redis-url, when Redis has all of it."),
    Option("usage_days", "gateway.usage_days", int, HTTP,
           "Days that usage records are kept, in Redis and in --state-dir.", lambda v: 1 <= v <= 366, "from 1 to 366"),
    Option("usage_rows", "gateway.usage_rows", int, HTTP,
           "Usage records in Redis, at most, about 200 bytes each. Beyond that the oldest become sums by hour; the "
           "journal in --state-dir still has them.", at_least(1000), "at least 1000"),
    Option("strict_fields", "gateway.strict_fields", bool, HTTP,
           "Refuse request fields that cannot change an answer and are not honoured: ids, hints, echoed fields. "
           "Default: accept them, and name them in the header x-tandem-ignored."),
    Option("enable_force_include_usage", "gateway.enable_force_include_usage", bool, HTTP,
           "End every stream with its usage, as if stream_options.include_usage were true."),
    Option("disable_fastapi_docs", "gateway.disable_fastapi_docs", bool, HTTP, "Do not serve /openapi.json and /docs."),
    Option("disable_ui", "gateway.disable_ui", bool, HTTP, "Do not serve the pages for a browser, / and /docs."),
    Option("shutdown_timeout", "shutdown_timeout_s", float, HTTP,
           "Seconds that requests in flight have to finish at shutdown, and in a group that is taken down until they "
           "move to another.", _wait, A_WEEK),
    Option("gateway_drain_timeout", "gateway.drain_timeout_s", float, HTTP,
           "Seconds that streams have to end through a gateway that another one replaces (a new version, fewer "
           "gateways, a drained node, SIGTERM), --shutdown-timeout if that is more. Those of a model that a new "
           "version no longer has end in their groups in that time.", _wait, A_WEEK),
    Option("sse_keep_alive_interval", "gateway.sse_keep_alive_s", float, HTTP,
           "Seconds of silence after which a stream gets a comment, for balancers that close silent connections; also "
           "while it waits for a group or for its first token. Status 200 goes out with it, and what fails later is an "
           "event. Default: 15, once the stream has begun.", lambda v: 1 <= v <= 3600, "from 1 to 3600"),
    Option("otlp_traces_endpoint", "gateway.otlp_traces_endpoint", str, HTTP,
           "Collector that traces of requests go to over OTLP: http://HOST:4317 for gRPC, http://HOST:4318/v1/traces "
           "for HTTP. Variables OTEL_* set sampling and the rest. Needs `pip install 'tandem-serve[traces]'`. Default: "
           "there are no traces.", _collector, "like http://localhost:4317 or localhost:4317"),
    Option("metrics_prefix", "gateway.metrics_prefix", str, HTTP,
           "Prefix of metric names, before a colon. vllm: the names that vLLM's dashboards expect.",
           _metric_name, "letters, digits, _ and :, and no digit first"),
    Option("per_request_spec_decode_metrics", "gateway.per_request_spec_decode_metrics", SpecDecodeMetrics, HTTP,
           "What an answer with one choice reports of its draft tokens, in metrics.speculative_decoding as in vLLM. "
           "summary: rates and histograms. detailed: each step too. Default: none."),
    Option("enable_auto_tool_choice", "gateway.enable_auto_tool_choice", bool, HTTP,
           "Serve tool_choice auto, which is also what tools without a tool_choice mean: the model decides whether it "
           "calls one. Add --tool-call-parser NAME beside it, unless the chat template says how calls are written (a "
           "line of the start tells). The template must show tools."),
    Option("trust_request_chat_template", "gateway.trust_request_chat_template", bool, HTTP,
           "Serve chat_template of a request: Jinja in place of the model's template, in the same sandbox."),
    Option("tool_call_parser", "gateway.tool_call_parser", ToolCallParser, HTTP,
           f"Format in which the model writes tool calls: {TOOL_PARSERS}. Default: as the chat template says, where it "
           "does. Calls are read with --enable-auto-tool-choice, or where a request forces one."),
    Option("reasoning_parser", "gateway.reasoning_parser", ReasoningParser, HTTP,
           "How the model writes its thinking: deepseek_r1, qwen3, granite or openai_gptoss. Answers then have it "
           "apart, as reasoning. Default: it is part of the content."),
    Option("redis_url", "redis.url", str, COORDINATION,
           "redis://, rediss:// or unix:// URL of a Redis to use, redis+sentinel://HOST[,HOST ...]/MASTER, or env:NAME "
           "or file:PATH that hold it. Default: a private one is started.", secret=True),
    Option("redis_timeout_ms", "redis.timeout_ms", float, COORDINATION,
           "Milliseconds that a request waits for Redis before it goes on without it.", lambda v: 0 < v <= 10_000,
           "above 0, up to 10000"),
    Option("log_level", "logs.level", LogLevel, LOGS,
           "The least weight of lines in the log files. Prompts, answers and keys are in none."),
    Option("log_dir", "logs.dir", str, LOGS,
           "Folder for log files: a folder in it for each run, of which the last ten are kept. Default: tandem/logs in "
           "XDG_STATE_HOME, or in ~/.local/state."),
    Option("log_format", "logs.format", LogFormat, LOGS,
           "The form of lines in the log files. json: an object a line. Under Ray Serve the encoding of its "
           "logging_config counts too."),
    Option("enable_log_requests", "logs.enable_log_requests", bool, LOGS,
           "Write a line when a request has ended: ids, tenant, model, tokens, times and how it ended, without texts."),
    Option("disable_uvicorn_access_log", "logs.disable_uvicorn_access_log", bool, LOGS,
           "Write no line for each HTTP answer."),
    Option("disable_access_log_for_endpoints", "logs.disable_access_log_for_endpoints", str, LOGS,
           "Paths, separated by commas, whose answers have no such line, e.g. /health,/metrics.", _paths,
           "paths that begin with /, separated by commas"),
    Option("record_mib", "logs.record_mib", int, LOGS,
           "MiB of memory in which each group keeps its last steps, to be written beside its log and replayed with "
           "`tandem replay`: when the group is lost, at SIGUSR2, or when an operator asks. Default: 0, nothing.",
           lambda v: 0 <= v <= 4096, "from 0 to 4096"),
    Option("record", "logs.record", RecordMode, LOGS,
           "What a recording's file has. redacted: no token ids of prompts and answers, which a keyed hash of whole "
           "blocks stands for. full: these too."),
)  # fmt: skip


def option_named(name: str) -> Option | None:
    """Finds the row with this name, spelled with dashes or underscores. None when there is none."""
    wanted = name.replace("-", "_")
    return next((option for option in OPTIONS if option.name == wanted), None)
