"""What drafters on a device guess from in awkward steps: beside rows without a guess, behind steps without drafts,
without memory, and behind steps that failed. A host that has all tokens says what the guesses are."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.parallel.exchange.step_collectives import StepCollectives
from tandem.workers.engine.base import step_limit
from tandem.workers.engine.drafting.drafting import Drafting
from tandem.workers.messages.request import GenerationRequest
from tandem.workers.messages.step import StepPlan
from tandem.workers.platforms.device_rows import NO_DRAFT
from tandem.workers.rank.drafters.head_ahead import HeadAhead
from tandem.workers.rank.launched_steps import LaunchedSteps, StepHandle
from tandem.workers.rank.model_runner import ModelRunner
from tandem.workers.sampling.processors.logits_processor import Reads
from tandem.workers.sampling.processors.penalties import Penalties
from tests.support.draft_models import DEMO, random_eagle, shorter_demo
from tests.support.engine_ranks import Fault
from tests.support.free_drafts import constant_drafts, free_drafts
from tests.support.traced_accelerator import is_view
from tests.unit.rank.test_device_drafts import PROCESSED, Launches, requests_of, served
from tests.unit.rank.test_guesses_ahead import MADE, Guesses, case_of

Found = dict[tuple[tuple[int, ...], int], tuple[int, ...]]


@pytest.fixture(scope="module", autouse=True)
def _always_drafting() -> Iterator[None]:
    with free_drafts():
        yield


def compared(host: Found, ahead: Found) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Returns the guesses of both, up to the first place without one, of rows that had some with as many tokens."""

    def said(ids: tuple[int, ...]) -> tuple[int, ...]:
        return ids[: ids.index(NO_DRAFT)] if NO_DRAFT in ids else ids

    return [(said(host[key]), said(ahead[key])) for key in sorted(host.keys() & ahead.keys())]


def longer(request: GenerationRequest, max_tokens: int) -> GenerationRequest:
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, max_tokens=max_tokens))


def test_a_row_without_a_guess_takes_no_vector_from_the_rows_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first row may say no id of those that the head knows. The last one has the host draw each place."""
    requests = requests_of([{"allowed_token_ids": (2, 3, 4, 6)}], presence_penalty=0.5, max_tokens=16)
    head = random_eagle(tmp_path / "eagle3")
    case = replace(case_of(DEMO, head, requests), method="eagle3", max_num_batched_tokens=64, drafts=3)
    told, found = [], []
    with constant_drafts():
        for late in (False, True):
            with monkeypatch.context() as patch:
                found.append(Guesses(patch).found)
                launches = Launches(patch)
                patch.setattr(Penalties, "reads", Reads.TOKENS_LATE)
                told.append(served(replace(case, late=late)))
    assert told[0].tokens == told[1].tokens and launches.proposed
    both = compared(*found)
    assert sum(len(host) == 3 for host, _ in both) >= 12
    assert [host for host, _ in both] == [ahead for _, ahead in both]


def test_guesses_behind_steps_without_drafts_are_those_of_steps_that_are_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft model has read guesses that the model has not kept. Steps without drafts follow, and the tokens that
    these bring stand where the guesses were: they are read, on the host as on a device."""
    case = replace(case_of(DEMO, shorter_demo(tmp_path / "draft"), requests_of()), drafts=3)
    case = replace(case, requests=tuple(longer(request, 40) for request in case.requests))
    monkeypatch.setattr(Drafting, "begin_step", lambda self, num_rows: True)
    monkeypatch.setattr(Drafting, "budget", lambda self, record, num_tokens: 0 if num_tokens % 5 else self.most)
    told, found = [], []
    for late in (False, True):
        with monkeypatch.context() as patch:
            found.append(Guesses(patch).found)
            told.append(served(replace(case, late=late)))
    assert told[0].tokens == told[1].tokens
    both = compared(*found)
    assert sum(len(host) == 3 for host, _ in both) >= 20
    assert [host for host, _ in both] == [ahead for _, ahead in both]


