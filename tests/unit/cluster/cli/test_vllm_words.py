"""Command lines that were written for vLLM: their spelling, and flags that Tandem has no setting for."""

import json
import re
import sys
from typing import Any

import pytest
import yaml

from tandem.cluster.cli.base.vllm_words import respelled
from tandem.cluster.cli.main import run_verb
from tandem.cluster.service import launcher
from tandem.configs.errors import SettingsError
from tandem.configs.foreign_flags import FOREIGN, NEUTRAL, REFUSED, SAME_VALUES, SWITCHES
from tandem.configs.load import build_settings, merge_config, resolved_yaml, settings_from_serve_args
from tandem.configs.options import OPTIONS, option_named

TAKES_VALUE = {
    "--lora-modules": True, "--served-model-name": True, "--api-key": True, "--port": True, "--dtype": True, "-o": True,
    "-tp": True, "--config": True, "--max-model-len": True, "--enable-lora": False, "--enable-prefix-caching": False,
    "--no-enable-prefix-caching": False, "--compilation-config": True, "-O": True, "--cuda-graph-sizes": True,
    "--hf-token": True, "--logits-processors": True,
}  # fmt: skip
PASTED = (
    "--host 127.0.0.1 --port 8001 --served-model-name small demo --dtype float --load-format auto --max_model_len 2k "
    "--enforce-eager --enable-chunked-prefill --disable-log-stats --swap-space 4 --tokenizer-mode auto -O3 "
    "--distributed-executor-backend ray --disable-custom-all-reduce --max-seq-len-to-capture 8192 "
    "--disable-frontend-multiprocessing --uvicorn-log-level info --scheduling-policy fcfs --task embed "
    "--enable-prefix-caching=True --cuda-graph-sizes 1 2 4 --compilation-config.mode 3 --limit-mm-per-prompt image=0 "
    "--performance-mode throughput --log-config-file log.json --enable-reasoning --mamba-cache-dtype float32"
)
"""A command line as in vLLM's guides, all at once."""


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        ("--lora-modules a=x b=y", "--lora-modules a=x --lora-modules b=y"),
        ("demo --lora-modules a=x b=y --port 5", "demo --lora-modules a=x --lora-modules b=y --port 5"),
        ("--lora-modules a=x b=y demo", "--lora-modules a=x --lora-modules b=y demo"),
        ("--lora-modules a=x --dtype=float32 b=y", "--lora-modules a=x --dtype=float32 b=y"),
        ("--lora-modules", "--lora-modules"),
        ("--lora-modules a=x -- b=y", "--lora-modules a=x -- b=y"),
        ("-- --lora-modules a=x b=y", "-- --lora-modules a=x b=y"),
        ("demo -o b=y c=z", "demo -o b=y c=z"),
        ("demo --served-model-name a b --port 5", "demo --served-model-name a --served-model-name b --port 5"),
        ("demo --served-model-name=a b", "demo --served-model-name a --served-model-name b"),
        ("--served-model-name a b --config f", "--served-model-name a --served-model-name b --config f"),
        ("--served-model-name a demo", "--served-model-name a demo"),
        ("--served-model-name a b demo -tp 2", "--served-model-name a --served-model-name b demo -tp 2"),
        ("--api-key k j --model demo", "--api-key k --api-key j demo"),
        ("--model demo --port 5", "demo --port 5"),
        ("--model=demo", "demo"),
        ("demo --max_model_len 4k", "demo --max-model-len 4k"),
        ("demo --max_model_len=4k -tp=2", "demo --max-model-len=4k -tp=2"),
        ("demo --served_model_name a_b", "demo --served-model-name a_b"),
        ("demo --enable-prefix-caching=False", "demo --no-enable-prefix-caching"),
        ("demo --enable-lora=true", "demo --enable-lora"),
        ("demo --enable-lora=false", "demo"),
        ("demo --enable-lora=maybe", "demo --enable-lora=maybe"),
        ("demo -O.mode 3 --compilation-config.x.y=z", """demo -O {"mode":3} --compilation-config={"x":{"y":"z"}}"""),
        ("-O.a.b 1 demo -O.a.c=x -O.d true", """-O {"a":{"b":1,"c":"x"},"d":true} demo"""),
        ("demo -O.a", "demo -O"),
        ("""-O {"a":1} demo -O.b 2""", """-O {"a":1,"b":2} demo"""),
        ("""-O.b 2 -O={"a":{"c":1}} --port 5 -O.a.d=3""", """-O {"b":2,"a":{"c":1,"d":3}} --port 5"""),
        ("""-O.a.b 1 -O.a {"b":2,"c":3}""", """-O {"a":{"b":2,"c":3}}"""),
        ("""-O {"a":1} -O {"b":2}""", """-O {"a":1} -O {"b":2}"""),
        ("-O.a 1 -O.a 2 -O", """-O {"a":2} -O"""),
        ("--hf-token demo", "--hf-token demo"),
        ("demo --hf-token", "demo"),
        ("--hf_token --port 5 demo", "--port 5 demo"),
        ("demo --logits-processors a:b c:d --port 5", "demo --logits-processors a:b --logits-processors c:d --port 5"),
        ("demo --cuda-graph-sizes 1 2", "demo --cuda-graph-sizes 1 --cuda-graph-sizes 2"),
        ("demo --no_such x", "demo --no_such x"),
        ("--port", "--port"),
        ("", ""),
    ],
)
def test_words_are_respelled(words: str, ours: str) -> None:
    assert respelled(words.split(), TAKES_VALUE) == ours.split()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("-O.a 1 -O.a.b 2", "-O: a is an object and a value"),
        ("-O.a.b 1 -O.a 2", "-O: a is an object and a value"),
        ("""-O {"a":{"b":{"c":1}}} -O.a.b x""", "-O: b is an object and a value"),
        ("-O 3 -O.a 1", "-O: a value that is no JSON object does not go with keys"),
        ("-O.a 1 -O {", "-O: a value that is no JSON object does not go"),
        ("--lora-modules.name a --lora-modules b=x c=y", "--lora-modules: a value does not go with keys"),
        ("""--lora-modules {"name":"a"} --lora-modules.path x""", "--lora-modules: a value does not go"),
    ],
)
def test_values_of_one_flag_that_do_not_go_together_are_refused(words: str, said: str) -> None:
    with pytest.raises(SettingsError, match=f"^{re.escape(said)}"):
        respelled(["demo", *words.split()], TAKES_VALUE)


