"""A rank that runs out of memory beside TP peers, in a pipeline or in both: the step fails on all of them, they stay in
step, and the same tokens come as without it. Ranks are threads here, each with an engine of its own.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.parallel.context import ParallelContext
from tandem.workers.engine.drafting.drafting import Drafting
from tandem.workers.messages.request import GenerationRequest, SamplingParams
from tandem.workers.messages.step import NOT_FINITE
from tandem.workers.planning import graph_room
from tandem.workers.rank.launched_steps import OUT_OF_MEMORY
from tandem.workers.speculation.ngram import NgramProposer
from tandem.workers.speculation.proposer import EndedRow, ProposalRow
from tandem.workers.speculation.suffix import SuffixProposer
from tests.support.engine_ranks import EngineCase, Fault, Share, Told, run_engine
from tests.support.free_drafts import free_drafts
from tests.support.thread_ranks import ThreadRanks
from tests.support.tiny_models import TinyModel, save_tiny_model

LAYERS = 2
LARGE = 30  # a prompt's length
GREEDY: dict[str, Any] = {
    "temperature": 0.0,
    "frequency_penalty": -0.1,
    "bad_words_token_ids": ((3, 3), (4, 3, 3), (9,)),
}
MIXED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "presence_penalty": 0.5, "logprobs": 2}
GROUPS = [(2, 1), (1, 2), (2, 2)]
IDS = ["tp2", "pp2", "tp2pp2"]


def requests_of(*lengths: int) -> tuple[GenerationRequest, ...]:
    """Every other one greedy; one has two choices."""
    return tuple(
        GenerationRequest(
            request_id=f"r{length}",
            prompt_token_ids=[3 + (7 * i + 5 * k) % 190 for k in range(length)],
            sampling=SamplingParams(
                max_tokens=4 + i, ignore_eos=True, seed=i, n=1 + (i == 1), **(MIXED if i % 2 else GREEDY)
            ),
        )
        for i, length in enumerate(lengths)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = TinyModel("of-two", "qwen3", {"num_hidden_layers": LAYERS})
    return save_tiny_model(model, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def wanted(folder: Path) -> Told:
    """One rank that has memory."""
    told = serve(folder, 1, 1)[0]
    assert len(told.tokens) == 4 and not told.failures
    return told


def serve(
    folder: Path,
    tp: int,
    pp: int,
    *faults: Fault,
    late: bool = False,
    large: int = 13,
    drafts: int = 0,
    method: str = "ngram",
    replays: bool = False,
    prompt_ranks: tuple[int, ...] = (),
) -> list[Told]:
    torch.set_num_threads(1)
    case = EngineCase(
        folder,
        tp,
        pp,
        requests_of(2, 9, large),
        faults,
        late,
        drafts=drafts,
        method=method,
        replays=replays,
        prompt_ranks=prompt_ranks,
    )
    return ThreadRanks().call(run_engine, tp, pp, case)  # type: ignore[no-any-return]


def check(told: list[Told], wanted: Told) -> None:
    """The same tokens; or their beginning, where a step of a single token failed."""
    first = told[0]
    assert all((one.tokens, one.failures) == (first.tokens, first.failures) for one in told)
    assert not first.failures or any(one.num_struck for one in told), "what comes after the ranks agreed fails no step"
    refused = {request_id for request_id, reasons in first.reasons.items() if "error" in reasons}
    assert len(refused) <= first.num_alone
    for key, tokens in wanted.tokens.items():
        mine = first.tokens.get(key, [])
        assert mine == (tokens[: len(mine)] if key[0] in refused else tokens)


PLACES = {
    "before the first collective": Fault(0, 1, 0, 0),
    "between two of a layer": Fault(0, 1, 2, 3),
    "in the last layer": Fault(0, 1, 2 * LAYERS - 1, 2),
    "in the head": Fault(0, 1, 2 * LAYERS + 1, 1),
    "before the logits are put together": Fault(0, 1, 2 * LAYERS + 2, 0),
    "in sampling": Fault(0, 1, 2 * LAYERS + 2, 4),
    "before the ranks agree": Fault(0, 1, 2 * LAYERS + 2, 60),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("place", PLACES)
def test_a_tp_rank_may_run_out_anywhere(folder: Path, wanted: Told, place: str, rank: int) -> None:
    fault = PLACES[place]
    told = serve(folder, 2, 1, Fault(rank, fault.step, fault.collectives, fault.operations))
    check(told, wanted)
    assert told[0].failures or (place, rank) in {
        ("in sampling", 1),
        ("before the ranks agree", 0),
        ("before the ranks agree", 1),
    }, "the only places without an operation on this rank"


@pytest.mark.parametrize("operations", [0, 9, 25, 40, 55])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_may_run_out_anywhere(folder: Path, wanted: Told, rank: int, operations: int) -> None:
    check(serve(folder, 1, 2, Fault(rank, 1, 0, operations)), wanted)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), *GROUPS], ids=["alone", *IDS])
@pytest.mark.parametrize("late", [False, True], ids=["now", "late"])
def test_the_row_that_never_fits_ends_and_the_others_go_on(
    folder: Path, wanted: Told, tp: int, pp: int, late: bool
) -> None:
    """Other rows' steps fail with it, until it is alone."""
    told = serve(folder, tp, pp, Fault(tp * pp - 1, None, 0, 12, prompt_len=LARGE), late=late, large=LARGE)
    large = f"r{LARGE}"
    assert told[0].reasons[large] == ["error"] and told[0].tokens.pop((large, 0)) == []
    others = {key: tokens for key, tokens in wanted.tokens.items() if key[0] != "r13"}
    assert told[0].tokens == others
    assert len(told[0].errors) == 1 and told[0].errors[0].startswith(OUT_OF_MEMORY)


