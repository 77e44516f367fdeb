"""`tools` and `tool_choice` of a body, as OpenAI has them. What they must be together: chat_checks.py."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

ToolName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class ToolFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A function that the model may call. parameters: JSON schema of its arguments; None: it has none. strict: a call
    must fit the schema, which forced calls do anyway."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool; of OpenAI's kinds only functions are served."""

    type: Literal["function"]
    function: ToolFunction


class ToolReference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The name of a tool."""

    name: ToolName


class NamedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tool that the model must call."""

    type: Literal["function"]
    function: ToolReference


ToolChoice = Literal["none", "auto", "required"] | NamedTool
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