@pytest.mark.parametrize("words", ["a --model b", "--model a --model b", "--model=b --port 5 a"])
def test_there_is_one_model(words: str) -> None:
    with pytest.raises(SettingsError, match=r"^MODEL: .*leave one of the two out"):
        respelled(words.split(), TAKES_VALUE)


class _Caught(Exception):
    """Thrown in place of a start."""


def flags_of(monkeypatch: pytest.MonkeyPatch, words: str) -> Any:
    """The settings that `tandem serve WORDS` makes."""
    found = []

    def take(*given: Any) -> Any:
        found.append(merge_config(*given))
        raise _Caught

    monkeypatch.setattr("tandem.cluster.cli.verbs.serve.merge_config", take)
    monkeypatch.setattr(sys, "argv", ["tandem", "serve", *words.split()])
    with pytest.raises(_Caught):
        run_verb()
    return found[0]


def test_a_pasted_command_line_is_taken_and_each_flag_without_effect_named(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = flags_of(monkeypatch, f"--model demo {PASTED}")
    model = settings.engine.model
    assert (model.model, model.served_model_name) == ("demo", ("small", "demo"))
    assert (model.dtype, model.max_model_len, settings.gateway.port) == ("float32", 2000, 8001)
    named = [line.partition(" ")[0] for line in settings.without_effect]
    given = {word.partition("=")[0] for word in PASTED.replace(".mode", "").split() if word.startswith("--")}
    assert sorted(named) == sorted({f for f in given if option_named(f[2:].replace("_", "-")) is None} | {
        "--optimization-level"})  # fmt: skip
    assert all(" has no effect: " in line for line in settings.without_effect)


def test_a_start_prints_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = build_settings("demo", {"disable_log_stats": True, "device": "cpu"})
    said: list[str] = []

    class Console(launcher.Console):
        def print_line(self, text: str) -> None:
            said.append(text)

    monkeypatch.setattr(launcher, "check_port", lambda host, port: (_ for _ in ()).throw(_Caught))
    with pytest.raises(_Caught):
        launcher.Launcher(settings, None, Console(), None)._check()  # type: ignore[arg-type]
    assert said == list(settings.without_effect) and said[0].startswith("--disable-log-stats has no effect: ")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"tokenizer_mode": "mistral"}, "--tokenizer-mode: 'mistral' is not supported, only auto or hf"),
        ({"distributed_executor_backend": "external_launcher"}, "--distributed-executor-backend: 'external_launcher'"),
        ({"task": "classify"}, "--task: 'classify' is not supported"),
        ({"decode_context_parallel_size": 2}, "--decode-context-parallel-size: 2 is not supported, only 1"),
        ({"kv_events_config": "{}x"}, "--kv-events-config: vLLM's flag is not one of Tandem's"),
        ({"download-dir": "/big"}, "set HF_HUB_CACHE to that folder"),
        ({"rope_scaling": {"factor": 2}}, "--hf-overrides"),
    ],
)
def test_what_would_change_something_is_refused_by_name(values: dict[str, Any], said: str) -> None:
    for build in (
        lambda: build_settings("demo", values),
        lambda: settings_from_serve_args({"model_loading_config": {"model_id": "demo"}, "engine_kwargs": values}),
    ):
        with pytest.raises(SettingsError) as caught:
            build()
        assert said in str(caught.value)


