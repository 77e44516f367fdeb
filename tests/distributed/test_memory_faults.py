"""Rank processes that run out of memory beside their peers, over gloo and shared memory: the group goes on, and every
request that fits gets the tokens of an undisturbed rank."""

from pathlib import Path

import pytest

from tandem.workers.messages.request import GenerationRequest, SamplingParams
from tandem.workers.rank.launched_steps import OUT_OF_MEMORY
from tests.support.decoder_ranks import RankProcesses
from tests.support.engine_ranks import EngineCase, Fault, Told, run_engine
from tests.support.thread_ranks import ThreadRanks
from tests.support.tiny_models import BY_NAME, save_tiny_model

LENGTHS = (2, 9, 13, 30)
LARGE = 30
FAULTS = {
    (2, 1): (Fault(1, 1, 2, 3), Fault(0, 6, 10, 4), Fault(1, 9, 9, 1), Fault(0, 10, 0, 0)),
    (1, 2): (Fault(0, 0, 0, 3), Fault(1, 5, 0, 20), Fault(0, 6, 0, 30)),
    (2, 2): (Fault(0, 1, 3, 1), Fault(3, 4, 4, 2), Fault(1, 8, 0, 0)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(BY_NAME["llama-gqa"], tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(("tp", "pp"), FAULTS, ids=["tp2", "pp2", "tp2pp2"])
def test_the_group_goes_on(ranks: RankProcesses, folder: Path, tp: int, pp: int) -> None:
    """Twelve rows, so that no step has a single token until the largest prompt, which never fits, is alone in it."""
    requests = tuple(
        GenerationRequest(
            request_id=f"{copy}-{length}",
            prompt_token_ids=[3 + (7 * copy + 5 * k) % 190 for k in range(length)],
            sampling=SamplingParams(max_tokens=10, ignore_eos=True, temperature=0.0),
        )
        for copy in range(3)
        for length in (LENGTHS if copy == 1 else LENGTHS[:3])
    )
    (undisturbed,) = ThreadRanks().call(run_engine, 1, 1, EngineCase(folder, 1, 1, requests))
    never = Fault(tp * pp - 1, None, 0, 12, prompt_len=LARGE)
    told: list[Told] = ranks.call(
        run_engine, tp, pp, EngineCase(folder, tp, pp, requests, (*FAULTS[tp, pp], never), most_rows=10)
    )
    first = told[0]
    assert all(one.tokens == first.tokens for one in told) and sum(one.num_struck for one in told) >= 5
    large = f"1-{LARGE}"
    assert first.reasons[large] == ["error"] and first.tokens.pop((large, 0)) == []
    assert len(first.errors) == 1 and first.errors[0].startswith(OUT_OF_MEMORY)
    undisturbed.tokens.pop((large, 0))
    assert first.tokens == undisturbed.tokens
