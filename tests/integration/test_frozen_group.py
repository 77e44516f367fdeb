"""A service whose only group freezes: readiness fails, and it recovers by itself. It ends by two signals.

In bf16 and batch-invariant mode, as test_failover_*.py; one_service/ loses groups in float32 and the usual mode.
"""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from tests.support.ends import end_by_a_second_signal
from tests.support.records import group_records
from tests.support.service import Service, is_alive, tandem_serve, wait_for

pytestmark = pytest.mark.cluster

ONE_GROUP = (
    "demo", "-tp", "2", "--device", "cpu", "--batch-invariant", "--num-gpu-blocks-override", "256",
    "--shutdown-timeout", "60",
)  # fmt: skip
ASKED = {
    "model": "demo",
    "prompt": "The",
    "max_tokens": 600,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with tandem_serve(*ONE_GROUP) as running:
        yield running


def test_readiness_falls_within_15_s_and_comes_back(service: Service) -> None:
    """With a request, which is answered by the group that takes the frozen one's place. (test_service.py freezes ranks
    while nothing runs.)"""
    with ThreadPoolExecutor(1) as pool:
        wanted = told(service.post("/v1/completions", ASKED))
        post = pool.submit(service.post, "/v1/completions", ASKED)
        wait_for(lambda: post.done() or any(r.kv_used > 0 for r in group_records(service)), 10, "it holds blocks", 0.01)
        freeze_and_wait(service)
        assert told(post.result()) == wanted
        assert told(service.post("/v1/completions", ASKED)) == wanted


def told(answer: httpx.Response) -> tuple[dict[str, Any], list[int]]:
    """The choice, and what is billed."""
    body = answer.json()
    (choice,) = body["choices"]
    assert len(choice["token_ids"]) == ASKED["max_tokens"] and choice["finish_reason"] == "length"
    return choice, [body["usage"][name] for name in ("prompt_tokens", "completion_tokens")]


def freeze_and_wait(service: Service) -> None:
    """Stops a rank; returns when its group has been replaced."""
    before = {p.pid for p in service.titled("tandem rank")}
    frozen = psutil.Process(max(before))
    os.kill(frozen.pid, signal.SIGSTOP)
    frozen_s = time.monotonic()
    wait_for(lambda: service.get("/readyz").status_code == 503, 15, "not ready")
    print(f"not ready {time.monotonic() - frozen_s:.2f} s after a rank froze")
    assert service.get("/livez").status_code == 200, "the gateway itself is well"
    wait_for(lambda: not is_alive(frozen), 15, "it is ended")
    wait_for(lambda: service.get("/readyz").status_code == 200, 180, "the group is replaced")
    print(f"ready again {time.monotonic() - frozen_s:.2f} s after a rank froze")
    assert len({p.pid for p in service.titled("tandem rank")} - before) == 2


def test_a_second_signal_does_not_wait_for_requests(service: Service) -> None:
    end_by_a_second_signal(service)
