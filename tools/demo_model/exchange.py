"""One exchange of a chat, the unit that skills draw and that `corpus.py` renders."""

from typing import NamedTuple


class Exchange(NamedTuple):
    """One user message and the assistant's answer.

    call, result: where a tool is used, the assistant's text that calls it, and what the tool returned.
    """

    question: str
    answer: str
    call: str = ""
    result: str = ""
