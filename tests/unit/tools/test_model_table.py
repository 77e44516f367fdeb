"""docs/models.md is what the registry makes it, and every cell has its test."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from tandem.configs.errors import SettingsError
from tandem.workers.lora.peft import peft_folder
from tandem.workers.models.spec.arch import Moe
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.models.spec.family_rows.families import FAMILIES
from tests.support.tiny_models import BY_NAME, save_tiny_model
from tools.model_table import NAMES, PAGE, ep_cell, page

README = Path(__file__).resolve().parents[3] / "README.md"
TYPES = {tiny.model_type for tiny in BY_NAME.values()}


def covered(module: str, *functions: str) -> set[str]:
    """The families of the tiny models that some tests or fixtures are run with."""
    names: set[str] = set()
    for function in functions:
        found: Any = getattr(importlib.import_module(f"tests.parity.{module}"), function)
        for mark in getattr(found, "pytestmark", ()):
            for each in mark.args[1] if "name" in mark.args[0] else ():
                values = getattr(each, "values", each)
                names.add(values if isinstance(values, str) else values[0])
        if fixture := getattr(found, "_fixture_function_marker", None):
            names.update(getattr(each, "values", (each,))[0] for each in fixture.params)
    return {BY_NAME[name].model_type for name in names if name in BY_NAME}


def test_the_page_is_what_the_registry_makes() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "make model-table"
    assert set(NAMES) == {family.architecture for family in FAMILIES}
    assert f"| {len(FAMILIES)} |" in README.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("module", "functions"),
    [
        ("test_decoder_logits", ["test_float32_equals_transformers"]),
        ("test_decoder_parallel", ["test_ranks_equal_one_rank", "test_ranks_of_every_family_equal_one_rank"]),
        ("test_decoder_steps", ["decoder", "test_every_family_in_chunks"]),
        (
            "test_lora_logits",
            [
                "test_every_linear_of_every_family_equals_peft",
                "test_other_linears_equal_peft",
                "test_linears_of_the_other_families_equal_peft",
            ],
        ),
        ("test_families_served", ["folder"]),
        ("test_streamed_layers", ["test_streamed_layers_equal_resident_ones"]),
    ],
)
def test_every_family_is_in_the_tests_of_a_column(module: str, functions: list[str]) -> None:
    assert covered(module, *functions) == TYPES


def test_the_words_of_refusals_are_those_of_the_errors(tmp_path: Path) -> None:
    spec = load_spec(save_tiny_model(BY_NAME["llama-gqa"], tmp_path))
    with pytest.raises(SettingsError, match=ep_cell(FAMILIES[0]).removeprefix("refused: ")):
        spec.check_parallel(1, expert_parallel=True)
    assert "adapters of experts are not supported" in Path(str(peft_folder.__file__)).read_text(encoding="utf-8")


def test_families_with_experts_are_in_the_tests_of_expert_parallelism(tmp_path: Path) -> None:
    found = covered("test_decoder_parallel", "test_whole_experts_on_each_rank_equal_one_rank")
    firsts = {tiny.model_type: tiny for tiny in reversed(BY_NAME.values())}
    specs = {kind: load_spec(save_tiny_model(tiny, tmp_path)) for kind, tiny in firsts.items()}
    assert found == {kind for kind, spec in specs.items() if isinstance(spec.layers[-1].mlp, Moe)}
