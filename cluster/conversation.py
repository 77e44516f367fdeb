"""The loop of `tandem chat`: reads lines, streams answers, keeps the messages.

    line -> answer streams -> next line      Ctrl-C ends the answer, what was said of it stays in the conversation
    /reset forgets, /exit or the end of input ends

With input from a file or a pipe there is no prompt, and the first answer that fails ends the run.
"""

import sys
from typing import Any

from cluster.commands.talking import say, show
from cluster.endpoint import Endpoint, EndpointError
from configs.errors import TandemError


class Conversation:
    """The messages so far, and the loop that adds to them."""

    def __init__(self, endpoint: Endpoint, fields: dict[str, Any], system: str | None, interactive: bool) -> None:
        self._endpoint = endpoint
        self._fields = fields
        self._opening = [{"role": "system", "content": system}] if system is not None else []
        self._messages = list(self._opening)
        self._interactive = interactive

    def run(self) -> None:
        """Until /exit or the end of input."""
        while (line := self._next_line()) is not None:
            text = line.strip()
            if text == "/exit":
                return
            if text == "/reset":
                self._messages = list(self._opening)
                say("the conversation begins anew")
            elif text.startswith("/") and text[1:].isalpha():
                say(f"{text} is no command; there are /reset and /exit")
            elif text:
                self._answer(line)

    def _answer(self, line: str) -> None:
        """One turn. A turn that brought no word of an answer leaves the conversation as it was."""
        asked = [*self._messages, {"role": "user", "content": line}]
        said: list[str] = []
        try:
            show(self._endpoint.stream("/v1/chat/completions", {**self._fields, "messages": asked}), said)
        except KeyboardInterrupt:
            say("the answer was stopped")
        except EndpointError as error:
            if not self._interactive:
                raise
            say(f"error: {error}")
        if said:
            self._messages = [*asked, {"role": "assistant", "content": "".join(said)}]

    def _next_line(self) -> str | None:
        try:
            if not self._interactive:
                line = sys.stdin.readline()
                return line.rstrip("\n") if line else None
            while True:
                try:
                    return input("> ")
                except KeyboardInterrupt:
                    print()
        except EOFError:
            print()
            return None
        except UnicodeDecodeError as error:
            raise TandemError("the input is not valid UTF-8") from error
