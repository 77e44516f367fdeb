"""Speculation, by n-grams, suffixes, a draft model or heads, changes no token: random requests of every kind on one
engine with drafts and one without, in float32 and, with --batch-invariant, in bfloat16, whatever happens to them on the
way (prefix hits, preemption, lower tiers, adapters, TP2, PP2), and requests that another engine resumes, as a second
group does when the first is lost. The cases: tests/support/draft_cases.py.

Prompts repeat themselves, so that there is something to look up. Sampling is among a few tokens: among hundreds, some
draw falls nearer to a border than float32 can tell.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits

from tandem import LLM, SamplingParams, StructuredOutputsParams
from tandem.workers.engine.transfers.copy_costs import CopyCosts
from tandem.workers.messages.request import Abort, AdapterRef, GenerationRequest, ReplyTo, TokenDelta
from tandem.workers.messages.thinking import ThinkingBudget
from tandem.workers.offline.inputs import as_prompts
from tandem.workers.offline.llm import RequestOutput
from tandem.workers.offline.outputs import Logprob, OfflineRun, OpenOutput, end_output
from tandem.workers.structured import grammar_store
from tests.support.adapters import save_random_adapter
from tests.support.draft_cases import CASES, CROWD, FOUND, NGRAM, RESUMED, SUFFIX
from tests.support.draft_models import random_eagle, random_eagle_one, random_medusa, random_mtp, shorter_demo
from tests.support.free_drafts import free_drafts
from tests.support.paged_rows import prompt_ids

BASE = Path(__file__).resolve().parents[2] / "configs" / "demo" / "model"
VOCAB = 700
COMMON: dict[str, Any] = {"max_num_seqs": 8, "enable_lora": True, "dtype": "float32", "cpu_threads": 1}
DRAFTS = {
    "draft_model": shorter_demo,
    "eagle": random_eagle_one,
    "eagle3": random_eagle,
    "medusa": random_medusa,
}
"""Writers of what guesses, by method."""
RANDOM = ("eagle", "medusa", "mtp")
"""Heads with random weights, which are right by chance."""
NEAR = 1e-3
"""Of log probabilities; float32, sums in another order."""
KNOWN_RANKS = 20
STORY = "Once upon a time there was a little dog. The little dog was red. "
STOPS = (" dog", "was", ". ", "little red", "time there")


@pytest.fixture(scope="module", autouse=True)
def _no_measured_times() -> Iterator[None]:
    """However slow the machine is: copies of KV always pay, and drafts do while they are accepted."""
    with (
        mock.patch.object(CopyCosts, "recompute_s", return_value=math.inf),
        free_drafts(),
    ):
        yield


def marked(cases: Mapping[str, bool]) -> list[Any]:
    """Parameters with the mark of make parity where they are given True."""
    return [pytest.param(name, marks=[pytest.mark.parity] if parity else []) for name, parity in cases.items()]


@pytest.fixture(scope="module", params=marked({name: case.parity for name, case in CASES.items()}))
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(case: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo, but for the layers that only another model has."""
    return str(random_mtp(tmp_path_factory.mktemp("mtp"))) if CASES[case].method == "mtp" else "demo"


