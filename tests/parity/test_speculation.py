"""n-gram speculation changes no token: random requests of every kind on one engine with drafts and one without, in
float32, whatever happens to them on the way (prefix hits, preemption, lower tiers, adapters, TP2, resumption).

Prompts repeat themselves, so that there is something to look up. Sampling is among a few tokens: among hundreds, some
draw falls nearer to a border than float32 can tell.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem import LLM, SamplingParams
from tandem.workers.messages.request import AdapterRef
from tandem.workers.offline import RequestOutput
from tests.support.adapters import save_random_adapter
from tests.support.paged_rows import prompt_ids

BASE = Path(__file__).resolve().parents[2] / "configs" / "demo" / "model"
VOCAB = 700
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
CASES: dict[str, dict[str, Any]] = {
    "room for all": {},
    "preemption": {"num_gpu_blocks_override": 24, "enable_prefix_caching": False},
    "offload": {"num_gpu_blocks_override": 24, "kv_offloading_size": 0.05},
    "small chunks": {"max_num_batched_tokens": 24},
    "tp2": {"tensor_parallel_size": 2},
}
STORY = "Once upon a time there was a little dog. The little dog was red. "
STOPS = (" dog", "was", ". ", "little red", "time there")


@pytest.fixture(scope="module", params=CASES)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, LLM]]:
    """One engine with drafts, one without; both with one adapter."""
    threads = torch.get_num_threads()
    more: dict[str, Any] = {"max_num_seqs": 8, "enable_lora": True, "dtype": "float32", "cpu_threads": 1} | CASES[
        request.param
    ]
    with LLM("demo", speculative_config=NGRAM, **more) as drafting, LLM("demo", **more) as plain:
        yield drafting, plain
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_adapter(BASE, tmp_path_factory.mktemp("adapter") / "a", rank=8, seed=3, modules=("q_proj",))


def params_of(fields: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "top_k": 4, "seed": 17, **fields})


PARAMS = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 32), "n": st.sampled_from([1, 1, 1, 3]), "ignore_eos": st.booleans()},
    optional={
        "temperature": st.sampled_from([0.0, 0.7, 1.0]),
        "min_tokens": st.just(1),
        "stop": st.lists(st.sampled_from(STOPS), min_size=1, max_size=2).map(tuple),
        "stop_token_ids": st.lists(st.integers(3, VOCAB), min_size=1, max_size=20).map(tuple),
        "logprobs": st.integers(0, 3),
        "presence_penalty": st.sampled_from([-1.0, 0.5]),
        "frequency_penalty": st.sampled_from([-0.5, 0.3]),
        "repetition_penalty": st.sampled_from([0.8, 1.2]),
        "logit_bias": st.just(((40, 3.0), (77, -5.0))),
        "min_p": st.just(0.05),
        "top_p": st.just(0.9),
    },
).map(params_of)
PROMPT_IDS = st.builds(
    lambda seed, length, times: prompt_ids(length, VOCAB, seed=seed) * times,
    st.integers(0, 5),
    st.integers(1, 20),
    st.integers(1, 4),
)
PROMPTS = PROMPT_IDS | st.integers(1, 3).map(lambda times: STORY * times)


def compared(outputs: list[RequestOutput]) -> list[Any]:
    """All that must be equal: tokens, texts, reasons, ids of the best tokens; log probabilities to a rounding."""
    return [
        [
            (
                choice.token_ids,
                choice.text,
                choice.finish_reason,
                choice.error,
                None
                if choice.logprobs is None
                else [(entry.token_id, round(entry.logprob, 2)) for entry in choice.logprobs],
            )
            for choice in output.outputs
        ]
        for output in outputs
    ]


@given(batch=st.lists(st.tuples(PROMPTS, PARAMS, st.booleans()), min_size=3, max_size=6))
@settings(max_examples=6, deadline=None)
def test_drafts_change_no_token(engines: tuple[LLM, LLM], adapter: Path, batch: list[Any]) -> None:
    prompts, params = [prompt for prompt, _, _ in batch], [one for _, one, _ in batch]
    answers = []
    for llm in engines:
        ref = llm.load_adapter(adapter)
        refs: list[AdapterRef | None] = [ref if adapted else None for _, _, adapted in batch]
        answers.append(compared(llm.generate(prompts, params, use_tqdm=False, lora_request=refs)))
    assert answers[0] == answers[1]


def test_drafts_are_accepted_and_refused(engines: tuple[LLM, LLM]) -> None:
    """The comparisons above compare something: after them, and a story, both have happened."""
    drafting, plain = engines
    params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    texts = [llm.generate([STORY * 2], params, use_tqdm=False)[0].text for llm in engines]
    assert texts[0] == texts[1]
    drafts = drafting._engine.stats().drafts
    assert drafts is not None and plain._engine.stats().drafts is None
    assert 0 < drafts.num_accepted < drafts.num_draft_tokens
    assert drafts.num_accepted == sum(drafts.accepted_per_position)
