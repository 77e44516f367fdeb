"""Drafts that a model makes on a device: steps are launched before the host has read those ahead of them, and the
tokens are those of steps without drafts. Fake streams stand in for the device, torch's CUDA sanitizer watches them."""

import inspect
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.parallel.context import ParallelContext
from tandem.workers.engine.drafting.drafting import Drafting
from tandem.workers.kernels.sampling_ops import TorchSampling
from tandem.workers.messages.request import GenerationRequest
from tandem.workers.messages.step import RowInit, RowSampling, RowWork, StepPlan
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.cpu import CpuPlatform
from tandem.workers.platforms.tensor_rows import TensorRows
from tandem.workers.rank import launched_steps
from tandem.workers.rank.drafters import draft_model
from tandem.workers.rank.drafters.draft_ahead import DraftAhead
from tandem.workers.rank.drafters.draft_model import DraftModel
from tandem.workers.rank.launched_steps import LaunchedSteps, StepHandle
from tandem.workers.rank.loading import load_rank
from tandem.workers.sampling.processors.logits_processor import Reads
from tandem.workers.sampling.processors.penalties import Penalties
from tests.support.draft_models import DEMO, random_eagle, random_eagle_one, random_medusa, random_mtp, shorter_demo
from tests.support.engine_ranks import EngineCase, Fault
from tests.support.free_drafts import constant_drafts, free_drafts
from tests.support.platforms import GpuOnHost, replaced
from tests.support.tiny_models import BY_NAME, GROUPED, save_tiny_model
from tests.support.traced_accelerator import TracedAccelerator
from tests.unit.rank.test_device_drafts import POOL, PROCESSED, PROMPTS, Launches, requests_of, served, some_fields


@pytest.fixture(scope="module", autouse=True)
def _always_drafting() -> Iterator[None]:
    with free_drafts():
        yield


def nearly(folder: Path, target: Path, noise: float = 0.03) -> Path:
    """Writes a model that thinks nearly as another one."""
    shutil.copytree(folder, target)
    rng = torch.Generator().manual_seed(7)
    for file in target.glob("*.safetensors"):
        tensors = {
            name: tensor + noise * tensor.std(unbiased=False) * torch.randn(tensor.shape, generator=rng)
            for name, tensor in load_file(file).items()
        }
        save_file(tensors, file, {"format": "pt"})
    return target


