"""Both ways of detokenizing over small vocabularies made here: bytes, half characters, spaces, special tokens."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from tandem.workers.text.detokenizer import (
    REPLACEMENT,
    Detokenizer,
    DetokenizerFactory,
    PieceDetokenizer,
    PrefixDetokenizer,
    byte_level_alphabet,
)
from tandem.workers.text.generation_config import GenerationDefaults
from tandem.workers.text.tokenizer import ModelTokenizer
from tests.unit.gateway.rig import EOS, make_tokenizer

BYTES = 20
PIECES = [
    "<s>",
    "</s>",
    "\u2581",
    "\u2581Hi",
    "a",
    "\u00e9",
    "<0xGG>",
    "<0x4>",
    "(0x41>",
    "<0x41)",
    "<1x41>",
    "\u2581\u2581b",
]
S, END, SPACE, HI, A, E_ACUTE, NO_BYTE, SHORT, ROUND, OPEN, ONE, SPACES_B = range(12)


def model_tokenizer(backend: Tokenizer) -> ModelTokenizer:
    return ModelTokenizer(
        backend, special_tokens={}, eos_token_ids=frozenset(), defaults=GenerationDefaults(), config={}
    )


def sentencepiece() -> ModelTokenizer:
    """As Llama 2's: "\u2581" for a space, bytes that no piece covers as <0x..>, one leading space dropped."""
    vocab = {piece: i for i, piece in enumerate(PIECES)} | {f"<0x{byte:02X}>": BYTES + byte for byte in range(256)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>")])
    return model_tokenizer(backend)


def metaspace() -> ModelTokenizer:
    """A decoder that no table knows."""
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(PIECES)}, merges=[]))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return model_tokenizer(backend)


LLAMA, BYTE_LEVEL, OTHER = sentencepiece(), make_tokenizer(), metaspace()


