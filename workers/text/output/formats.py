"""The formats in which models write tool calls and thinking: Tool, ToolFormat, ReasoningFormat.

A format is one file of tools/ or reasoning/, named in TOOL_FORMATS or REASONING_FORMATS (format_list.py). Gateways
choose by name (--tool-call-parser, --reasoning-parser) or by the chat template.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from tandem.workers.text.output.events import OutputParser


class SchemaNotExpressible(ValueError):
    """A tool's schema asks for arguments that a format cannot be forced to write. The message names tool and reason."""


class Tool(NamedTuple):
    """A function that the model may call. parameters: JSON schema of its arguments, an object."""

    name: str
    description: str
    parameters: Mapping[str, Any]


class ToolFormat(Protocol):
    """The form of tool calls of one family of models."""

    @property
    def shows_special_tokens(self) -> bool:
        """True if its marks are special tokens: then the text that is parsed must have special tokens."""
        ...

    def marks_in(self, template: str) -> bool:
        """Returns whether a chat template is written for this format."""
        ...

    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        """Returns a parser for one choice, behind the thinking. Text that only looks like a call is content."""
        ...

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, special_tokens: Mapping[str, int] = ...) -> str:
        """Returns a grammar (llguidance's Lark) whose texts are one call, or several if `parallel`, of these tools with
        arguments that fit their schemas, each of which parser() reads as just these calls.

        special_tokens: the tokenizer's special tokens and their ids; a mark among them is written as that token.
        Raises SchemaNotExpressible if the format cannot write all arguments that a tool's schema allows."""
        ...


class ReasoningFormat(Protocol):
    """The marks of thinking of one family of models."""

    @property
    def shows_special_tokens(self) -> bool:
        """The same as in ToolFormat."""
        ...

    def marks_in(self, template: str) -> bool:
        """The same as in ToolFormat."""
        ...

    @property
    def start(self) -> str:
        """The mark before the thinking."""
        ...

    @property
    def end(self) -> str:
        """The mark behind the thinking."""
        ...

    def starts_inside(self, prompt: str) -> bool:
        """Returns whether a rendered prompt ends inside an open thinking part, so that the answer has no start mark."""
        ...

    def is_open(self, begun: str) -> bool:
        """Returns whether an answer that was begun with this text, and goes on, is inside its thinking."""
        ...

    def parser(self, then: OutputParser, *, inside: bool) -> OutputParser:
        """Returns a parser whose text behind the thinking is parsed by `then`. inside: see starts_inside() and
        is_open()."""
        ...
