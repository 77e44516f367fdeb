"""Granite's thinking, which plain sentences mark: "Here is my thought process:" and "Here is my response:"."""

from tandem.workers.text.output.events import OutputParser
from tandem.workers.text.output.reasoning.think_tags import thinking
from tandem.workers.text.output.stepping import Marks, SteppedParser

_STARTS = ("Here is my thought process:", "Here's my thought process:")
_ENDS = ("Here is my response:", "Here's my response:")
_END = Marks(*_ENDS)


class GraniteThinking:
    """Reads either wording of both sentences."""

    shows_special_tokens = False
    start, end = _STARTS[0], _ENDS[0]

    def marks_in(self, template: str) -> bool:
        return any(start.removesuffix(":") in template for start in _STARTS)

    def starts_inside(self, prompt: str) -> bool:
        return prompt.rstrip().endswith(_STARTS)

    def is_open(self, begun: str) -> bool:
        return begun.lstrip().startswith(_STARTS) and not any(end in begun for end in _ENDS)

    def parser(self, then: OutputParser, *, inside: bool) -> OutputParser:
        return SteppedParser(lambda source: thinking(source, then, start=_STARTS, end=_END, inside=inside))
