"""openai_gptoss: thinking as gpt-oss writes it, in harmony's channel analysis."""

from tandem.workers.text.output.events import OutputParser
from tandem.workers.text.output.stepping import SteppedParser
from tandem.workers.text.output.tools.harmony import ANALYSIS, CHANNEL, ENDS, ContentTo, HarmonyParser, messages


class OpenAIGptOss:
    """Sorts analysis from content, and leaves calls to the `openai` format, which sorts all of it."""

    shows_special_tokens = True
    start, end = ANALYSIS, ENDS[0]

    def marks_in(self, template: str) -> bool:
        return f"{CHANNEL}analysis" in template

    def starts_inside(self, prompt: str) -> bool:
        return prompt.endswith(ANALYSIS)

    def is_open(self, begun: str) -> bool:
        return begun.startswith(ANALYSIS) and not any(end in begun for end in ENDS)

    def parser(self, then: OutputParser, *, inside: bool) -> OutputParser:
        if isinstance(then, HarmonyParser):
            return HarmonyParser(then.tools, inside=inside)
        return SteppedParser(lambda source: messages(source, ContentTo(then, source), inside=inside))
