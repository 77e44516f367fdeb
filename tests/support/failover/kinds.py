"""The twelve kinds of request that a lost group must not harm, and where their answers are cut."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from tests.support.failover.calls import Call
from tests.support.mixed_requests import PREFIX
from tests.support.service import DEMO

PROMPT = PREFIX * 20
"""Longer than any request beside it, prompt and answer together: its positions are its own."""
MAX_TOKENS = 60
CUT = 20
"""Tokens of each choice that are delivered before the group is lost, if nothing asks for another place."""
LEAD, REST = 130, 110
"""The tokens of a first byte of two in UTF-8, and of a second one."""
TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def anywhere(whole: Call) -> int:
    """The number of tokens before the cut."""
    del whole
    return CUT


def within_a_character(whole: Call) -> int:
    """Behind the first byte of a character whose second byte follows."""
    ids = whole.choices[0].token_ids
    found = (i + 1 for i in range(10, len(ids) - 10) if ids[i] == LEAD and ids[i + 1] == REST)
    return next(found)


@dataclass(frozen=True)
class Kind:
    """One kind of request. changes: to the plain greedy stream. is_exact: the answer is the same in each run. cut: from
    the undisturbed answer. stops: it ends in a stop string that lies across the cut."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    is_chat: bool = False
    is_exact: bool = True
    cut: Callable[[Call], int] = anywhere
    stops: bool = False
    adapted: bool = False

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def body(self, model: str = "demo", prompt: str = PROMPT, stop: str | None = None) -> dict[str, Any]:
        """The request's body. model: the adapter's name for an adapted one."""
        asked = {"messages": [{"role": "user", "content": prompt}]} if self.is_chat else {"prompt": prompt}
        plain = {"max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
        stops = {} if stop is None else {"stop": [stop]}
        return {"model": model, **asked, **plain, "return_token_ids": True, **self.changes, **stops}


SAMPLED = {"temperature": 1, "top_p": 0.95}
KINDS = {
    kind.name: kind
    for kind in (
        Kind("greedy"),
        Kind("seeded", {**SAMPLED, "seed": 11}),
        Kind("unseeded", SAMPLED, is_exact=False),
        Kind("penalties", {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2}),
        Kind("n = 4", {**SAMPLED, "seed": 5, "n": 4}),
        Kind("stop string", stops=True),
        Kind("logprobs", {"logprobs": 3}),
        Kind(
            "split UTF-8",
            {"frequency_penalty": 2, "logit_bias": {str(LEAD): 100, str(REST): 100}},  # they take turns
            cut=within_a_character,
        ),
        Kind("LoRA", adapted=True),
        Kind("chat", is_chat=True),
        Kind("non-streaming", {"stream": False}),
        Kind("include_usage", {"stream_options": {"include_usage": True}}),
    )
}

STRUCTURED = Kind("structured output", {"structured_outputs": {"regex": "[a-z ]{200,900}"}})
"""Its grammar is compiled in the next group too, which follows it from the tokens that were delivered."""


def stop_across(whole: Call, around: int = CUT) -> tuple[str, int]:
    """A text of four tokens of a greedy answer that has not occurred before, and the number of tokens up to its
    middle."""
    ids, text = whole.choices[0].token_ids, whole.choices[0].text
    for cut in range(around, len(ids) - 2):
        before, wanted = TOKENIZER.decode(ids[: cut - 2]), TOKENIZER.decode(ids[: cut + 2])
        stop = wanted[len(before) :]
        if wanted.startswith(before) and text.startswith(wanted) and text.find(stop) == len(before):
            return stop, cut
    raise AssertionError("no text of four tokens occurs once")