@pytest.mark.parametrize("place", [0, 1])
def test_a_head_without_memory_guesses_again_while_drafts_are_in_flight(
    place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the first pass nothing but that step's guesses is lost; ahead of it rows begin again, with the next
    block at the latest."""
    requests = tuple(longer(request, 40) for request in requests_of([{"temperature": 0.0}] * 4))
    case = replace(case_of(DEMO, random_eagle(tmp_path / "eagle3"), requests), method="eagle3")
    case = replace(case, max_num_batched_tokens=64, drafts=3)
    drawn, guess = HeadAhead._drawn, HeadAhead.guess
    passes, guessed, failed_at = [0], list[tuple[int, int]](), list[int]()

    def failing(self: HeadAhead, step: Any, sent: Any, tensors: Any, vectors: Any, at: int, guesses: Any) -> Any:
        passes[0] += at == place
        if passes[0] == 8 and not failed_at:
            failed_at.append(len(guessed))
            raise torch.OutOfMemoryError("no room")
        return drawn(self, step, sent, tensors, vectors, at, guesses)

    def noted(self: HeadAhead, rows: Any, **more: Any) -> torch.Tensor:
        ids_AD = guess(self, rows, **more)
        if rows:
            guessed.append((len(rows), int((ids_AD[:, 0] >= 0).sum())))
        return ids_AD

    with constant_drafts():
        wanted = served(replace(case, late=False))
        monkeypatch.setattr(HeadAhead, "_drawn", failing)
        monkeypatch.setattr(HeadAhead, "guess", noted)
        launches = Launches(monkeypatch)
        assert served(case).tokens == wanted.tokens
    assert len(guessed) >= failed_at[0] + 16 and launches.ahead >= 16
    assert guessed[failed_at[0] - 1] == (4, 4), "all rows had guesses"
    behind = guessed[failed_at[0] :] if place else guessed[failed_at[0] + 8 :]
    assert all(asked == with_guess for asked, with_guess in behind), guessed


class NoMemory(TorchDispatchMode):
    """Lets all operations fail that need memory for what they return."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, counts: Callable[[], bool]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._counts() and not is_view(func) and not func._schema.name.endswith("_"):
            raise torch.OutOfMemoryError("Tried to allocate 2.00 MiB")
        return func(*args, **kwargs or {})


PARITY = pytest.mark.parity
KINDS = [
    ("eagle3", 2),
    ("draft_model", 1),
    *(pytest.param(*kind, marks=PARITY) for kind in [("medusa", 2), ("eagle3", 1)]),
]


@pytest.mark.parametrize(("method", "tp_size"), KINDS)
def test_ranks_without_any_memory_for_guesses_say_that_there_are_none(
    method: str, tp_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every rank in turn, nothing at all can be allocated while it proposes, but for the sum itself."""
    requests = tuple(longer(request, 24) for request in requests_of(PROCESSED))
    case = replace(case_of(DEMO, MADE[method](tmp_path / method), requests), method=method, tp_size=tp_size)
    wanted = served(replace(case, late=False))
    propose, all_reduce, settle_all = ModelRunner._propose, StepCollectives.all_reduce, LaunchedSteps.settle_all
    calls, struck, mine = Counter[int](), Counter[int](), threading.local()

    def exempt(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any) -> Any:
            before, mine.is_full = getattr(mine, "is_full", False), False
            try:
                return call(*given)
            finally:
                mine.is_full = before

        return called

    def proposed(runner: ModelRunner, plan: Any) -> Any:
        rank = runner._context.rank
        calls[rank] += any(work.max_drafts for work in plan.work)
        if calls[rank] % 4 != 1 + rank:
            return propose(runner, plan)
        struck[rank] += 1
        mine.is_full = True
        with NoMemory(lambda: mine.is_full):
            try:
                return propose(runner, plan)
            finally:
                mine.is_full = False

    monkeypatch.setattr(ModelRunner, "_propose", proposed)
    monkeypatch.setattr(StepCollectives, "all_reduce", exempt(all_reduce))
    monkeypatch.setattr(LaunchedSteps, "settle_all", exempt(settle_all))
    launches = Launches(monkeypatch)
    with constant_drafts():
        told = served(replace(case, drafts=3))
    assert told.tokens == wanted.tokens and not told.failures
    assert all(struck[rank] >= 3 for rank in range(tp_size)) and launches.guessed >= 8


@pytest.mark.parametrize("method", ["draft_model", pytest.param("eagle3", marks=PARITY)])
def test_what_was_read_behind_a_failed_step_is_read_again(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step fails, a whole prompt. The next plan is made and its guesses too before the engine knows: what the
    draft has read by then is zeroed with what the model has not computed."""
    draft = DEMO if method == "draft_model" else MADE[method](tmp_path / method)
    case = replace(case_of(DEMO, draft, tuple(longer(each, 40) for each in requests_of(PROCESSED))), method=method)
    wanted = served(replace(case, late=False))
    launch, zeroed = ModelRunner.launch, list[int]()

    def checked(runner: ModelRunner, plan: StepPlan) -> StepHandle:
        handle = launch(runner, plan)
        if plan.rolled_back:
            kv = runner.kv
            for block in np.flatnonzero(kv.drafted > 0).tolist():
                read = kv.draft.layers[0].planes[0][block, : kv.drafted[block]]
                zeroed.append(int((read == 0).flatten(1).all(1).sum()))
        return handle

    monkeypatch.setattr(ModelRunner, "launch", checked)
    monkeypatch.setattr(step_limit, "GOOD_STEPS", 1)  # until steps have as many tokens as before
    launches = Launches(monkeypatch)
    with constant_drafts():
        told = served(replace(case, drafts=3, faults=(Fault(0, 0, 0, 40),)))
    assert told.tokens == wanted.tokens and len(told.failures) >= 2, "a plan that counts for nothing"
    assert sum(zeroed) == 0, zeroed
    if method == "draft_model":
        assert launches.accepted == launches.guessed >= 8
