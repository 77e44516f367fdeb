"""ParsedChatFormat: chat completions with thinking and tool calls apart from the content, as OpenAI and vLLM word them.

Answers without a parser are ChatFormat's.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import msgspec

from tandem.cluster.gateway.conversation.chat_output import ChatOutput
from tandem.cluster.gateway.generation.response_format import ChoiceAnswer
from tandem.cluster.gateway.openai.answers import ChatFormat
from tandem.workers.messages.request import FinishReason
from tandem.workers.messages.thinking import ThinkingSpan
from tandem.workers.text.choice_text import TextDelta
from tandem.workers.text.output.events import (
    CallArguments,
    CallBegin,
    Content,
    OutputEvent,
    OutputParser,
    Reasoning,
)

_encode = msgspec.json.Encoder().encode


@dataclass
class ParsedChoice:
    """One choice as far as it has been parsed. thinking: counts its tokens, if the model's thinking is known. make_id:
    of a call; ids: of its calls."""

    parser: OutputParser
    make_id: Callable[[], str]
    thinking: ThinkingSpan | None
    ids: list[str] = field(default_factory=list)

    def events(self, addition: TextDelta) -> list[OutputEvent]:
        """Returns what an addition to its text makes certain."""
        if self.thinking is not None:
            self.thinking.add(addition.token_ids)
        events = self.parser.push(addition.text) if addition.text else []
        reason = addition.finish_reason
        return events if reason is None else [*events, *self.parser.finish(cut=reason != "stop")]

    def new_id(self) -> str:
        """The id of its next call."""
        self.ids.append(self.make_id())
        return self.ids[-1]


class ParsedChatFormat(ChatFormat):
    """See the module. output: how texts are read; other arguments as for ChatFormat."""

    def __init__(self, output: ChatOutput, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._output = output
        self._choices: dict[int, ParsedChoice] = {}

    def chunk(self, index: int, addition: TextDelta) -> bytes:
        choice = self._choice(index)
        contents = [b'"delta":' + _encode(delta) for delta in _deltas(choice, choice.events(addition))]
        shown = self._logprobs(addition.logprobs) if addition.logprobs else None
        addition = addition._replace(finish_reason=self._finish(choice, addition.finish_reason))  # type: ignore[arg-type]
        return self._frame.sorted_chunks(index, contents, shown, addition)

    def _whole_choice(self, choice: ChoiceAnswer) -> dict[str, Any]:
        parsed = self._choice(choice.index)
        reason: FinishReason = "stop" if choice.finish_reason == "stop" else "length"
        whole = TextDelta(choice.text, choice.token_ids, None, None, reason, None, None)
        message = _message(parsed, parsed.events(whole))
        entry = super()._whole_choice(replace(choice, finish_reason=self._finish(parsed, choice.finish_reason) or ""))
        return {**entry, "message": message}

    def _usage_details(self) -> dict[str, Any]:
        counts = [choice.thinking.tokens for choice in self._choices.values() if choice.thinking is not None]
        if self._output.reasoning_format is None:
            return {}
        return {"completion_tokens_details": {"reasoning_tokens": sum(counts)}}

    def _choice(self, index: int) -> ParsedChoice:
        if index not in self._choices:
            marks = self._output.thinking
            thinking = None if marks is None else ThinkingSpan(marks.start, marks.end, inside=marks.inside)
            self._choices[index] = ParsedChoice(self._output.make_parser(), self._output.new_call_id, thinking)
        return self._choices[index]

    def _finish(self, choice: ParsedChoice, reason: str | None) -> str | None:
        """OpenAI's reason: a choice with calls ends with "tool_calls", but "stop" where the body named the tool."""
        return "tool_calls" if reason == "stop" and choice.ids and not self._output.is_named else reason


def _kind(event: OutputEvent) -> tuple[type, int]:
    return type(event), event.call if isinstance(event, CallBegin | CallArguments) else 0


def _deltas(choice: ParsedChoice, events: Iterable[OutputEvent]) -> list[dict[str, Any]]:
    """Deltas of a message, neighbours of one kind together."""
    deltas: list[dict[str, Any]] = []
    for (kind, call), run in groupby(events, _kind):
        if kind is CallBegin:
            deltas += [_call_begins(choice, event) for event in run if isinstance(event, CallBegin)]
            continue
        text = "".join(event.text for event in run if not isinstance(event, CallBegin))
        if not text:
            continue
        if kind is CallArguments:
            deltas.append({"tool_calls": [{"index": call, "function": {"arguments": text}}]})
        else:
            deltas.append({"content": text} if kind is Content else {"reasoning": text, "reasoning_content": text})
    return deltas


def _call_begins(choice: ParsedChoice, event: CallBegin) -> dict[str, Any]:
    function = {"name": event.name, "arguments": ""}
    return {"tool_calls": [{"index": event.call, "id": choice.new_id(), "type": "function", "function": function}]}


def _message(choice: ParsedChoice, events: Iterable[OutputEvent]) -> dict[str, Any]:
    """The whole message. Its content is null where there is only thinking, or calls."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[tuple[str, list[str]]] = []
    for event in events:
        if isinstance(event, Content):
            content.append(event.text)
        elif isinstance(event, Reasoning):
            reasoning.append(event.text)
        elif isinstance(event, CallBegin):
            calls.append((event.name, []))
        else:
            calls[event.call][1].append(event.text)
    text = "".join(content)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": text or (None if calls or reasoning else ""),
        "refusal": None,
    }
    if reasoning:
        message["reasoning"] = message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = [
            {"id": choice.new_id(), "type": "function", "function": {"name": name, "arguments": "".join(arguments)}}
            for name, arguments in calls
        ]
    return message
