"""What a held chat answer may be: forced calls, a form or a call, behind thinking; against llguidance itself."""

import json
import threading
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from tandem.cluster.gateway.conversation import conversation
from tandem.cluster.gateway.conversation.chat_output import ChatOutput, chat_output
from tandem.cluster.gateway.conversation.held_grammar import held_grammar, special_tokens
from tandem.cluster.gateway.schemas.chat_body import read_chat
from tandem.cluster.gateway.schemas.ignored_fields import IgnoredFields
from tandem.configs.schema import GatewaySettings
from tandem.workers.messages.errors import RequestRefused
from tandem.workers.text.format_list import TOOL_FORMATS
from tandem.workers.text.grammars import json_schema
from tandem.workers.text.output.formats import SchemaNotExpressible
from tests.support.invented_format import InventedReasoning, InventedToolFormat
from tests.unit.gateway.rig import USER, Rig, gateway, make_tokenizer
from tests.unit.gateway.test_tool_calls import FORMATS, SETTINGS, TEMPLATE, THINKING, TOOLS

BYTES = LLTokenizer("byte")
CALL, CLOCK = '<call>weather {"city": "Löw"}</call>', "<call>clock {}</call>"
SCHEMA = json_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
NAMED = {"type": "function", "function": {"name": "clock"}}


def allows(grammar: str, text: str) -> bool:
    """Whether the text is a whole answer."""
    matcher = LLMatcher(BYTES, grammar)
    assert not matcher.get_error(), matcher.get_error()
    return bool(matcher.consume_tokens(list(text.encode()))) and matcher.is_accepting()


@pytest.fixture
async def rig() -> Any:
    async with gateway(settings=SETTINGS, template=TEMPLATE, text={**FORMATS}) as rig:
        yield rig


def output_of(rig: Rig, prompt: str = "", **fields: Any) -> ChatOutput:
    ignored = IgnoredFields()
    return chat_output(rig.text, read_chat({"messages": USER, **fields}, GatewaySettings(), ignored), prompt, ignored)


def held(rig: Rig, answer: str | None = None, prompt: str = "", **fields: Any) -> str | None:
    return held_grammar(output_of(rig, prompt, **fields), rig.text, answer)