def said(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


def llama_bytes(raw: bytes) -> list[int]:
    return [BYTES + byte for byte in raw]


# ---- tables ----


def test_which_tokenizers_have_a_table() -> None:
    made = [DetokenizerFactory(t).make([]) for t in (LLAMA, BYTE_LEVEL, OTHER)]
    assert [isinstance(one, PieceDetokenizer) for one in made] == [True, True, False]


@given(st.binary(max_size=12))
@example(b"\xf0\x9f\x98")
@example(b"a\xc3\xa9\xc3b\xe2\x82")
def test_bytes_come_out_as_the_decode_of_the_whole(raw: bytes) -> None:
    got = said(DetokenizerFactory(BYTE_LEVEL).make([]), list(raw))
    assert "".join(got) == raw.decode("utf-8", "replace") == BYTE_LEVEL.decode(list(raw))


def test_a_character_is_shown_when_its_last_byte_is_there() -> None:
    euro = list("x\u20acy".encode())
    assert said(DetokenizerFactory(BYTE_LEVEL).make([]), euro) == ["x", "", "", "\u20ac", "y", ""]
    assert said(DetokenizerFactory(LLAMA).make([]), llama_bytes("x\u20acy".encode())) == [
        "x",
        "",
        "",
        "\u20ac",
        "y",
        "",
    ]


def test_a_hidden_token_between_the_bytes_of_a_character_does_not_break_it() -> None:
    for skip, middle in ((True, ""), (False, REPLACEMENT + "<eos>")):
        got = said(DetokenizerFactory(BYTE_LEVEL).make([], skip_special_tokens=skip), [0xC3, EOS, 0xA9])
        assert got[:2] == ["", middle]
        assert "".join(got) == ("\u00e9" if skip else f"{middle}{REPLACEMENT}")


@pytest.mark.parametrize(
    ("raw", "by_character", "by_byte"),
    [
        (b"\xf0\x9f", 1, 2),
        (b"\xff\xfe", 2, 2),
        (b"\xe2\x82x", 1, 2),
        (b"\xe2\x82\xe2\x82", 2, 4),
    ],
)
def test_what_is_no_text_is_replaced_byte_by_byte_only_with_byte_fallback(
    raw: bytes, by_character: int, by_byte: int
) -> None:
    assert "".join(said(DetokenizerFactory(BYTE_LEVEL).make([]), list(raw))).count(REPLACEMENT) == by_character
    got = "".join(said(DetokenizerFactory(LLAMA).make([]), llama_bytes(raw)))
    assert got.count(REPLACEMENT) == by_byte
    if b"x" not in raw:
        assert got == LLAMA.decode(llama_bytes(raw))


def test_text_before_a_bad_byte_is_kept() -> None:
    got = said(DetokenizerFactory(BYTE_LEVEL).make([]), [*b"\xc3", *b"\xc3\xa9", *b"\xff"])
    assert got == ["", REPLACEMENT, "\u00e9", REPLACEMENT, ""]
    pieces = DetokenizerFactory(LLAMA).make([])
    assert said(pieces, [*llama_bytes(b"\xc3"), E_ACUTE]) == ["", REPLACEMENT + "\u00e9", ""]


def test_a_token_of_many_bytes_may_end_one_character_and_spoil_the_next() -> None:
    alphabet = byte_level_alphabet()
    piece = "".join(alphabet[byte] for byte in b"\xa9x\xffy\xc3")
    vocab = {char: i for i, char in enumerate(alphabet)} | {piece: 256}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    got = said(DetokenizerFactory(model_tokenizer(backend)).make([]), [0xC3, 256, 0xA8])
    assert got == ["", f"\u00e9x{REPLACEMENT}y", "\u00e8", ""]


def test_the_first_space_is_dropped_once_and_only_at_the_start() -> None:
    factory = DetokenizerFactory(LLAMA)
    assert said(factory.make([S]), [HI, HI]) == ["Hi", " Hi", ""]
    assert said(factory.make([]), [END, SPACE, HI]) == ["", "", " Hi", ""]
    assert said(factory.make([]), [SPACES_B]) == [" b", ""]
    assert said(factory.make([A]), [HI]) == [" Hi", ""]
    assert said(factory.make([S], skip_special_tokens=False), [HI]) == [" Hi", ""]
    assert said(DetokenizerFactory(BYTE_LEVEL).make([]), [32, 97]) == [" ", "a", ""]


def test_special_tokens_are_hidden_unless_asked_for() -> None:
    factory = DetokenizerFactory(LLAMA)
    assert said(factory.make([A]), [S, A, END]) == ["", "a", "", ""]
    assert said(factory.make([A], skip_special_tokens=False), [S, A, END]) == ["<s>", "a", "</s>", ""]
    assert said(factory.make([A]), [S, A]) == ["", "a", ""], "what was shown to one is hidden from the next"


def test_only_a_piece_that_spells_a_byte_is_one() -> None:
    factory = DetokenizerFactory(LLAMA)
    odd = [NO_BYTE, SHORT, ROUND, OPEN, ONE]
    assert said(factory.make([A]), odd) == [*(PIECES[i] for i in odd), ""]
    assert [factory.token_bytes(i) for i in (*odd, BYTES + 0x41)] == [*(PIECES[i].encode() for i in odd), b"A"]
    assert LLAMA.decode([A, *odd]) == "a" + "".join(PIECES[i] for i in odd)


def test_pieces_of_bytes_are_text_in_other_vocabularies_and_added_tokens_are_themselves() -> None:
    backend = make_tokenizer().backend
    backend.add_tokens([AddedToken("\u65e5 \u672c"), AddedToken("<0x41>")])
    tokenizer = model_tokenizer(backend)
    factory = DetokenizerFactory(tokenizer)
    added = [backend.token_to_id(t) for t in ("\u65e5 \u672c", "<0x41>")]
    assert [factory.token_bytes(i).decode() for i in added] == ["\u65e5 \u672c", "<0x41>"]
    assert factory.token_bytes(10**6) == b"" and said(factory.make([]), [10**6, 97]) == ["", "a", ""]


# ---- any other decoder ----


@given(st.lists(st.integers(0, 11), max_size=20))
def test_windows_join_to_the_decode_of_the_whole(ids: list[int]) -> None:
    assert "".join(said(PrefixDetokenizer(OTHER, True, []), ids)) == OTHER.decode(ids)


@given(st.text(max_size=12))
def test_windows_hold_back_half_characters(text: str) -> None:
    got = said(PrefixDetokenizer(BYTE_LEVEL, True, []), list(text.encode("utf-8", "replace")))
    assert "".join(got) == text.encode("utf-8", "replace").decode()


def test_a_window_shows_a_character_with_its_last_byte_and_then_begins_anew() -> None:
    pieces = PrefixDetokenizer(BYTE_LEVEL, True, [97])
    assert said(pieces, list("x\u20acy".encode())) == ["x", "", "", "\u20ac", "y", ""]
    assert pieces._ids == [ord("y")] and pieces._read == 1, "its cost stays that of a few tokens"


def test_a_window_that_stays_open_is_given_up() -> None:
    pieces = PrefixDetokenizer(BYTE_LEVEL, True, [97])
    got = [pieces.push(0xFF) for _ in range(2 * pieces.MAX_OPEN)]
    assert [i for i, text in enumerate(got, start=1) if text] == [pieces.MAX_OPEN, 2 * pieces.MAX_OPEN]
    assert pieces.flush() == ""


def test_an_open_window_is_shown_at_the_end() -> None:
    pieces = PrefixDetokenizer(BYTE_LEVEL, True, [97])
    assert said(pieces, [98, 0xC3]) == ["b", "", REPLACEMENT]
    assert pieces.flush() == "" and PrefixDetokenizer(BYTE_LEVEL, True, [97]).flush() == ""


def test_without_a_table_a_prompt_gives_the_first_window_and_tokens_are_decoded_one_by_one() -> None:
    factory = DetokenizerFactory(OTHER)
    prompt = [A] * 20
    pieces = factory.make(prompt)
    assert isinstance(pieces, PrefixDetokenizer) and pieces._ids == prompt[-factory.CONTEXT_TOKENS :]
    assert said(pieces, [HI, A]) == [" Hi", "a", ""]
    assert factory.token_bytes(E_ACUTE) == "\u00e9".encode() and factory.token_bytes(S) == b"<s>"


def test_a_hidden_token_takes_no_space_from_the_next() -> None:
    assert said(DetokenizerFactory(OTHER).make([A]), [HI, S, HI]) == [" Hi", "", " Hi", ""]
