"""Texts in windows of tokens, as a model scores them. Torch-free.

A token is scored once, behind all that its window has before it. As in lm-eval's rolling log likelihoods, a text's
first token is not scored unless the tokenizer puts BOS before it.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.configs.errors import SettingsError
from tandem.workers.text.tokenizer import ModelTokenizer

FILE_FLAG = "--perplexity"


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """A text's token ids, BOS included where the tokenizer adds one, and the bytes of UTF-8 that each stands for: 0 for
    BOS and for all but the last token of a character that several tokens spell."""

    ids: list[int]
    bytes_of: list[int]


@dataclass(frozen=True, slots=True)
class TokenWindow:
    """Tokens that are computed together. text: the number of its text. start: the position of its first token in the
    text. first: of its tokens, the first one that is scored, at least 1; all behind it are scored too."""

    text: int
    start: int
    ids: list[int]
    first: int

    @property
    def num_scored(self) -> int:
        return len(self.ids) - self.first


def read_texts(file: Path, flag: str = FILE_FLAG) -> list[str]:
    """Returns the texts of a file: of a .jsonl file one a line, its key "text"; else all of it is one text.
    SettingsError, by `flag`, for a file that cannot be read, has no text, or is not UTF-8."""
    try:
        whole = file.read_bytes().decode("utf-8")
    except OSError as error:
        raise SettingsError(f"{file}: {error.strerror}", flag) from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{file} is not UTF-8: byte {error.start} is {error.reason}", flag) from error
    texts = [whole] if file.suffix != ".jsonl" else list(_lines(whole, file, flag))
    if not any(text.strip() for text in texts):
        raise SettingsError(f"{file} has no text", flag)
    return [text for text in texts if text]


def tokenize(tokenizer: ModelTokenizer, texts: Sequence[str]) -> list[TokenizedText]:
    """Returns the texts' tokens, as a prompt of each would have them."""
    return [_tokenized(tokenizer, text) for text in texts]


def windows_of(
    texts: Sequence[Sequence[int]], window: int, stride: int | None = None, tokens: int | None = None
) -> list[TokenWindow]:
    """Returns the windows of texts, given as token ids.

    window: the most tokens of one, at least 2. stride: how many tokens each window scores behind a text's first one,
    from 1 to window - 1, so that each has at least window - stride tokens before it; None: window - 1, every token
    computed once. tokens: how many are scored in all; None: all that there are. ValueError for other numbers.
    """
    stride = window - 1 if stride is None else stride
    if window < 2 or not 1 <= stride < window or (tokens is not None and tokens < 1):
        raise ValueError(f"window={window}, stride={stride}, tokens={tokens}")
    found: list[TokenWindow] = []
    left = sum(map(len, texts)) if tokens is None else tokens
    for number, ids in enumerate(texts):
        for one in _of_text(number, list(ids), window, stride):
            cut = one.ids[: one.first + left]
            if len(cut) > one.first:
                found.append(TokenWindow(number, one.start, cut, one.first))
                left -= found[-1].num_scored
    return found


def _of_text(number: int, ids: list[int], window: int, stride: int) -> Iterator[TokenWindow]:
    end, start, first = min(window, len(ids)), 0, 1
    while first < end - start:
        yield TokenWindow(number, start, ids[start:end], first)
        start, first = max(0, end - (window - stride)), window - stride
        end = min(start + window, len(ids))


def _lines(whole: str, file: Path, flag: str) -> Iterator[str]:
    for number, line in enumerate(whole.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except ValueError as error:
            raise SettingsError(f"{file}, line {number} is no JSON: {error}", flag) from error
        text = found.get("text") if isinstance(found, dict) else None
        if not isinstance(text, str):
            raise SettingsError(f'{file}, line {number} has no "text": {line:.80}', flag)
        yield text


def _tokenized(tokenizer: ModelTokenizer, text: str) -> TokenizedText:
    encoding = tokenizer.backend.encode(text, add_special_tokens=True)
    ends_at = [0]  # in bytes, by characters
    for character in text:
        ends_at.append(ends_at[-1] + len(character.encode()))
    lengths, done = [], 0
    for _, last in encoding.offsets:
        lengths.append(max(0, ends_at[last] - done))
        done = max(done, ends_at[last])
    return TokenizedText(encoding.ids, lengths)
