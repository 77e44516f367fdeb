"""ChosenFormats: how a service's model writes calls and thinking, by flags or by the chat template. Torch-free."""

from typing import NamedTuple

from tandem.configs.errors import SettingsError
from tandem.configs.options import TOOL_PARSERS
from tandem.configs.schema import GatewaySettings
from tandem.workers.text.format_list import REASONING_FORMATS, TOOL_FORMATS, tool_format_of
from tandem.workers.text.output.formats import ReasoningFormat, ToolFormat


class ChosenFormats(NamedTuple):
    """Names in TOOL_FORMATS and REASONING_FORMATS; None: unknown. by_template: the chat template named tool_name, for
    --enable-auto-tool-choice."""

    tool_name: str | None
    reasoning_name: str | None
    by_template: bool = False

    @property
    def tool(self) -> ToolFormat | None:
        return None if self.tool_name is None else TOOL_FORMATS[self.tool_name]

    @property
    def reasoning(self) -> ReasoningFormat | None:
        return None if self.reasoning_name is None else REASONING_FORMATS[self.reasoning_name]

    @property
    def note(self) -> str | None:
        """A line for an operator who has asked for calls, where the template has chosen."""
        return f"tool calls are parsed as {self.tool_name}, by the chat template" if self.by_template else None


def choose_formats(settings: GatewaySettings, template: str | None) -> ChosenFormats:
    """template: the text of the chat template. SettingsError for --enable-auto-tool-choice where neither names how
    calls are written."""
    named = settings.tool_call_parser
    name = named if named is not None or template is None else tool_format_of(template)
    if settings.enable_auto_tool_choice and name is None:
        why = "the model has no chat template to say" if template is None else "the chat template does not say"
        what = f"add --tool-call-parser NAME, the format in which the model writes tool calls, as {why}"
        raise SettingsError(f"{what}. NAME is {TOOL_PARSERS}", "--enable-auto-tool-choice")
    by_template = settings.enable_auto_tool_choice and named is None
    return ChosenFormats(name, settings.reasoning_parser, by_template=by_template)
