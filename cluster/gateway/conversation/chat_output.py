"""ChatOutput: how the text of a conversation's answer is read, from its tools, its thinking and the model's formats."""

import uuid
from dataclasses import dataclass
from functools import cache

import msgspec

from tandem.cluster.gateway.conversation.chat_checks import known_tools, shows_tools
from tandem.cluster.gateway.conversation.parser_wraps import OneCall, SpecialSpellings, Without, WithoutSpecialTokens
from tandem.cluster.gateway.schemas.chat_body import ChatBody
from tandem.cluster.gateway.schemas.ignored_fields import IgnoredFields
from tandem.cluster.gateway.schemas.reading import invalid, unsupported
from tandem.cluster.gateway.schemas.tool_fields import NamedTool
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.workers.messages.thinking import ThinkingBudget
from tandem.workers.text.chat_messages import message_text
from tandem.workers.text.format_list import TOOL_FORMATS
from tandem.workers.text.output.events import Content, OutputParser, PlainOutput, Reasoning
from tandem.workers.text.output.formats import ReasoningFormat, Tool, ToolFormat
from tandem.workers.text.tokenizer import ModelTokenizer

MAX_BUDGET = 2**31 - 1
FORCED_FORMAT = "hermes"
AUTO_NEEDS = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
"""vLLM's words."""
PARSERS = f"Parsers: {', '.join(TOOL_FORMATS)}."


@dataclass(frozen=True, kw_only=True)
class ChatOutput:
    """The way in which answers are read."""

    # None where no call is looked for
    tool_format: ToolFormat | None
    # None where no thinking is looked for
    reasoning_format: ReasoningFormat | None
    # those that may be called
    tools: list[Tool]
    # a call must come
    is_forced: bool
    # of the tool that the body names; OpenAI's finish_reason is then "stop"
    is_named: bool
    # it ends with its first call
    one_call: bool
    include_reasoning: bool
    # the marks around it, and its budget, MAX_BUDGET if there is none
    thinking: ThinkingBudget | None
    shows_special_tokens: bool
    # set where special tokens are shown to the parser and hidden from the client
    special: SpecialSpellings | None
    # the chat template takes ids of calls with 9 characters only
    has_short_ids: bool

    @property
    def is_plain(self) -> bool:
        """True if all text is content, so that nothing is parsed."""
        return self.tool_format is None and self.reasoning_format is None

    @property
    def ends_early(self) -> bool:
        """True if the gateway has to end a choice behind its first call. A forced call is the last by its grammar."""
        return self.one_call and self.tool_format is not None and not self.is_forced

    def new_call_id(self) -> str:
        """An id for a call; vLLM's form, and for Mistral's templates theirs."""
        number = uuid.uuid4().hex
        return number[:9] if self.has_short_ids else f"chatcmpl-tool-{number}"

    def make_parser(self) -> OutputParser:
        """A parser for one choice."""
        parser = self._make_call_parser()
        if not self.include_reasoning:
            parser = Without(parser, Reasoning)
        if self.is_forced:
            parser = Without(parser, Content)
        return parser if self.special is None else WithoutSpecialTokens(parser, self.special)

    def make_one_call(self) -> OneCall:
        """Makes a parser that knows when a choice ends early."""
        parser = self._make_call_parser()
        assert isinstance(parser, OneCall)
        return parser

    def _make_call_parser(self) -> OutputParser:
        """Makes the parser before what clients do not see is taken out."""
        parser: OutputParser = PlainOutput()
        if self.tool_format is not None:
            parser = self.tool_format.parser(self.tools)
        if self.reasoning_format is not None:
            parser = self.reasoning_format.parser(parser, inside=self.thinking is not None and self.thinking.inside)
        return OneCall(parser) if self.one_call and self.tool_format is not None else parser


