"""`tandem serve` with ranks on a GPU: answers, and no stream is lost when a rank is killed."""

import json
import threading
from collections.abc import Iterator

import pytest

from tandem import LLM, SamplingParams
from tests.support.plain_http import plain_http
from tests.support.service import Service, tandem_serve, wait_for

PROMPT = "INFO 2026-01-01"
STREAMS, TOKENS = 8, 400


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with tandem_serve(
        "demo",
        "--device",
        "cuda",
        "--dtype",
        "float32",
        "--kv-cache-memory-bytes",
        str(2**28),
        "--max-model-len",
        "512",
        "--no-tune",
    ) as running:
        yield running
        assert running.stop() == 0, running.output
        assert "a kernel was compiled after the start" not in running.output
        running.check_gone()


def streamed(service: Service, texts: list[str], began: threading.Semaphore) -> None:
    body = {
        "model": "demo",
        "prompt": PROMPT,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    text, is_first = "", True
    with plain_http.stream("POST", service.url + "/v1/completions", json=body, timeout=120) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
            if text and is_first:
                is_first = False
                began.release()
    texts.append(text)


def test_answers_are_those_of_an_engine_and_survive_a_killed_rank(service: Service) -> None:
    flags = {"dtype": "float32", "kv_cache_memory_bytes": 2**28, "max_model_len": 512, "tune": False}
    with LLM("demo", device="cuda", **flags) as llm:
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        wanted = llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].text
    texts: list[str] = []
    began = threading.Semaphore(0)
    threads = [threading.Thread(target=streamed, args=(service, texts, began)) for _ in range(STREAMS)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert began.acquire(timeout=60)
    (rank,) = wait_for(lambda: service.titled("tandem rank"), 10, "a rank is there")
    rank.kill()
    for thread in threads:
        thread.join(120)
    assert texts == [wanted] * STREAMS
    wait_for(lambda: service.get("/readyz").status_code == 200, 60, "the group is back")