def test_a_token_of_the_hub_is_taken_and_never_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import get_token

    monkeypatch.setenv("HF_TOKEN", "before")
    settings = flags_of(monkeypatch, "demo --hf-token hf_very_secret")
    (line,) = settings.without_effect
    assert line.startswith("--hf-token is taken, but ") and "HF_TOKEN" in line
    assert "secret" not in str(settings) and "secret" not in resolved_yaml(settings)
    assert get_token() == "hf_very_secret"
    assert not flags_of(monkeypatch, "demo --hf-token --port 5").without_effect
    assert not build_settings("demo", {"hf_token": True}).without_effect and get_token() == "hf_very_secret"


STRUCTURED = "structured_outputs_config"


def test_the_object_of_structured_outputs_is_read_key_by_key(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"backend": "xgrammar", "disable_any_whitespace": True, "reasoning_parser": "qwen3"}
    with_object = flags_of(monkeypatch, f"demo --structured-outputs-config {json.dumps(given, separators=(',', ':'))}")
    keys = "".join(f" --{STRUCTURED}.{key}={value}" for key, value in given.items())
    for settings in (
        with_object,
        flags_of(monkeypatch, f"demo{keys}"),
        build_settings("demo", {STRUCTURED: given, "reasoning_parser": "qwen3"}),
        settings_from_serve_args({"model_loading_config": {"model_id": "demo"}, "engine_kwargs": {STRUCTURED: given}}),
    ):
        assert settings.gateway.reasoning_parser == "qwen3"
        assert [line.partition(":")[0] for line in settings.without_effect] == [
            f"--structured-outputs-config.{key} has no effect" for key in ("backend", "disable_any_whitespace")
        ]
    assert not build_settings("demo", {STRUCTURED: {}}).without_effect


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{", "--structured-outputs-config: '{' is no JSON object"),
        ([1], "--structured-outputs-config: [1] is no JSON object"),
        ({"enable_in_reasoning": True}, "--structured-outputs-config.enable_in_reasoning: vLLM's flag is not one of"),
        ({"reasoning_parser_plugin": "x.py"}, "--structured-outputs-config.reasoning_parser_plugin: vLLM's flag"),
        ({"reasoning_parser": "granite"}, "--reasoning-parser: 'qwen3', and 'granite' in --structured-outputs-config"),
        ({"mood": 1}, "structured_outputs_config.mood is not a setting"),
    ],
)
def test_what_is_wrong_in_the_object_of_structured_outputs_is_named(given: Any, said: str) -> None:
    for dash in "_-":
        with pytest.raises(SettingsError, match=re.escape(said)):
            build_settings("demo", {STRUCTURED: given, f"reasoning{dash}parser": "qwen3"})


