"""The service that the tests of this folder share."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ends import end_by_a_dead_ray
from tests.support.mixed_requests import PROMPTS
from tests.support.proxies import DEAD_PROXIES
from tests.support.service import Service, tandem_serve, wait_for

SAID = "The lighthouse keeper's cat has learned to whistle."
FLAGS = (
    "demo", "-tp", "2", "-dp", "2", "--device", "cpu", "--dtype", "float32", "--num-gpu-blocks-override", "512",
    "--log-level", "debug", "--log-format", "json", "--enable-log-requests", "--record-mib", "8",
    "--shutdown-timeout", "120",  # longer than any stream lasts on a busy machine
)  # fmt: skip


POISON = "raise RuntimeError('a package of the user was imported as one of ours')\n"


def _shadowing_folder(folder: Path) -> Path:
    """A user's folder with packages named like ours and like one that Ray's workers import."""
    for name in ("tandem", "workers", "configs", "tests", "cluster", "parallel", "offload", "redis"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(POISON)
    return folder


@pytest.fixture(scope="package")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The demo model, 2 groups x TP 2 on CPU, started once by the real launcher. It ends with the last test of this
    folder, as even a service without requests takes a tenth of a core, as its Ray dies. All variables of proxies
    name one that does not answer: no traffic between its processes may meet it. It starts in a user's folder whose
    packages have our names."""
    folder = _shadowing_folder(tmp_path_factory.mktemp("users"))
    with tandem_serve(*FLAGS, cwd=folder, env=DEAD_PROXIES) as running:
        wait_for(lambda: "serving demo" in running.output, 60, "both groups are ready")
        yield running
        answer = running.post(
            "/v1/completions", {"model": "demo", "prompt": SAID, "max_tokens": 40, "ignore_eos": True}
        )
        assert running.post("/v1/completions", {"model": SAID, "prompt": SAID}).status_code == 404
        end_by_a_dead_ray(running)
        check_log_files(running, answer.json()["choices"][0]["text"])


def check_log_files(service: Service, answered: str) -> None:
    """The files outlive the service; each process has one, and none has what clients or the model said."""
    files = service.log_files()
    parts = Counter(name.partition("-")[0].removesuffix(".log") for name in files if name.endswith(".log"))
    assert parts.keys() == {"launcher", "gateway", "requests", "group", "rank"}
    assert parts["launcher"] == 1 and parts["gateway"] >= 1 and parts["group"] >= 2 and parts["rank"] >= 4
    lines = [json.loads(line) for text in files.values() for line in text.splitlines()]
    text = "\n".join(str(value) for line in lines for value in line.values())
    wrong = [phrase for phrase in (SAID, *PROMPTS, *_phrases(answered)) if len(phrase) > 12 and phrase in text]
    assert not wrong, [line for line in text.splitlines() if any(phrase in line for phrase in wrong)]
    assert "nothing is left running" in files["launcher.log"] and "serving demo with 2 groups" in files["launcher.log"]
    for words in ("starts in process", "serves after", "tokens/s", "in flight"):
        assert words in text, words
    ended, answers = ([line for line in lines if name in line] for name in ("outcome", "path"))
    assert {"length", "rejected"} <= {line["outcome"] for line in ended}
    assert {200, 404} <= {line["status"] for line in answers}
    ids = Counter(line["request_id"] for line in answers)
    over_http = [line["request_id"] for line in ended if not line["request_id"].startswith("batch_")]
    assert all(ids[request_id] for request_id in over_http), "each request that ended has an answer too"


def _phrases(answered: str) -> Iterator[str]:
    """Parts of an answer that are long enough to be nobody else's."""
    words = answered.split()
    yield from (" ".join(words[at : at + 4]) for at in range(len(words) - 3))