@pytest.mark.parametrize(("tp", "pp"), GROUPS, ids=IDS)
def test_nan_on_a_rank_is_the_rows_own_error(folder: Path, wanted: Told, tp: int, pp: int) -> None:
    told = serve(folder, tp, pp, Fault(tp * pp - 1, None, prompt_len=13, nan=True))
    assert told[0].errors == [NOT_FINITE] and told[0].reasons["r13"] == ["error"] and not told[0].failures
    assert all(told[0].tokens[key] == tokens for key, tokens in wanted.tokens.items() if key[0] != "r13")


@pytest.mark.parametrize(("tp", "pp"), GROUPS, ids=IDS)
def test_without_memory_for_the_exchanges_the_group_ends_and_says_why(folder: Path, tp: int, pp: int) -> None:
    with pytest.raises(torch.OutOfMemoryError, match=f"^{OUT_OF_MEMORY} in step 2: .* its peers cannot go on: Tried"):
        serve(folder, tp, pp, Fault(tp * pp - 1, 1, 0, 5, again=True))


def failing_twice(folder: Path, context: ParallelContext, share: Share) -> None:
    """A collective that only some steps make."""
    context.tp.begin(3, 1)
    context.tp.all_reduce(torch.zeros(3, 2))
    context.tp.end()
    context.tp.begin(2, 1)
    context.tp.all_reduce(torch.zeros(2, 2))
    context.tp.all_reduce(torch.zeros(2, 2))
    context.tp.end()


def test_a_model_whose_steps_make_different_collectives_is_found_at_once(folder: Path) -> None:
    with pytest.raises(AssertionError, match="2 collectives, not 1"):
        ThreadRanks().call(failing_twice, 2, 1, folder)


def faults_of(num_ranks: int) -> st.SearchStrategy[list[Fault]]:
    fault = st.builds(
        Fault,
        rank=st.integers(0, num_ranks - 1),
        step=st.integers(0, 9),
        collectives=st.integers(0, 2 * LAYERS + 2),
        operations=st.integers(0, 12) | st.integers(0, 70),
    )
    return st.lists(fault, min_size=1, max_size=4)


@settings(max_examples=40)
@given(group=st.sampled_from(GROUPS), data=st.data())
def test_any_rank_may_run_out_at_any_operation(
    folder: Path, wanted: Told, group: tuple[int, int], data: st.DataObject
) -> None:
    drafts = data.draw(st.sampled_from([0, 3]), "drafts")
    check(serve(folder, *group, *data.draw(faults_of(group[0] * group[1])), drafts=drafts), wanted)


@settings(max_examples=8)
@given(group=st.sampled_from(GROUPS[:2]), data=st.data())
def test_so_it_is_where_the_host_learns_of_it_a_step_late(
    folder: Path, wanted: Told, group: tuple[int, int], data: st.DataObject
) -> None:
    drafts = data.draw(st.sampled_from([0, 3]), "drafts")
    check(serve(folder, *group, *data.draw(faults_of(group[0] * group[1])), late=True, drafts=drafts), wanted)


