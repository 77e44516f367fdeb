"""A real service with tiers below the device: returning turns, a rank killed amid copies, a restart with weights that
stream and with drafts; then nothing is left. `make chaos`: tests/distributed/test_kv_tiers.py has the tiers without a
service, test_failover_ranks.py a service with a host tier."""

import asyncio
import json
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tandem import LLM
from tests.support.metric_names import not_served
from tests.support.mixed_requests import answers, greedy
from tests.support.plain_http import plain_http
from tests.support.service import Service, tandem_serve, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.chaos]

FLAGS = (
    "--device", "cpu", "--dtype", "float32", "-tp", "2", "--num-gpu-blocks-override", "96",
    "--kv-offloading-size", "0.25", "--kv-disk-size", "0.25",
)  # fmt: skip
MOST_DRAFTS, LONG = 4, 300
NGRAM = {
    "method": "ngram", "num_speculative_tokens": MOST_DRAFTS, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
}  # fmt: skip
DRAFTS = ("--speculative-config", json.dumps(NGRAM), "--per-request-spec-decode-metrics", "summary")
STORY = "Once upon a time there was a little dog. The little dog was red. "
CONVERSATION = [10 + i * 7 % 300 for i in range(400)]


def ask(service: Service, prompt: list[int], max_tokens: int = 8) -> tuple[str, int]:
    """The text, and how many prompt tokens were not computed."""
    asked = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    answer: dict[str, Any] = service.post("/v1/completions", asked).json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def push_out(service: Service, salt: int) -> None:
    """Other prompts take the device's blocks."""
    for other in range(4):
        ask(service, [(salt + other * 13 + i * 3) % 290 + 10 for i in range(900)], 1)


@contextmanager
def talkers(service: Service) -> Iterator[list[int]]:
    """Two clients with prompts that nobody has sent before: KV goes down as long as they talk. Yields the status of
    each answer."""
    stop, statuses = threading.Event(), list[int]()

    def talk(client: int) -> None:
        draw = random.Random(client)
        while not stop.is_set():
            prompt = [draw.randrange(10, 300) for _ in range(200)]
            asked = {"model": "demo", "prompt": prompt, "max_tokens": 2}
            statuses.append(service.post("/v1/completions", asked).status_code)

    with ThreadPoolExecutor(2) as pool:
        talking = [pool.submit(talk, client) for client in range(2)]
        try:
            yield statuses
        finally:
            stop.set()
    for client in talking:
        client.result()


def wait_for_more(service: Service, name: str) -> None:
    """Until a counter has grown."""
    before = service.metric(name)
    wait_for(lambda: service.metric(name) > before, 20, f"{name} grows", 0.02)


def kill_a_rank_amid_copies(service: Service) -> None:
    """While stores go on: what is asked then, and later, is answered; nothing stays in use or under way."""
    with talkers(service) as statuses:
        for _ in range(3):
            wait_for_more(service, "kv_offload_store_bytes")
        (rank, *_) = service.titled("tandem rank")
        rank.kill()
        answered = len(statuses)
        wait_for(lambda: rank.pid not in [p.pid for p in service.titled("tandem rank")], 60, "the rank is gone")
        wait_for(lambda: len(statuses) > answered + 4, 60, f"answers go on: {service.output}")
    assert set(statuses) == {200}
    wait_for(lambda: len(service.titled("tandem rank")) == 2, 60, f"the group comes back: {service.output}")
    wait_for(lambda: service.get("/readyz").status_code == 200, 60, "ready again")
    wait_for(lambda: "tandem:kv_offload_open_tickets{" in service.get("/metrics").text, 60, "the new group reports")
    wait_for(lambda: service.metric("kv_cache_usage_perc") == 0, 60, "no block is used")
    wait_for(lambda: service.metric("kv_offload_open_tickets") == 0, 60, "no ticket is open")


def check_drafts(service: Service, llm: LLM) -> None:
    """The first requests, of a prompt that repeats itself: the text is that of an engine without drafts, answers and
    /metrics tell what became of the drafts, and a stream tells it in its usage. How many drafts a request has is a
    matter of measured times, so it is asked until some are accepted."""
    asked = {"model": "demo", "prompt": STORY * 2, "max_tokens": LONG, "temperature": 0, "ignore_eos": True}
    (wanted,) = greedy(llm, [STORY * 2], [LONG])
    reports: list[dict[str, Any]] = []

    def some_are_accepted() -> bool:
        whole = service.post("/v1/completions", asked).json()
        assert whole["choices"][0]["text"] == wanted
        reports.append(whole["metrics"]["speculative_decoding"])
        return bool(reports[-1]["num_accepted_draft_tokens"])

    wait_for(some_are_accepted, 120, "drafts are accepted")
    body = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    with plain_http.stream("POST", service.url + "/v1/completions", json=body, timeout=60) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]) == wanted
    reports.append(chunks[-1]["metrics"]["speculative_decoding"])
    for told in reports:
        assert told["num_accepted_draft_tokens"] <= told["num_draft_tokens"] <= MOST_DRAFTS * told["num_spec_steps"]
        assert told["num_accepted_draft_tokens"] + told["num_spec_steps"] <= LONG, "each step brings one token more"
        assert told["num_spec_tokens"] == MOST_DRAFTS and "per_step_accepted" not in told
    names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    sums = [sum(told[name] for told in reports) for name in names]
    wait_for(lambda: draft_counts(service) == [*sums, sums[-1]], 60, f"{sums} in /metrics, and by place")


def draft_counts(service: Service) -> list[float]:
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")
    return [service.metric(f"spec_decode_{name}_total") for name in names]


def test_a_conversation_survives_eviction_a_killed_rank_and_a_restart(tmp_path: Path) -> None:
    """After the restart the weights stream from host memory and rows have drafts: what KV is on disk is of use to that
    service too, and it says what the offline engine says."""
    flags = [*FLAGS, "--kv-disk-path", str(tmp_path / "kv")]
    with tandem_serve("demo", *flags) as service:
        wait_for(lambda: "serving demo" in service.output, 30, "the launcher says what it chose")
        assert "host tier: " in service.output and "disk tier: " in service.output
        wanted, cached = ask(service, CONVERSATION)
        assert cached == 0
        push_out(service, 1)
        assert ask(service, CONVERSATION) == (wanted, 384), "loaded from host memory"
        wait_for(lambda: service.metric("kv_offload_load_bytes") > 0, 60, "it shows in the metrics")
        push_out(service, 2)
        kill_a_rank_amid_copies(service)
        assert ask(service, CONVERSATION) == (wanted, 384), "the memory has outlived the group"
        assert service.stop(signal.SIGINT) == 0
        service.check_gone()
    streaming = ("--cpu-offload-gb", "1")
    with (
        LLM("demo", dtype="float32", device="cpu") as llm,
        tandem_serve("demo", *flags, *streaming, *DRAFTS) as service,
    ):
        wait_for(lambda: "serving demo" in service.output, 30, "the launcher says what it chose")
        assert "0 layers and the tables resident" in service.output, "less than 1 GiB in all: every layer streams"
        check_drafts(service, llm)
        assert ask(service, CONVERSATION) == (wanted, 384), "read from disk"
        wait_for(lambda: service.metric("kv_offload_fetch_bytes") > 0, 60, "it shows in the metrics")
        panels = ("KV offload", "Speculative decoding")
        assert not_served(service.get("/metrics").text, *panels) == {}, "panels of the dashboard"
        assert asyncio.run(answers(service.url)) == greedy(llm), "of the model on one rank, no layer of it streaming"
        assert service.stop(signal.SIGINT) == 0
        service.check_gone()
