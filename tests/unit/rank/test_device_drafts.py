"""Drafts on a device, beside any logits processors: a step is launched before the host has read the one ahead of it,
and the tokens are those of a host without drafts. Fake streams stand in for the device, torch's CUDA sanitizer watches
them."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.workers.messages.request import GenerationRequest, SamplingParams
from tandem.workers.messages.step import StepPlan
from tandem.workers.messages.thinking import ThinkingBudget
from tandem.workers.rank.launched_steps import LaunchedSteps, StepHandle
from tandem.workers.rank.model_runner import ModelRunner
from tandem.workers.sampling.processors import chain
from tandem.workers.sampling.processors.logits_processor import Reads
from tandem.workers.sampling.processors.penalties import Penalties
from tandem.workers.speculation import proposer
from tests.support.engine_ranks import EngineCase, Fault, Told, run_engine
from tests.support.free_drafts import free_drafts
from tests.support.thread_ranks import ThreadRanks
from tests.support.tiny_models import BY_NAME, GROUPED, save_tiny_model
from tests.unit.sampling.test_device_tokens import some_sampling

PROMPTS = [[5, 6, 7, 8] * 4, [9, 3, 9, 3, 9], [11] * 7, [4, 5, 6, 4, 5, 6, 4]]
POOL = 60
FIELDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.4, "top_k": 2},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.3, "top_p": 0.5},
]


BUDGET = ThinkingBudget(tokens=2, start=(11,), end=(5, 6), inside=True)
PROCESSED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.05, "frequency_penalty": -0.05},
    {
        "min_tokens": 8,
        "stop_token_ids": tuple(range(0, 200, 3)),
        "bad_words_token_ids": tuple((t, t) for t in range(200)),
    },
    {"presence_penalty": -0.2, "thinking_budget": BUDGET},
    {"logit_bias": ((4, 0.5),), "allowed_token_ids": tuple(range(40)), "bad_words_token_ids": ((4, 5, 6), (7,))},
]
"""Of each row some, with tokens that go on repeating themselves."""


def requests_of(processed: list[dict[str, Any]] | None = None, **more: Any) -> tuple[GenerationRequest, ...]:
    """Rows that repeat themselves, some with random tokens. processed: fields for each. more: of the last one."""
    every = [{"max_tokens": 10 + 3 * place, "seed": place, **fields} for place, fields in enumerate(FIELDS)]
    for fields, added in zip(every, processed or [], strict=False):
        fields |= added
    every[-1] |= more
    return tuple(
        GenerationRequest(
            request_id=f"r{place}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(ignore_eos=True, **fields),
        )
        for place, (prompt, fields) in enumerate(zip(PROMPTS, every, strict=True))
    )


@pytest.fixture(scope="module", autouse=True)
def _always_drafting() -> Iterator[None]:
    with free_drafts():
        yield


@pytest.fixture(
    scope="module", params=["gemma2", *(pytest.param(name, marks=pytest.mark.parity) for name in ("qwen3", "bloom"))]
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Windows, soft-caps and ALiBi among them."""
    return save_tiny_model(BY_NAME[request.param], tmp_path_factory.mktemp("models"))


class Launches:
    """Counts steps of a runner. proposed: with drafts from the host. ahead: launched while a step with drafts was not
    read, which then still was not. guessed, accepted: drafts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.proposed = self.ahead = self.waited = self.guessed = self.accepted = 0
        launch, settle_one = ModelRunner.launch, LaunchedSteps._settle_one

        def counted(runner: ModelRunner, plan: StepPlan) -> StepHandle:
            unread = [step for step in runner._steps._waiting if step.work is not None and step.work.drafts is not None]
            step = launch(runner, plan)
            drafts = None if step.work is None else step.work.drafts
            self.proposed += drafts is not None and drafts.ids is not None
            if unread and plan.work:
                self.ahead += not unread[-1].settled
                self.waited += unread[-1].settled
            return step

        def settled(steps: LaunchedSteps, step: StepHandle) -> None:
            settle_one(steps, step)
            if step.step_result is not None:
                with_drafts = [row for row in step.step_result.rows if row.num_drafts]
                self.guessed += sum(row.num_drafts for row in with_drafts)
                self.accepted += sum(len(row.token_ids) - 1 for row in with_drafts)

        monkeypatch.setattr(ModelRunner, "launch", counted)
        monkeypatch.setattr(LaunchedSteps, "_settle_one", settled)


def served(case: EngineCase) -> Told:
    torch.set_num_threads(1)
    told = ThreadRanks().call(run_engine, case.tp_size, case.pp_size, case)
    assert all(one.tokens == told[0].tokens for one in told)
    return told[0]  # type: ignore[no-any-return]


def case_of(folder: Path, requests: tuple[GenerationRequest, ...]) -> EngineCase:
    return EngineCase(folder, 1, 1, requests, late=True, num_blocks=96)


def test_steps_with_drafts_are_launched_ahead_and_change_no_token(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(folder, requests_of())
    wanted = served(replace(case, late=False))
    launches = Launches(monkeypatch)
    assert served(replace(case, drafts=3)).tokens == wanted.tokens
    assert launches.ahead >= 8 and launches.waited == 0, "nothing is read before the next launch"
    assert launches.accepted >= 2


def test_logits_processors_that_read_tokens_wait_for_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are preempted with drafts in flight."""
    case = case_of(folder, requests_of(PROCESSED))
    wanted = served(replace(case, late=False))
    launches = Launches(monkeypatch)
    assert served(case).tokens == wanted.tokens
    told = served(replace(case, drafts=3, num_blocks=14))
    assert told.tokens == wanted.tokens and told.num_preempted
    assert launches.ahead >= 8 and launches.waited == 0 and launches.accepted >= 2


