"""benchmarks/engine/dictated.py: a model writes what it is told to, with drafts and without."""

from typing import Any

import pytest

from benchmarks.engine.dictated import KEY, dictate, quoting_jobs
from tandem import LLM, SamplingParams
from tests.support.free_drafts import free_drafts
from tests.support.in_process import runner_of

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


@pytest.mark.parametrize("settings", [{}, {"speculative_config": NGRAM}], ids=["plain", "drafts"])
def test_it_writes_what_it_is_told_to(settings: dict[str, Any]) -> None:
    jobs, answers = quoting_jobs("edit", 2, 24)
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    with free_drafts(), LLM("demo", dtype="float32", cpu_threads=1, num_gpu_blocks_override=64, **settings) as llm:
        dictate(runner_of(llm._engine.executor), answers)
        outputs = llm.generate([job.prompt for job in jobs], params, use_tqdm=False)
        drafts = llm._engine.stats().drafts
    for job, output in zip(jobs, outputs, strict=True):
        assert output.outputs[0].token_ids == answers[tuple(job.prompt[:KEY])][:24]
    assert drafts is None or drafts.num_accepted > 10
