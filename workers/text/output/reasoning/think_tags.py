"""<think>...</think> at the begin of an answer: Qwen3, and DeepSeek R1, which always thinks first."""

from collections.abc import Iterator

from tandem.workers.text.output.events import OutputEvent, OutputParser, Reasoning
from tandem.workers.text.output.stepping import Marks, SteppedParser, Steps, TextSource, one_of, spaces, text_until

START, END = "<think>", "</think>"
ASSISTANT = "<｜Assistant｜>"
_END = Marks(END)


class Qwen3:
    """The thinking begins with <think>, in the prompt or in the answer; an answer without it has no thinking."""

    shows_special_tokens = False
    start, end = START, END

    def marks_in(self, template: str) -> bool:
        return END in template and ASSISTANT not in template

    def starts_inside(self, prompt: str) -> bool:
        return prompt.rstrip().endswith(START)

    def is_open(self, begun: str) -> bool:
        return begun.lstrip().startswith(START) and END not in begun

    def parser(self, then: OutputParser, *, inside: bool) -> OutputParser:
        return SteppedParser(lambda source: thinking(source, then, start=(START,), end=_END, inside=inside))


class DeepSeekR1(Qwen3):
    """All text before </think> is thinking, unless the prompt has closed it."""

    def marks_in(self, template: str) -> bool:
        return END in template and ASSISTANT in template

    def starts_inside(self, prompt: str) -> bool:
        _, header, turn = prompt.rpartition(ASSISTANT)  # a turn that is continued may have more behind its thinking
        return END not in turn if header else not prompt.rstrip().endswith(END)


def thinking(
    source: TextSource, then: OutputParser, *, start: tuple[str, ...], end: Marks, inside: bool
) -> Steps[None]:
    """Reads thinking and its end mark, and passes the rest to `then`. Without a start mark, white space aside, there is
    no thinking, unless the prompt ends `inside`."""
    source.keep()
    yield from spaces(source)
    began = (yield from one_of(source, start)) is not None
    space = source.release()
    if began or inside:
        if not began and space:
            yield Reasoning(space)
        found = yield from text_until(source, end, _reasoning)
        if found is not None:
            yield from one_of(source, (found,))
    elif space:
        yield from then.push(space)
    yield from rest(source, then)


def rest(source: TextSource, then: OutputParser) -> Steps[None]:
    """Passes all further text to `then`."""
    while not source.exhausted:
        if source.at < len(source.text):
            yield from then.push(source.take(len(source.text)))
        else:
            yield None
    yield from then.finish(cut=source.cut)


def _reasoning(text: str) -> Iterator[OutputEvent]:
    yield Reasoning(text)
