"""Tiles of kernels on a GPU: candidates run and are right there, and a start computes with what was measured."""

from pathlib import Path
from typing import Any

import pytest

from tandem import LLM, SamplingParams
from tandem.configs.bundled import DEMO_MODEL
from tandem.configs.schema import EngineSettings, ModelSettings
from tandem.parallel.context import ParallelContext
from tandem.workers.kernels.triton.tiles import words
from tandem.workers.platforms.open_platform import open_platform
from tandem.workers.rank.loading import model_to_tune
from tandem.workers.tuning.trials import Trial
from tandem.workers.tuning.tuned_start import measure
from tandem.workers.tuning.tuning_file import add_trials, read_trials
from tests.support.in_process import runner_of
from tests.support.paged_rows import prompt_ids

MOST = 4
"""Candidates of a use; each is compiled for seconds."""


def test_a_start_has_the_tiles_that_were_fastest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = EngineSettings(model=ModelSettings(model=str(DEMO_MODEL), dtype="bfloat16"))
    platform = open_platform(settings, rank=0, ranks_on_node=1)
    tuner = platform.tuner()
    assert tuner is not None, platform.obstacle(model_to_tune(settings, ParallelContext.single(), platform).dtype)
    tunables = tuner.tunables(model_to_tune(settings, ParallelContext.single(), platform))
    assert {str(one.use[0]) for one in tunables} == {"attend_parts", "attend_tiles"}
    for tunable in tunables:
        tiles = tunable.candidates[:MOST]
        trials = [trial for _, trial in measure(tuner, [type(tunable)(tunable.use, tiles, tunable.prepare)])]
        assert [trial.tile for trial in trials if not trial.why] == list(map(tuple, tiles)), trials
        loads = trials[0].us
        faster = Trial(trials[1].tile, {name: us / 2 for name, us in loads.items()})  # as if it were
        add_trials(tuner.device, {words(tunable.use): (trials[0], faster)})
    known = read_trials(tuner.device)
    flags: dict[str, Any] = {"kv_cache_memory_bytes": 2**28, "max_model_len": 512, "max_num_seqs": 4}
    texts = []
    for tune in (True, False):
        with LLM("demo", device="cuda", dtype="bfloat16", tune=tune, **flags) as llm:
            chosen = runner_of(llm._executor)._platform.tiles.chosen
            assert chosen == ({use: own[1].tile for use, own in known.items()} if tune else {})
            params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
            texts.append([one.outputs[0].token_ids for one in llm.generate([prompt_ids(90, 700)], params)])
    assert texts[0] == texts[1] and read_trials(tuner.device) == known, "nothing was measured again"
