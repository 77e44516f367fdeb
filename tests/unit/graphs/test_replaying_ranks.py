"""Ranks of a stage as gloo processes: they make captures at the start together, and replays equal the same padded steps
run eagerly, bit for bit, with adapters, drafts and a grammar. What they do without memory, tests/unit/rank has more of.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.configs.bundled import DEMO_MODEL
from tandem.workers.messages.request import NO_TOKENS, GenerationRequest, Pool, SamplingParams
from tests.support.adapters import save_random_adapter
from tests.support.decoder_ranks import RankProcesses
from tests.support.engine_ranks import EngineCase, Fault, Told, run_engine
from tests.support.replay_course import CourseCase, Ran, run_awaited, run_course
from tests.support.thread_ranks import ThreadRanks
from tests.support.tiny_models import BY_NAME, TinyModel, save_tiny_model
from tests.unit.rank.test_out_of_memory_ranks import check, requests_of

STEPS = 12


def course(ranks: "RankProcesses | ThreadRanks", folder: Path, tp: int, **changes: Any) -> list[Ran]:
    return ranks.call(run_course, tp, 1, CourseCase(folder, tp, **changes))


@pytest.mark.parametrize(
    ("tp", "drafts", "adapted", "grammar", "shards"),
    [
        (2, 0, True, True, False),
        (2, 3, True, True, False),
        (2, 3, False, False, False),
        (2, 3, False, False, True),
        (4, 0, True, False, True),
    ],
    ids=["adapters-grammar", "drafts-adapters-grammar", "drafts", "drafts-shards", "tp4-adapters-shards"],
)
def test_replays_equal_eager_steps(
    ranks: RankProcesses, tmp_path: Path, tp: int, drafts: int, adapted: bool, grammar: bool, shards: bool
) -> None:
    """Captured with padding, replayed with the crowd. Nothing is captured after the start. shards: no row needs whole
    logits."""
    folder = DEMO_MODEL if tp == 2 else save_tiny_model(BY_NAME["llama-mha-tied"], tmp_path)
    adapters = [save_random_adapter(folder, tmp_path / f"a{n}", rank=4 + n, seed=n) for n in range(2 * adapted)]
    budget = 16 if adapted else 64
    given: dict[str, Any] = {"adapters": tuple(adapters), "drafts": drafts, "grammar": grammar, "budget": budget}
    given |= {"plain": not adapted, "shards": shards}
    replayed, padded = (course(ranks, folder, tp, kind=kind, **given) for kind in ("replayed", "padded"))
    for mine, its in zip(replayed, padded, strict=True):
        assert mine.num_replays >= STEPS + 3 * (not adapted) and mine.num_replays == its.num_replays
        assert len(mine.logits) == len(its.logits) and all(map(torch.equal, mine.logits, its.logits))
        assert mine.report is not None and not mine.report.failures
        assert mine.num_captured == mine.report.num_captures >= 3 and mine.num_captured_late == 0
    by_shards = [one.num_by_shards for one in replayed]
    assert by_shards == [replayed[0].num_replays] * tp if shards else 0 < by_shards[0] < replayed[0].num_replays
    assert not replayed[0].num_drawn_behind, "masks of grammars and bad words come to a capture behind the step's"
    assert replayed[0].tokens == padded[0].tokens and replayed[0].num_said_replayed == replayed[0].num_replays
    alone = course(ThreadRanks(), folder, 1, **given)[0]
    assert alone.tokens == replayed[0].tokens, "those of one rank"


@pytest.mark.parametrize(("fails", "early"), [(0, False), (1, False), (1, True)])
def test_a_capture_that_fails_on_one_rank_is_dropped_on_both(ranks: RankProcesses, fails: int, early: bool) -> None:
    """early: in its eager run, whose sums the peer waits for."""
    whole, told = course(ranks, DEMO_MODEL, 2), course(ranks, DEMO_MODEL, 2, fails=fails, fails_early=early)
    why = ["on another rank of the stage"] * 2
    why[fails] = "Tried to allocate 20.00 GiB" if early else "no memory for a graph"
    for rank, one in enumerate(told):
        assert one.report is not None
        assert one.report.failures == {f"4 tokens, 10 blocks{kind}": why[rank] for kind in ("", ", by shards")}
        assert one.report.num_captures == 4 + 2 * (rank == 0), "one rank draws with rules"
        assert 0 < one.num_replays < whole[rank].num_replays, "steps of three rows run eagerly"
    assert told[0].tokens == whole[0].tokens


@pytest.mark.parametrize("refuses", [0, 1])
def test_ranks_of_which_one_replays_nothing_run_eagerly(ranks: RankProcesses, refuses: int) -> None:
    told = course(ranks, DEMO_MODEL, 2, refuses=refuses)
    assert all(one.report is None and one.num_captured == one.num_replays == 0 for one in told)
    assert told[0].tokens == course(ranks, DEMO_MODEL, 2)[0].tokens


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (2, 2)])
@pytest.mark.parametrize("operations", [0, 1])
def test_a_rank_without_memory_fails_the_step_of_all_and_the_next_is_right(
    ranks: RankProcesses, tmp_path: Path, tp: int, pp: int, operations: int
) -> None:
    """Ahead of its replay, which needs none."""
    folder = save_tiny_model(TinyModel("of-two", "qwen3", {"num_hidden_layers": 2}), tmp_path)
    wanted = ranks.call(run_engine, 1, 1, EngineCase(folder, 1, 1, requests_of(2, 9, 13)))[0]
    case = EngineCase(folder, tp, pp, requests_of(2, 9, 13), (Fault(tp * pp - 1, 3, 0, operations),), replays=True)
    told = ranks.call(run_engine, tp, pp, case)
    check(told, wanted)
    assert told[0].failures
    assert told[-1].num_struck == 1 and min(one.num_replays for one in told) >= 3


def test_a_rank_that_owes_a_load_replays_with_its_peers() -> None:
    """Its peer has waited for the load layer by layer, in an eager step; it waits at once, ahead of the replay."""
    told = ThreadRanks().call(run_awaited, 2, 1, CourseCase(DEMO_MODEL, 2))
    assert told == [([False, False, True], set()), ([False, False, True], {4})]


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)])
def test_embeddings_and_scored_prompts_are_read_behind_replays(tmp_path: Path, tp: int, pp: int) -> None:
    """In chunks, beside decodes; what a captured step leaves is what an eager one returns."""
    folder = save_tiny_model(TinyModel("of-two", "qwen3", {"num_hidden_layers": 2}), tmp_path)
    requests = (
        *requests_of(9, 30),
        *(
            GenerationRequest(
                request_id=kind,
                prompt_token_ids=[3 + k % 50 for k in range(25)],
                sampling=NO_TOKENS,
                pool=Pool(kind=kind),
            )
            for kind in ("mean", "last")
        ),
        GenerationRequest(
            request_id="scored",
            prompt_token_ids=[5 + k % 60 for k in range(30)],
            sampling=SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=2),
        ),
    )
    given: dict[str, Any] = {"max_num_batched_tokens": 40, "is_hybrid": False}
    eager, replayed = (
        ThreadRanks().call(run_engine, tp, pp, EngineCase(folder, tp, pp, requests, replays=replays, **given))[0]
        for replays in (False, True)
    )
    assert replayed.num_replays >= 5 and not eager.num_replays
    assert replayed.tokens == eager.tokens and replayed.embeddings.keys() == eager.embeddings.keys() == {"mean", "last"}
    for kind, vector in eager.embeddings.items():
        mine, its = (np.frombuffer(bytes_of, np.float32) for bytes_of in (replayed.embeddings[kind], vector))
        np.testing.assert_allclose(mine, its, atol=1e-5)
    (mine_of, its_of) = (told.prompt_logprobs["scored"] for told in (replayed, eager))
    assert len(mine_of) == len(its_of) == 29
    for one, other in zip(mine_of, its_of, strict=True):
        assert (one.token_id, one.rank) == (other.token_id, other.rank)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_group_of_one_whose_captures_draw_and_add_may_run_out_around_them(tmp_path: Path, drafts: int) -> None:
    """Rows that a replay has moved on go back with the step."""
    folder = save_tiny_model(TinyModel("of-two", "qwen3", {"num_hidden_layers": 2}), tmp_path)
    requests = tuple(
        GenerationRequest(
            request_id=f"r{number}",
            prompt_token_ids=[3 + (7 * number + 5 * k) % 190 for k in range(9 - number)],
            sampling=SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.8 * (number % 2), seed=number),
        )
        for number in range(3)
    )

    def served(*faults: Fault, **given: Any) -> Told:
        case = EngineCase(folder, 1, 1, requests, faults, drafts=drafts, **given)
        return ThreadRanks().call(run_engine, 1, 1, case)[0]  # type: ignore[no-any-return]

    wanted = served()
    for operations in (0, 1, 3):
        told = served(Fault(0, 3, 0, operations), Fault(0, 6, 0, operations), replays=True)
        check([told], wanted)
        assert told.num_replays >= 5 and bool(told.failures) == bool(told.num_struck)
        assert told.failures or operations > 0