@settings(max_examples=10)
@given(late=st.booleans(), data=st.data())
def test_ranks_learn_alike_from_rows_that_end(folder: Path, wanted: Told, late: bool, data: st.DataObject) -> None:
    """Whichever of them runs out of memory, and though it knows a step's tokens late."""
    learnt: dict[int, list[tuple[list[int], int]]] = {}
    learn = SuffixProposer.learn

    def noted(self: SuffixProposer, rows: Sequence[EndedRow]) -> None:
        said = [(row.token_ids.tolist(), row.prompt_len) for row in rows if len(row.token_ids) > row.prompt_len]
        learnt.setdefault(id(self), []).extend(said)
        learn(self, rows)

    with mock.patch.object(SuffixProposer, "learn", noted):
        told = serve(folder, 2, 1, *data.draw(faults_of(2)), late=late, drafts=3, method="suffix")
    check(told, wanted)
    one, other = learnt.values()
    assert one == other and len(one) >= 2


@pytest.mark.parametrize("late", [False, True], ids=["now", "late"])
@pytest.mark.parametrize("rank", [0, 1])
def test_stages_that_are_told_drafts_may_run_out(
    folder: Path, wanted: Told, rank: int, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some guesses are right, and some are not. Each rank has an engine of its own, which hears of the same ones."""
    known = {request.request_id: request.prompt_token_ids for request in requests_of(2, 9, 13)}
    answers = [[*known[name], *tokens] for (name, _), tokens in wanted.tokens.items()]
    told_of: list[tuple[int, int]] = []

    def propose(self: NgramProposer, rows: Sequence[ProposalRow]) -> list[Sequence[int]]:
        ends = [(row, row.token_ids.tolist()) for row in rows]
        found = [next((a[len(ids) :] for a in answers if a[: len(ids)] == ids), []) for _, ids in ends]
        return [
            [*right[: row.max_drafts - 1], 5][: row.max_drafts] for (row, _), right in zip(ends, found, strict=True)
        ]

    observe = Drafting.observe
    monkeypatch.setattr(NgramProposer, "propose", propose)
    monkeypatch.setattr(
        Drafting, "observe", lambda self, record, *counts: (told_of.append(counts), observe(self, record, *counts))[1]
    )
    with free_drafts():
        told = serve(folder, 1, 2, Fault(rank, 5, 0, 9), late=late, drafts=3)
    check(told, wanted)
    assert told[0].failures and any(0 < right < drafts for drafts, right in told_of)


# ---- ranks that replay ----


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (2, 2), (4, 1)], ids=["tp2", "tp2pp2", "tp4"])
def test_ranks_that_replay_say_the_same(folder: Path, wanted: Told, tp: int, pp: int, drafts: int) -> None:
    told = serve(folder, tp, pp, drafts=drafts, replays=True)
    assert all(one.tokens == wanted.tokens for one in told)
    assert len({one.num_replays for one in told}) == 1 and told[0].num_replays >= 5


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_runs_out_in_a_replayed_step_launches_it_on_padding(
    folder: Path, wanted: Told, place: str, rank: int
) -> None:
    """The second step and later ones are replays on its peer; the step after it is right."""
    fault = PLACES[place]
    for step in (2, 4):
        told = serve(folder, 2, 1, Fault(rank, step, min(fault.collectives, 1), fault.operations), replays=True)
        check(told, wanted)
        assert told[0].num_replays >= 3


@settings(max_examples=20)
@given(group=st.sampled_from(GROUPS), data=st.data())
def test_any_rank_that_replays_may_run_out_at_any_operation(
    folder: Path, wanted: Told, group: tuple[int, int], data: st.DataObject
) -> None:
    drafts = data.draw(st.sampled_from([0, 3]), "drafts")
    check(serve(folder, *group, *data.draw(faults_of(group[0] * group[1])), drafts=drafts, replays=True), wanted)


@pytest.mark.parametrize("prompt_ranks", [(0,), (1,)])
def test_ranks_that_know_different_outcomes_choose_one_capture(
    folder: Path, wanted: Told, prompt_ranks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has read which drafts were accepted, the other has not. Tables of 2, 4 and 8 blocks have captures, and the
    twin's collectives tell a replay from another."""
    monkeypatch.setattr(graph_room, "NARROWEST_TOKENS", 8)
    monkeypatch.setattr(graph_room, "MAX_CAPTURES", 30)
    told = serve(folder, 2, 1, late=True, drafts=3, replays=True, prompt_ranks=prompt_ranks)
    assert all(one.tokens == wanted.tokens for one in told)
    assert told[0].num_replays == told[1].num_replays >= 5


@pytest.mark.parametrize("drafts", [0, 3])
def test_ranks_that_replay_and_learn_late_stay_in_step(folder: Path, wanted: Told, drafts: int) -> None:
    """The step behind the one that fails is launched before that is known: on one rank as padding, on the other as it
    was planned."""
    told = serve(folder, 2, 1, Fault(1, 3, 0, 0), late=True, drafts=drafts, replays=True)
    check(told, wanted)
    assert told[0].num_replays >= 4 and len(told[0].failures) >= 2
