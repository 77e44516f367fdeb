"""Variables of the environment in place of flags: precedence, values, errors that name them, unknown ones."""

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import typer.main

from tandem.cluster.cli.base.flag_variables import YIELDS, several, variables_of
from tandem.cluster.cli.client import running_service
from tandem.cluster.cli.main import build_app, run_verb
from tandem.configs.environment import FOR_TESTS, NO_FLAGS, flag_variables
from tandem.configs.errors import SettingsError, TandemError
from tandem.configs.schema import ServiceSettings


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in flag_variables():
        monkeypatch.delenv(name)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServiceSettings]:
    """What `tandem serve` would start with: it ends there."""
    found: list[ServiceSettings] = []

    def end(settings: ServiceSettings) -> None:
        found.append(settings)
        raise TandemError("enough")

    monkeypatch.setattr("tandem.cluster.deploy.resolved_settings.pin_settings", end)
    return found


def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str, **variables: str) -> str:
    """What `tandem WORDS`, which ends with status 2, says on standard error."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["tandem", *words])
    with pytest.raises(SystemExit) as ended:
        run_verb()
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_the_command_line_wins_over_variables_and_they_over_the_file(
    served: list[ServiceSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "service.yaml"
    file.write_text("{port: 1001, host: from-file.invalid, max_num_seqs: 11, block_size: 32}")
    variables = {
        "TANDEM_CONFIG": str(file),
        "TANDEM_PORT": "1002",
        "TANDEM_MAX_NUM_SEQS": "12",
        "TANDEM_TENSOR_PARALLEL_SIZE": "2",
        "TANDEM_MAX_MODEL_LEN": "1k",
        "TANDEM_ENABLE_PREFIX_CACHING": "false",
        "TANDEM_ENABLE_LORA": "1",
        "TANDEM_SERVED_MODEL_NAME": "a b",
        "TANDEM_API_KEY": "sk-1 sk-2",
        "TANDEM_LOG_LEVEL": "",  # as if it were not there
    }
    lines = said(monkeypatch, capsys, "serve", "demo", "--port", "1003", "-tp", "4", **variables)
    read = sorted(variables.keys() - {"TANDEM_PORT", "TANDEM_TENSOR_PARALLEL_SIZE", "TANDEM_LOG_LEVEL"})
    assert lines.splitlines() == [f"tandem: from the environment: {', '.join(read)}", "tandem: error: enough"]
    (settings,) = served
    assert settings.gateway.port == 1003 and settings.engine.parallel.tensor_parallel_size == 4
    assert settings.engine.scheduler.max_num_seqs == 12 and settings.engine.model.max_model_len == 1000
    assert settings.gateway.host == "from-file.invalid" and settings.engine.cache.block_size == 32
    assert not settings.engine.cache.enable_prefix_caching and settings.engine.lora.enable_lora
    assert settings.engine.model.served_model_name == ("a", "b") and settings.gateway.api_keys == ("sk-1", "sk-2")


@pytest.mark.parametrize(
    ("words", "variables", "wanted"),
    [
        (["serve", "demo"], {"TANDEM_PORT": "77777"}, r"--port: 77777 must .* \(from TANDEM_PORT in the environment\)"),
        (["serve", "demo"], {"TANDEM_MAX_NUM_SEQS": "x"}, r"'--max-num-seqs' \(env var: 'TANDEM_MAX_NUM_SEQS'\)"),
        (["serve", "demo"], {"TANDEM_ENABLE_LORA": "maybe"}, r"'--enable-lora' \(env var: 'TANDEM_ENABLE_LORA'\)"),
        (["serve", "demo"], {"TANDEM_DOWNLOAD_DIR": "/x"}, r"--download-dir.* \(from TANDEM_DOWNLOAD_DIR in"),
        (["serve", "demo", "--auth", "open"], {"TANDEM_API_KEY": "sk-secret"}, r"--auth: .* \(from TANDEM_API_KEY in"),
        (["serve", "demo"], {"TANDEM_API_KEY": "env:NO_SUCH_ONE"}, r"NO_SUCH_ONE: .* \(from TANDEM_API_KEY in"),
        (["serve", "demo"], {"TANDEM_REDIS_URL": "http://sk-secret"}, r"--redis-url: .* \(from TANDEM_REDIS_URL in"),
        (["serve", "demo"], {"TANDEM_API_KEY": '["sk-secret'}, r"'--api-key' \(env var: 'TANDEM_API_KEY'\).*no JSON"),
        (["plan", "demo"], {"TANDEM_RANKS": "0"}, r"--ranks: 0 must .* \(from TANDEM_RANKS in"),
        (["plan", "demo", "--ranks", "0"], {"TANDEM_RANKS": "1"}, r"--ranks: 0 must be from 1 to 4096$"),
        (["chat"], {"TANDEM_URL": "sk-secret:x"}, r"--url.* \(from TANDEM_URL in"),
        (["tenants", "add", "x"], {"TANDEM_WEIGHT": "y"}, r"--weight: 'y' .* \(from TANDEM_WEIGHT in"),
    ],
)
def test_an_error_names_the_variable_whose_value_was_read(
    words: list[str],
    variables: dict[str, str],
    wanted: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = said(monkeypatch, capsys, *words, **variables)
    assert re.search(wanted, text.strip(), re.DOTALL), text
    assert "sk-secret" not in text or "TANDEM_URL" in variables


def test_variables_that_no_verb_has_are_named_with_the_nearest(
    served: list[ServiceSettings], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = {
        "TANDEM_MAX_NUM_SEQ": "sk-secret",
        "TANDEM_XYZZY": "1",
        "TANDEM_TEMPERATURE": "0.5",  # of another verb
        f"{FOR_TESTS}WORD": "1",
        "TANDEM_UNSET": "",
        # in every container of a Kubernetes with Services named tandem and tandem-serve-svc
        "TANDEM_SERVICE_HOST": "10.0.0.1",
        "TANDEM_SERVICE_PORT_HTTP": "8000",
        "TANDEM_PORT": "tcp://10.0.0.1:8000",
        "TANDEM_PORT_8000_TCP_ADDR": "10.0.0.1",
        "TANDEM_SERVE_SVC_PORT": "tcp://10.0.0.1:8000",
        **dict.fromkeys(NO_FLAGS, ""),
    }
    lines = said(monkeypatch, capsys, "serve", "demo", **variables).splitlines()
    assert lines == [
        "tandem: TANDEM_MAX_NUM_SEQ in the environment is ignored: no verb has such a flag; did you mean "
        "TANDEM_MAX_NUM_SEQS?",
        "tandem: TANDEM_XYZZY in the environment is ignored: no verb has such a flag",
        "tandem: error: enough",
    ]
    assert served[0].gateway.port == 8000, "not the address that Kubernetes puts there"


def test_every_flag_has_a_variable_and_those_of_two_verbs_mean_the_same() -> None:
    root: Any = typer.main.get_command(build_app())
    helps: dict[str, set[str]] = defaultdict(set)
    for verb in [leaf for one in root.commands.values() for leaf in getattr(one, "commands", {"": one}).values()]:
        assert set(verb.variables.names) == {
            option.name for option in verb.params if option.param_type_name == "option"
        }
        for option in verb.params:
            if option.param_type_name == "option" and not option.hidden:
                helps[verb.variables.names[option.name]].add(option.opts[0])
    assert not {name: flags for name, flags in helps.items() if len(flags) > 1}, "two flags of one variable"
    known = variables_of(root)
    assert not known & set(NO_FLAGS) and not [name for name in known if name.startswith(FOR_TESTS)]
    assert {"TANDEM_API_KEY", "TANDEM_INPUT_FILE", "TANDEM_SSL_CERTFILE", "TANDEM_CLIENT_SSL_CERTFILE"} <= known
    assert root.commands["chat"].variables.names["ssl_certfile"] == "TANDEM_CLIENT_SSL_CERTFILE"
    parameters = {option.name for verb in root.commands.values() for option in verb.params}
    assert YIELDS.keys() <= parameters | {"tenant"}


def test_a_variable_gives_way_to_a_flag_that_says_the_same_otherwise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def service_at(url: str | None, redis_url: str | None) -> None:
        raise SettingsError(f"{url} {redis_url}")

    monkeypatch.setattr(running_service, "newest", lambda instead: service_at(None, None))
    monkeypatch.setattr(running_service, "_running", lambda instead: ["a run"])
    monkeypatch.setattr(running_service, "runs_on", lambda url, runs: service_at(url, None))
    both = {"TANDEM_URL": "http://h:1", "TANDEM_REDIS_URL": "no-url"}
    assert "http://h:2 None" in said(monkeypatch, capsys, "usage", "--url", "http://h:2", **both)
    assert "from TANDEM_REDIS_URL" in said(monkeypatch, capsys, "usage", **both)
    assert "from TANDEM" not in said(monkeypatch, capsys, "usage", "--redis-url", "no-url", **both)
    monkeypatch.delenv("TANDEM_REDIS_URL")
    assert "http://h:1 None" in said(monkeypatch, capsys, "usage")
    monkeypatch.setattr("tandem.cluster.deploy.machine_facts.read_facts", lambda: service_at("doctor", "here"))
    for_serve = {"TANDEM_ADDRESS": "h:1", "TANDEM_PORT_RANGE": "3-4", "TANDEM_MODEL": "m"}
    assert "doctor here" in said(monkeypatch, capsys, "doctor", **for_serve)
    assert "needs --cluster" in said(monkeypatch, capsys, "doctor", "--address", "h:1")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a  b\n", ["a", "b"]),
        ('["a b", {"name": "x"}]', ["a b", '{"name": "x"}']),
        ('{"name": "x", "path": "/a b"}', ['{"name": "x", "path": "/a b"}']),
    ],
)
def test_several_values_are_words_or_a_json_list(text: str, values: list[str]) -> None:
    assert several(text) == values
