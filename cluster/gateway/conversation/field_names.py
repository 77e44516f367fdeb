"""Refusals of a chat body, which another API's body may have been translated to: they name the fields that the client
has sent."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tandem.workers.messages.errors import RequestRefused

_TOOL = re.compile(r"tools\[(\d+)\]")
_MESSAGE = re.compile(r"messages\[(\d+)\](.*)", re.DOTALL)


@dataclass(frozen=True)
class FieldNames:
    """The client's names. fields: by chat field. prompt, limit: of the fields with the conversation and the number of
    new tokens. messages: where the chat messages come from, in order; None: from `messages`. parts: what stands for
    parts of a chat field's path, inside of fields. tools: the client's numbers of those here; None: the same."""

    fields: Mapping[str, str]
    prompt: str
    limit: str
    messages: Sequence[str] | None = ()
    parts: Sequence[tuple[str, str]] = ((".function", ""), (".json_schema", ""))
    tools: Sequence[int] | None = None

    def of(self, param: str) -> str:
        """The client's name of a chat field, or of a place in one, such as tools[0].function.name."""
        if self.messages is not None and (found := _MESSAGE.fullmatch(param)) is not None:
            at = int(found[1])
            return self.messages[at] if at < len(self.messages) else self.prompt
        if param == "messages":
            return self.prompt
        head = re.match(r"\w*", param)
        assert head is not None
        rest = param[head.end() :]
        if self.tools is not None and (number := _TOOL.match(param)) is not None:
            rest = f"[{self.tools[int(number[1])]}]{param[number.end() :]}"
        for theirs, own in self.parts:
            rest = rest.replace(theirs, own)
        return self.fields.get(head[0], head[0]) + rest

    @contextmanager
    def in_refusals(self) -> Iterator[None]:
        """A refusal that passes is worded with the client's names."""
        try:
            yield
        except RequestRefused as refusal:
            if (param := refusal.param) is not None and (own := self.of(param)) != param:
                text = re.sub(rf"(?<![\w.]){re.escape(param)}(?!\w)", lambda _: own, str(refusal))
                refusal.args = (text,)
                refusal.param = own
            raise