@pytest.fixture(
    scope="module", params=["qwen3", *(pytest.param(name, marks=pytest.mark.parity) for name in ("gemma2", "bloom"))]
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(BY_NAME[request.param], tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def draft(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nearly(folder, tmp_path_factory.mktemp("drafts") / "draft")


def case_of(folder: Path, draft: Path, requests: tuple[GenerationRequest, ...]) -> EngineCase:
    return EngineCase(folder, 1, 1, requests, late=True, num_blocks=96, method="draft_model", draft=draft)


def test_a_model_that_guesses_for_itself_is_right_without_a_wait(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and drawn, with logits processors: all guesses are accepted, and the device is ahead of the host."""
    case = case_of(folder, folder, requests_of(PROCESSED))
    wanted = served(replace(case, late=False))
    launches = Launches(monkeypatch)
    told = served(replace(case, drafts=3))
    assert told.tokens == wanted.tokens
    assert launches.ahead >= 8 and launches.waited == 0 and not launches.proposed
    assert launches.accepted == launches.guessed >= 8


def test_wrong_guesses_change_no_token(folder: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(folder, draft, requests_of(PROCESSED))
    wanted = served(replace(case, late=False))
    launches = Launches(monkeypatch)
    assert served(replace(case, drafts=3, num_blocks=14)).tokens == wanted.tokens
    assert launches.ahead >= 8 and launches.waited == 0 and not launches.proposed
    assert 2 <= launches.accepted < launches.guessed


def test_a_long_prompt_is_read_in_pieces_while_its_row_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its places for drafts are in flight meanwhile, so that positions are bounds. Behind it all guesses are right."""
    requests = [*requests_of()]
    requests[0] = msgspec.structs.replace(requests[0], prompt_token_ids=[*range(5, 75)])
    case = case_of(folder, folder, tuple(requests))
    wanted = served(replace(case, late=False))
    lens, make = [], DraftAhead._pass

    def noted(self: DraftAhead, *given: Any) -> Any:
        made = make(self, *given)
        lens.append(int(made.rows.lens_R.max()))
        return made

    monkeypatch.setattr(DraftAhead, "_pass", noted)
    monkeypatch.setattr(draft_model, "CATCH_UP", 20)
    launches = Launches(monkeypatch)
    told = served(replace(case, drafts=3))
    assert told.tokens == wanted.tokens
    assert sum(length > 10 for length in lens) >= 3 and max(lens) <= 20 + 2 + 2 * 3, "windows begin later"
    assert launches.waited == 0 and launches.accepted == launches.guessed >= 8


def test_rows_that_wait_for_their_tokens_wait_for_guesses_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar's row has the host guess for all rows of its steps; before and behind these the device does. What the
    draft has read counts for both."""
    requests = requests_of(PROCESSED[:3], presence_penalty=0.5, max_tokens=8)
    case = case_of(folder, folder, requests)
    wanted = served(replace(case, late=False))
    launches = Launches(monkeypatch)
    monkeypatch.setattr(Penalties, "reads", Reads.TOKENS_LATE)
    told = served(replace(case, drafts=3))
    assert told.tokens == wanted.tokens
    assert launches.proposed and launches.accepted == launches.guessed


def test_a_drafter_without_memory_guesses_nothing_in_that_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(folder, folder, requests_of(PROCESSED))
    wanted = served(replace(case, late=False))
    calls, run = [0], DraftAhead._run

    def failing(self: DraftAhead, *given: Any) -> None:
        calls[0] += 1
        if calls[0] % 5 == 3:
            raise torch.OutOfMemoryError("no room")
        run(self, *given)

    monkeypatch.setattr(DraftAhead, "_run", failing)
    launches = Launches(monkeypatch)
    assert served(replace(case, drafts=3)).tokens == wanted.tokens
    assert launches.waited == 0 and launches.accepted == launches.guessed >= 8


def test_what_is_in_the_drafts_cache_changes_no_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(folder, folder, requests_of(PROCESSED))
    wanted = served(replace(case, late=False))
    rng, guess = np.random.default_rng(1), DraftModel.guess

    def corrupted(self: DraftModel, rows: Any) -> torch.Tensor:
        for layer in self._kv.draft.layers:
            for plane in layer.planes:
                plane.copy_(torch.from_numpy(rng.normal(size=plane.shape)))
                plane[torch.from_numpy(rng.random(len(plane)) < 0.01)] = float("nan")
        return guess(self, rows)

    monkeypatch.setattr(DraftModel, "guess", corrupted)
    launches = Launches(monkeypatch)
    assert served(replace(case, drafts=3)).tokens == wanted.tokens
    assert launches.guessed > launches.accepted


def test_ranks_guess_alike_without_a_wait(folder: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank guesses, the sum that tells the others is the device's."""
    case = case_of(folder, draft, requests_of(PROCESSED))
    wanted = served(replace(case, late=False))
    launches = Launches(monkeypatch)
    assert served(replace(case, drafts=3, tp_size=2)).tokens == wanted.tokens
    assert launches.ahead >= 8 and launches.waited == 0 and launches.accepted >= 2


def test_groups_of_layers_give_blocks_back_with_guesses_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft has the model's windows."""
    model = save_tiny_model(GROUPED, tmp_path)
    case = replace(case_of(model, model, requests_of(max_tokens=60)), max_num_batched_tokens=8, num_blocks=POOL)
    wanted = served(replace(case, late=False, is_hybrid=False, num_blocks=96))
    launches = Launches(monkeypatch)
    told = served(replace(case, drafts=3))
    longest = max(len(ids) for ids in told.tokens.values()) + len(PROMPTS[-1])
    assert 4 * (longest // 4) > POOL and told.tokens == wanted.tokens
    assert launches.ahead >= 8 and launches.waited == 0 and launches.accepted == launches.guessed >= 8


@pytest.mark.parametrize("late", [pytest.param(True, marks=pytest.mark.parity), False])
def test_replayed_steps_take_guesses_of_a_model(
    folder: Path, draft: Path, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(case_of(folder, draft, requests_of(PROCESSED)), replays=True)
    wanted = served(replace(case, late=False, replays=False))
    launches = Launches(monkeypatch)
    told = served(replace(case, drafts=3, late=late))
    assert told.tokens == wanted.tokens and told.num_replays >= 8
    assert launches.accepted >= 2


# ---- guesses are those of a host that has all tokens ----


class Guesses:
    """The guesses of each row, by its prompt and by how many tokens it had when they were made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}
        take, accept = LaunchedSteps._take, launched_steps.accept
        tables: list[Any] = []

        def taken(steps: LaunchedSteps, work: Any) -> Any:
            tables.append(steps._table)
            return take(steps, work)

        def noted(rows_S: Any, ids_S: Any, drafts_S: Any) -> Any:
            outcomes, table = accept(rows_S, ids_S, drafts_S), tables[-1]
            for one in outcomes:
                known = int(table.num_known[one.row] - table.num_unread[one.row])
                prompt = tuple(table.token_ids[one.row, : table.prompt_len[one.row]].tolist())
                own = drafts_S[one.first : one.first + one.num_drafts].tolist()
                if own:
                    self.found[prompt, known] = tuple(own)
            return outcomes

        monkeypatch.setattr(LaunchedSteps, "_take", taken)
        monkeypatch.setattr(launched_steps, "accept", noted)


MADE: dict[str, Any] = {
    "draft_model": shorter_demo,
    "eagle3": random_eagle,
    "eagle": random_eagle_one,
    "medusa": random_medusa,
}


@pytest.mark.parametrize(
    "method", ["eagle3", *(pytest.param(name, marks=pytest.mark.parity) for name in (*MADE, "mtp") if name != "eagle3")]
)
def test_guesses_are_those_of_a_host_that_has_all_tokens(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are made in the same steps, whatever became of the ones before: a rank on the host's platform guesses as
    one on a device does that is ahead of it."""
    model = random_mtp(tmp_path) if method == "mtp" else DEMO
    draft = model if method == "mtp" else MADE[method](tmp_path / method)
    case = replace(case_of(model, draft, requests_of(PROCESSED)), method=method, drafts=3)
    told, guesses = [], []
    with constant_drafts():
        for late in (False, True):
            with monkeypatch.context() as patch:
                guesses.append(Guesses(patch).found)
                launches = Launches(patch)
                told.append(served(replace(case, late=late)))
    assert told[0].tokens == told[1].tokens == served(replace(case, drafts=0, late=False)).tokens
    assert launches.ahead >= 8 and launches.waited == 0 and not launches.proposed
    ahead, host = guesses[1], guesses[0]
    both = host.keys() & ahead.keys()
    assert len(both) >= 20 and len(both) >= 0.8 * len(host), (len(both), len(host), len(ahead))
    assert {key: host[key] for key in both} == {key: ahead[key] for key in both}


# ---- heads ----


@pytest.fixture(scope="module")
def head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    method = str(request.param)
    return method, MADE[method](tmp_path_factory.mktemp("heads") / method)


def of_head(head: tuple[str, Path], requests: tuple[GenerationRequest, ...]) -> EngineCase:
    method, folder = head
    return replace(case_of(DEMO, folder, requests), method=method)


HEADS = ["eagle3", *(pytest.param(name, marks=pytest.mark.parity) for name in ("medusa", "eagle"))]


@pytest.mark.parametrize("head", HEADS, indirect=True)
def test_heads_with_rows_that_wait_guess_what_they_guess_without(
    head: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row waits, ends early, and others go on without it: heads miss none of their steps."""
    case = replace(of_head(head, requests_of(presence_penalty=0.5, max_tokens=8)), max_num_batched_tokens=64)
    wanted = served(replace(case, late=False))
    guesses = []
    with constant_drafts():
        for reads in (Reads.TOKENS, Reads.TOKENS_LATE):
            with monkeypatch.context() as patch:
                guesses.append(Guesses(patch).found)
                launches = Launches(patch)
                patch.setattr(Penalties, "reads", reads)
                assert served(replace(case, drafts=3)).tokens == wanted.tokens
    assert launches.proposed and launches.ahead >= 4
    both = guesses[0].keys() & guesses[1].keys()
    assert len(both) >= 20
    assert {key: guesses[0][key] for key in both} == {key: guesses[1][key] for key in both}


@pytest.mark.parametrize("head", HEADS, indirect=True)
@pytest.mark.parametrize(
    "change", [{"tp_size": 2}, pytest.param({"num_blocks": 18}, marks=pytest.mark.parity)], ids=str
)
def test_heads_change_no_token(head: tuple[str, Path], change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On two ranks, and with preemption."""
    case = of_head(head, requests_of(PROCESSED))
    wanted = served(replace(case, late=False))
    launches = Launches(monkeypatch)
    with constant_drafts():
        told = served(replace(case, drafts=3, **change))
    assert told.tokens == wanted.tokens
    assert launches.ahead >= 8 and launches.waited == 0 and not launches.proposed and launches.guessed >= 20


@pytest.mark.parametrize("head", HEADS, indirect=True)
def test_heads_read_what_replayed_steps_leave(head: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """And guess what they guess behind eager ones."""
    case = of_head(head, requests_of(PROCESSED))
    guesses, told = [], []
    with constant_drafts():
        for replays in (False, True):
            with monkeypatch.context() as patch:
                guesses.append(Guesses(patch).found)
                told.append(served(replace(case, drafts=3, late=False, replays=replays)))
    assert told[0].tokens == told[1].tokens and told[1].num_replays >= 8
    both = guesses[0].keys() & guesses[1].keys()
    assert len(both) >= 20
    assert {key: guesses[0][key] for key in both} == {key: guesses[1][key] for key in both}


@pytest.mark.parametrize("head", HEADS, indirect=True)
def test_a_head_that_reads_along_waits_for_nothing(head: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without drafts, which a head reads all the same: each is launched before the one ahead of it is read. Then
    rows have drafts, and guesses at once."""
    case = of_head(head, requests_of(max_tokens=30))
    wanted = served(replace(case, late=False))
    steps, launches = [0], Launches(monkeypatch)

    def later(self: Drafting, num_rows: int) -> bool:
        steps[0] += 1
        return steps[0] > 12

    waits = mock.patch.object(LaunchedSteps, "settle_all", side_effect=AssertionError("a wait"))
    with constant_drafts(), waits, monkeypatch.context() as patch:  # which ends first, so that nothing of it stays
        patch.setattr(Drafting, "begin_step", later)
        told = served(replace(case, drafts=3))
    assert told.tokens == wanted.tokens and launches.guessed >= 12


@pytest.mark.parametrize("head", HEADS, indirect=True)
def test_a_head_without_memory_guesses_nothing_in_that_step(
    head: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the rows themselves are out of memory, the host reads the steps ahead: it has to tell the device anew."""
    case = of_head(head, requests_of(PROCESSED))
    wanted = served(replace(case, late=False))
    calls, copy = [0], TensorRows._take_changes

    def failing(self: TensorRows, sent: Any) -> None:
        calls[0] += 1
        if calls[0] % 7 == 3:
            frame = inspect.currentframe()
            assert frame is not None and frame.f_back is not None
            if frame.f_back.f_code.co_name == "send_passes":
                raise torch.OutOfMemoryError("no room")
        copy(self, sent)

    monkeypatch.setattr(TensorRows, "_take_changes", failing)
    launches = Launches(monkeypatch)
    with constant_drafts():
        assert served(replace(case, drafts=3)).tokens == wanted.tokens
    assert launches.guessed >= 8 and launches.waited


# ---- steps of a rank ----


def in_turns(case: EngineCase, platform: Platform, *, at_once: bool) -> dict[int, list[int]]:
    """The tokens of two rows that are in every other step each, with as many drafts as there may be. at_once: all steps
    are launched before any is read."""
    context = ParallelContext.single()
    runner = load_rank(case.settings(), context, platform, rank=0, ranks_on_node=1).build_runner(case.num_blocks)
    plans = []
    for row in range(2):
        blocks = list(range(row * 40, (row + 1) * 40))
        init = RowInit(
            row=row, token_ids=PROMPTS[row], prompt_len=len(PROMPTS[row]), num_computed=0, sampling=SAMPLINGS[row]
        )
        work = RowWork(row=row, num_tokens=len(PROMPTS[row]), samples=True, new_block_ids=blocks)
        plans.append(StepPlan(step_id=1 + row, work=[work], new_rows=[init]))
    for step in range(14):
        work = RowWork(row=step % 2, num_tokens=1, samples=True, max_drafts=case.drafts)
        plans.append(StepPlan(step_id=3 + step, work=[work]))
    tokens: dict[int, list[int]] = {0: [], 1: []}
    waiting: list[StepHandle] = []
    for plan in plans:
        waiting.append(runner.launch(plan))
        while waiting and (not at_once or plan is plans[-1]):
            result = waiting.pop(0).result()
            assert result is not None and result.failure is None
            for row in result.rows:
                tokens[row.row] += row.token_ids
    runner.close()
    return tokens


SAMPLINGS = (RowSampling(temperature=0.0), RowSampling(temperature=0.7, seed=5, presence_penalty=0.1))


@pytest.mark.parametrize("method", MADE)
def test_rows_in_turns_with_all_steps_in_flight(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read before all of 16 steps are launched; guesses are those of a host that reads each."""
    torch.set_num_threads(1)
    case = replace(case_of(DEMO, MADE[method](tmp_path / method), ()), method=method, drafts=3)
    accelerator = TracedAccelerator()
    platform = replaced(GpuOnHost(accelerator), memory=lambda: None, sampling_ops=TorchSampling)
    guesses, told = [], []
    for late in (False, True):
        with monkeypatch.context() as patch:
            guesses.append(Guesses(patch).found)
            if late:
                with accelerator.tracing():
                    told.append(in_turns(case, platform, at_once=True))
            else:
                told.append(in_turns(case, CpuPlatform(), at_once=False))
    assert told[0] == told[1]
    assert len(guesses[0]) >= 10 and guesses[0] == guesses[1]


@pytest.mark.parity
@pytest.mark.parametrize("method", ["draft_model", "eagle3", "medusa"])
@pytest.mark.parametrize("seed", range(4))
def test_any_mix_with_steps_that_fail(
    method: str, seed: int, folder: Path, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that is tight or runs out, TP, rows that others get next."""
    rng = random.Random(seed)
    requests = requests_of([some_fields(rng) for _ in PROMPTS])
    if method == "draft_model":
        case = case_of(folder, draft, requests)
    else:
        case = replace(case_of(DEMO, MADE[method](tmp_path / method), requests), method=method)
    tp_size, num_blocks, most_rows = 1 + (seed == 3), rng.choice((16, 96)), rng.choice((2, 4))
    faults = tuple(
        Fault(rng.randrange(tp_size), rng.randrange(12), rng.randrange(5), rng.randrange(80)) for _ in range(seed % 3)
    )
    wanted = served(replace(case, late=False))
    more = {"drafts": 3, "num_blocks": num_blocks, "most_rows": most_rows, "faults": faults, "tp_size": tp_size}
    with constant_drafts():
        told = served(replace(case, **more))
    refused = {request_id for request_id, reasons in told.reasons.items() if "error" in reasons}
    assert len(refused) <= told.num_alone
    for key, tokens in wanted.tokens.items():
        mine = told.tokens.get(key, [])
        assert mine == (tokens[: len(mine)] if key[0] in refused else tokens)
