"""Heads behind several pipeline stages guess what they guess behind one, and change no token: what a head reads of
earlier stages' layers is handed on with the hidden states. Ranks are threads of this process."""

import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tandem.parallel.context import ParallelContext
from tandem.parallel.exchange.collectives import SingleRank
from tandem.parallel.mesh import Mesh
from tandem.parallel.pipeline import StageLink
from tandem.workers.engine.drafting.drafting import Drafting
from tandem.workers.gguf.gguf_folder import gguf_folder
from tandem.workers.models.decoder import Decoder, build_decoder
from tandem.workers.models.spec.config.head_config import HeadSpec
from tandem.workers.models.spec.stage_taps import StageTaps, stage_taps
from tandem.workers.models.step_tensors import Heard
from tandem.workers.planning.resolve import draft_spec, read_spec
from tandem.workers.planning.sizes import draft_bytes, tap_bytes
from tandem.workers.platforms.cpu import CpuPlatform
from tandem.workers.rank.drafters import head_drafts
from tandem.workers.rank.drafters.draft_rank import load_draft
from tandem.workers.rank.drafts import NextDrafts
from tests.support.draft_models import DEMO, random_eagle, random_eagle_one, random_medusa, random_mtp
from tests.support.engine_ranks import EngineCase, Fault
from tests.support.free_drafts import constant_drafts, free_drafts
from tests.support.gguf_files import save_gguf
from tests.support.thread_ranks import Sent
from tests.unit.rank.test_device_drafts import PROCESSED, requests_of, served
from tests.unit.rank.test_guesses_ahead import Guesses
from tests.unit.text.test_gguf_vocabulary import of_bytes

Found = dict[tuple[tuple[int, ...], int], tuple[int, ...]]
MADE: dict[str, Any] = {"eagle3": random_eagle, "eagle": random_eagle_one, "medusa": random_medusa}
PARITY = pytest.mark.parity


@pytest.fixture(scope="module", autouse=True)
def _always_drafting() -> Iterator[None]:
    with free_drafts():
        yield


def case_of(method: str, tmp_path: Path, **more: Any) -> EngineCase:
    """Rows of which some are greedy, with prompts that come in chunks."""
    model = random_mtp(tmp_path, dense=True) if method == "mtp" else DEMO
    draft = model if method == "mtp" else MADE[method](tmp_path / method)
    case = EngineCase(model, 1, 1, requests_of(PROCESSED), num_blocks=96, method=method, draft=draft, drafts=3)
    return replace(case, **more)


def told_guesses(patch: pytest.MonkeyPatch) -> Found:
    """What the last stage guesses, by rows' prompts and by how many tokens they had, once it does so."""
    found: Found = {}
    guess = NextDrafts._guess

    def noted(self: NextDrafts, asked: list[int], most: dict[int, int]) -> dict[int, list[int]]:
        drafts, table = guess(self, asked, most), self._table
        for row, ids in drafts.items():
            prompt = tuple(table.token_ids[row, : table.prompt_len[row]].tolist())
            found[prompt, int(table.num_known[row])] = tuple(ids)
        return drafts

    patch.setattr(NextDrafts, "_guess", noted)
    return found


@pytest.mark.parametrize(
    ("method", "change"),
    [
        ("eagle3", {"pp_size": 2}),
        ("eagle3", {"pp_size": 4}),
        ("eagle3", {"pp_size": 2, "replays": True}),
        pytest.param("eagle3", {"pp_size": 2, "late": True, "replays": True}, marks=PARITY),
        pytest.param("eagle3", {"pp_size": 2, "tp_size": 2}, marks=PARITY),
        pytest.param("eagle3", {"pp_size": 2, "num_blocks": 18}, marks=PARITY),
        pytest.param("eagle", {"pp_size": 2, "late": True}, marks=PARITY),
        pytest.param("mtp", {"pp_size": 2, "late": True}, marks=PARITY),
        ("mtp", {"pp_size": 2}),
    ],
    ids=str,
)
def test_guesses_are_those_of_one_stage(
    method: str, change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows that take turns in the steps in flight: none of a row's tokens is missed."""
    case = case_of(method, tmp_path)
    with constant_drafts():
        with monkeypatch.context() as patch:
            alone = Guesses(patch).found
            wanted = served(case)
        with monkeypatch.context() as patch:
            found = told_guesses(patch)
            told = served(replace(case, **change))
    assert told.tokens == wanted.tokens == served(replace(case, drafts=0)).tokens
    assert not change.get("replays") or told.num_replays >= 8
    assert not change.get("num_blocks") or told.num_preempted
    both = [(found[key], alone[key]) for key in sorted(found.keys() & alone.keys()) if found[key]]
    assert len(both) >= 20 and len(both) >= 0.75 * min(len(found), len(alone)), (len(both), len(found), len(alone))
    differing = [(one, other) for one, other in both if one[: len(other)] != other[: len(one)]]
    assert not differing or (change.get("num_blocks") and len(differing) < len(both) / 4)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=PARITY) for seed in range(1, 4))])
