"""Incremental text equals the text of the whole, for every tokenizer and both ways of detokenizing."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.workers.text.detokenizer import (
    REPLACEMENT,
    Detokenizer,
    DetokenizerFactory,
    PieceDetokenizer,
    PrefixDetokenizer,
    byte_level_alphabet,
    decoder_kind,
)
from tandem.workers.text.tokenizer import ModelTokenizer, load_tokenizer
from tests.unit.text.data import TOKENIZERS, needs_data, tokenizer_folder
from tests.unit.text.test_tokenizer import TEXTS

NAMES = st.sampled_from(TOKENIZERS)


@cache
def loaded(name: str) -> tuple[ModelTokenizer, DetokenizerFactory]:
    tokenizer = load_tokenizer(tokenizer_folder(name))
    return tokenizer, DetokenizerFactory(tokenizer)


def pieces(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@needs_data
@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_real_tokenizers_use_the_table(name: str) -> None:
    assert isinstance(loaded(name)[1].make([]), PieceDetokenizer)


@needs_data
@settings(deadline=None, max_examples=300)
@given(NAMES, st.text(), st.booleans())
def test_pieces_join_to_the_decoded_text(name: str, text: str, skip: bool) -> None:
    tokenizer, factory = loaded(name)
    ids = tokenizer.encode(text, add_special_tokens=True)
    got = pieces(factory.make([], skip_special_tokens=skip), ids)
    assert "".join(got) == tokenizer.decode(ids, skip_special_tokens=skip)
    if REPLACEMENT not in text:
        assert REPLACEMENT not in "".join(got)


@needs_data
@settings(deadline=None, max_examples=300)
@given(NAMES, st.lists(st.integers(0, 511), max_size=60), st.booleans())
def test_any_ids_of_byte_level_vocabularies_decode_equally(name: str, ids: list[int], skip: bool) -> None:
    tokenizer, factory = loaded(name)
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    got = "".join(pieces(factory.make([], skip_special_tokens=skip), ids))
    if name in ("llama2", "stories260K") and REPLACEMENT in whole:
        # A run of bytes with one bad byte loses its good characters in a whole decode; streaming keeps them.
        assert REPLACEMENT in got
        return
    assert got == whole


@needs_data
@settings(deadline=None, max_examples=150)
@given(NAMES, st.text(min_size=1), st.text())
def test_text_after_a_prompt_is_the_difference_of_the_decodes(name: str, before: str, after: str) -> None:
    tokenizer, factory = loaded(name)
    prompt = tokenizer.encode(before, add_special_tokens=True)
    output = tokenizer.encode(after, add_special_tokens=False)
    decoded, shown = tokenizer.decode(prompt), tokenizer.decode(prompt + output)
    if not decoded or REPLACEMENT in decoded + shown:
        return
    assert decoded + "".join(pieces(factory.make(prompt), output)) == shown


@needs_data
@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", [text for text in TEXTS if text.strip() and REPLACEMENT not in text])
def test_the_prefix_method_gives_the_same_text(name: str, text: str) -> None:
    tokenizer, _ = loaded(name)
    ids = tokenizer.encode(text, add_special_tokens=True)
    got = "".join(pieces(PrefixDetokenizer(tokenizer, True, []), ids))
    assert got == tokenizer.decode(ids)


@needs_data
@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_piece_shows_half_a_character(name: str) -> None:
    tokenizer, factory = loaded(name)
    text = "👩‍👩‍👧 𝄞 日本語 ñ"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > len(text.split())
    got = pieces(factory.make(tokenizer.encode("x", add_special_tokens=True)), ids)
    assert all(REPLACEMENT not in piece for piece in got)
    assert "".join(got).removeprefix(" ") == text


@needs_data
def test_an_unfinished_character_becomes_a_replacement_at_the_end() -> None:
    tokenizer, factory = loaded("gpt2")
    ids = tokenizer.encode("😀", add_special_tokens=False)[:-1]
    detokenizer = factory.make([])
    assert "".join(detokenizer.push(i) for i in ids) == ""
    assert detokenizer.flush() == REPLACEMENT
    assert detokenizer.flush() == ""


@needs_data
def test_the_first_space_goes_only_where_nothing_was_shown() -> None:
    tokenizer, factory = loaded("stories260K")
    ids = tokenizer.encode("Once", add_special_tokens=False)
    assert "".join(pieces(factory.make([1]), ids)) == "Once"
    assert "".join(pieces(factory.make(tokenizer.encode("He", add_special_tokens=True)), ids)) == " Once"
    assert "".join(pieces(factory.make([1], skip_special_tokens=False), ids)) == " Once"


@needs_data
def test_special_tokens_hide_unless_asked_for() -> None:
    tokenizer, factory = loaded("qwen2.5")
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>", add_special_tokens=False)
    assert "".join(pieces(factory.make([]), ids)) == "hi"
    assert "".join(pieces(factory.make([], skip_special_tokens=False), ids)) == "<|im_start|>hi<|im_end|>"


@needs_data
def test_unknown_ids_are_silent() -> None:
    _, factory = loaded("qwen2.5")
    assert pieces(factory.make([]), [10**6]) == ["", ""]
    assert factory.token_bytes(10**6) == b""


def test_the_byte_alphabet_is_a_bijection() -> None:
    from tokenizers import pre_tokenizers

    assert sorted(byte_level_alphabet()) == sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.mark.parametrize(
    ("decoder", "kind"),
    [
        (None, None),
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, None),
        ({"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}, None),
        ({"type": "ByteLevel", "add_prefix_space": True}, "byte_level"),
        ({"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}, "byte_level"),
        ({"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}, None),
    ],
)
def test_only_known_decoders_use_the_table(decoder: dict[str, object] | None, kind: str | None) -> None:
    assert decoder_kind(decoder) == kind
