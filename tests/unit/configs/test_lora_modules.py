"""--lora-modules: several values behind one flag, and vLLM's JSON beside name=path."""

from typing import Any

import pytest

from tandem.configs.errors import SettingsError
from tandem.configs.load import build_settings, read_config_file
from tests.support.verbs import invoked

JSON = '{"name": "c", "path": "z"}'


@pytest.mark.parametrize("given", [["a=x", "b=y", JSON], ["a=x", {"name": "b", "path": "y"}, JSON]], ids=str)
def test_all_ways_to_write_an_adapter_are_one(given: list[Any]) -> None:
    settings = build_settings("m", {"enable_lora": True, "lora_modules": given})
    assert settings.adapters.modules == ("a=x", "b=y", "c=z")
    same = build_settings(
        "m", {"enable_lora": True, "lora_modules": {"name": "c", "path": "z", "base_model_name": None}}
    )
    assert same.adapters.modules == ("c=z",)


def test_json_that_cannot_be_honoured_is_named() -> None:
    for given, words in (
        ('{"name"', "is not JSON"),
        ('{"name": "a", "path": "x", "rank": 8}', "rank is not a key"),
        ('{"name": "a", "path": "x", "base_model_name": "b"}', "base_model_name: remove it or give m"),
        ("pirate", "'pirate' must be name=path"),
        ('{"name": "a"}', "path must be a text"),
    ):
        with pytest.raises(SettingsError, match=f"^--lora-modules: .*{words}"):
            build_settings("m", {"enable_lora": True, "lora_modules": [given]})


@pytest.mark.parametrize("served", [None, "demo", ["other", "demo"]], ids=str)
def test_an_adapter_may_name_the_served_model(served: Any) -> None:
    module = '{"name": "a", "path": "x", "base_model_name": "demo"}'
    values = {"enable_lora": True, "lora_modules": [module], "served_model_name": served}
    assert build_settings("demo" if served is None else "folder", values).adapters.modules == ("a=x",)
    with pytest.raises(SettingsError, match="remove it or give x or y"):
        build_settings("demo", {**values, "served_model_name": ["x", "y"]})


def test_a_config_file_may_use_each_form(tmp_path: Any) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("enable_lora: true\nlora-modules: [a=x, {name: b, path: y}]\n")
    values = read_config_file(str(file))
    assert build_settings("m", values).adapters.modules == ("a=x", "b=y")


def test_the_command_line_takes_several_behind_one_flag() -> None:
    """The error names the adapter whose name comes again last, so all were read as adapters."""
    words = ["serve", "demo", "--enable-lora", "--lora-modules", "a=x", JSON, "c=y"]
    done = invoked(words)
    assert str(done.exception) == "--lora-modules: c is given twice"
