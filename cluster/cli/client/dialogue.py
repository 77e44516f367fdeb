"""The conversation of `tandem chat`: reads lines, streams answers, keeps the messages.

    line -> answer streams -> next line      Ctrl-C ends the answer; the part that came stays in the conversation
    /reset forgets, /exit or the end of input ends

With input from a file or a pipe there is no prompt, and the first answer that fails ends the run.
"""

import sys
from collections.abc import Iterable
from typing import Any

from tandem.cluster.cli.base.terminal import say
from tandem.cluster.cli.client.endpoint import Endpoint, EndpointError
from tandem.configs.errors import TandemError

_CONTROLS = {code: "�" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class Dialogue:
    """The messages so far, and the loop that adds to them."""

    def __init__(self, endpoint: Endpoint, fields: dict[str, Any], system: str | None, interactive: bool) -> None:
        """fields: of every request, such as `model`. interactive: input and output are a terminal."""
        self._endpoint = endpoint
        self._fields = fields
        self._opening = [{"role": "system", "content": system}] if system is not None else []
        self._messages = list(self._opening)
        self._interactive = interactive

    def run(self) -> None:
        """Runs until /exit or the end of input. EndpointError when an answer fails, unless interactive."""
        while (line := self._next_line()) is not None:
            text = line.strip()
            if text == "/exit":
                return
            if text == "/reset":
                self._messages = list(self._opening)
                say("new conversation")
            elif text.startswith("/") and text[1:].isalpha():
                say(f"{text} is no command; there are /reset and /exit")
            elif text:
                self._answer(line)

    def _answer(self, line: str) -> None:
        """Runs one turn. A turn without any answer text leaves the conversation unchanged."""
        asked = [*self._messages, {"role": "user", "content": line}]
        pieces: list[str] = []
        try:
            show(self._endpoint.stream("/v1/chat/completions", {**self._fields, "messages": asked}), pieces)
        except KeyboardInterrupt:
            say("the answer was stopped")
        except EndpointError as error:
            if not self._interactive:
                raise
            say(f"error: {error}")
        if pieces:
            self._messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]

    def _next_line(self) -> str | None:
        """The next line without its line feed; None at the end of input."""
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


def show(pieces: Iterable[str], into: list[str]) -> None:
    """Prints the pieces of an answer as they come, then ends the line. `into` gets them too, also of an answer that
    breaks off. On a terminal control characters are shown as U+FFFD, so that a model cannot send escape sequences."""
    terminal = sys.stdout.isatty()
    try:
        for piece in pieces:
            into.append(piece)
            print(piece.translate(_CONTROLS) if terminal else piece, end="", flush=True)
    finally:
        if into and not into[-1].endswith("\n"):
            print(flush=True)
