"""Mistral's tekken.json against transformers' converter of it, and files that are refused."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.workers.messages.errors import SettingsError
from tandem.workers.text.tokenizer import load_tokenizer
from tests.unit.text.test_tokenizer import TEXTS

PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = ("th", "he", " t", "the", " the", "in", "ing", "aa", "aaa", "\u00e9", "\u65e5", "  ", "\n\n", " 1", "anth")
SPECIAL = ("<unk>", "<s>", "</s>", "[INST]")


def entry(rank: int, token: bytes) -> dict[str, Any]:
    return {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}


def tekken(special: Sequence[dict[str, Any]] | None = None, **config: Any) -> dict[str, Any]:
    """A file with all bytes, some words, and three pieces beyond the vocabulary's size."""
    tokens = [bytes([byte]) for byte in range(256)] + [word.encode() for word in (*WORDS, "xy", "xyz", "xx")]
    size = 6 + 256 + len(WORDS)
    named = [{"rank": i, "token_str": token, "is_control": True} for i, token in enumerate(SPECIAL)]
    return {
        "config": {"pattern": PATTERN, "default_vocab_size": size, "default_num_special_tokens": 6, **config},
        "vocab": [entry(rank, token) for rank, token in enumerate(tokens)],
        "special_tokens": named if special is None else special,
    }


def folder_of(at: Path, file: Any) -> Path:
    (at / "tekken.json").write_text(json.dumps(file))
    return at


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    from transformers.integrations.mistral.tokenizer import MistralConverter

    at = folder_of(tmp_path_factory.mktemp("tekken"), tekken())
    return load_tokenizer(at), MistralConverter(str(at / "tekken.json")).converted()


@given(
    text=st.lists(st.sampled_from([*WORDS, *SPECIAL, *"aht 1!xyz\n", "xyz", "\U0001f600"]), max_size=15).map("".join)
)
def test_ids_and_texts_are_transformers(pair: tuple[Any, Any], text: str) -> None:
    ours, theirs = pair
    ids = ours.encode(text, add_special_tokens=False)
    assert ids == theirs.encode(text, add_special_tokens=False).ids
    assert ours.decode(ids, skip_special_tokens=False) == text


def test_odd_texts_and_bos(pair: tuple[Any, Any]) -> None:
    ours, theirs = pair
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=True)
        assert ids == [1, *theirs.encode(text, add_special_tokens=False).ids]
        assert ours.decode(ids) == theirs.decode(ids)
    assert ours.vocab_size == 6 + 256 + len(WORDS)
    assert (ours.bos_token, ours.eos_token, ours.eos_token_ids) == ("<s>", "</s>", {2})
    assert ours.piece(5) == "<SPECIAL_5>" and ours.hidden_token_ids == set(range(6))


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ({}, "cannot be read"),
        ([], "cannot be read"),
        ({**tekken(), "special_tokens": None}, "names no special tokens, as files of its first version"),
        (tekken([{"rank": 3, "token_str": "<s>"}]), "the ranks of its special tokens have gaps"),
        ({**tekken(), "vocab": [entry(1, b"a"), entry(0, b"b")]}, "not in the order of their ranks"),
        ({**tekken(), "vocab": [entry(0, b"<s>")]}, "'<s>' is a special token and a piece of text"),
    ],
)
def test_files_that_are_not_understood_are_refused(tmp_path: Path, file: Any, words: str) -> None:
    with pytest.raises(SettingsError, match=f"tekken.json cannot be read.*{words}|tekken.json {words}"):
        load_tokenizer(folder_of(tmp_path, file))
