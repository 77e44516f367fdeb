"""SentencePiece models made here, and a plain twin of what the library does with them.

transformers has the schema of the file, so it writes the bytes; nothing is trained, and SentencePiece is not needed.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils import sentencepiece_model_pb2_new as schema

SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
UNIGRAM, BPE = 1, 2
Piece = tuple[str, float, int]
HEAD: list[Piece] = [("<unk>", 0, UNKNOWN), ("<s>", 0, CONTROL), ("</s>", 0, CONTROL)]
BYTES: list[Piece] = [(f"<0x{byte:02X}>", 0, BYTE) for byte in range(256)]
WORDS = (
    *("\u2581t", "he", "in", "\u2581a", "aa", "\u2581the", "th", "an", "the", "re", "\u2581in", "aaaa", "nd", "and"),
    *("\u2581and", "ing", "\u2581there", "\u00e9e", "\u65e5\u672c", "\u2581\u65e5", "ab", "ba", "aba", "aab", "t\n"),
    *("11", "1.", "\u2581\u25811"),
)
LETTERS = (SPACE, *"abehinrtdgx.,!01\n\u00e9\u65e5\u672c")


def pieces_of(words: Sequence[str] = WORDS, letters: Sequence[str] = LETTERS) -> list[Piece]:
    """Words and letters, the better the earlier; no two ways to write a text cost the same."""
    return [(word, -1 - 0.7310585 * i - 1e-3 * i * i, NORMAL) for i, word in enumerate([*words, *letters])]


RUNS: list[Piece] = [(SPACE * length, -1e9 + length * 1e3, NORMAL) for length in (2, 4)]
"""Runs of spaces score lowest in Llama's file, although their ids come first."""


def model_proto(pieces: Sequence[Piece], kind: int = BPE, **fields: Any) -> Any:
    """A model of pieces (text, score, type); fields: of the trainer and the normalizer, by name."""
    model = schema.ModelProto()
    for text, score, of in pieces:
        model.pieces.add(piece=text, score=score, type=of)
    model.trainer_spec.model_type = kind
    for name, value in fields.items():
        spec = model.normalizer_spec if name in schema.NormalizerSpec.DESCRIPTOR.fields_by_name else model.trainer_spec
        setattr(spec, name, value)
    return model


def llama_like(**fields: Any) -> Any:
    return model_proto(
        [*HEAD, *BYTES, *RUNS, *pieces_of()], byte_fallback=True, remove_extra_whitespaces=False, **fields
    )


def gemma_like() -> Any:
    head = [("<pad>", 0, CONTROL), ("<eos>", 0, CONTROL), ("<bos>", 0, CONTROL), ("<unk>", 0, UNKNOWN)]
    own = [(text, 0, USER_DEFINED) for text in ("<turn>", "\n\n", SPACE * 2, SPACE * 3)]
    return model_proto(
        [*head, *own, *BYTES, *pieces_of()],
        byte_fallback=True,
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
    )


def unigram_like(**fields: Any) -> Any:
    return model_proto([*HEAD, *pieces_of()], UNIGRAM, **fields)


@dataclass(frozen=True, slots=True)
class Twin:
    """Encodes as SentencePiece: pairs merge best first, the leftmost of equals; Unigram takes the best of all paths."""

    model: Any

    def encode(self, text: str) -> list[int]:
        spec = self.model.normalizer_spec
        if spec.remove_extra_whitespaces:
            text = re.sub(" +", " ", text).strip(" ")
        if text and spec.add_dummy_prefix:
            text = " " + text
        text = text.replace(" ", SPACE)
        best = self._paths(text) if self.model.trainer_spec.model_type == UNIGRAM else self._merged(text)
        return self._ids(best)

    def _merged(self, text: str) -> list[str]:
        scores = {p.piece: p.score for p in self.model.pieces if p.type in (NORMAL, USER_DEFINED)}
        own = sorted((p.piece for p in self.model.pieces if p.type == USER_DEFINED), key=len, reverse=True)
        symbols, frozen = [], []
        while text:
            whole = next((piece for piece in own if text.startswith(piece)), None)
            symbols.append(whole or text[0])
            frozen.append(whole is not None)
            text = text[len(symbols[-1]) :]
        while True:
            pairs = [
                (-scores[symbols[i] + symbols[i + 1]], i)
                for i in range(len(symbols) - 1)
                if symbols[i] + symbols[i + 1] in scores and not (frozen[i] or frozen[i + 1])
            ]
            if not pairs:
                return symbols
            at = min(pairs)[1]
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
            frozen[at : at + 2] = [False]

    def _paths(self, text: str) -> list[str]:
        scores = {p.piece: p.score for p in self.model.pieces if p.type in (NORMAL, USER_DEFINED)}
        unknown = min(scores.values()) - 10
        best: list[tuple[float, list[str]]] = [(0, [])]
        for end in range(1, len(text) + 1):
            ways = []
            for start in range(end):
                piece = text[start:end]
                cost = scores.get(piece, unknown if end - start == 1 else None)
                if cost is not None:
                    ways.append((best[start][0] + cost, [*best[start][1], piece]))
            best.append(max(ways, key=lambda way: way[0]))
        return best[-1][1]

    def _ids(self, symbols: list[str]) -> list[int]:
        """Unknown pieces become bytes, or one unknown token for all in a row."""
        known = {p.piece: i for i, p in enumerate(self.model.pieces) if p.type in (NORMAL, USER_DEFINED)}
        named = {p.piece: i for i, p in enumerate(self.model.pieces)}
        ids: list[int] = []
        before = False
        for symbol in symbols:
            missing = symbol not in known
            if not missing:
                ids.append(known[symbol])
            elif self.model.trainer_spec.byte_fallback:
                ids += [named[f"<0x{byte:02X}>"] for byte in symbol.encode()]
            elif not before:
                ids.append(self.model.trainer_spec.unk_id)
            before = missing
        return ids