def test_flags_win_over_the_object_of_structured_outputs_in_a_file(tmp_path: Any) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text(yaml.safe_dump({"structured-outputs-config": {"reasoning_parser": "qwen3", "backend": "xgrammar"}}))
    by_object = {STRUCTURED: '{"reasoning_parser":"granite"}'}
    for flags, parser in (({"reasoning_parser": "granite"}, "granite"), (by_object, "granite"), ({}, "qwen3")):
        settings = merge_config(str(file), "demo", flags)
        assert settings.gateway.reasoning_parser == parser
        assert [line.partition(" ")[0] for line in settings.without_effect] == [
            f"--{STRUCTURED}.backend".replace("_", "-")
        ]
    file.write_text(yaml.safe_dump({"reasoning_parser": "qwen3"}))
    assert merge_config(str(file), "demo", by_object).gateway.reasoning_parser == "granite"
    file.write_text(yaml.safe_dump({"reasoning_parser": "qwen3", STRUCTURED: {"reasoning_parser": "granite"}}))
    with pytest.raises(SettingsError, match="'qwen3', and 'granite'"):
        merge_config(str(file), "demo", {})


@pytest.mark.parametrize("preset", ["latency", "throughput"])
def test_the_line_about_performance_mode_names_presets_that_work(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = flags_of(monkeypatch, f"demo --performance-mode {preset}").without_effect
    assert f"`--config {preset}`" in line and line.startswith("--performance-mode has no effect: ")
    sizes = flags_of(monkeypatch, f"demo --config {preset}").engine.scheduler
    plain = build_settings("demo", {}).engine.scheduler
    if preset == "latency":
        assert sizes.max_num_batched_tokens < plain.max_num_batched_tokens
    else:
        assert sizes.max_num_batched_tokens > plain.max_num_batched_tokens


def test_keys_of_our_own_objects_may_stand_behind_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "demo --speculative-config.method ngram --speculative_config.num_speculative_tokens 3 --hf-overrides.a.b 1"
    engine = flags_of(monkeypatch, words).engine
    assert (engine.speculative.method, engine.speculative.num_speculative_tokens) == ("ngram", 3)
    assert engine.model.hf_overrides == {"a": {"b": 1}}
    both = 'demo --hf-overrides {"rope_theta":5000.0} --hf-overrides.rms_norm_eps 0.001'
    both += (
        ' --structured-outputs-config {"reasoning_parser":"deepseek_r1"} --structured-outputs-config.backend xgrammar'
    )
    settings = flags_of(monkeypatch, both)
    assert settings.engine.model.hf_overrides == {"rope_theta": 5000.0, "rms_norm_eps": 0.001}
    assert settings.gateway.reasoning_parser == "deepseek_r1"


def test_code_of_others_is_refused_by_name_however_many_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tandem", "serve", "--model", "demo", "--logits-processors", "a:b", "c:d"])
    with pytest.raises(SystemExit):
        run_verb()
    assert "--logits-processors: vLLM's flag is not one of Tandem's: no code of others" in capsys.readouterr().err


def test_files_may_have_them(tmp_path: Any) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text(
        yaml.safe_dump({"model": "demo", "disable-log-stats": True, "swap_space": 4, "enable_sleep_mode": False})
    )
    lines = merge_config(str(file), None, {}).without_effect
    assert [line.partition(" ")[0] for line in lines] == ["--disable-log-stats", "--swap-space"]
    args = {"model_loading_config": {"model_id": "demo"}, "engine_kwargs": {"disable_log_stats": True}}
    assert settings_from_serve_args(args).without_effect == lines[:1]


def test_the_tables_are_of_one_piece() -> None:
    """A setting of ours is in none of them; each value and switch has a flag."""
    assert not [name for name in (*FOREIGN, *REFUSED) if option_named(name) is not None]
    assert not FOREIGN.keys() & REFUSED.keys()
    assert NEUTRAL.keys() <= FOREIGN.keys() and {*FOREIGN, *REFUSED} >= SWITCHES and not SWITCHES & NEUTRAL.keys()
    assert SAME_VALUES.keys() <= {option.name for option in OPTIONS}
