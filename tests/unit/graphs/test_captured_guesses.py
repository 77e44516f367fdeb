"""Passes of drafters in graphs: a replay makes all guesses of a step, those of passes that are launched one by
one, on a host that has all tokens; texts are those of steps without drafts. The GPU platform over the host memory,
with the recorder of torch's operations."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.workers.attention.backend import DECODE_QUERIES
from tandem.workers.engine.drafting.drafting import Drafting
from tandem.workers.kernels.lora_ops import AdapterRows
from tandem.workers.kernels.sampling_ops import TorchSampling
from tandem.workers.messages.request import GenerationRequest
from tandem.workers.planning.graph_room import GuessSize
from tandem.workers.platforms.device_rows import StepRows
from tandem.workers.platforms.step_buffer import StepBuffer
from tandem.workers.rank.captured.guess_replays import AskedGuesses, GuessReplays, GuessStep
from tandem.workers.rank.drafters import head_drafts, medusa_drafts
from tandem.workers.rank.drafters.eagle_head import EagleHead
from tandem.workers.rank.drafters.head_ahead import HeadAhead
from tandem.workers.rank.model_runner import ModelRunner
from tests.support import recorded_graph
from tests.support.adapters import save_random_adapter
from tests.support.crowds import decoder_on, device
from tests.support.draft_models import DEMO, random_eagle, random_eagle_one, random_medusa, random_mtp, shorter_demo
from tests.support.engine_ranks import EngineCase
from tests.support.free_drafts import constant_drafts, free_drafts
from tests.support.platforms import GpuOnHost
from tests.support.tiny_models import BY_NAME, GROUPED, save_tiny_model
from tests.support.traced_accelerator import is_view
from tests.unit.rank.test_device_drafts import FIELDS, PROMPTS, requests_of, served
from tests.unit.rank.test_guesses_ahead import Guesses

MOST_LAUNCHES = 6
"""Operations beside the replay: a copy of the arrays and where it puts them, three that take what has changed of the
rows, and of heads the positions of the last step."""
MADE: dict[str, Any] = {
    "draft_model": shorter_demo,
    "eagle3": random_eagle,
    "eagle": random_eagle_one,
    "medusa": random_medusa,
}
PARITY = pytest.mark.parity
METHODS = ["draft_model", "eagle3", "medusa", "mtp", pytest.param("eagle", marks=PARITY)]
FEW = ["eagle3", *(pytest.param(name, marks=PARITY) for name in ("draft_model", "medusa", "mtp"))]


@pytest.fixture(scope="module", autouse=True)
def _always_drafting() -> Iterator[None]:
    with free_drafts():
        yield


class Counted(TorchDispatchMode):
    """Counts operations that are launched outside of replays."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not is_view(func) and recorded_graph.here.replay is None
        return func(*args, **kwargs or {})


@dataclass
class Proposals:
    """Steps of a runner whose drafter did something. replayed: operations beside the replay of each that had one;
    launched: of each other; sizes: rows and places of the captures replayed."""

    replayed: list[int] = field(default_factory=list)
    launched: list[int] = field(default_factory=list)
    sizes: set[tuple[int, int]] = field(default_factory=set)

    @classmethod
    def watched(cls, patch: pytest.MonkeyPatch) -> "Proposals":
        found, propose, fill = cls(), ModelRunner._propose, GuessStep.fill
        filled: list[GuessStep] = []

        def noted(step: GuessStep, *given: Any) -> None:
            filled.append(step)
            fill(step, *given)

        def counted(runner: ModelRunner, plan: Any) -> Any:
            before = len(filled)
            with Counted() as mode:
                drafts = propose(runner, plan)
            if len(filled) > before:
                found.replayed.append(mode.count)
                found.sizes.add(filled[-1].size[:2])
            elif mode.count:
                found.launched.append(mode.count)
            return drafts

        patch.setattr(GuessStep, "fill", noted)
        patch.setattr(ModelRunner, "_propose", counted)
        return found


def requests_with(fields: list[dict[str, Any]], max_tokens: int = 14) -> tuple[GenerationRequest, ...]:
    """Each with some more tokens than the one before, so that rows end one by one."""
    return tuple(
        msgspec.structs.replace(
            each, sampling=msgspec.structs.replace(each.sampling, max_tokens=max_tokens + 4 * place)
        )
        for place, each in enumerate(requests_of(fields))
    )