def test_steps_that_fail_and_steps_without_drafts_change_no_token(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On any stage memory runs out, and there is little KV; the head rests at times."""
    case = case_of("eagle3", tmp_path, num_blocks=18 if seed % 2 else 96)
    wanted = served(replace(case, drafts=0))
    monkeypatch.setattr(head_drafts, "REST_AFTER", 2)
    monkeypatch.setattr(Drafting, "begin_step", lambda self, num_rows: True)
    monkeypatch.setattr(Drafting, "budget", lambda self, record, num_tokens: 3 * (num_tokens // 6 % 2))
    fault = Fault(seed % 2, 6 + seed, 0, 5 + 9 * seed)
    found = told_guesses(monkeypatch)
    told = served(replace(case, pp_size=2, faults=(fault,)))
    assert told.failures and any(found.values())
    refused = {request_id for request_id, reasons in told.reasons.items() if "error" in reasons}
    for key, tokens in wanted.tokens.items():
        mine = told.tokens.get(key, [])
        assert mine == (tokens[: len(mine)] if key[0] in refused else tokens)


def test_a_layer_at_a_border_is_heard_once_by_the_stage_behind() -> None:
    taps = (4, 1, 2)
    stages = [stage_taps(taps, 4, Mesh(1, 2, rank)) for rank in range(2)]
    assert stages == [StageTaps((), (1,), (1,)), StageTaps((1,), (4, 2), (4, 1, 2))]
    assert stage_taps(taps, 4, Mesh()) == StageTaps((), taps, taps)
    assert [stage_taps(taps, 4, Mesh(1, 4, rank)).heard for rank in range(4)] == [(), (1,), (1, 2), taps]


@pytest.mark.parametrize("pp_size", [2, 3])
def test_no_more_messages_are_there_than_are_planned(pp_size: int, tmp_path: Path) -> None:
    """Where the stage behind is slow, in bytes of float32."""
    there: list[weakref.ref[torch.Tensor]] = []
    most = 0

    class Slow(SingleRank):
        def isend(self, tensor: torch.Tensor, peer: int) -> Sent:
            nonlocal most
            there.append(weakref.ref(tensor))
            most = max(most, sum(ref() is not None for ref in there))
            return Sent()

    settings, mesh = case_of("eagle3", tmp_path).settings(), Mesh(1, pp_size, 0)
    model, head = read_spec(settings), draft_spec(settings)
    assert isinstance(head, HeadSpec)
    heard, size = len(stage_taps(head.taps, model.num_layers, mesh).heard), model.hidden_size
    context = ParallelContext(mesh, world=Slow())
    link = StageLink(context, size, torch.float32, torch.device("cpu"), 0, heard)
    for step in range(8):
        if step % 3:
            link.send(torch.zeros(5, size), [torch.zeros(5, size)] * heard)
        else:
            link.send_failure(5)
    assert most == pp_size and tap_bytes(head, model, mesh, 5, 4) == (1 + most) * heard * 5 * size * 4
    assert tap_bytes(head, model, mesh, 5, 4, is_captured=True) == heard * 5 * size * 4
    assert not tap_bytes(head, model, Mesh(2, pp_size, 1), 5, 4), "tensors go along the first ranks of stages"


def test_a_step_gives_back_what_the_last_one_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Heard | None] = []
    walk = Decoder._walk
    monkeypatch.setattr(Decoder, "_walk", lambda self, inputs: (held.append(self.heard), walk(self, inputs))[1])
    told = served(case_of("eagle3", tmp_path, pp_size=2))
    assert told.tokens and len(held) > 20 and not any(held)


@pytest.mark.parametrize(
    ("method", "quantization"),
    [("eagle3", None), ("eagle", None), ("medusa", None), ("mtp", None), ("eagle", "int8"), ("eagle3", "gguf")],
)
def test_the_bytes_of_a_head_are_predicted(method: str, quantization: str | None, tmp_path: Path) -> None:
    """With the model's tables that it has none of, where its rank has not all of them; a table that a checkpoint has as
    codes is the model's own then."""
    case = case_of(method, tmp_path)
    if quantization == "gguf":
        file, _ = save_gguf(DEMO, tmp_path / "m.gguf", lambda name: "Q8_0", of_bytes(DEMO, "smollm"))
        case = replace(case, folder=gguf_folder(file))
    settings, platform = case.settings(), CpuPlatform()
    if quantization == "int8":
        own = msgspec.structs.replace(settings.model, quantization="int8")
        settings = msgspec.structs.replace(settings, model=own)
    model, head = read_spec(settings), draft_spec(settings)
    for tp_size, pp_size in ((1, 1), (2, 1), (1, 2), (2, 2)):
        mesh = Mesh(tp_size, pp_size, (pp_size - 1) * tp_size)
        context, dtype = ParallelContext(mesh), torch.float32
        decoder = build_decoder(model, context, folder=case.folder, dtype=dtype, platform=platform)
        loaded = load_draft(settings, context, platform, dtype, dtype, (None,), decoder)
        assert loaded is not None
        assert loaded.weight_bytes == draft_bytes(head, model, mesh, 4, platform.packs(dtype)), mesh
