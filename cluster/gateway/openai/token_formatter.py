"""TokenFormatter: token ids and log probabilities in both of OpenAI's styles."""

from collections.abc import Sequence
from typing import Any

import msgspec

from tandem.workers.messages.request import TokenLogprobs
from tandem.workers.text.detokenizer import DetokenizerFactory

_encode = msgspec.json.Encoder().encode


class TokenFormatter:
    """Token ids and logprobs in both of OpenAI's styles. by_id: tokens are named "token_id:5", as in vLLM with
    return_tokens_as_token_ids, so that those of one text differ."""

    LOWEST = -9999.0

    def __init__(self, detokenizers: DetokenizerFactory, *, by_id: bool = False) -> None:
        self._bytes = detokenizers.token_bytes
        self.text = detokenizers.token_text
        self._by_id = by_id

    def name(self, token_id: int) -> str:
        """A token's name in log probabilities: its text, or its id."""
        return f"token_id:{token_id}" if self._by_id else self.text(token_id)

    def chat(self, entry: TokenLogprobs) -> dict[str, Any]:
        """One item of logprobs.content."""
        item = self._item
        shown = item(entry.token_id, entry.logprob)
        shown["top_logprobs"] = [item(token_id, logprob) for token_id, logprob in entry.top]
        return shown

    def completion(self, entries: Sequence[TokenLogprobs], offsets: Sequence[int]) -> dict[str, Any]:
        """The parallel lists of completions; the chosen token is always among its top_logprobs. These are by text: of
        tokens with one text (as parts of characters have, U+FFFD) the chosen one is shown, else the best."""
        tops: list[dict[str, float]] = []
        for entry in entries:
            top: dict[str, float] = {}
            for token_id, logprob in entry.top:
                top.setdefault(self.name(token_id), self._finite(logprob))
            top[self.name(entry.token_id)] = self._finite(entry.logprob)
            tops.append(top)
        return {
            "tokens": [self.name(entry.token_id) for entry in entries],
            "token_logprobs": [self._finite(entry.logprob) for entry in entries],
            "top_logprobs": tops,
            "text_offset": list(offsets[: len(entries)]),
        }

    def prompt(self, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any] | None]:
        """vLLM's prompt_logprobs: nothing of the first token, then by token id its own and those of the best tokens."""
        shown: list[dict[str, Any] | None] = [None]
        for entry in entries:
            found = [(entry.token_id, entry.logprob, entry.rank)]
            found += [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, 1)]
            one: dict[str, Any] = {}
            for token_id, logprob, rank in found:
                item = {"logprob": self._finite(logprob), "rank": rank, "decoded_token": self.text(token_id)}
                one.setdefault(str(token_id), item)
            shown.append(one)
        return shown

    def _item(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._bytes(token_id)
        name = f"token_id:{token_id}" if self._by_id else raw.decode("utf-8", "replace")
        return {"token": name, "logprob": self._finite(logprob), "bytes": list(raw)}

    def _finite(self, logprob: float) -> float:
        """JSON has no infinities; OpenAI's value for "very unlikely"."""
        return max(logprob, self.LOWEST)