def chat_output(text: TextServices, body: ChatBody, prompt: str, ignored: IgnoredFields) -> ChatOutput:
    """prompt: as rendered. Notes fields about thinking where none is looked for. RequestRefused for a choice of tools
    that this service or model does not have."""
    tools, is_forced, is_named = _chosen_tools(text, body)
    tool_format = _call_format(text) if tools else None
    thinks = text.reasoning_format
    if thinks is None:
        _note_thinking(body, ignored)
    shows = any(form is not None and form.shows_special_tokens for form in (tool_format, thinks))
    hides = shows and body.skip_special_tokens is not False
    return ChatOutput(
        tool_format=tool_format,
        reasoning_format=thinks,
        tools=tools,
        is_forced=is_forced,
        is_named=is_named,
        one_call=body.parallel_tool_calls is False or is_named,
        include_reasoning=body.include_reasoning is not False,
        thinking=None if thinks is None else _thinking(text.tokenizer, thinks, prompt, body),
        shows_special_tokens=shows,
        special=_special_spellings(text.tokenizer) if hides else None,
        has_short_ids=text.chat_template is not None and text.chat_template.for_tools.has_short_call_ids,
    )


def _call_format(text: TextServices) -> ToolFormat | None:
    """The form of calls. A model that is shown no tools has learned none; a grammar can force any."""
    if text.tool_format is None and not shows_tools(text.chat_template):
        return TOOL_FORMATS[FORCED_FORMAT]
    return text.tool_format


def _chosen_tools(text: TextServices, body: ChatBody) -> tuple[list[Tool], bool, bool]:
    """The tools that may be called; whether one must be, and whether the body names it."""
    choice, tools = body.tool_choice, known_tools(body.tools)
    if choice == "none" or (not tools and choice in (None, "auto")):
        return [], False, False
    if not tools:
        raise invalid("tool_choice", "When using tool_choice, tools must be set.")
    param = "tools" if choice is None else "tool_choice"
    if choice is None or choice == "auto":
        if not shows_tools(text.chat_template):
            return [], False, False  # check_conversation() has noted it
        if text.tool_format is None or not text.settings.enable_auto_tool_choice:
            raise unsupported(param, f"{AUTO_NEEDS}. {PARSERS}")
        return tools, False, False
    if _call_format(text) is None:
        raise unsupported(param, f"A forced tool call requires --tool-call-parser to be set. {PARSERS}")
    if not isinstance(choice, NamedTool):
        return tools, True, False
    named = [tool for tool in tools if tool.name == choice.function.name]
    if not named:
        raise invalid("tool_choice.function.name", f"No tool of this request has the name {choice.function.name}.")
    return named, True, True


def _thinking(tokenizer: ModelTokenizer, form: ReasoningFormat, prompt: str, body: ChatBody) -> ThinkingBudget:
    """The marks as this tokenizer spells them, and whether the answer begins between them: the prompt opens them, or
    the message that it continues."""
    start, end = (tuple(tokenizer.encode(mark, add_special_tokens=False)) for mark in (form.start, form.end))
    tokens = MAX_BUDGET if body.thinking_token_budget is None else body.thinking_token_budget
    last = message_text(msgspec.to_builtins(body.messages[-1].content))
    is_open = bool(body.continue_final_message) and form.is_open(last)
    return ThinkingBudget(tokens=tokens, start=start, end=end, inside=is_open or form.starts_inside(prompt))


def _note_thinking(body: ChatBody, ignored: IgnoredFields) -> None:
    """Notes what only a service that tells thinking apart can do: without, all text is content."""
    if body.include_reasoning is False:
        ignored.note("include_reasoning", "Only a service with --reasoning-parser can leave thinking out.")
    if body.thinking_token_budget is not None:
        ignored.note("thinking_token_budget", "thinking_token_budget requires --reasoning-parser to be set.")


@cache
def _special_spellings(tokenizer: ModelTokenizer) -> SpecialSpellings:
    return SpecialSpellings([piece for i in tokenizer.hidden_token_ids if (piece := tokenizer.piece(i)) is not None])
