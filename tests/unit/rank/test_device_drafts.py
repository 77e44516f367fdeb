"""Drafts on a device: a step is launched before the host has read the one ahead of it, drafts or not, and the tokens
are those without drafts. Fake streams stand in for the device, torch's CUDA sanitizer watches them."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tandem.workers.engine.base.drafting import Drafting
from tandem.workers.messages.request import GenerationRequest, SamplingParams
from tandem.workers.messages.step import StepPlan
from tandem.workers.rank.model_runner import ModelRunner, StepHandle
from tests.support.engine_ranks import EngineCase, Told, run_engine
from tests.support.thread_ranks import ThreadRanks
from tests.support.tiny_models import BY_NAME, GROUPED, save_tiny_model

PROMPTS = [[5, 6, 7, 8] * 4, [9, 3, 9, 3, 9], [11] * 7, [4, 5, 6, 4, 5, 6, 4]]
POOL = 60
FIELDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.4, "top_k": 2},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.3, "top_p": 0.5},
]


def requests_of(**more: Any) -> tuple[GenerationRequest, ...]:
    """Rows that repeat themselves, some with random tokens. more: fields of the last one."""
    every = [{"max_tokens": 10 + 3 * place, "seed": place, **fields} for place, fields in enumerate(FIELDS)]
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
    with mock.patch.object(Drafting, "step_seconds", return_value=(1.0, 0.0)):
        yield


@pytest.fixture(
    scope="module", params=["gemma2", *(pytest.param(name, marks=pytest.mark.parity) for name in ("qwen3", "bloom"))]
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Windows, soft-caps and ALiBi among them."""
    return save_tiny_model(BY_NAME[request.param], tmp_path_factory.mktemp("models"))


class Launches:
    """Counts steps of a runner. ahead: launched while a step with drafts was not read, which then still was not.
    accepted: drafts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.with_drafts = self.ahead = self.waited = self.accepted = 0
        launch, settle_one = ModelRunner.launch, ModelRunner._settle_one

        def counted(runner: ModelRunner, plan: StepPlan) -> StepHandle:
            unread = [step for step in runner._steps if step.computed is not None and step.computed.drafts is not None]
            step = launch(runner, plan)
            self.with_drafts += step.computed is not None and step.computed.drafts is not None
            if unread and plan.work:
                self.ahead += not unread[-1].settled
                self.waited += unread[-1].settled
            return step

        def settled(runner: ModelRunner, step: StepHandle) -> None:
            settle_one(runner, step)
            if step.step_result is not None:
                self.accepted += sum(len(row.token_ids) - 1 for row in step.step_result.rows if row.num_drafts)

        monkeypatch.setattr(ModelRunner, "launch", counted)
        monkeypatch.setattr(ModelRunner, "_settle_one", settled)


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


@pytest.mark.parity
def test_ranks_guess_and_accept_alike(folder: Path) -> None:
    case = case_of(folder, requests_of())
    assert served(replace(case, drafts=3, tp_size=2)).tokens == served(replace(case, late=False)).tokens


def test_rows_that_wait_for_their_tokens_and_tight_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row with a penalty ends early; until then the host proposes. Rows are preempted with drafts in flight."""
    requests = requests_of(presence_penalty=0.5, max_tokens=12)
    case = case_of(folder, requests)
    wanted = served(replace(case, late=False))
    launches = Launches(monkeypatch)
    told = served(replace(case, drafts=3, num_blocks=14))
    assert told.tokens == wanted.tokens and told.num_preempted
    assert launches.ahead and launches.waited and launches.accepted


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