@pytest.fixture(scope="module")
def config(case: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    method = CASES[case].method
    known = {"ngram": NGRAM, "suffix": SUFFIX, "mtp": {"method": "mtp", "num_speculative_tokens": 3}}
    if method in known:
        return known[method]
    folder = DRAFTS[method](tmp_path_factory.mktemp("draft") / method)
    return {"method": method, "model": str(folder), "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def engines(case: str, model: str, config: dict[str, Any]) -> Iterator[tuple[LLM, LLM]]:
    """One engine with drafts, one without; both with one adapter. The one without is always a single rank."""
    threads, flags = torch.get_num_threads(), CASES[case].flags
    alone = {flag: value for flag, value in flags.items() if not flag.endswith("_parallel_size")}
    with (
        LLM(model, speculative_config=config, **COMMON | flags) as drafting,
        LLM(model, **COMMON | alone) as plain,
    ):
        yield drafting, plain
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def second(case: str, model: str, config: dict[str, Any]) -> Iterator[LLM]:
    """The group that resumes: with drafts too, and nobody's KV."""
    flags = {flag: value for flag, value in CASES[case].flags.items() if flag not in CROWD}
    with LLM(model, speculative_config=config, **COMMON | flags) as llm:
        yield llm


@pytest.fixture(scope="module")
def adapter(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base, modules = (BASE, "q_proj") if model == "demo" else (Path(model), "o_proj")
    return save_random_adapter(base, tmp_path_factory.mktemp("adapter") / "a", rank=8, seed=3, modules=(modules,))


def params_of(fields: dict[str, Any]) -> SamplingParams:
    if "structured_outputs" in fields:  # of which few tokens leave nothing
        fields = {name: value for name, value in fields.items() if name not in ("allowed_token_ids", "bad_words")}
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
        "bad_words": st.lists(st.sampled_from(STOPS), min_size=1, max_size=2).map(tuple),
        "allowed_token_ids": st.integers(40, 400).map(lambda end: tuple(range(3, end))),
        "prompt_logprobs": st.integers(0, 2),
        "structured_outputs": st.sampled_from(
            [
                StructuredOutputsParams(regex=r"( ?(the|little|dog|was|red|[a-z]+)[. ])+"),
                StructuredOutputsParams(choice=("the little dog", "the little red dog was red", "dog")),
            ]
        ),
        "thinking_budget": st.integers(0, 9).map(
            lambda tokens: ThinkingBudget(tokens=tokens, start=(40,), end=(41, 42), inside=True)
        ),
    },
).map(params_of)
PROMPT_IDS = st.builds(
    lambda seed, length, times: prompt_ids(length, VOCAB, seed=seed) * times,
    st.integers(0, 5),
    st.integers(1, 20),
    st.integers(1, 4),
)
PROMPTS = PROMPT_IDS | st.integers(1, 3).map(lambda times: STORY * times)


def assert_same(case: str, one: list[RequestOutput], other: list[RequestOutput]) -> None:
    """Equal are tokens, texts, reasons and the ids of the best tokens; log probabilities to a rounding, or exactly. An
    error ends all choices of a request, wherever these are, and its step's part of the prompt's log probabilities: so
    the texts of several are equal as far as both go, and those of the prompt are not compared."""
    near = 0.0 if CASES[case].is_exact else NEAR
    for first, again in zip(one, other, strict=True):
        failed = any(each.error for each in (*first.outputs, *again.outputs))
        if failed and len(first.outputs) > 1:
            for a, b in zip(first.outputs, again.outputs, strict=True):
                assert all(token == same for token, same in zip(a.token_ids, b.token_ids, strict=False))
            continue
        if not failed:
            assert_near(first.prompt_logprobs, again.prompt_logprobs, near)
        for a, b in zip(first.outputs, again.outputs, strict=True):
            assert (a.token_ids, a.text, a.finish_reason, a.error) == (b.token_ids, b.text, b.finish_reason, b.error)
            assert_near(a.logprobs, b.logprobs, near)


def assert_near(one: Any, other: Any, near: float) -> None:
    ids, values = zip(*map(split, (one, other)), strict=True)
    assert ids[0] == ids[1]
    assert values[0] == pytest.approx(values[1], rel=0, abs=near)


def split(places: list[dict[int, Logprob] | None] | None) -> tuple[Any, list[float]]:
    """(all ids and ranks, all log probabilities). Ranks far down, of prompts of a random model, hang on roundings."""
    given = [place for place in places or [] if place is not None]
    ids = [[(token, min(one.rank, KNOWN_RANKS)) for token, one in place.items()] for place in given]
    return (places is None, ids), [one.logprob for place in given for one in place.values()]


@given(batch=st.lists(st.tuples(PROMPTS, PARAMS, st.booleans()), min_size=3, max_size=6))
@settings(max_examples=6, deadline=None)
def test_drafts_change_no_token(case: str, engines: tuple[LLM, LLM], adapter: Path, batch: list[Any]) -> None:
    prompts, params = [prompt for prompt, _, _ in batch], [one for _, one, _ in batch]
    answers = []
    for llm in engines:
        ref = llm.load_adapter(adapter)
        refs: list[AdapterRef | None] = [ref if adapted else None for _, _, adapted in batch]
        answers.append(llm.generate(prompts, params, use_tqdm=False, lora_request=refs))
    assert_same(case, *answers)


def test_drafts_are_accepted_and_refused(case: str, engines: tuple[LLM, LLM]) -> None:
    """The comparisons above compare something: to prompts that come twice everything happens that the case is for."""
    drafting, plain = engines
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    others = 7 if CASES[case].happens != FOUND else 0
    crowd = [STORY * 2, *(prompt_ids(20, VOCAB, seed=10 + i) * 3 for i in range(others))]
    for _ in range(2):
        assert_same(case, *(llm.generate(crowd, params, use_tqdm=False) for llm in engines))
    stats = drafting._engine.stats()
    drafts = stats.drafts
    assert drafts is not None and plain._engine.stats().drafts is None
    least = 0 if CASES[case].method in RANDOM else 1
    assert least <= drafts.num_accepted < drafts.num_draft_tokens
    assert drafts.num_accepted == sum(drafts.accepted_per_position)
    counts = {
        "preempted": stats.preemptions,
        "found": stats.prefix_cache_hits,
        "loaded": 0 if stats.offload is None else stats.offload.blocks["load"],
    }
    assert {name for name, count in counts.items() if count} >= CASES[case].happens


@pytest.mark.parametrize("case", ["room for all"], indirect=True)
def test_a_grammars_limit_ends_a_text_where_it_would_without_drafts(case: str, engines: tuple[LLM, LLM]) -> None:
    """With the same words, and the tokens ahead of it: the limit may be met behind a draft, and the draft be wrong."""
    reasons = set()
    for limit in (24, 30, 36):
        pattern = rf"x{{1,{limit}}}|[ab]*a[ab]{{12}}c"  # another grammar each time, so that it is compiled
        params = SamplingParams(
            max_tokens=40, temperature=2.0, seed=5, structured_outputs=StructuredOutputsParams(regex=pattern)
        )
        limits = LLParserLimits(max_lexer_states=limit, verbose_errors=False)
        with mock.patch.object(grammar_store, "LIMITS", limits):
            answers = [llm.generate(["abab" * 6, "aab" * 8], params, use_tqdm=False) for llm in engines]
        assert_same(case, *answers)
        reasons |= {each.outputs[0].finish_reason for each in answers[0]}
    assert reasons == {"error", "length"}


# ---- failover ----


class GroupIsLost(Exception):
    """As many tokens as were wanted have come."""


class CutRun(OfflineRun):
    """Takes the tokens of one request until there are so many."""

    def __init__(self, opened: OpenOutput, num_tokens: float) -> None:
        super().__init__()
        self.open = {opened.output.request_id: opened}
        self.output, self.num_tokens = opened.output, num_tokens

    def deltas(self, deltas: list[TokenDelta]) -> list[Abort]:
        aborts = super().deltas(deltas)
        if sum(len(choice.token_ids) for choice in self.output.outputs) >= self.num_tokens:
            raise GroupIsLost
        return aborts


def run_until(llm: LLM, opened: OpenOutput, request: GenerationRequest, num_tokens: float = math.inf) -> None:
    """Runs a request until it has ended, or has so many tokens."""
    with llm.local.call(CutRun(opened, num_tokens)) as call, suppress(GroupIsLost):
        request = msgspec.structs.replace(request, reply_to=call.address)
        call.run([request], lambda ended: end_output(opened.output, ended))


def moved(
    first: LLM, then: LLM, prompt: Any, given: SamplingParams, folder: Path | None, cut: int, suspect: bool
) -> tuple[RequestOutput, bool]:
    """The answer that a client gets whose group `first` is lost once it has sent `cut` tokens, as a gateway goes on in
    `then`; and whether something was left to do there."""
    (params,) = first.text.checked(given, 1)
    refs = [None if folder is None else llm.load_adapter(folder) for llm in (first, then)]
    name = first.local.new_id()
    opened, request = first.text.request(name, as_prompts(prompt)[0], params, refs[0], 0, ReplyTo("", ""))
    assert request is not None
    run_until(first, opened, request, cut)
    output = opened.output
    ended = [choice.index for choice in output.outputs if choice.finish_reason is not None]
    if len(ended) == params.n:
        return output, False
    again = GenerationRequest(
        request_id=name,
        attempt=1,
        prompt_token_ids=output.prompt_token_ids,
        sampling=msgspec.structs.replace(request.sampling, prompt_logprobs=None),  # delivered before the first token
        adapter=refs[1],
        resume_token_ids=[[*choice.token_ids] for choice in output.outputs],
        begun=True,
        suspect=suspect,
        ended_choices=ended,
    )
    run_until(then, opened, again)
    return output, True


@pytest.mark.parametrize("case", marked(RESUMED), indirect=True)
@given(prompt=PROMPTS, params=PARAMS, adapted=st.booleans(), cut=st.integers(1, 40), suspect=st.booleans())
@settings(max_examples=6, deadline=None)
def test_a_stream_that_another_group_resumes(
    case: str,
    engines: tuple[LLM, LLM],
    second: LLM,
    adapter: Path,
    prompt: Any,
    params: SamplingParams,
    adapted: bool,
    cut: int,
    suspect: bool,
) -> None:
    """Lost by a group with drafts or one without, resumed by one with drafts."""
    drafting, plain = engines
    ref = plain.load_adapter(adapter) if adapted else None
    whole = plain.generate([prompt], params, use_tqdm=False, lora_request=ref)
    for first in (drafting, plain):
        output, _ = moved(first, second, prompt, params, adapter if adapted else None, cut, suspect)
        assert_same(case, whole, [output])


@pytest.mark.parametrize("case", ["room for all"], indirect=True)
def test_a_story_is_drafted_on_by_the_group_that_resumes_it(case: str, engines: tuple[LLM, LLM], second: LLM) -> None:
    drafting, plain = engines
    params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True, seed=3, n=2, logprobs=2)
    whole = plain.generate([STORY * 2], params, use_tqdm=False)
    for cut in (1, 20, 50):
        before = second._engine.stats().drafts
        output, is_moved = moved(drafting, second, STORY * 2, params, None, cut, suspect=False)
        after = second._engine.stats().drafts
        assert_same(case, whole, [output])
        assert is_moved and before is not None and after is not None
        assert after.num_accepted > before.num_accepted
