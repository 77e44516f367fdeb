"""configs/load.py: every flag lands in its place, everything else is refused by name."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.cluster.deploy.preflight import with_device
from tandem.configs.autoscaling import GROUP_SCALING
from tandem.configs.errors import SettingsError
from tandem.configs.load import (
    LORA_SIZES,
    build_settings,
    default_of,
    merge_config,
    read_config_file,
    read_serve_file,
    resolved_yaml,
    settings_from_serve_args,
)
from tandem.configs.options import OPTIONS, parse_size
from tandem.configs.schema import SpeculativeSettings

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


def value_at(settings: Any, path: str) -> Any:
    for part in path.split("."):
        settings = getattr(settings, part)
    return settings


GOOD: dict[str, tuple[Any, Any]] = {
    "served_model_name": (["a", "b"], ("a", "b")),
    "tokenizer": ("t", "t"),
    "revision": ("main", "main"),
    "tokenizer_revision": ("main", "main"),
    "log_level": ("debug", "debug"),
    "log_dir": ("/logs", "/logs"),
    "log_format": ("json", "json"),
    "otlp_traces_endpoint": ("http://localhost:4317", "http://localhost:4317"),
    "enable_log_requests": (True, True),
    "disable_uvicorn_access_log": (True, True),
    "disable_access_log_for_endpoints": ("/health, /metrics", "/health, /metrics"),
    "record_mib": (64, 64),
    "record": ("full", "full"),
    "dtype": ("bfloat16", "bfloat16"),
    "quantization": ("int8", "int8"),
    "batch_invariant": (True, True),
    "enforce_eager": (True, True),
    "max_model_len": ("2k", 2000),
    "load_format": ("dummy", "dummy"),
    "seed": (7, 7),
    "chat_template": ("x.jinja", "x.jinja"),
    "trust_remote_code": (True, True),
    "hf_overrides": ('{"rope_theta": 5}', {"rope_theta": 5}),
    "generation_config": ("vllm", "vllm"),
    "override_generation_config": ('{"top_k": 5}', {"top_k": 5}),
    "pooler_config": ('{"pooling_type": "MEAN"}', {"pooling_type": "MEAN"}),
    "tensor_parallel_size": (2, 2),
    "cpu_offload_gb": (1.5, 1.5),
    "pipeline_parallel_size": (3, 3),
    "data_parallel_size": (4, 4),
    "devices_per_node": (8, 8),
    "port_range": ("20000-20999", "20000-20999"),
    "label_selector": ('{"tandem": "engine"}', {"tandem": "engine"}),
    "gateway_label_selector": ({"tandem": "!engine"}, {"tandem": "!engine"}),
    "enable_expert_parallel": (True, True),
    "kv_cache_dtype": ("int8", "int8"),
    "gpu_memory_utilization": (0.5, 0.5),
    "kv_cache_memory_bytes": ("1G", 2**30),
    "num_gpu_blocks_override": (100, 100),
    "block_size": (32, 32),
    "enable_prefix_caching": (False, False),
    "kv_events": (False, False),
    "disable_hybrid_kv_cache_manager": (True, True),
    "max_num_seqs": (8, 8),
    "max_num_batched_tokens": ("4K", 4096),
    "max_num_queued_reqs": (9, 9),
    "max_num_queued_tokens": (10, 10),
    "max_itl_ms": (50, 50.0),
    "speculative_config": (
        '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}',
        SpeculativeSettings(method="ngram", num_speculative_tokens=3, prompt_lookup_max=4),
    ),
    "batching_policy": ("static", "static"),
    "batching_max_delay_ms": (20, 20.0),
    "step_log": ("s.jsonl", "s.jsonl"),
    "kv_offloading_size": (2, 2.0),
    "kv_disk_path": ("kv", "kv"),
    "kv_disk_size": (1.5, 1.5),
    "kv_eviction": ("cost", "cost"),
    "enable_lora": (True, True),
    "lora_modules": (["a=x", "b=y=z"], ("a=x", "b=y=z")),
    "max_loras": (3, 3),
    "max_lora_rank": (64, 64),
    "max_cpu_loras": (200, 200),
    "lora_memory_bytes": ("512M", 512 * 2**20),
    "lora_root": (["/a", "s3://b"], ("/a", "s3://b")),
    "lora_watch_dir": ("/w", "/w"),
    "device": ("cuda", "cuda"),
    "cpu_threads": (2, 2),
    "tune": (False, False),
    "host": ("0.0.0.0", "0.0.0.0"),
    "port": (9000, 9000),
    "api_server_count": (2, 2),
    "auth": ("required", "required"),
    "routing_policy": ("p2c", "p2c"),
    "ssl_certfile": ("c.pem", "c.pem"),
    "ssl_keyfile": ("k.pem", "k.pem"),
    "ssl_ca_certs": ("a.pem", "a.pem"),
    "ssl_cert_reqs": (1, 1),
    "allowed_origins": (["http://a:1", '["https://b", "*"]'], ("http://a:1", "https://b", "*")),
    "api_key": (["k"], ("k",)),
    "admin_api_key": (["a", "b"], ("a", "b")),
    "max_logprobs": (-1, -1),
    "max_text_bytes": ("4M", 4 * 2**20),
    "max_answer_bytes": ("256M", 2**28),
    "response_store_ttl": (60, 60),
    "response_store_bytes": ("1M", 2**20),
    "idempotency_ttl": (60, 60),
    "idempotency_bytes": ("1M", 2**20),
    "files_ttl": (3600, 3600),
    "max_file_bytes": ("1G", 2**30),
    "files_bytes": ("4G", 2**32),
    "max_batch_lines": (100, 100),
    "max_grammar_bytes": ("256K", 2**18),
    "grammar_timeout": (3, 3.0),
    "metrics_api_key": (["m"], ("m",)),
    "state_dir": ("state", "state"),
    "usage_days": (7, 7),
    "usage_rows": (5000, 5000),
    "queue_timeout": (30, 30.0),
    "strict_fields": (True, True),
    "disable_fastapi_docs": (True, True),
    "disable_ui": (True, True),
    "enable_force_include_usage": (True, True),
    "shutdown_timeout": (5, 5.0),
    "gateway_drain_timeout": (60, 60.0),
    "metrics_prefix": ("vllm", "vllm"),
    "sse_keep_alive_interval": (20, 20.0),
    "per_request_spec_decode_metrics": ("summary", "summary"),
    "enable_auto_tool_choice": (True, True),
    "trust_request_chat_template": (True, True),
    "tool_call_parser": ("hermes", "hermes"),
    "reasoning_parser": ("qwen3", "qwen3"),
    "redis_url": ("redis://h:1", "redis://h:1"),
    "redis_timeout_ms": (20, 20.0),
}


def test_the_table_of_good_values_covers_every_option() -> None:
    assert set(GOOD) == {option.name for option in OPTIONS}


@pytest.mark.parametrize("spelled", ["dashes", "underscores"])
def test_values_land_in_their_places(spelled: str) -> None:
    found = {}
    for option in OPTIONS:
        name = option.name.replace("_", "-") if spelled == "dashes" else option.name
        settings = build_settings("m", {**NEEDED.get(option.name, {}), name: GOOD[option.name][0]})
        unset = build_settings("m", {name: None})
        found[option.name] = value_at(settings, option.path), value_at(unset, option.path) == default_of(option)
    assert found == {name: (wanted, True) for name, (_, wanted) in GOOD.items()}


NEEDED: dict[str, dict[str, Any]] = {
    "lora_modules": {"enable_lora": True},
    "lora_root": {"enable_lora": True},
    "lora_watch_dir": {"enable_lora": True},
    **{name: {"enable_lora": True} for name in LORA_SIZES},
    "kv_eviction": {"kv_offloading_size": 1},
    "record": {"record_mib": 64},
    "batching_max_delay_ms": {"batching_policy": "dynamic"},
    "per_request_spec_decode_metrics": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "kv_disk_path": {"kv_offloading_size": 1, "kv_disk_size": 1},
    "kv_disk_size": {"kv_offloading_size": 1, "kv_disk_path": "kv"},
    "ssl_keyfile": {"ssl_certfile": "c.pem"},
    "ssl_ca_certs": {"ssl_certfile": "c.pem"},
    "ssl_cert_reqs": {"ssl_certfile": "c.pem", "ssl_ca_certs": "a.pem"},
}
"""What a setting does not go without."""


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"kv_offloading_size": 1, "enable_prefix_caching": False}, "--kv-offloading-size"),
        ({"kv_disk_path": "kv", "kv_disk_size": 1}, "--kv-disk-path"),
        ({"kv_offloading_size": 1, "kv_disk_path": "kv"}, "--kv-disk-size"),
        ({"kv_offloading_size": 1, "kv_disk_size": 1}, "--kv-disk-size"),
    ],
)
def test_tiers_that_do_not_go_together_are_refused(values: dict[str, Any], flag: str) -> None:
    with pytest.raises(SettingsError) as caught:
        build_settings("m", values)
    assert caught.value.flag == flag


BAD = [
    ("log_format", "xml"),
    ("record_mib", -1),
    ("record_mib", 4097),
    ("record", "half"),
    ("otlp_traces_endpoint", ""),
    ("otlp_traces_endpoint", "http://user@host:4317"),
    ("otlp_traces_endpoint", "http://"),
    ("disable_access_log_for_endpoints", "/health,metrics"),
    ("disable_access_log_for_endpoints", ""),
    ("port_range", "20000"),
    ("port_range", "20999-20000"),
    ("port_range", "80-20000"),
    ("label_selector", {"tandem": ""}),
    ("label_selector", '{"tandem": 1}'),
    ("kv_offloading_size", 0),
    ("kv_offloading_size", "much"),
    ("kv_disk_size", -1),
    ("kv_eviction", "fifo"),
    ("lora_modules", ["no-path="]),
    ("lora_modules", ["=no-name"]),
    ("lora_modules", ["neither"]),
    ("lora_modules", ['{"name": "a"']),
    ("lora_modules", ['{"name": "a"}']),
    ("lora_modules", ['{"name": "a", "path": ""}']),
    ("lora_modules", ['{"name": "a=b", "path": "x"}']),
    ("lora_modules", ['{"name": "a", "path": "x", "local_path": "y"}']),
    ("lora_modules", [{"name": "a", "path": "x", "base_model_name": "b"}]),
    ("lora_modules", [5]),
    ("batching_policy", "orca"),
    ("batching_max_delay_ms", 0),
    ("batching_max_delay_ms", 10_001),
    ("max_loras", 0),
    ("max_lora_rank", 513),
    ("max_cpu_loras", 0),
    ("lora_memory_bytes", 0),
    ("cpu_offload_gb", -1),
    ("cpu_offload_gb", float("nan")),
    ("cpu_offload_gb", float("inf")),
    ("tensor_parallel_size", 0),
    ("tensor_parallel_size", 1.5),
    ("tensor_parallel_size", "two"),
    ("tensor_parallel_size", True),
    ("gpu_memory_utilization", 1.1),
    ("gpu_memory_utilization", 0),
    ("block_size", 12),
    ("block_size", 512),
    ("port", 0),
    ("port", 70000),
    ("dtype", "int8"),
    ("load_format", "pt"),
    ("device", "tpu"),
    ("auth", "off"),
    ("routing_policy", "fastest"),
    ("ssl_keyfile", "k.pem"),
    ("ssl_ca_certs", "a.pem"),
    ("ssl_cert_reqs", 3),
    ("ssl_cert_reqs", 2),
    ("allowed_origins", ["chat.example"]),
    ("allowed_origins", ["https://chat.example/"]),
    ("allowed_origins", "[1]"),
    ("allowed_origins", '["x"'),
    ("max_itl_ms", 0),
    ("speculative_config", "ngram"),
    ("speculative_config", "{}"),
    ("speculative_config", {"method": "eagle", "num_speculative_tokens": 3}),
    ("speculative_config", {"method": "ngram"}),
    ("speculative_config", {"method": "ngram", "num_speculative_tokens": 0}),
    ("speculative_config", {"method": "ngram", "num_speculative_tokens": 17}),
    ("speculative_config", {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 0}),
    ("speculative_config", {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": -1}),
    ("speculative_config", {"method": "ngram", "num_speculative_tokens": 3, "model": "draft"}),
    (
        "speculative_config",
        {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 4, "prompt_lookup_max": 3},
    ),
    ("max_model_len", "12q"),
    ("max_model_len", "1.5"),
    ("hf_overrides", "{"),
    ("hf_overrides", "[1]"),
    ("api_key", [""]),
    ("admin_api_key", ["a\n"]),
    ("metrics_api_key", ["a\x00"]),
    ("redis_timeout_ms", 0),
    ("max_logprobs", -2),
    ("max_answer_bytes", 0),
    ("response_store_ttl", -1),
    ("response_store_bytes", 0),
    ("idempotency_ttl", -1),
    ("idempotency_ttl", 59),
    ("idempotency_bytes", 0),
    ("files_ttl", -1),
    ("max_file_bytes", 0),
    ("files_bytes", 0),
    ("max_batch_lines", 0),
    ("max_grammar_bytes", 0),
    ("grammar_timeout", 0),
    ("grammar_timeout", 601),
    ("max_answer_bytes", "64q"),
    ("sse_keep_alive_interval", 0),
    ("metrics_prefix", ""),
    ("metrics_prefix", "9lives"),
    ("metrics_prefix", "a-b"),
    ("metrics_prefix", "a b\n"),
    ("metrics_prefix", "vllm\n"),
    ("metrics_prefix", "métrique"),
    ("served_model_name", [" "]),
    ("max_num_batched_tokens", 4),
]


def test_bad_values_are_refused_by_their_flags() -> None:
    wrong = []
    for name, value in BAD:
        try:
            build_settings("m", {name: value})
        except SettingsError as error:
            if error.flag == "--" + name.replace("_", "-") and "\n" not in str(error):
                continue
            wrong.append((name, value, error.flag, str(error)))
        else:
            wrong.append((name, value, None, "was accepted"))
    assert not wrong


@pytest.mark.parametrize(
    ("name", "value", "values"),
    [
        ("dtype", "int8", "auto, bfloat16, float16, float32"),
        ("dtype", 16, "auto, bfloat16, float16, float32"),
        ("quantization", "exl2", "int8, w8a8, int4, w4a8, nf4, fp8, auto-round, auto_awq"),
        ("load_format", "pt", "safetensors, gguf, dummy"),
        ("kv_cache_dtype", "fp8_e5m2", "auto, bfloat16, fp8, fp8_e4m3, int8"),
        ("device", "tpu", "cpu, cuda"),
    ],
)
def test_a_setting_with_few_values_lists_them(name: str, value: Any, values: str) -> None:
    with pytest.raises(SettingsError, match=f"{value}'? is not one of {values}"):
        build_settings("m", {name: value})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"host": "0.0.0.0"}, "--host 0.0.0.0 is reachable from elsewhere"),
        ({"api_key": ["sk"]}, "--api-key"),
        ({"admin_api_key": ["root"]}, "--admin-api-key"),
    ],
)
def test_a_service_that_cannot_be_open_refuses_to_be(values: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words) as caught:
        build_settings("m", {"auth": "open", **values})
    assert caught.value.flag == "--auth"
    for auth in (None, "required"):
        assert build_settings("m", {"auth": auth, **values}).gateway.auth == auth


NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"method": "eagles", "num_speculative_tokens": 3}, "method 'eagles': one of ngram"),
        ({**NGRAM, "num_speculative_tokens": 99}, "num_speculative_tokens 99: from 1 to 16"),
        ({**NGRAM, "num_speculative_tokens": 0}, "num_speculative_tokens 0: from 1 to 16"),
        ({**NGRAM, "prompt_lookup_max": 0}, "prompt_lookup_max 0: at least 1"),
        ({**NGRAM, "prompt_lookup_min": -1}, "prompt_lookup_min -1: at least 1"),
        ({**NGRAM, "prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min 4: at most prompt_lookup_max 3"),
        ({**NGRAM, "draft_tensor_parallel_size": 1}, "draft_tensor_parallel_size 1: not a key of method 'ngram'"),
        ({**NGRAM, "suffix_decoding_max_tree_depth": 8}, "suffix_decoding_max_tree_depth 8: not a key of method"),
        ({**SUFFIX, "suffix_decoding_max_tree_depth": 1}, "suffix_decoding_max_tree_depth 1: from 2 to 256"),
        ({**SUFFIX, "suffix_decoding_max_cached_requests": -1}, "suffix_decoding_max_cached_requests -1: from 0 to"),
        ({**SUFFIX, "suffix_decoding_max_spec_factor": 0}, "suffix_decoding_max_spec_factor 0.0: above 0, up to 16"),
        ({**SUFFIX, "suffix_decoding_min_token_prob": 1.5}, "suffix_decoding_min_token_prob 1.5: from 0 to 1"),
        ({**NGRAM, "lookup": 1}, "lookup 1: not a key; known are method, num_speculative_tokens, prompt_lookup_max"),
    ],
)
def test_the_key_of_speculative_config_that_is_wrong_is_named(given: dict[str, Any], words: str) -> None:
    for value in (given, json.dumps(given)):
        with pytest.raises(SettingsError) as caught:
            build_settings("m", {"speculative_config": value})
        assert str(caught.value).startswith(f"--speculative-config: {words}")


def test_unknown_names_are_refused_with_a_suggestion() -> None:
    with pytest.raises(SettingsError, match="tensor_parallel_size"):
        build_settings("m", {"tensor_paralel_size": 2})


@pytest.mark.parametrize("spelled", ["redis_sentinel_url", "redis-sentinel-url"])
def test_an_unknown_setting_is_refused(spelled: str) -> None:
    with pytest.raises(SettingsError, match=r"redis.sentinel.url is not a setting"):
        build_settings("m", {spelled: "redis://h:1"})


@pytest.mark.parametrize("dashes", [True, False])
@pytest.mark.parametrize(
    ("values", "flag", "words"),
    [
        ({"kv_eviction": "cost"}, "--kv-eviction", "needs --kv-offloading-size"),
        ({"max_loras": 8}, "--max-loras", "needs --enable-lora"),
        ({"record": "full"}, "--record", "needs --record-mib"),
        ({"max_lora_rank": 16}, "--max-lora-rank", "needs --enable-lora"),
        ({"max_cpu_loras": 4}, "--max-cpu-loras", "needs --enable-lora"),
        ({"lora_memory_bytes": "1M"}, "--lora-memory-bytes", "needs --enable-lora"),
        ({"batching_max_delay_ms": 9}, "--batching-max-delay-ms", "needs --batching-policy dynamic"),
        (
            {"per_request_spec_decode_metrics": "summary"},
            "--per-request-spec-decode-metrics",
            "needs --speculative-config",
        ),
        ({"cpu_threads": 2, "device": "cuda"}, "--cpu-threads", "on CPU"),
    ],
)
def test_a_flag_that_would_have_no_effect_is_refused(
    values: dict[str, Any], flag: str, words: str, dashes: bool
) -> None:
    given = {name.replace("_", "-") if dashes else name: value for name, value in values.items()}
    with pytest.raises(SettingsError, match=words) as caught:
        build_settings("m", given)
    assert caught.value.flag == flag and str(caught.value).startswith(f"{flag}: "), "also if it begins another's name"
    build_settings("m", dict.fromkeys(values))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:hush@h:6379/0", "redis://:(hidden)@h:6379/0"),
        ("rediss://user:hush@h/0", "rediss://user:(hidden)@h/0"),
        ("redis://h:6379/0", "redis://h:6379/0"),
        ("redis://:hu/sh@hush@h:6379/0", "redis://:(hidden)@h:6379/0"),
        ("redis://h:6379/0?password=hush", "redis://h:6379/0?(hidden)"),
        ("file:/etc/tandem/redis", "file:/etc/tandem/redis"),
    ],
)
def test_resolved_settings_show_no_secrets(url: str, shown: str) -> None:
    keys = {name: ["hush"] for name in ("api_key", "admin_api_key", "metrics_api_key")}
    text = resolved_yaml(build_settings("m", {"redis_url": url, **keys}))
    assert shown in text and "hush" not in text


@pytest.mark.parametrize("name", ["api_key", "admin_api_key", "metrics_api_key", "redis_url"])
@pytest.mark.parametrize("value", [["hush", 1], {"hush": 1}, ["hush\n"]])
def test_errors_show_no_secrets(name: str, value: Any) -> None:
    with pytest.raises(SettingsError) as caught:
        build_settings("m", {name: value})
    assert "hush" not in str(caught.value) and caught.value.flag == f"--{name.replace('_', '-')}"


def test_a_gpus_share_has_no_effect_on_cpu() -> None:
    for share in (0.5, 0.9):
        (line,) = build_settings("m", {"device": "cpu", "gpu_memory_utilization": share}).without_effect
        assert line.startswith("--gpu-memory-utilization has no effect: ") and "--kv-cache-memory-bytes" in line
    assert not build_settings("m", {"device": "cpu"}).without_effect
    assert not build_settings("m", {"device": "cuda", "gpu_memory_utilization": 0.5}).without_effect
    unknown = build_settings("m", {"gpu_memory_utilization": 0.5})
    assert not unknown.without_effect and with_device(unknown, "cpu", None).without_effect == (line,)
    assert with_device(with_device(unknown, "cpu", None), "cpu", None).without_effect == (line,)
    (line,) = with_device(build_settings("m", {"tune": False}), "cpu", None).without_effect
    assert line == "--tune has no effect: it is about kernels for GPUs"
    assert with_device(build_settings("m", {"tune": True}), "cpu", None).without_effect == ()


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("2k", 2000), ("2K", 2048), ("3MiB", 3 * 2**20), ("1.5G", 3 * 2**29), ("4GB", 2**32)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: from-file\ntensor-parallel-size: 2\nmax_num_seqs: 9\nautoscaling_config: {max_replicas: 3}\n"
    )
    settings = merge_config(str(file), None, {"max_num_seqs": 5})
    assert settings.engine.model.model == "from-file"
    assert settings.engine.parallel.tensor_parallel_size == 2
    assert settings.engine.scheduler.max_num_seqs == 5
    assert settings.autoscaling_config == {"max_replicas": 3, "policy": {"policy_function": GROUP_SCALING}}
    assert merge_config(str(file), "given", {}).engine.model.model == "given"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tensor_parallel: 2", "tensor_parallel is not a setting"),
        ("- a", "must hold a mapping"),
        ("a: [", "is not YAML"),
        ("model: m\nautoscaling_config: {min: 1}", "min is not a setting"),
        ("model: m\nautoscaling_config: {min_replicas: 3, max_replicas: 2}", "no range"),
        ("model: m\nautoscaling_config: {initial_replicas: 0}", "initial_replicas 0 is not between"),
        ("model: m\nautoscaling_config: {initial_replicas: 3, max_replicas: 2}", "initial_replicas 3 is not between"),
        ("model: m\nautoscaling_config: {max_replicas: 2}\ndata_parallel_size: 2", "chooses the number of groups"),
        ("port: 1", "no model"),
        ("applications: []", "c.yaml is a Ray Serve file: start it with `serve run "),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=re.escape(words)):
        merge_config(str(file), None, {})


def test_a_missing_file_is_named() -> None:
    with pytest.raises(SettingsError, match=r"nowhere\.yaml .* \(presets: latency, throughput\)"):
        read_config_file("nowhere.yaml")


@pytest.mark.parametrize("preset", sorted(p.stem for p in (CONFIGS / "presets").glob("*.yaml")))
def test_presets_load_by_name(preset: str) -> None:
    assert merge_config(preset, "m", {}).engine.model.model == "m"


def test_serve_args_in_the_shape_of_ray_serve_llm() -> None:
    settings = settings_from_serve_args(
        {
            "model_loading_config": {"model_id": "name", "model_source": "source"},
            "engine_kwargs": {"tensor_parallel_size": 2, "max_num_seqs": 3},
            "deployment_config": {"autoscaling_config": {"min_replicas": 1, "max_replicas": 2}},
            "gateway_config": {
                "api_key": "k",
                "metrics_prefix": "vllm",
                "max_answer_bytes": "2G",
                "label_selector": {"tandem": "gateway"},
            },
        }
    )
    assert settings.gateway.metrics_prefix == "vllm"
    assert settings.gateway.max_answer_bytes == 2**31
    assert settings.gateway.label_selector == {"tandem": "gateway"} and settings.engine.parallel.label_selector == {}
    assert settings.engine.model.model == "source"
    assert settings.engine.model.served_model_name == ("name",)
    assert settings.engine.parallel.tensor_parallel_size == 2
    assert settings.gateway.api_keys == ("k",)
    assert settings.autoscaling_config is not None and settings.autoscaling_config["max_replicas"] == 2


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"lora_config": {"odd": 1}}, "odd is not a setting"),
        ({"model_loading_config": {"model_id": "m"}, "single_node": "yes"}, "single_node: 'yes' must be true or false"),
        (
            {"model_loading_config": {"model_id": "m"}, "allow_unauthenticated_ray": 1},
            "allow_unauthenticated_ray: 1 must be true or false",
        ),
        ({"engine_kwarg": {}}, "engine_kwarg is not a setting"),
        (
            {"model_loading_config": {"model_id": "m"}, "gateway_config": {"gateway_label_selector": {"a": "b"}}},
            "gateway_label_selector is not a setting",
        ),
        ({"zzz": {}}, "known are model_loading_config, engine_kwargs,"),
        ({"model_loading_config": {"model_id": "m", "mirror": 1}}, "mirror is not a setting"),
        ({"model_loading_config": {"model_id": "m"}, "redis_config": {"redis_sentinel_url": 5}}, "not a setting"),
        ({"model_loading_config": {}}, "must name a model"),
        ({"model_loading_config": {"model_id": "m"}, "engine_kwargs": {"tp": 2}}, "tp is not a setting"),
        *(
            ({"model_loading_config": {"model_id": "m"}, "engine_kwargs": {key: value}}, f"{key} does not belong")
            for key, value in (
                ("port", 2),
                ("ssl_certfile", "a.pem"),
                ("ssl_keyfile", "a.pem"),
                ("ssl_ca_certs", "a.pem"),
                ("ssl_cert_reqs", 2),
                ("ssl-certfile", "a.pem"),
            )
        ),
        (
            {"model_loading_config": {"model_id": "m"}, "deployment_config": {"max_ongoing_requests": 2}},
            "not a setting",
        ),
    ],
)
def test_bad_serve_args_are_refused(args: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(words)):
        settings_from_serve_args(args)


@pytest.mark.parametrize("applications", ["5", "[odd]", "{a: b}", "[{import_path: tandem.cluster.app:build}, odd]"])
def test_what_is_no_application_is_refused(tmp_path: Path, applications: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"applications: {applications}")
    with pytest.raises(SettingsError, match="must be a list of mappings, not"):
        read_serve_file(str(file))


@pytest.mark.parametrize("applications", ["[]", "[{import_path: other.app:build}]"])
def test_a_serve_file_of_others_is_said_to_be_one(tmp_path: Path, applications: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"applications: {applications}")
    with pytest.raises(SettingsError, match="none of its applications has import_path"):
        read_serve_file(str(file))


@pytest.mark.parametrize("others", ["", ", {import_path: tandem.cluster.app:build}"])
def test_the_import_path_of_before_is_refused_with_the_new_one_named(tmp_path: Path, others: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"applications: [{{import_path: cluster.app:build}}{others}]")
    with pytest.raises(SettingsError, match=r"import_path cluster\.app:build is now tandem\.cluster\.app:build$"):
        read_serve_file(str(file))


def test_a_serve_file_has_the_settings_of_each_application_of_ours(tmp_path: Path) -> None:
    args = "args: {model_loading_config: {model_id: %s}, single_node: false}"
    apps = [f"{{import_path: tandem.cluster.app:build, {args % name}}}" for name in ("one", "two")]
    file = tmp_path / "c.yaml"
    file.write_text(f"applications: [{', '.join(apps)}, {{import_path: other.app:build}}]")
    assert [settings.engine.model.model for settings in read_serve_file(str(file))] == ["one", "two"]
    file.write_text("port: 1")
    assert read_serve_file(str(file)) == []


@pytest.mark.parametrize("name", ["demo", "autoscale"])
def test_shipped_serve_files_hold_good_args(name: str) -> None:
    loaded = yaml.safe_load((CONFIGS / "serve" / f"{name}.yaml").read_text())
    (app,) = loaded["applications"]
    assert app["import_path"] == "tandem.cluster.app:build"
    assert settings_from_serve_args(app["args"]).engine.model.model == "demo"


def test_resolved_settings_hide_keys() -> None:
    text = resolved_yaml(build_settings("m", {"api_key": ["secret-key"]}))
    assert "secret-key" not in text
    assert yaml.safe_load(text)["engine"]["model"]["model"] == "m"


@pytest.mark.parametrize("name", ["seed", "max_num_seqs", "devices_per_node"])
def test_numbers_that_no_message_holds_are_refused_by_name(name: str) -> None:
    """They would end a start that is under way, without a word on the flag."""
    with pytest.raises(SettingsError, match="1180591620717411303424 is no whole number of 64 bits") as refused:
        build_settings("m", {name: 2**70})
    assert refused.value.flag == f"--{name.replace('_', '-')}"
