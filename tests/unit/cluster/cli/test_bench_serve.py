"""`tandem bench serve` against a real gateway over a fake engine: its table, its file, failures, Ctrl-C, bad flags."""

import asyncio
import http.server
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.testing

from tandem.cluster.cli.base.vllm_words import with_lists
from tandem.cluster.cli.bench.bench_figures import LoadFigures
from tandem.cluster.cli.bench.load_client import Outcome
from tandem.cluster.cli.bench.load_run import LoadResult
from tandem.configs.errors import SettingsError, TandemError
from tandem.configs.schema import GatewaySettings
from tandem.workers.messages.errors import QueueFull
from tests.support.fake_backend import FakeBackend
from tests.unit.cluster.cli.test_talking import answering, body, service, tandem

SMALL = ("--tokenizer", "demo", "--num-prompts", "4", "--random-input-len", "6", "--random-output-len", "5")
SMALL += ("--disable-tqdm",)
VLLM_FIELDS = {
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate",
    "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
    "request_throughput", "request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
    "max_concurrent_requests",
    *(f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl")),
}  # fmt: skip
"""What vLLM 0.33 writes without --save-detailed; its `rtfx` is of speech."""
DETAILS = {"input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors"}


def value(result: typer.testing.Result, name: str) -> float:
    """The figure of a line of the table."""
    (line,) = [line for line in result.stdout.splitlines() if line.startswith(name)]
    return float(line.split()[-1])


async def test_the_table_and_the_file_are_vllms(tmp_path: Path) -> None:
    async with service() as (rig, url):
        keep = ("--save-result", "--result-dir", str(tmp_path / "new"), "--result-filename", "found.json")
        goals = ("--goodput", "ttft:100000", "tpot:100000", "--metadata", "gpu=none", "tp=1")
        done = await tandem("bench", "serve", "--url", url, *SMALL, *keep, *goals, "--max-concurrency", "2")
        assert done.exit_code == 0, done
        assert (value(done, "Successful requests:"), value(done, "Failed requests:")) == (4, 0)
        said = sum(len(request.prompt_token_ids) for request in rig.backend.requests)
        assert (value(done, "Total input tokens:"), value(done, "Total generated tokens:")) == (said, 20)
        assert value(done, "Maximum request concurrency:") == 2 <= value(done, "Peak concurrent requests:")
        assert value(done, "Request goodput (req/s):") == value(done, "Request throughput (req/s):") > 0
        assert "the model is echo" in done.stderr and "/v1/completions at once" in done.stderr
        assert "goodput counts requests with ttft up to 100000 ms, tpot up to 100000 ms" in done.stderr
        found = json.loads((tmp_path / "new" / "found.json").read_text())
        assert found.keys() == VLLM_FIELDS | {"gpu", "tp"} and found["model_id"] == "echo"
        assert found["median_ttft_ms"] == pytest.approx(value(done, "Median TTFT"), abs=0.01)
        assert [(r.sampling.max_tokens, r.sampling.ignore_eos) for r in rig.backend.requests] == [(5, True)] * 4


@pytest.mark.parametrize("backend", ["openai-chat", "openai-responses", "openai-embeddings"])
async def test_other_routes(backend: str, tmp_path: Path) -> None:
    async with service() as (rig, url):
        file = tmp_path / "all.jsonl"
        keep = ("--append-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", file.name)
        for _ in range(2):
            done = await tandem("bench", "serve", "--url", url, "--backend", backend, *SMALL, *keep)
            assert done.exit_code == 0, done
        pools = backend == "openai-embeddings"
        assert value(done, "Successful requests:") == 4 and len(rig.backend.requests) == 8
        assert ("Total generated tokens" in done.stdout) != pools != ("Median TTFT" in done.stdout)
        assert ("Median E2EL" in done.stdout) == pools
        first, second = map(json.loads, file.read_text().splitlines())
        assert first.keys() == second.keys() >= DETAILS
        assert first["input_lens"] == second["input_lens"] and min(first["input_lens"]) >= 6
        assert pools or (first["output_lens"] == [5] * 4 and first["itls"] and all(first["generated_texts"]))


async def test_keys_and_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TANDEM_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    async with service(settings=GatewaySettings(api_keys=("sk-one",))) as (_, url):
        command = ("bench", "serve", "--base-url", f"{url}/v1", *SMALL, "--model", "echo")
        none = await tandem(*command)
        assert none.exit_code == 1 and value(none, "Failed requests:") == 4
        assert none.stderr.count("4 requests failed: 401: ") == 1, "a reason is said once"
        monkeypatch.setenv("OPENAI_API_KEY", "sk-one")
        assert (await tandem(*command)).exit_code == 0
        adapters = ("--lora-modules", "no-a", "no-b", "--lora-assignment", "round-robin")
        unknown = await tandem(*command, *adapters)
        assert unknown.exit_code == 1 and "no-a" in unknown.stderr and "no-b" in unknown.stderr
        half = await tandem(*command, "--lora-modules", "echo", *adapters[2:])
        assert (half.exit_code, value(half, "Successful requests:"), value(half, "Failed requests:")) == (0, 2, 2)


async def test_headers_are_sent_and_an_answer_that_is_cut_off_is_none() -> None:
    seen: list[str | None] = []

    def cut(handler: http.server.BaseHTTPRequestHandler) -> None:
        seen.extend(handler.headers.get(name) for name in ("x-one", "x-two", "x-request-id", "authorization"))
        body(200, b'data: {"choices":[{"text":"a"}]}\n\n')(handler)

    more = ("--header", "x-one=1", "x-two=b=c", "--request-id-prefix", "mine-", "--api-key", "sk-two")
    with answering(cut) as endpoint:
        done = await tandem("bench", "serve", "--url", endpoint.url, "--model", "demo", *more, *SMALL)
    assert done.exit_code == 1 and "4 requests failed: the answer broke off: the connection was closed" in done.stderr
    assert "mine-0" in seen and seen[:2] == ["1", "b=c"] and seen[3] == "Bearer sk-two"


async def test_refusals_and_broken_answers_are_counted_with_their_reasons() -> None:
    full = FakeBackend(refuse=QueueFull("the queue is full"))
    async with service(full) as (_, url):
        done = await tandem("bench", "serve", "--url", url, *SMALL)
        assert done.exit_code == 1 and value(done, "Failed requests:") == 4
        assert "4 requests failed: 429: " in done.stderr
    async with service(FakeBackend(fail_at_position=2)) as (_, url):
        done = await tandem("bench", "serve", "--url", url, *SMALL)
        assert done.exit_code == 1 and "the answer broke off: " in done.stderr


async def test_nothing_there_is_told_and_is_no_success() -> None:
    unreachable = await tandem("bench", "serve", "--port", "1", "--model", "demo", *SMALL)
    assert unreachable.exit_code == 1 and "4 requests failed: ClientConnectorError" in unreachable.stderr
    waited = await tandem("bench", "serve", "--port", "1", "--model", "demo", *SMALL, "--ready-check-timeout-sec", "1")
    assert "gave no answer within 1 s" in str(waited.exception)
    assert "nothing answers on http://127.0.0.1:1" in str((await tandem("bench", "serve", "--port", "1")).exception)


async def test_ctrl_c_shows_what_there_is_so_far() -> None:
    """A real process: two of four requests have ended when it is interrupted."""
    async with service(FakeBackend(manual=True)) as (rig, url):
        command = [str(Path(sys.executable).parent / "tandem"), "bench", "serve", "--url", url, *SMALL]
        child = subprocess.Popen(
            [*command, "--max-concurrency", "2", "--model", "echo"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            await asyncio.wait_for(rig.backend.submitted.wait(), 60)
            while len(rig.backend.requests) < 2:
                await asyncio.sleep(0.01)
            rig.backend.step(8)
            while len(rig.backend.requests) < 4:
                await asyncio.sleep(0.01)
            child.send_signal(signal.SIGINT)
            said, errors = await asyncio.to_thread(child.communicate, timeout=60)
            assert child.returncode == 130, errors
            assert b"Successful requests:                     2 " in said and b"Unfinished requests:" in said
            assert b"interrupted: 2 of 4 requests have no end" in errors and b"Traceback" not in errors
            await asyncio.wait_for(rig.backend.aborted.wait(), 60)
        finally:
            child.kill()
            await asyncio.to_thread(child.wait)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--backend", "tgi"), "--backend: tgi: not one of openai, vllm,"),
        (("--request-rate", "0"), "--request-rate: 0 must be above 0"),
        (("--num-prompts", "0"), "--num-prompts: 0 must be at least 1"),
        (("--request-rate", "2", "--ramp-up-strategy", "linear"), "needs --ramp-up-start-rps"),
        (("--ramp-up-start-rps", "2"), "--ramp-up-strategy: is missing"),
        (("--self-timed",), "--self-timed: --dataset-name random has no times"),
        (("--goodput", "itl:3"), "--goodput: itl:3: goals are of ttft, tpot, e2el"),
        (("--goodput", "ttft"), "not NAME:MILLISECONDS"),
        (("--percentile-metrics", "ttft,x"), "--percentile-metrics: x: not one of"),
        (("--metric-percentiles", "101"), "not within 0 and 100"),
        (("--header", "novalue"), "--header: novalue: not KEY=VALUE"),
        (("--extra-body", "[1]"), "--extra-body: [1] is no JSON object"),
        (("--plot", "a.txt"), "--plot: a.txt: must end with .png"),
        (("--plot", "/no/such/a.png"), "there is no folder /no/such"),
        (("--result-dir", "x"), "nothing is saved without --save-result"),
        (("--base-url", "http://a", "--port", "1"), "--host and --port say the same"),
        (("--base-url", "ftp://a"), "must be like http://"),
        (("--logprobs", "1", "--backend", "openai-responses"), "has none"),
    ],
)
async def test_wrong_flags_are_refused_before_anything_is_sent(flags: tuple[str, ...], words: str) -> None:
    where = () if {"--base-url", "--port"} & set(flags) else ("--port", "1")
    done = await tandem("bench", "serve", *where, "--model", "demo", *flags)
    assert isinstance(done.exception, TandemError) and words in str(done.exception), done


async def test_a_plot_is_drawn_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with service() as (_, url):
        done = await tandem("bench", "serve", "--url", url, *SMALL, "--plot", str(tmp_path / "a.svg"))
        assert done.exit_code == 0 and (tmp_path / "a.svg").read_text().lstrip().startswith("<?xml")
        monkeypatch.setattr("tandem.cluster.cli.base.plot_file.find_spec", lambda name: None)
        none = await tandem("bench", "serve", "--url", url, *SMALL, "--plot", str(tmp_path / "b.svg"))
        assert isinstance(none.exception, SettingsError) and "pip install matplotlib" in str(none.exception)


def outcome(start_s: float, ttft_s: float, itl_s: list[float], **more: Any) -> Outcome:
    latency_s = ttft_s + sum(itl_s)
    return Outcome(10, start_s, ttft_s, latency_s, itl_s, pieces=["a"] * (len(itl_s) + 1), error=None, **more)


def test_figures_are_computed_as_vllm_does() -> None:
    """By hand: two answers of four tokens, one of one token, one that failed."""
    good = [outcome(0.0, 0.2, [0.1, 0.1, 0.1], output_tokens=4), outcome(0.5, 0.4, [0.3, 0.3], output_tokens=4)]
    result = LoadResult([*good, outcome(1.0, 0.1, []), Outcome(9, error="429: no")], 2.0)
    shown = ("ttft", "tpot", "itl", "e2el", "client_queue_time")
    kinds: dict[str, Any] = {"queues": False, "rate": float("inf"), "count": lambda text: len(text)}
    goals = {"ttft": 300.0, "e2el": 600.0}
    found = LoadFigures(result, shown=shown, percentiles=(50,), goals=goals, **kinds)
    summary = found.summary
    assert (summary["completed"], summary["failed"], summary["total_input_tokens"]) == (3, 1, 30)
    assert summary["total_output_tokens"] == 9, "a service that does not count has its text counted"
    assert summary["output_throughput"] == 4.5 and summary["request_goodput"] == 1.0
    assert summary["mean_tpot_ms"] == pytest.approx((100 + 200) / 2), "one token has no time per token"
    assert summary["median_itl_ms"] == pytest.approx(100) and summary["p50_ttft_ms"] == pytest.approx(200)
    assert summary["max_output_tokens_per_s"] == 5 and summary["max_concurrent_requests"] == 2
    assert found.shown == ["ttft", "tpot", "itl", "e2el"], "nobody waited in the client"
    nothing = LoadFigures(LoadResult([], 0.0), shown=shown, percentiles=(99,), goals={}, **kinds)
    assert nothing.summary["mean_ttft_ms"] == 0 == nothing.summary["output_throughput"]


def test_several_values_behind_one_flag() -> None:
    lists = {"--goodput", "--header"}
    assert with_lists(["--goodput", "a", "b", "--seed", "3", "--header", "x"], lists) == [
        *("--goodput", "a", "--goodput", "b", "--seed", "3", "--header", "x")
    ]
    assert with_lists(["--goodput=a", "b", "--goodput"], lists) == ["--goodput=a", "--goodput", "b", "--goodput"]