@pytest.mark.parity
@pytest.mark.parametrize("seed", range(4))
def test_any_mix_of_logits_processors(folder: Path, seed: int) -> None:
    """With memory that is tight or runs out, TP, rows that others get next."""
    rng = random.Random(seed)
    tp_size, drafts, num_blocks, most_rows = 1 + (seed == 3), 3 * (seed != 2), rng.choice((14, 96)), rng.choice((2, 4))
    faults = [
        Fault(
            rng.randrange(tp_size),
            rng.randrange(12),
            rng.randrange(5),
            rng.choice((rng.randrange(10), rng.randrange(80))),
        )
        for _ in range(seed % 3)
    ]
    case = EngineCase(folder, 1, 1, requests_of([some_fields(rng) for _ in PROMPTS]), num_blocks=96)
    wanted = served(case)
    more = {"drafts": drafts, "num_blocks": num_blocks, "most_rows": most_rows, "faults": tuple(faults)}
    told = served(replace(case, late=True, tp_size=tp_size, **more))
    refused = {request_id for request_id, reasons in told.reasons.items() if "error" in reasons}
    assert len(refused) <= told.num_alone
    for key, tokens in wanted.tokens.items():
        mine = told.tokens.get(key, [])
        assert mine == (tokens[: len(mine)] if key[0] in refused else tokens)


def some_fields(rng: random.Random) -> dict[str, Any]:
    """Fields of SamplingParams for a mix of logits processors."""
    sampling = some_sampling(rng)
    names = set(SamplingParams.__struct_fields__) - {"temperature", "seed", "logprobs", *FIELDS[1], *FIELDS[3]}
    fields = {name: getattr(sampling, name) for name in sampling.__struct_fields__ if name in names}
    fields["stop_token_ids"] = tuple(range(0, 200, 7)) if sampling.min_tokens else ()
    fields["allowed_token_ids"] = tuple(range(16)) if sampling.allowed_token_ids else None
    return fields


@pytest.mark.parity
@pytest.mark.parametrize("drafts", [0, 3])
def test_ranks_guess_and_accept_alike(folder: Path, drafts: int) -> None:
    case = case_of(folder, requests_of(PROCESSED))
    assert served(replace(case, drafts=drafts, tp_size=2)).tokens == served(replace(case, late=False)).tokens


class HostPenalties:
    """Penalties without their form for devices."""

    reads = Reads.TOKENS

    def __init__(self) -> None:
        own = Penalties()
        self.bind, self.prepare, self.free = own.bind, own.prepare, own.free


def late(patch: pytest.MonkeyPatch) -> None:
    """As a grammar."""
    patch.setattr(Penalties, "reads", Reads.TOKENS_LATE)


def on_the_host(patch: pytest.MonkeyPatch) -> None:
    """As a processor without a form for devices."""
    patch.setattr(chain, "Penalties", HostPenalties)


def without_guesses(patch: pytest.MonkeyPatch) -> None:
    """As a proposer without one."""
    patch.setattr(proposer, "GUESSES", {})


@pytest.mark.parametrize(
    "waits", [late, *(pytest.param(each, marks=pytest.mark.parity) for each in (on_the_host, without_guesses))]
)
def test_rows_that_wait_for_their_tokens(
    folder: Path, waits: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row waits and ends early; with its drafts, the host proposes. Other rows wait with it."""
    case = case_of(folder, requests_of(PROCESSED[:3], presence_penalty=0.5, max_tokens=8))
    wanted = served(replace(case, late=False))
    launches = Launches(monkeypatch)
    waits(monkeypatch)
    told = served(replace(case, drafts=3, num_blocks=14))
    assert told.tokens == wanted.tokens
    assert launches.proposed


@pytest.mark.parametrize("tp_size", [1, pytest.param(2, marks=pytest.mark.parity)])
def test_groups_of_layers_give_blocks_back_with_drafts_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp_size: int
) -> None:
    """From a pool that could not hold the longest text in all of four groups; blocks that a window has passed hold
    other rows' tokens by then. The tokens are those of steps without drafts that keep all KV."""
    requests = requests_of(max_tokens=60)
    case = replace(case_of(save_tiny_model(GROUPED, tmp_path), requests), max_num_batched_tokens=8, num_blocks=POOL)
    wanted = served(replace(case, late=False, is_hybrid=False, num_blocks=96))
    launches = Launches(monkeypatch)
    told = served(replace(case, drafts=3, tp_size=tp_size))
    longest = max(len(ids) for ids in told.tokens.values()) + len(PROMPTS[-1])
    assert 4 * (longest // 4) > POOL and told.tokens == wanted.tokens
    assert launches.ahead >= 8 and launches.accepted >= 2