def test_forced_calls_are_of_the_tools_and_fit_their_schemas(rig: Rig) -> None:
    grammar = held(rig, tools=TOOLS, tool_choice="required")
    assert grammar is not None
    assert allows(grammar, CALL) and allows(grammar, CALL + CLOCK)
    assert not any(
        allows(grammar, text) for text in ("", "Hi", '<call>weather {"city": 5}</call>', "<call>x {}</call>")
    )
    one = held(rig, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert one is not None and allows(one, CLOCK) and not allows(one, CALL + CLOCK)
    named = held(rig, tools=TOOLS, tool_choice=NAMED)
    assert named is not None and allows(named, CLOCK) and not allows(named, CALL)


def test_free_answers_are_free_and_forms_stay_as_they_are(rig: Rig) -> None:
    assert held(rig) is None
    assert held(rig, tools=TOOLS) is None
    assert held(rig, SCHEMA) == SCHEMA
    assert held(rig, SCHEMA, tools=TOOLS, tool_choice="none") == SCHEMA


def test_where_a_form_is_asked_for_a_call_may_come_instead(rig: Rig) -> None:
    grammar = held(rig, SCHEMA, tools=TOOLS)
    assert grammar is not None
    assert allows(grammar, '{"a": 1}') and allows(grammar, CALL)
    assert not allows(grammar, "Hi") and not allows(grammar, CALL + '{"a": 1}')
    forced = held(rig, SCHEMA, tools=TOOLS, tool_choice="required")
    assert forced is not None and allows(forced, CALL) and not allows(forced, '{"a": 1}')


@pytest.mark.parametrize("inside", [False, True])
async def test_thinking_comes_first(inside: bool) -> None:
    async with gateway(settings=SETTINGS, template=TEMPLATE, text={**FORMATS, **THINKING}) as rig:
        prompt = "x<think>" if inside else "x"
        thought = "Hm {<call> ä\n</think>" if inside else "<think>Hm {<call> ä\n</think>"
        forced = held(rig, None, prompt, tools=TOOLS, tool_choice="required")
        formed = held(rig, SCHEMA, prompt)
        either = held(rig, SCHEMA, prompt, tools=TOOLS)
        assert held(rig, None, prompt, tools=TOOLS) is None
        assert forced is not None and formed is not None and either is not None
        for gap in ("", "\n", "\n\n"):
            assert allows(forced, thought + gap + CALL)
            assert allows(formed, thought + gap + '{"a": 1}')
            assert allows(either, thought + gap + CALL) and allows(either, thought + gap + '{"a": 1}')
        assert not allows(forced, thought) and not allows(forced, thought + "Hi") and not allows(formed, thought + CALL)
        assert allows(forced, CALL) is not inside and allows(formed, '{"a": 1}') is not inside


async def test_marks_that_are_special_tokens_are_tokens(rig: Rig) -> None:
    class Turns(InventedReasoning):
        start, end = "<bos>go ", "<turn>"

    async with gateway(settings=SETTINGS, template=TEMPLATE, text={**FORMATS, "reasoning_format": Turns()}) as other:
        grammar = held(other, SCHEMA)
        assert grammar is not None
        (first, *_) = json.loads(grammar)["grammars"]
        ids = special_tokens(make_tokenizer())
        assert f'think: <[{ids["<bos>"]}]> "go " thought' in first["lark_grammar"]
        assert f"thought: thought_text <[{ids['<turn>']}]> paragraph" in first["lark_grammar"]


def test_a_forced_call_of_a_function_without_parameters_has_no_arguments(rig: Rig) -> None:
    grammar = held(rig, tools=[{"type": "function", "function": {"name": "clock"}}], tool_choice="required")
    assert grammar is not None
    assert allows(grammar, "<call>clock {}</call>") and not allows(grammar, '<call>clock {"a": 1}</call>')


async def test_a_tool_that_cannot_be_forced_is_refused() -> None:
    class Unable(InventedToolFormat):
        def grammar(self, *_: Any, **__: Any) -> str:
            raise SchemaNotExpressible("weather: it has an array")

    async with gateway(settings=SETTINGS, template=TEMPLATE, text={"tool_format": Unable()}) as rig:
        with pytest.raises(RequestRefused, match="weather: it has an array") as refusal:
            held(rig, tools=TOOLS, tool_choice="required")
        assert (refusal.value.code, refusal.value.param) == ("invalid_grammar", "tools")


async def test_tools_that_are_too_much_or_make_no_grammar_are_refused(rig: Rig) -> None:
    def function(**schema: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": schema}}}

    for tool, words in (
        (function(a={"enum": ["x" * 70_000]}), "--max-grammar-bytes"),
        (function(a={"type": "string", "pattern": "("}), "regex"),
    ):
        with pytest.raises(RequestRefused, match=words) as refusal:
            held(rig, tools=[tool], tool_choice="required")
        assert (refusal.value.code, refusal.value.param) == ("invalid_grammar", "tools")
        assert held(rig, tools=[tool]) is None


@pytest.mark.parametrize("name", TOOL_FORMATS)
async def test_every_format_is_held_behind_thinking_and_read_back(name: str) -> None:
    """Whatever the matcher leads to is read as calls of the tools."""
    async with gateway(
        settings=SETTINGS, template=TEMPLATE, text={"tool_format": TOOL_FORMATS[name], **THINKING}
    ) as rig:
        for answer in (None, SCHEMA):
            choice = {"tool_choice": "required"} if answer is None else {}
            grammar = held(rig, answer, tools=TOOLS, **choice)
            assert grammar is not None
            matcher = LLMatcher(BYTES, grammar)
            assert not matcher.get_error(), matcher.get_error()


@pytest.mark.parametrize(
    "fields", [{"tools": TOOLS, "tool_choice": "required"}, {"response_format": {"type": "json_object"}}]
)
async def test_grammars_are_made_off_the_event_loop(monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]) -> None:
    """However small they are: little text may take long."""
    threads: list[threading.Thread] = []

    def noted(*given: Any) -> str | None:
        threads.append(threading.current_thread())
        return held_grammar(*given)

    monkeypatch.setattr(conversation, "held_grammar", noted)
    async with gateway(settings=SETTINGS, template=TEMPLATE, text={**FORMATS}) as rig:
        assert (await rig.chat(**fields)).status_code == 200
        assert len(threads) == 1 and threads[0] is not threading.current_thread()
