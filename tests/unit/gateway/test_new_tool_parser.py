"""The recipe "Add a tool parser" of CONTRIBUTING.md, followed with an invented format (tests/support)."""

import re
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from tandem.cluster.gateway.conversation import format_choice
from tandem.cluster.gateway.conversation.format_choice import choose_formats
from tandem.configs.schema import GatewaySettings
from tandem.workers.text import format_list
from tandem.workers.text.format_list import TOOL_FORMATS
from tandem.workers.text.output.formats import Tool
from tandem.workers.text.output.stepping import joined
from tests.support.invented_format import InventedToolFormat
from tests.unit.gateway.test_tool_calls import CALL, TOOLS, calls_of, gathered, saying, tooled

ROOT = Path(__file__).resolve().parents[3]
RECIPE = (ROOT / "CONTRIBUTING.md").read_text().partition("### Add a tool parser")[2].partition("\n### ")[0]
TEMPLATE = "{% if tools %}<call>name {}</call>{% endif %}"


def test_step_2_it_is_chosen_by_its_name_or_by_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {**TOOL_FORMATS, "invented": InventedToolFormat()}
    monkeypatch.setattr(format_list, "TOOL_FORMATS", named)
    monkeypatch.setattr(format_choice, "TOOL_FORMATS", named)
    assert choose_formats(GatewaySettings(), TEMPLATE).tool is named["invented"]
    given: Any = "invented"
    assert choose_formats(GatewaySettings(tool_call_parser=given), None).tool is named["invented"]


def test_step_3_it_reads_any_cut_alike() -> None:
    text = f"Hm, <call>bogus {{}}</call> {CALL} <call>clock {{}}</call> done <call>"
    tools = [Tool("weather", "", {}), Tool("clock", "", {})]

    def events(size: int) -> list[Any]:
        parser = InventedToolFormat().parser(tools)
        cut = [text[at : at + size] for at in range(0, len(text), size)]
        return joined([*(event for piece in cut for event in parser.push(piece)), *parser.finish()])

    assert all(events(size) == events(len(text)) for size in range(1, 20))


@pytest.mark.parametrize("parallel", [True, False])
def test_step_1_its_grammar_compiles(parallel: bool) -> None:
    tools = [Tool("weather", "", TOOLS[0]["function"]["parameters"]), Tool("clock", "", {})]
    assert LLMatcher.validate_grammar(InventedToolFormat().grammar(tools, parallel=parallel)) == ""


async def test_calls_come_through_the_gateway_whole_and_streamed() -> None:
    async with tooled(saying(f"Look: {CALL}", tokens_per_step=3)) as rig:
        whole = (await rig.chat(tools=TOOLS)).json()["choices"][0]
        assert calls_of(whole["message"]) == [("weather", {"city": "Löw"})]
        assert gathered((await rig.chat(tools=TOOLS, stream=True)).text)[0]["calls"] == [
            ["weather", whole["message"]["tool_calls"][0]["function"]["arguments"]]
        ]


def test_the_recipe_names_what_is_there() -> None:
    paths = re.findall(r"`((?:workers|cluster|tests|configs)/[\w/.]+)`", RECIPE)
    assert len(paths) >= 5 and all((ROOT / path).exists() for path in paths)
