"""Answers that a model is made to write: edits and summaries of real text, whatever the model knows.

A model with random weights writes nothing that quotes its prompt. Here a logits processor raises the token that comes
next in a given answer, so that prompts, answers, lookups, rejected drafts and step times are those of a model that
writes this answer; only what it would have written is given. Passages are of this project's own pages, tokens those of
the demo model's tokenizer.
"""

import random
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.models import DEMO
from benchmarks.workload import Job
from tandem.workers.kernels.sampling_ops import Change
from tandem.workers.messages.step import RowSampling
from tandem.workers.rank.model_runner import ModelRunner
from tandem.workers.sampling.processors.chain import ProcessorChain
from tandem.workers.sampling.processors.logits_processor import Reads, SampledRows
from tandem.workers.text.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ("multi-tenancy.md", "operations.md", "architecture.md")
PAGES = [*sorted((ROOT / "docs" / "serving").glob("*.md")), *(ROOT / "docs" / name for name in GUIDES)]
PASSAGE_WORDS = 120
CHANGED = 0.05
"""The share of words that an edit changes."""
RAISED = 1e6
KEY = 16
"""Prompt tokens that tell one answer from the others."""


class Dictated:
    """A LogitsProcessor that makes each row write the answer of its prompt."""

    reads = Reads.TOKENS

    def __init__(self, answers: dict[tuple[int, ...], list[int]]) -> None:
        self._answers = answers

    def bind(self, row: int, sampling: RowSampling) -> bool:
        """Every row has an answer."""
        return True

    def prepare(self, rows: SampledRows) -> Change | None:
        """Raises the next token of the answer. Behind its end, where drafts may lead, nothing changes."""
        columns = []
        for row, position in rows:
            tokens, prompt_len = rows.history(row, position)
            answer = self._answers[tuple(tokens[:KEY].tolist())]
            columns.append(np.array(answer[position - prompt_len :][:1], np.int64))
        if not any(map(len, columns)):
            return None
        at = rows.at(columns)

        def change(logits_SV: torch.Tensor) -> None:
            logits_SV[at()] = RAISED

        return change

    def free(self, row: int) -> None:
        """Nothing is kept by row."""


def dictate(runner: ModelRunner, answers: dict[tuple[int, ...], list[int]]) -> None:
    """Makes a rank's rows write these answers, by the first KEY tokens of their prompts. No row may be bound."""
    table = runner._table.sampling
    table.chain = ProcessorChain([Dictated(answers)], len(table.flags))


def passages(count: int) -> list[list[str]]:
    """Passages of some PASSAGE_WORDS words, as sentences, of the pages' paragraphs."""
    found: list[list[str]] = []
    for page in PAGES:
        for paragraph in page.read_text().split("\n\n"):
            sentences = re.findall(r"[A-Z][^.!?|#]*[.!?]", " ".join(paragraph.split()))
            if sum(len(sentence.split()) for sentence in sentences) >= PASSAGE_WORDS // 2:
                found.append(sentences)
    assert len(found) >= count, f"{len(found)} passages, not {count}"
    return found[:count]


def edited(sentences: Sequence[str], rng: random.Random) -> str:
    """The passage with some words changed, as an edit of a text or of code leaves most of it."""
    words = " ".join(sentences).split()
    return " ".join("otherwise" if rng.random() < CHANGED else word for word in words)


def summarized(sentences: Sequence[str], rng: random.Random) -> str:
    """Beginnings of every other sentence, joined by words of its own, as an extractive summary quotes its source."""
    del rng
    parts = [" ".join(sentence.split()[:10]) for sentence in sentences[::2]]
    return "In short: " + "; and then ".join(parts)


def quoting_jobs(kind: str, count: int, most: int) -> tuple[list[Job], dict[tuple[int, ...], list[int]]]:
    """(requests, their answers by prompt). kind: "edit" or "summarize". most: tokens of an answer."""
    rng, tokenizer = random.Random(7), load_tokenizer(DEMO)
    jobs: list[Job] = []
    answers: dict[tuple[int, ...], list[int]] = {}
    for sentences in passages(count):
        prompt = tokenizer.encode(f"{' '.join(sentences)}\n{kind}:", add_special_tokens=False)
        answer = (edited if kind == "edit" else summarized)(sentences, rng)
        answers[tuple(prompt[:KEY])] = ids = tokenizer.encode(answer, add_special_tokens=False)[:most]
        jobs.append(Job(prompt, len(ids)))
    return jobs, answers
