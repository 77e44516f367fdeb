"""Which formats of calls and thinking a service takes, by its flags and its chat template."""

import re
from pathlib import Path
from typing import get_args

import pytest

from tandem.cluster.gateway.app.model_text import check_text
from tandem.cluster.gateway.conversation.format_choice import choose_formats
from tandem.configs.errors import SettingsError
from tandem.configs.load import build_settings, settings_from_serve_args
from tandem.configs.schema import GatewaySettings, ReasoningParser, ToolCallParser
from tandem.workers.text.format_list import REASONING_FORMATS, TOOL_FORMATS

DEMO = Path(__file__).resolve().parents[3] / "configs" / "demo" / "model"
HERMES = "{% if tools %}<tool_call>{}</tool_call>{% endif %}"


def test_the_settings_name_every_format() -> None:
    assert set(get_args(ToolCallParser)) == set(TOOL_FORMATS)
    assert set(get_args(ReasoningParser)) == set(REASONING_FORMATS)


def test_the_template_chooses_unless_a_flag_does() -> None:
    chosen = choose_formats(GatewaySettings(), HERMES)
    assert (chosen.tool_name, chosen.reasoning_name) == ("hermes", None)
    assert chosen.tool is TOOL_FORMATS["hermes"] and chosen.reasoning is None
    assert chosen.note is None, "nobody has asked for calls"
    auto = choose_formats(GatewaySettings(enable_auto_tool_choice=True), HERMES)
    assert auto.note == "tool calls are parsed as hermes, by the chat template"
    named = choose_formats(GatewaySettings(tool_call_parser="mistral", reasoning_parser="qwen3"), HERMES)
    assert (named.tool_name, named.reasoning_name, named.note) == ("mistral", "qwen3", None)
    assert named.reasoning is REASONING_FORMATS["qwen3"]


def test_auto_tool_choice_needs_to_know_how_calls_look() -> None:
    settings = GatewaySettings(enable_auto_tool_choice=True)
    for template in (None, "{{ messages }}"):
        assert choose_formats(GatewaySettings(), template).tool is None
        with pytest.raises(SettingsError, match=r"^--enable-auto-tool-choice: add --tool-call-parser NAME, ") as error:
            choose_formats(settings, template)
        assert error.value.flag == "--enable-auto-tool-choice"
        assert all(re.search(rf"NAME is .*\b{name}\b", str(error.value)) for name in TOOL_FORMATS)
    assert choose_formats(settings, HERMES).tool_name == "hermes"


@pytest.mark.parametrize("flag", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_name_is_refused_with_the_known_ones(flag: str) -> None:
    known = ToolCallParser if flag == "tool_call_parser" else ReasoningParser
    with pytest.raises(SettingsError) as error:
        build_settings("m", {flag: "bogus"})
    assert all(name in str(error.value) for name in get_args(known))


@pytest.mark.parametrize("section", ["engine_kwargs", "gateway_config"])
def test_serve_files_have_them_as_ray_serve_llm_does(section: str) -> None:
    given = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    args = {"model_loading_config": {"model_id": "m"}, section: given}
    gateway = settings_from_serve_args(args).gateway
    assert {name: getattr(gateway, name) for name in given} == given


def test_the_launcher_and_check_config_check_the_choice(tmp_path: Path) -> None:
    template = tmp_path / "plain.jinja"
    template.write_text("{{ messages }}")
    auto = {"enable_auto_tool_choice": True}
    assert check_text(build_settings(str(DEMO), auto)) == ("tool calls are parsed as hermes, by the chat template",)
    with pytest.raises(SettingsError, match=r"as the chat template does not say\. NAME is hermes"):
        check_text(build_settings(str(DEMO), {**auto, "chat_template": str(template)}))
    assert check_text(build_settings(str(DEMO), {"chat_template": str(template)})) == ()
