"""`tandem bench latency` and `throughput` on the demo model, in this process, with vLLM's words and JSON fields."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer.testing

from tandem.configs.errors import TandemError
from tests.support.verbs import invoked

ENGINE = ("--device", "cpu", "--dtype", "float32")


def tandem(*arguments: str) -> typer.testing.Result:
    return invoked(arguments)


def of_the_page(verb: str) -> list[str]:
    """The words of the command in docs/benchmarking.md, without its settings of the engine."""
    page = Path(__file__).resolve().parents[3] / "docs" / "benchmarking.md"
    (command,) = re.findall(rf"^    .venv/bin/tandem (bench {verb} demo .*)$", page.read_text(), re.M)
    return str(command).split()


def test_latency(tmp_path: Path) -> None:
    file = tmp_path / "latency.json"
    done = tandem(*of_the_page("latency"), *ENGINE, "--output-json", str(file))
    assert done.exit_code == 0, done
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == [
        "Avg latency",
        *(f"{percent}% percentile latency" for percent in (10, 25, 50, 75, 90, 99)),
    ]
    found = json.loads(file.read_text())
    assert found.keys() == {"model_id", "avg_latency", "latencies", "percentiles"}
    assert len(found["latencies"]) == 3 and found["avg_latency"] == pytest.approx(sum(found["latencies"]) / 3)


def test_throughput(tmp_path: Path) -> None:
    file = tmp_path / "throughput.json"
    more = ("--n", "2", "--num-warmups", "1", "--output-json", str(file))
    done = tandem(*of_the_page("throughput"), *more, *ENGINE)
    assert done.exit_code == 0, done
    assert "Total num output tokens:  640\n" in done.stdout
    found = json.loads(file.read_text())
    assert found["num_requests"] == 20 and found["total_num_tokens"] >= 20 * 64 + 640
    assert found["requests_per_second"] == pytest.approx(20 / found["elapsed_time"])


@pytest.mark.parity
def test_beams_and_prompts_beyond_the_context() -> None:
    small = ("--output-len", "3", "--batch-size", "2", "--num-iters-warmup", "1", "--num-iters", "1", *ENGINE)
    beams = tandem("bench", "latency", "--model", "demo", *small, "--use-beam-search", "--n", "2")
    assert beams.exit_code == 0 and "Avg latency: " in beams.stdout, beams
    long = tandem("bench", "latency", "demo", *small, "--input-len", "9000")
    assert isinstance(long.exception, TandemError) and "are more than the context of" in str(long.exception)
    few = ("--num-prompts", "3", "--random-input-len", "5", "--max-model-len", "4", *ENGINE)
    failed = tandem("bench", "throughput", "demo", *few)
    assert failed.exit_code == 1 and "3 of 3 prompts failed, the first one: " in failed.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("latency", "demo", "--output-json", "/no/such/a.json"), "there is no such folder"),
        (("latency", "demo", "--batch-size", "0"), "--batch-size: 0 must be at least 1"),
        (("throughput", "demo", "--dataset-name", "sharegpt"), "is read from a file"),
    ],
)
def test_wrong_flags_are_refused(words: tuple[str, ...], said: str) -> None:
    done: Any = tandem("bench", *words)
    assert isinstance(done.exception, TandemError) and said in str(done.exception), done
