"""The recipe "Add a proposer" of CONTRIBUTING.md, followed with an invented one that says the last tokens again."""

import re
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import ClassVar

import pytest

from tandem import LLM, SamplingParams
from tandem.configs.errors import SettingsError
from tandem.configs.load import build_settings
from tandem.configs.options import DRAFT_METHODS
from tandem.configs.schema import SpeculativeSettings
from tandem.workers.rank.drafters.draft_rank import DRAFTERS
from tandem.workers.speculation.proposer import ProposalRow
from tandem.workers.speculation.proposers import PROPOSERS

ROOT = Path(__file__).resolve().parents[3]
RECIPE = (ROOT / "CONTRIBUTING.md").read_text().partition("## Add a proposer")[2].partition("\n## ")[0]
RECIPE = RECIPE.partition("\n### ")[0]
AGAIN = {"method": "again", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
PROMPTS = ["Once upon a time", "The days are Monday,", "a a a a"]
PARAMS = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


class Again:
    """Step 1: guesses that the last prompt_lookup_max tokens come again, and again."""

    made: ClassVar[list["Again"]] = []

    def __init__(self, settings: SpeculativeSettings) -> None:
        assert settings.method == "again" and settings.prompt_lookup_max is not None
        self.period = settings.prompt_lookup_max
        self.num_asked = 0
        self.made.append(self)

    def propose(self, rows: Sequence[ProposalRow]) -> list[Sequence[int]]:
        self.num_asked += len(rows)
        return [[*islice(cycle(map(int, row.token_ids[-self.period :])), row.max_drafts)] for row in rows]


@pytest.fixture
def _named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 2: its method, and the key that it has."""
    monkeypatch.setitem(PROPOSERS, "again", Again)
    monkeypatch.setitem(DRAFT_METHODS, "again", ("prompt_lookup_max",))
    monkeypatch.setattr(Again, "made", [])


def texts(**settings: object) -> tuple[list[str], int]:
    """The answers, and how many drafts there were."""
    with LLM("demo", dtype="float32", cpu_threads=1, num_gpu_blocks_override=64, **settings) as llm:  # type: ignore[arg-type]
        answers = [output.text for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
        drafts = llm._engine.stats().drafts
        return answers, 0 if drafts is None else drafts.num_draft_tokens


@pytest.mark.usefixtures("_named")
def test_an_invented_proposer_changes_no_text() -> None:
    """Step 3, on a model."""
    answers, num_drafts = texts(speculative_config=AGAIN)
    assert answers == texts()[0]
    (made,) = Again.made
    assert (made.period, num_drafts > 0, made.num_asked > 0) == (2, True, True)


def test_a_method_that_is_not_named_is_refused() -> None:
    with pytest.raises(SettingsError, match="method 'again': one of ngram") as caught:
        build_settings("m", {"speculative_config": AGAIN})
    assert caught.value.flag == "--speculative-config"


@pytest.mark.usefixtures("_named")
def test_a_key_of_another_method_is_refused() -> None:
    assert build_settings("m", {"speculative_config": AGAIN}).engine.max_drafts == 3
    with pytest.raises(SettingsError, match="prompt_lookup_min 1: not a key of method 'again'") as caught:
        build_settings("m", {"speculative_config": {**AGAIN, "prompt_lookup_min": 1}})
    assert caught.value.flag == "--speculative-config"


def test_each_method_is_named_in_both_places() -> None:
    assert PROPOSERS.keys() | DRAFTERS.keys() == DRAFT_METHODS.keys()
    assert {key for keys in DRAFT_METHODS.values() for key in keys} | {"method", "num_speculative_tokens"} == set(
        SpeculativeSettings.__struct_fields__
    ), "a key belongs to some method"


def test_the_recipe_names_what_is_there() -> None:
    paths = re.findall(r"`((?:workers|configs|tests)/[\w/.]+)`", RECIPE)
    assert len(paths) >= 5
    for path in paths:
        assert (ROOT / path).exists(), path
    code = "".join((ROOT / path).read_text() for path in paths if path.endswith(".py"))
    code += (ROOT / "workers" / "speculation" / "proposer.py").read_text()
    for name in ("Proposer", "PROPOSERS", "DRAFT_METHODS", "SpeculativeSettings"):
        assert f"`{name}`" in RECIPE
        assert re.search(rf"^(class )?{name}\b", code, re.M), name
