"""Heads behind several pipeline stages guess what they guess behind one, and change no token: what a head reads of
earlier stages' layers is handed on with the hidden states. Ranks are threads of this process."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.parallel.context import ParallelContext
from tandem.parallel.mesh import Mesh
from tandem.workers.engine.drafting.drafting import Drafting
from tandem.workers.models.decoder import build_decoder
from tandem.workers.models.spec.stage_taps import StageTaps, stage_taps
from tandem.workers.planning.resolve import draft_spec, read_spec
from tandem.workers.planning.sizes import draft_bytes
from tandem.workers.platforms.cpu import CpuPlatform
from tandem.workers.rank.drafters import head_drafts
from tandem.workers.rank.drafters.draft_rank import load_draft
from tandem.workers.rank.drafts import NextDrafts
from tests.support.draft_models import DEMO, random_eagle, random_eagle_one, random_medusa, random_mtp
from tests.support.engine_ranks import EngineCase, Fault
from tests.support.free_drafts import constant_drafts, free_drafts
from tests.unit.rank.test_device_drafts import PROCESSED, requests_of, served
from tests.unit.rank.test_guesses_ahead import Guesses

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


@pytest.mark.parametrize("method", ["eagle3", "eagle", "medusa", "mtp"])
def test_the_bytes_of_a_head_are_predicted(method: str, tmp_path: Path) -> None:
    """With the model's tables that it has none of, where its rank has not all of them."""
    case = case_of(method, tmp_path)
    settings, platform = case.settings(), CpuPlatform()
    model, head = read_spec(settings), draft_spec(settings)
    for tp_size, pp_size in ((1, 1), (2, 1), (1, 2), (2, 2)):
        mesh = Mesh(tp_size, pp_size, (pp_size - 1) * tp_size)
        context, dtype = ParallelContext(mesh), torch.float32
        decoder = build_decoder(model, context, folder=case.folder, dtype=dtype, platform=platform)
        loaded = load_draft(settings, context, platform, dtype, dtype, (None,), decoder)
        assert loaded is not None
        assert loaded.weight_bytes == draft_bytes(head, model, mesh, 4, platform.packs(dtype)), mesh
