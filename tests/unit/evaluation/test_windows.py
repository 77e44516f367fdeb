"""Texts in windows: each token is scored once, behind what its window has before it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.configs.errors import SettingsError
from tandem.workers.evaluation.windows import read_texts, tokenize, windows_of
from tandem.workers.text.tokenizer import load_tokenizer

DEMO = Path(__file__).resolve().parents[3] / "configs" / "demo" / "model"


@given(st.lists(st.integers(0, 40), max_size=4), st.integers(2, 12), st.integers(1, 11), st.integers(1, 60))
def test_each_token_is_scored_once_in_order(lengths: list[int], window: int, stride: int, tokens: int) -> None:
    stride = min(stride, window - 1)
    texts = [[100 * number + place for place in range(length)] for number, length in enumerate(lengths)]
    found = windows_of(texts, window, stride, tokens)
    scored = [(one.text, token) for one in found for token in one.ids[one.first :]]
    assert scored == [(number, token) for number, text in enumerate(texts) for token in text[1:]][:tokens]
    for one in found:
        assert one.ids == texts[one.text][one.start : one.start + len(one.ids)]
        assert 1 <= one.first < len(one.ids) <= window
        assert one.start == 0 or one.first == window - stride


def test_windows_of_all_new_tokens_but_one() -> None:
    found = windows_of([list(range(10))], 4)
    assert [(one.start, one.ids, one.first) for one in found] == [
        (0, [0, 1, 2, 3], 1),
        (3, [3, 4, 5, 6], 1),
        (6, [6, 7, 8, 9], 1),
    ]


def test_bytes_of_tokens_are_those_of_the_text() -> None:
    tokenizer = load_tokenizer(DEMO)
    for text in ("What is 2 + 3?", "żółw 🐢 and ähm", "a"):
        (found,) = tokenize(tokenizer, [text])
        assert sum(found.bytes_of) == len(text.encode())
        assert len(found.bytes_of) == len(found.ids)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.txt", b" \n", "has no text"),
        ("latin.txt", b"caf\xe9", "is not UTF-8: byte 3"),
        ("lines.jsonl", b'{"text": "a"}\n{"words": 1}\n', 'line 2 has no "text"'),
        ("broken.jsonl", b"{\n", "line 1 is no JSON"),
        ("none.jsonl", b"", "has no text"),
    ],
)
def test_files_without_text_are_refused(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SettingsError, match=words) as error:
        read_texts(tmp_path / name)
    assert error.value.flag == "--perplexity"


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        read_texts(tmp_path / "absent.txt")


def test_lines_are_texts(tmp_path: Path) -> None:
    (tmp_path / "two.jsonl").write_text('{"text": "one"}\n\n{"text": "two\\n", "id": 3}\n')
    assert read_texts(tmp_path / "two.jsonl") == ["one", "two\n"]
