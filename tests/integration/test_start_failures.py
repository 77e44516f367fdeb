"""Settings that cannot work end with one line that names the flag, before Ray is started; nothing is left behind."""

import json
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import yaml

from tandem.cluster.process.reaper import StatusPipe
from tandem.cluster.service.launcher import Launcher
from tandem.configs.environment import short_temp_folder
from tests.support.certificates import Authority
from tests.support.service import DEMO, free_port, run_tandem
from tests.support.verbs import run_verb_here

SERVE_FILES = Path(__file__).resolve().parents[2] / "configs" / "serve"


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture
def strange_model(tmp_path: Path) -> Path:
    """The demo with an architecture nobody has heard of."""
    folder = tmp_path / "strange"
    shutil.copytree(DEMO, folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["StrangeForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def refused(*arguments: str) -> str:
    """What `tandem serve ARGUMENTS` ends with, in this process, as the launcher is not needed to know."""
    return said_by(run_verb_here("serve", *arguments, "--port", str(free_port())))


def refused_by_a_check(*arguments: str) -> str:
    """The same where the launcher has to look at the model and the machine, up to its last check."""
    log, run = patch("tandem.cluster.cli.verbs.serve.open_log_of_run"), patch.object(Launcher, "run", Launcher._check)
    with log, run:
        return said_by(run_verb_here("serve", *arguments, "--port", str(free_port()), split=partial(Mock, StatusPipe)))


def refused_by_the_launcher(*arguments: str) -> str:
    """The same of a launcher, which is a process; nothing of it stays."""
    port = () if "--port" in arguments else ("--port", str(free_port()))
    with tempfile.TemporaryDirectory(prefix="tt-", dir=short_temp_folder()) as temp:
        done = run_tandem("serve", *arguments, *port, temp=Path(temp))
        assert not list(Path(temp).iterdir())
    return said_by(done)


def said_by(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    return done.stderr


def one_line(text: str) -> str:
    assert text.startswith("tandem: error: ") and text.count("\n") == 1, text
    return text


def test_a_missing_folder() -> None:
    text = one_line(refused("/no/such/model"))
    assert "MODEL" in text and "/no/such/model" in text


def test_an_unsupported_architecture(strange_model: Path) -> None:
    text = one_line(refused_by_a_check(str(strange_model)))
    assert "StrangeForCausalLM" in text and "MODEL" in text


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    assert "config.json" in one_line(refused_by_the_launcher(str(tmp_path)))


def test_a_broken_chat_template(tmp_path: Path) -> None:
    folder = shutil.copytree(DEMO, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{% if messages %}{{ messages }")
    text = one_line(refused_by_a_check(str(folder)))
    assert "--chat-template: chat template (chat_template.jinja): unexpected '}'" in text and "gateway" not in text


def test_tensor_parallel_that_does_not_divide() -> None:
    text = one_line(refused_by_a_check("demo", "-tp", "7"))
    assert "--tensor-parallel-size" in text and "7" in text and "heads" in text


def test_more_stages_than_layers() -> None:
    assert "--pipeline-parallel-size" in one_line(refused_by_a_check("demo", "-pp", "99"))


def test_a_busy_port(busy_port: int) -> None:
    text = one_line(refused_by_the_launcher("demo", "--port", str(busy_port)))
    assert "--port" in text and str(busy_port) in text and "in use" in text


def test_an_unreachable_redis() -> None:
    text = one_line(refused_by_a_check("demo", "--redis-url", "redis://:hush@127.0.0.1:1/0"))
    assert "--redis-url" in text and "127.0.0.1:1" in text and "hush" not in text


def test_a_context_beyond_the_models() -> None:
    assert "--max-model-len" in one_line(refused_by_a_check("demo", "--max-model-len", "10000000"))


def test_more_kv_than_memory() -> None:
    text = one_line(refused_by_a_check("demo", "--kv-cache-memory-bytes", "900T", "--device", "cpu"))
    assert "--kv-cache-memory-bytes" in text and "GiB" in text


def test_certificates_that_do_not_fit(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    one, other = authority.issue("one"), authority.issue("other")
    text = one_line(refused_by_a_check("demo", "--ssl-certfile", one.certfile, "--ssl-keyfile", other.keyfile))
    assert "--ssl-keyfile" in text and "is not the key of the certificate" in text


def test_code_in_the_model_folder(tmp_path: Path) -> None:
    folder = tmp_path / "coded"
    shutil.copytree(DEMO, folder)
    (folder / "modeling_x.py").write_text("raise SystemExit('this must never run')")
    assert "--trust-remote-code" in one_line(refused(str(folder)))


def test_a_value_out_of_range() -> None:
    text = one_line(refused("demo", "--block-size", "12"))
    assert "--block-size" in text and "12" in text


def test_a_bad_config_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: demo\ntensor_paralel_size: 2\n")
    text = one_line(refused("--config", str(file)))
    assert "tensor_paralel_size" in text and "tensor_parallel_size" in text


@pytest.mark.parametrize("flag", ["--quantization", "--no-such-flag"])
def test_a_flag_that_does_not_exist_is_refused(flag: str) -> None:
    assert flag in refused("demo", flag, "x")


def test_help_shows_groups_and_defaults() -> None:
    text = run_verb_here("serve", "--help").stdout
    for words in (
        "Parallelism",
        "KV cache",
        "--tensor-parallel-size",
        "--max-num-seqs",
        "--enable-lora",
        "Default: 64",
    ):
        assert words in text
    for absent in ("--kv-transfer-config",):
        assert absent not in text


def test_check_config_prints_the_resolved_settings(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: demo\ntensor-parallel-size: 2\napi-key: hush\n")
    done = run_verb_here("check-config", str(file))
    assert done.returncode == 0, done.stderr
    assert "tensor_parallel_size: 2" in done.stdout and "hush" not in done.stdout
    file.write_text("model: demo\ntensor-parallel-size: 7\n")
    assert run_verb_here("check-config", str(file)).returncode == 2


@pytest.mark.parametrize("name", ["demo", "autoscale"])
def test_check_config_takes_ray_serve_files(name: str, tmp_path: Path) -> None:
    file = SERVE_FILES / f"{name}.yaml"
    done = run_verb_here("check-config", str(file))
    assert done.returncode == 0, done.stderr
    assert "max_num_seqs: 64" in done.stdout
    assert (
        done.stderr
        == f"tandem: {file} is a Ray Serve file: start it with `serve run {file}`, on a cluster with `serve deploy`\n"
    )
    named = run_verb_here("check-config", str(file), "demo")
    assert named.returncode == 2 and "MODEL: demo: " in named.stderr
    both = tmp_path / "both.yaml"
    both.write_text(yaml.safe_dump({"applications": 2 * yaml.safe_load(file.read_text())["applications"]}))
    documents = list(yaml.safe_load_all(run_verb_here("check-config", str(both)).stdout))
    assert len(documents) == 2 and documents[0] == documents[1]
    broken = tmp_path / "c.yaml"
    broken.write_text(file.read_text().replace("max_num_seqs", "max_seqs"))
    refused = run_verb_here("check-config", str(broken))
    assert refused.returncode == 2 and "max_seqs is not a setting; did you mean max_num_seqs?" in refused.stderr
