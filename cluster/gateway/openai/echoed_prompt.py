"""EchoedPrompt: a prompt as an answer with `echo` begins: its text, and where each of its tokens begins in it.

The echo of a text is that text, special tokens included, whatever skip_special_tokens says. The echo of token ids, and
of a text that was cut, is their decoding. Work for the threads of text_workers.py.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tandem.cluster.gateway.schemas.generation_body import CompletionBody
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.cluster.gateway.serving.prompts import Prompt
from tandem.workers.text.tokenizer import ModelTokenizer


class EchoedPrompt(NamedTuple):
    """offsets: the place of each token in the text, in characters; a token that adds no text, as a BOS that the
    tokenizer adds and all but the last part of a character, has the place of what follows."""

    text: str
    token_ids: Sequence[int]
    offsets: Sequence[int]


def echoed_prompt(services: TextServices, prompt: Prompt, body: CompletionBody) -> EchoedPrompt:
    """The echo of a prompt; its offsets are empty where nobody asks for log probabilities."""
    ids, skips = prompt.token_ids, body.skip_special_tokens is not False
    is_text = prompt.text is not None and body.truncate_prompt_tokens is None
    text = prompt.text if is_text else services.tokenizer.decode(ids, skip_special_tokens=skips)
    assert text is not None
    if body.logprobs is None:
        return EchoedPrompt(text, ids, ())
    added = [False] * len(ids)
    if is_text and body.add_special_tokens is not False:
        added = added_tokens(services.tokenizer, text)
    detokenizer = services.detokenizers.make([], skip_special_tokens=skips and not is_text)
    pieces = ["" if is_added else detokenizer.push(one) for one, is_added in zip(ids, added, strict=True)]
    return EchoedPrompt(text, ids, _places(text, pieces))


def added_tokens(tokenizer: ModelTokenizer, text: str) -> list[bool]:
    """True for each token of an encoded text that the tokenizer has added."""
    (encoding,) = tokenizer.backend.encode_batch_fast([text], add_special_tokens=True)
    return [mark == 1 for mark in encoding.special_tokens_mask]


def _places(text: str, pieces: Sequence[str]) -> list[int]:
    """Returns where each piece begins. A space in front of a piece that the text has not there, which SentencePiece
    adds behind a special token, takes no place."""
    places, at = [], 0
    for piece in pieces:
        places.append(min(at, len(text)))
        if piece.startswith(" ") and not text.startswith(" ", at):
            piece = piece[1:]
        at += len(piece)
    return places
