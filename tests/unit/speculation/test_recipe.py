"""The recipe "Add a proposer" of CONTRIBUTING.md, followed with an invented one that repeats the last token."""

from collections.abc import Sequence

import pytest

from tandem import LLM, SamplingParams
from tandem.configs.schema import SpeculativeSettings
from tandem.workers.speculation.proposer import PROPOSERS, ProposalRow, Proposer

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
PROMPTS = ["Once upon a time", "The days are Monday,", "a a a a"]
PARAMS = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


class Again:
    """Guesses the last token again and again."""

    def __init__(self, settings: SpeculativeSettings) -> None:
        self.num_asked = 0

    def propose(self, rows: Sequence[ProposalRow]) -> list[Sequence[int]]:
        self.num_asked += len(rows)
        return [[int(row.token_ids[-1])] * row.max_drafts for row in rows]


def texts(**settings: object) -> tuple[list[str], int]:
    """The answers, and how many drafts there were."""
    with LLM("demo", dtype="float32", cpu_threads=1, num_gpu_blocks_override=64, **settings) as llm:  # type: ignore[arg-type]
        answers = [output.text for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
        drafts = llm._engine.stats().drafts
        return answers, 0 if drafts is None else drafts.num_draft_tokens


def test_an_invented_proposer_changes_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Again] = []

    def make(settings: SpeculativeSettings) -> Proposer:
        made.append(Again(settings))
        return made[-1]

    monkeypatch.setitem(PROPOSERS, "ngram", make)
    answers, num_drafts = texts(speculative_config=NGRAM)
    assert answers == texts()[0]
    assert num_drafts > 0 and made[0].num_asked > 0
