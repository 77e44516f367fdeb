"""The ids that end a text: generation_config.json's before config.json's."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from tandem.configs.errors import SettingsError
from tandem.configs.schema import ModelSettings
from tandem.workers.build import eos_token_ids

SPEC: Any = SimpleNamespace(eos_token_ids=(2,))


@pytest.mark.parametrize(
    ("given", "ids"), [(None, (2,)), ({}, (2,)), ({"eos_token_id": 7}, (7,)), ({"eos_token_id": [7, 9]}, (7, 9))]
)
def test_which_ids_end_a_text(tmp_path: Path, given: dict[str, Any] | None, ids: tuple[int, ...]) -> None:
    if given is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(given))
    assert eos_token_ids(ModelSettings(model=str(tmp_path)), SPEC) == ids


@pytest.mark.parametrize("wrong", ["x", [1, "x"], 1.5, True])
def test_an_id_that_is_none_is_refused_by_file_and_value(tmp_path: Path, wrong: object) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
    with pytest.raises(SettingsError, match=r"generation_config.json: eos_token_id is .*, want a token id"):
        eos_token_ids(ModelSettings(model=str(tmp_path)), SPEC)


def test_overridden_ids_win(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    for source in ("auto", "vllm"):
        plain = ModelSettings(model=str(tmp_path), generation_config=source)
        assert eos_token_ids(plain, SPEC) == (7,)
        assert eos_token_ids(replace(plain, override_generation_config={"eos_token_id": [3, 4]}), SPEC) == (3, 4)
        assert eos_token_ids(replace(plain, override_generation_config={"eos_token_id": None}), SPEC) == (2,)
