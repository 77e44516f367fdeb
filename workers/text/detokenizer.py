"""Incremental detokenization: one Detokenizer per choice, O(1) amortised per token.

PieceTable caches the text of each token, for byte-level BPE and SentencePiece with byte fallback (most models).
PrefixDetokenizer decodes a short window twice and emits the difference, for any other decoder. Both hold back a
character until all its bytes are there. The joined pieces equal the decode of the whole. Invalid UTF-8 becomes U+FFFD,
per byte with byte fallback (a valid character beside it survives, where a whole decode drops it).
"""

import json
from collections.abc import Sequence
from typing import Any, Protocol

from tandem.workers.text.tokenizer import ModelTokenizer
from tandem.workers.text.vocabulary.byte_alphabet import byte_level_alphabet

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Turns one choice's tokens into text."""

    def push(self, token_id: int) -> str:
        """Adds a token and returns the text that it completes, "" while a character is incomplete."""
        ...

    def flush(self) -> str:
        """Returns the remaining text at the end: an incomplete character becomes U+FFFD."""
        ...


class NoText:
    """A Detokenizer for choices whose text nobody wants."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class PieceTable:
    """The bytes of every token, filled on first use and shared by all choices of a model. Its races are benign."""

    def __init__(self, tokenizer: ModelTokenizer, kind: str) -> None:
        self._tokenizer = tokenizer
        self._kind = kind
        self._bytes_of_char = {char: byte for byte, char in enumerate(byte_level_alphabet())}
        self._bytes: dict[int, bytes] = {}
        self.text_shown: dict[int, str | None] = {}
        self.text_hidden: dict[int, str | None] = {}
        self.strips_first_space = kind == "byte_fallback"
        self.replaces_each_byte = kind != "byte_level"

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token, special tokens spelled out; b"" for an unknown id."""
        found = self._bytes.get(token_id)
        if found is None:
            piece = self._tokenizer.piece(token_id)
            found = b"" if piece is None else self._spell(piece)
            self._bytes[token_id] = found
        return found

    def look_up(self, token_id: int, skip_special_tokens: bool) -> str | None:
        """Fills the table for a token and returns its text; None when its bytes are not whole characters."""
        hidden = skip_special_tokens and token_id in self._tokenizer.hidden_token_ids
        raw = b"" if hidden else self.token_bytes(token_id)
        try:
            text: str | None = raw.decode("utf-8")
        except UnicodeDecodeError:
            text = None
        (self.text_hidden if skip_special_tokens else self.text_shown)[token_id] = text
        return text

    def _spell(self, piece: str) -> bytes:
        if self._kind == "byte_level":
            table = self._bytes_of_char
            if all(char in table for char in piece):
                return bytes(table[char] for char in piece)
            return piece.encode("utf-8", "replace")
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            try:
                return bytes([int(piece[3:5], 16)])
            except ValueError:
                pass
        return piece.replace("\u2581", " ").encode("utf-8", "replace")


class PieceDetokenizer:
    """A Detokenizer over a PieceTable. `at_start`: no visible token precedes, so one leading space is dropped."""

    __slots__ = ("_at_start", "_known", "_pending", "_skip", "_table")

    def __init__(self, table: PieceTable, skip_special_tokens: bool, at_start: bool) -> None:
        self._table = table
        self._skip = skip_special_tokens
        self._known = table.text_hidden if skip_special_tokens else table.text_shown
        self._pending = b""
        self._at_start = at_start and table.strips_first_space

    def push(self, token_id: int) -> str:
        try:
            text = self._known[token_id]
        except KeyError:
            text = self._table.look_up(token_id, self._skip)
        if text is None or self._pending:
            text = self._push_bytes(token_id, text)
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        raw, self._pending = self._pending, b""
        return REPLACEMENT * len(raw) if self._table.replaces_each_byte else raw.decode("utf-8", "replace")

    def _push_bytes(self, token_id: int, text: str | None) -> str:
        if text == "":
            return ""
        raw = self._pending + self._table.token_bytes(token_id)
        parts = []
        while raw:
            try:
                parts.append(raw.decode("utf-8"))
                raw = b""
            except UnicodeDecodeError as error:
                parts.append(raw[: error.start].decode("utf-8"))
                if error.end == len(raw) and error.reason == "unexpected end of data":
                    raw = raw[error.start :]
                    break
                width = error.end - error.start
                parts.append(REPLACEMENT * (width if self._table.replaces_each_byte else 1))
                raw = raw[error.end :]
        self._pending = raw
        return "".join(parts)


class PrefixDetokenizer:
    """A Detokenizer for any decoder: decodes a window from the last safe point with and without the new tokens.

    The window restarts after each emission, so the cost per token is constant (the prefix-offset method of vLLM and
    text-generation-inference). A window that is incomplete for MAX_OPEN tokens counts as invalid UTF-8 and is emitted.
    """

    MAX_OPEN = 16

    def __init__(self, tokenizer: ModelTokenizer, skip_special_tokens: bool, context_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(context_ids)
        self._read = len(self._ids)

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        return self._emit(force=len(self._ids) - self._read >= self.MAX_OPEN)

    def flush(self) -> str:
        return self._emit(force=True) if self._read < len(self._ids) else ""

    def _emit(self, force: bool) -> str:
        before = self._tokenizer.decode(self._ids[: self._read], skip_special_tokens=self._skip)
        now = self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)
        if len(now) <= len(before) or (now.endswith(REPLACEMENT) and not force):
            return ""
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        return now[len(before) :]


class DetokenizerFactory:
    """Chooses the method once per model; makes one Detokenizer per choice and spells single tokens for logprobs."""

    CONTEXT_TOKENS = 6

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        kind = decoder_kind(json.loads(tokenizer.backend.to_str())["decoder"])
        self._table = PieceTable(tokenizer, kind) if kind is not None else None

    def make(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> Detokenizer:
        """Returns a Detokenizer for the text after the prompt. Its first space is dropped only if the prompt shows no
        text."""
        if self._table is None:
            return PrefixDetokenizer(self._tokenizer, skip_special_tokens, prompt_token_ids[-self.CONTEXT_TOKENS :])
        hidden = self._tokenizer.hidden_token_ids if skip_special_tokens else frozenset[int]()
        at_start = self._table.strips_first_space and all(i in hidden for i in prompt_token_ids)
        return PieceDetokenizer(self._table, skip_special_tokens, at_start)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of one token, special tokens spelled out."""
        if self._table is not None:
            return self._table.token_bytes(token_id)
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        """Returns the text of one token by itself; bytes that are no whole character become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


def decoder_kind(decoder: dict[str, Any] | None) -> str | None:
    """Returns how a tokenizer.json decoder spells tokens: byte_level, byte_fallback (Llama's), byte_fallback_spaced
    (Gemma's, which keeps a first space), or None when a table cannot represent it."""
    if decoder is None:
        return None
    if decoder["type"] == "ByteLevel":
        return "byte_level"
    if decoder["type"] != "Sequence":
        return None
    steps = [{key: value for key, value in step.items() if key != "prepend_scheme"} for step in decoder["decoders"]]
    sentencepiece = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    if steps == sentencepiece:
        return "byte_fallback"
    if steps == sentencepiece[:-1]:
        return "byte_fallback_spaced"
    return "byte_level" if [step["type"] for step in steps] == ["ByteLevel"] else None