EDITED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.05, "frequency_penalty": -0.05},
    {"min_tokens": 8, "stop_token_ids": tuple(range(0, 60, 3)), "logit_bias": ((4, 0.5),)},
    {"presence_penalty": -0.2},
]
"""What captures draw with, log probabilities among it (FIELDS)."""


def case_of(method: str, tmp_path: Path, **more: Any) -> EngineCase:
    model = random_mtp(tmp_path, dense=True) if method == "mtp" else DEMO
    draft = model if method == "mtp" else MADE[method](tmp_path / method)
    case = EngineCase(model, 1, 1, requests_with(EDITED), num_blocks=96, max_num_batched_tokens=64)
    return replace(case, method=method, draft=draft, **{"drafts": 3, **more})


def both(host: dict[Any, Any], ahead: dict[Any, Any], most: int) -> None:
    """Guesses of rows that had some with as many tokens are equal."""
    keys = host.keys() & ahead.keys()
    assert len(keys) >= most, (len(keys), len(host), len(ahead))
    assert {key: host[key] for key in keys} == {key: ahead[key] for key in keys}


@pytest.mark.parametrize("method", METHODS)
def test_steady_decodes_launch_one_graph_for_all_guesses(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four rows, then fewer as they end, at temperatures, with limits, penalties and biases."""
    assert any("logprobs" in each for each in FIELDS)
    case, told, found = case_of(method, tmp_path), [], []
    with constant_drafts():
        for replays in (False, True):
            with monkeypatch.context() as patch:
                found.append(Guesses(patch).found)
                proposals = Proposals.watched(patch)
                told.append(served(replace(case, replays=replays)))
    plain = served(replace(case, drafts=0, replays=False))
    assert told[0].tokens == told[1].tokens == plain.tokens
    both(*found, 40)
    assert len(proposals.replayed) >= 14, proposals
    assert len(proposals.launched) <= 4, "of the start two, then prompts, and what is read of them"
    assert max(proposals.replayed) <= MOST_LAUNCHES and min(proposals.replayed) <= 3, proposals
    assert (4, 3) in proposals.sizes and {rows for rows, _ in proposals.sizes} == {1, 2, 4}
    assert max(proposals.launched) > 4 * MOST_LAUNCHES


@pytest.mark.parametrize("method", FEW)
@pytest.mark.parametrize("change", [{}, {"num_blocks": 18}, {"tp_size": 2}], ids=str)
def test_any_number_of_drafts_is_guessed_as_by_single_passes(
    method: str, change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row has 0 to 3 in each step, all of them none in some; rows are preempted; there are two ranks."""
    case, told, found = case_of(method, tmp_path, **change), [], []
    monkeypatch.setattr(Drafting, "begin_step", lambda self, num_rows: True)
    monkeypatch.setattr(Drafting, "budget", lambda self, record, num_tokens: (num_tokens * 7 // 3) % 4)
    for replays in (False, True):
        with monkeypatch.context() as patch:
            found.append(Guesses(patch).found)
            proposals = Proposals.watched(patch)
            told.append(served(replace(case, replays=replays)))
    assert told[0].tokens == told[1].tokens == served(replace(case, drafts=0, replays=False)).tokens
    both(*found, 20)
    assert len(proposals.replayed) >= 10 and len({places for _, places in proposals.sizes}) >= 2, proposals
    assert not change.get("num_blocks") or told[1].num_preempted


@pytest.mark.parametrize("method", FEW)
def test_rows_that_a_drafter_has_missed_begin_again_in_replays(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind steps without drafts in which heads rest: they see nothing ahead of a block."""
    case, told, found, is_late, steps = case_of(method, tmp_path), [], [], [False], [0]
    fill = GuessStep.fill

    def begun(drafting: Drafting, num_rows: int) -> bool:
        steps[0] += 1
        return True

    def noted(step: GuessStep, rows: StepRows, guesses: AskedGuesses, *given: Any) -> None:
        is_late[0] |= bool(guesses.skipped_R.any())
        fill(step, rows, guesses, *given)

    monkeypatch.setattr(head_drafts, "REST_AFTER", 2)
    monkeypatch.setattr(medusa_drafts, "REST_AFTER", 2)
    monkeypatch.setattr(Drafting, "begin_step", begun)
    monkeypatch.setattr(Drafting, "budget", lambda self, record, num_tokens: 3 * (steps[0] // 6 % 2))
    monkeypatch.setattr(GuessStep, "fill", noted)
    for replays in (False, True):
        with monkeypatch.context() as patch:
            steps[0] = 0
            found.append(Guesses(patch).found)
            told.append(served(replace(case, replays=replays)))
    assert told[0].tokens == told[1].tokens == served(replace(case, drafts=0, replays=False)).tokens
    both(*found, 10)
    assert is_late[0] == (method in ("eagle3", "mtp"))


@pytest.mark.parametrize("method", FEW)
def test_a_replay_without_memory_for_its_arrays_costs_that_steps_guesses(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(method, tmp_path, replays=True)
    wanted = served(replace(case, drafts=0, replays=False))
    calls, is_full, fill, upload = [0], [False], GuessStep.fill, StepBuffer.fill

    def counted(step: GuessStep, *given: Any) -> None:
        calls[0] += 1
        is_full[0] = calls[0] % 5 == 3
        fill(step, *given)

    def failing(buffer: StepBuffer, *given: Any) -> Any:
        """Behind changes of rows that count as brought to the device."""
        if is_full[0]:
            is_full[0] = False
            raise torch.OutOfMemoryError("no room")
        return upload(buffer, *given)

    monkeypatch.setattr(GuessStep, "fill", counted)
    monkeypatch.setattr(StepBuffer, "fill", failing)
    proposals = Proposals.watched(monkeypatch)
    with constant_drafts():
        assert served(case).tokens == wanted.tokens
    assert calls[0] >= 10 and proposals.replayed


@pytest.mark.parametrize("method", FEW)
def test_replays_of_passes_are_launched_ahead_in_the_streams_order(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each operation of a replay is watched by the sanitizer, draws among them."""
    case = case_of(method, tmp_path, drafts=2, replays=True, late=True, draws=True, most_rows=2, max_model_len=120)
    case = replace(case, requests=case.requests[:2])
    proposals = Proposals.watched(monkeypatch)
    with constant_drafts():
        told = served(case)
    assert told.tokens == served(replace(case, late=False, replays=False, drafts=0)).tokens
    assert len(proposals.replayed) >= 8


def test_a_draft_with_windows_reads_blocks_that_its_rows_still_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tiny_model(GROUPED, tmp_path)
    requests = requests_with([], 40)
    case = EngineCase(
        model, 1, 1, requests, num_blocks=60, drafts=3, method="draft_model", draft=model, max_num_batched_tokens=8
    )
    proposals, guesses = Proposals.watched(monkeypatch), Guesses(monkeypatch)
    told = served(replace(case, replays=True))
    assert told.tokens == served(replace(case, drafts=0)).tokens
    assert len(proposals.replayed) >= 10 and len(guesses.found) >= 20
    assert 4 * (max(map(len, told.tokens.values())) // 4) > 40, "of each of four groups, beyond its windows"


def test_a_drafter_that_no_graph_holds_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its tokens stay what they are, and so they do where some captures fail."""
    case = case_of("medusa", tmp_path, replays=True)
    wanted = served(replace(case, drafts=0))
    with monkeypatch.context() as patch:
        patch.setattr(GpuOnHost, "sampling_ops", lambda self: TorchSampling())
        proposals = Proposals.watched(patch)
        assert served(case).tokens == wanted.tokens and not proposals.replayed
    assert caplog.text.count("passes of medusa are launched one by one: tokens are not drawn in captures") == 1
    caplog.clear()
    run, frame_of = GuessStep.run, GuessStep.__init__

    def refused(step: GuessStep, passes: Any) -> Any:
        if step.size.num_places == 3 and recorded_graph.here.capture is not None:
            raise RuntimeError("not in a capture")
        return run(step, passes)

    def full(step: GuessStep, parts: Any, size: GuessSize, memory: Any) -> None:
        if size.num_places == 2:
            raise torch.OutOfMemoryError("no room for its arrays")
        frame_of(step, parts, size, memory)

    monkeypatch.setattr(GuessStep, "run", refused)
    monkeypatch.setattr(GuessStep, "__init__", full)
    with constant_drafts():
        assert served(case).tokens == wanted.tokens
    assert "passes of medusa are launched one by one: 6 of 12 captures failed" in caplog.text
    caplog.clear()

    def failing(step: GuessStep, passes: Any) -> None:
        raise RuntimeError("no steps of padding")

    monkeypatch.setattr(GuessStep, "warm", failing)
    with constant_drafts():
        assert served(case).tokens == wanted.tokens
    assert "passes of medusa are launched one by one: no steps of padding" in caplog.text


def test_no_replay_is_taken_for_a_step_that_it_cannot_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt beside decodes, and rows with rules: passes are launched one by one, and go on as replays."""
    fields = [*EDITED, {"allowed_token_ids": tuple(range(40)), "max_tokens": 10}]
    requests = [*requests_with(fields)]
    requests[-1] = msgspec.structs.replace(
        requests[-1],
        prompt_token_ids=[*range(5, 75)],
        sampling=msgspec.structs.replace(requests[-1].sampling, max_tokens=10),
    )
    case = replace(case_of("draft_model", tmp_path, replays=True, max_num_batched_tokens=24), requests=tuple(requests))
    taken: list[bool] = []
    guess = GuessReplays.guess

    def noted(self: GuessReplays, *given: Any) -> Any:
        ids_AD = guess(self, *given)
        taken.append(ids_AD is not None)
        return ids_AD

    monkeypatch.setattr(GuessReplays, "guess", noted)
    with constant_drafts():
        assert served(case).tokens == served(replace(case, drafts=0, replays=False)).tokens
    assert len(PROMPTS) == 4 and False in taken and taken[-5:] == [True] * 5


def test_a_head_reads_a_piece_of_a_prompt_by_a_pass_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its step was a replay, and a capture of more rows had room for its tokens: captures attend as decodes."""
    requests = [*requests_with(EDITED)]
    requests[-1] = msgspec.structs.replace(requests[-1], prompt_token_ids=[*range(5, 35)])
    case = replace(case_of("eagle3", tmp_path, replays=True, most_rows=8), requests=tuple(requests))
    longest: list[tuple[int, bool]] = []
    guess = GuessReplays.guess

    def noted(self: GuessReplays, rows: StepRows, guesses: AskedGuesses) -> torch.Tensor | None:
        assert self._is_at_hand(guesses), "captures of steps have chunks too"
        ids_AD = guess(self, rows, guesses)
        longest.append((int(rows.lens_R.max()), ids_AD is not None))
        return ids_AD

    monkeypatch.setattr(GuessReplays, "guess", noted)
    with constant_drafts():
        assert served(case).tokens == served(replace(case, drafts=0, replays=False)).tokens
    assert DECODE_QUERIES < max(longest)[0] <= 8 * 4
    assert all(is_replayed == (queries <= DECODE_QUERIES) for queries, is_replayed in longest)


def test_a_head_that_reads_a_step_without_drafts_makes_no_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of("eagle3", tmp_path, replays=True, most_rows=2, drafts=1)
    sizes: list[GuessSize] = []
    passes, forward, found = HeadAhead.passes, EagleHead.forward, set[tuple[int, int]]()

    def under_way(self: HeadAhead, step: GuessStep) -> None:
        sizes.append(step.size)
        passes(self, step)
        sizes.pop()

    def noted(self: EagleHead, ids_T: torch.Tensor, vectors_TH: torch.Tensor, batch: Any, kv: Any) -> Any:
        if sizes:
            found.add((sizes[-1].num_places, len(batch.logits_rows_S)))
        return forward(self, ids_T, vectors_TH, batch, kv)

    monkeypatch.setattr(HeadAhead, "passes", under_way)
    monkeypatch.setattr(EagleHead, "forward", noted)
    assert served(case).tokens == served(replace(case, drafts=0, replays=False)).tokens
    assert found == {(0, 0), (1, 1), (1, 2)}


def test_captures_have_no_more_rows_than_steps_sample(tmp_path: Path) -> None:
    """Of five rows, and steps of seven tokens: the room for counts of tokens is that of captured steps."""
    case = case_of("draft_model", tmp_path, replays=True, most_rows=5, max_num_batched_tokens=7)
    assert case.settings().most_samples == 7
    with constant_drafts():
        assert served(case).tokens == served(replace(case, drafts=0, replays=False)).tokens


def test_a_head_looks_tokens_up_without_the_adapters_of_the_step_before(tmp_path: Path) -> None:
    folder = save_tiny_model(BY_NAME["llama-gqa"], tmp_path)
    adapter = save_random_adapter(folder, tmp_path / "a", modules=("embed_tokens", "lm_head"))
    decoder, ids_T = decoder_on(device(None), folder, [adapter]), torch.arange(3, 8)
    plain_TH = decoder.embed(ids_T)
    rows = AdapterRows(torch.zeros(5, dtype=torch.int32), [(0, 5, 0)])
    adapters: Any = decoder._adapters
    adapters.begin(SimpleNamespace(adapters=rows, sample_adapters=rows, real_T=None))
    assert decoder._embedding is not None and not torch.equal(decoder._embedding(ids_T), plain_TH)
    assert torch.equal(decoder.embed(ids_T), plain_TH)
