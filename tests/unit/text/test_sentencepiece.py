"""tokenizer.model of SentencePiece's: ids as the library's, classes as transformers', and what is refused."""

import json
import struct
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from tandem.workers.messages.errors import SettingsError
from tandem.workers.text.detokenizer import DetokenizerFactory
from tandem.workers.text.tokenizer import ModelTokenizer, load_tokenizer
from tandem.workers.text.vocabulary.sentencepiece_model import read_model, to_tokenizer
from tests.support import sentencepiece_file as made
from tests.support.sentencepiece_file import BPE, HEAD, SPACE, Twin
from tests.unit.text.data import needs_data, tokenizer_folder
from tests.unit.text.test_tokenizer import TEXTS

MODELS = {
    "llama": made.llama_like(),
    "gemma": made.gemma_like(),
    "unigram": made.unigram_like(),
    "unigram of bytes": made.model_proto(
        [*HEAD, *made.BYTES, *made.pieces_of()], made.UNIGRAM, byte_fallback=True, remove_extra_whitespaces=False
    ),
    "no bytes": made.model_proto([*HEAD, *made.pieces_of()], BPE, remove_extra_whitespaces=True),
}
PARTS = (*made.WORDS, *"abthe .,01\n\t\u65e5\u00e9\U0001f600x!\u0301", " ", "  ", "   ", SPACE, "\r\n", "\n\n", "aaa")
texts = st.lists(st.sampled_from(PARTS), max_size=20).map("".join)


def folder_of(at: Path, model: Any, **files: Any) -> Path:
    """Writes a folder with tokenizer.model and JSON files beside it."""
    at.mkdir(exist_ok=True)
    (at / "tokenizer.model").write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    for name, content in files.items():
        (at / f"{name}.json").write_text(json.dumps(content))
    return at


@cache
def loaded(name: str, at: Path) -> ModelTokenizer:
    return load_tokenizer(folder_of(at / name, MODELS[name]))


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sentencepiece")


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=80)
@given(text=texts)
@example(text=" ")
@example(text="1    aaaaaaa     the")
@example(text="x\u2581\u2581 \u2581 \u2581the")
@example(text="\t\U0001f600\U0001f600 \U0001f600")
def test_ids_are_those_of_sentencepiece(name: str, text: str, at: Path) -> None:
    got = loaded(name, at).encode(text, add_special_tokens=False)
    assert got == Twin(MODELS[name]).encode(text)


@pytest.mark.parametrize("name", ["llama", "gemma", "unigram of bytes"])
@settings(max_examples=40)
@given(text=texts)
def test_texts_come_back_as_they_were(name: str, text: str, at: Path) -> None:
    """Whole, and token by token, a character of several bytes when its last byte is there."""
    tokenizer = loaded(name, at)
    ids = tokenizer.encode(text, add_special_tokens=True)
    whole = text.replace(SPACE, " ")
    assert tokenizer.decode(ids) == whole
    pieces = DetokenizerFactory(tokenizer).make([])
    assert "".join([*(pieces.push(i) for i in ids), pieces.flush()]) == whole


def test_tokens_of_gemmas_kind_have_their_bytes(at: Path) -> None:
    pieces = DetokenizerFactory(loaded("gemma", at))
    ids = loaded("gemma", at).encode(" \U0001f600", add_special_tokens=False)
    assert [pieces.token_bytes(i) for i in ids] == [b" ", b"\xf0", b"\x9f", b"\x98", b"\x80"]


@needs_data
def test_llama_2_has_the_ids_of_its_tokenizer_json(tmp_path: Path) -> None:
    """Which transformers made of the same file."""
    shared = tokenizer_folder("llama2")
    old = load_tokenizer(folder_of(tmp_path, (shared / "tokenizer.model").read_bytes()))
    new = load_tokenizer(shared)
    runs = "a  b   c    d" + " " * 40 + "e <0x0A><s>x</s> y\n\n<unk>"
    for text in (*TEXTS, runs, json.dumps({"k": [1, 2.5, None]}, indent=8)):
        for special in (True, False):
            ids = old.encode(text, add_special_tokens=special)
            assert ids == new.encode(text, add_special_tokens=special), text
            assert old.decode(ids) == new.decode(ids)
    assert old.special_tokens == new.special_tokens and old.eos_token_ids == new.eos_token_ids
    assert old.hidden_token_ids == new.hidden_token_ids


TOKEN = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
SPECIALS = (
    "<s>the</s> a",
    "the<|end|>   the",
    "a <new> b<new>",
    "<unk> in</s></s>",
    " the",
    "  the and <|end|> the",
    "the<s> 1. \U0001f600",
    "\u2581the",
)


@pytest.mark.parametrize("eos", [True, False])
def test_llamas_class_without_legacy_is_transformers(tmp_path: Path, eos: bool) -> None:
    """transformers cannot read the file itself without SentencePiece: its class gets the pieces and our merges."""
    from transformers import LlamaTokenizer

    declared = {
        "288": {"content": "<|end|>", "special": True, **TOKEN, "rstrip": True},
        "287": {"content": "<new>", "special": False, **TOKEN},
    }
    model = made.model_proto(
        [*HEAD, *made.BYTES, *made.pieces_of(made.WORDS[:10], made.LETTERS[:18])],
        byte_fallback=True,
        remove_extra_whitespaces=False,
    )
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True, "add_eos_token": eos}
    config = {"tokenizer_class": "LlamaTokenizer", "legacy": False, **named, "added_tokens_decoder": declared}
    ours = load_tokenizer(folder_of(tmp_path, model, tokenizer_config=config))
    bpe = json.loads(ours.backend.to_str())["model"]
    merges = [tuple(merge) for merge in bpe["merges"]]
    added = {int(i): AddedToken(**token) for i, token in declared.items()}
    theirs = LlamaTokenizer(vocab=bpe["vocab"], merges=merges, legacy=False, added_tokens_decoder=added, **named)
    for text in (*TEXTS, *SPECIALS):
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs(text, add_special_tokens=special).input_ids, text
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
            assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    assert ours.token_id("<|end|>") == 288 and 288 in ours.hidden_token_ids and 287 not in ours.hidden_token_ids


def test_gemmas_class_is_transformers(tmp_path: Path) -> None:
    from transformers import GemmaTokenizer

    config = {"tokenizer_class": "GemmaTokenizer", "bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True}
    ours = load_tokenizer(folder_of(tmp_path, made.gemma_like(), tokenizer_config=config))
    saved = json.loads(ours.backend.to_str())
    theirs = GemmaTokenizer(
        vocab=saved["model"]["vocab"], merges=[tuple(m) for m in saved["model"]["merges"]], add_bos_token=True
    )
    theirs.add_tokens([AddedToken(text, normalized=False) for text in ("<turn>", "\n\n")])
    for text in (*TEXTS, "<bos>the\n\n\nand<turn> in  the</s>", "   x<eos> "):
        ids = ours.encode(text, add_special_tokens=True)
        assert ids == theirs(text).input_ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.token_id("<turn>") not in ours.hidden_token_ids


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [SPACE, "1", "</s>", f"{SPACE}the"]),
        ({"legacy": True}, [SPACE, "1", "</s>", f"{SPACE}the"]),
        ({"legacy": False}, [SPACE, "1", "</s>", "the"]),
        ({"add_prefix_space": False}, ["1", "</s>", "the"]),
    ],
)
def test_a_space_goes_before_each_part_of_a_text_or_the_first(
    tmp_path: Path, config: dict[str, Any], expected: list[str]
) -> None:
    tokenizer = load_tokenizer(folder_of(tmp_path, made.llama_like(), tokenizer_config=config))
    ids = tokenizer.encode("1</s>the", add_special_tokens=False)
    assert [tokenizer.piece(i) for i in ids] == expected


def test_bos_stands_in_front_unless_the_config_says_no(tmp_path: Path) -> None:
    for config, expected in (({}, [1]), ({"add_bos_token": False}, []), ({"add_eos_token": True}, [1, 2])):
        tokenizer = load_tokenizer(folder_of(tmp_path, made.llama_like(), tokenizer_config=config))
        assert tokenizer.encode("", add_special_tokens=True) == expected
        assert tokenizer.eos_token_ids == {2} and tokenizer.bos_token == "<s>"


def test_older_files_add_tokens(tmp_path: Path) -> None:
    size = len(MODELS["llama"].pieces)
    added = {"<|b|>": size + 1, "<|a|>": size}
    tokenizer = load_tokenizer(
        folder_of(tmp_path, MODELS["llama"], added_tokens=added, special_tokens_map={"pad_token": "<|b|>"})
    )
    assert tokenizer.encode("<|a|>", add_special_tokens=False)[-1] == size
    assert tokenizer.encode("<|b|>", add_special_tokens=False) == [size + 1]
    assert size + 1 in tokenizer.hidden_token_ids and size not in tokenizer.hidden_token_ids
    assert tokenizer.vocab_size == size + 2


def test_a_declared_name_takes_the_place_of_a_placeholder(tmp_path: Path) -> None:
    config = {"added_tokens_decoder": {"4": {"content": "<tool>", "special": True, **TOKEN}}}
    tokenizer = load_tokenizer(folder_of(tmp_path, made.gemma_like(), tokenizer_config=config))
    assert tokenizer.piece(4) == "<tool>" and tokenizer.token_id("<turn>") is None
    assert tokenizer.encode("the<tool>", add_special_tokens=False)[-1] == 4 and 4 in tokenizer.hidden_token_ids


@pytest.mark.parametrize(
    ("token_id", "words"), [(9000, "declared with id 9000, but"), (270, "declared with id 270, which is")]
)
def test_ids_that_contradict_the_file_are_refused(tmp_path: Path, token_id: int, words: str) -> None:
    config = {"added_tokens_decoder": {str(token_id): {"content": "<tool>", "special": True}}}
    with pytest.raises(SettingsError, match=f"tokenizer.model: token '<tool>' is {words}"):
        load_tokenizer(folder_of(tmp_path, made.llama_like(), tokenizer_config=config))


def test_a_tab_that_only_bytes_spell_still_merges(tmp_path: Path) -> None:
    """As in Gemma 1: two tabs are a piece, one is not."""
    model = made.model_proto(
        [*HEAD, *made.BYTES, ("a", -1, 1), ("\t\t", -2, 1), (SPACE, -3, 1)], byte_fallback=True, add_dummy_prefix=False
    )
    ids = load_tokenizer(folder_of(tmp_path, model)).encode("a\t\t\ta", add_special_tokens=False)
    assert ids == Twin(model).encode("a\t\t\ta") == [259, 260, 3 + 9, 259]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (b"", "not a protobuf of SentencePiece: it holds no pieces"),
        (b"\x0a\xff", r"not a protobuf of SentencePiece \("),
        (made.llama_like(model_type=3).SerializeToString(), "it has model_type 3, which is not read"),
        (made.llama_like(treat_whitespace_as_suffix=True).SerializeToString(), "treat_whitespace_as_suffix"),
        (made.llama_like(escape_whitespaces=False).SerializeToString(), "escape_whitespaces false"),
        (made.llama_like(unk_id=-1).SerializeToString(), "no unknown piece"),
        (made.model_proto([*HEAD, ("a", 0, made.UNUSED)]).SerializeToString(), "unused pieces"),
    ],
)
def test_files_that_are_not_understood_are_refused(tmp_path: Path, model: bytes, words: str) -> None:
    with pytest.raises(SettingsError, match=rf"tokenizer.model cannot be read: {words}|{words}"):
        load_tokenizer(folder_of(tmp_path, model))


def test_classes_that_do_more_than_the_file_are_refused(tmp_path: Path) -> None:
    folder_of(tmp_path, made.llama_like(), tokenizer_config={"tokenizer_class": "XGLMTokenizerFast"})
    with pytest.raises(SettingsError, match=r"but tokenizer\.model, which is not read for XGLMTokenizer\. Make one"):
        load_tokenizer(tmp_path)


def test_tiktokens_kind_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"tokenizer.model of tiktoken's kind, which does not say how .* split"):
        load_tokenizer(folder_of(tmp_path, b"IQ== 0\nIg== 1\nIw== 2\n"))


def test_a_pointer_of_git_lfs_is_told(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="git lfs pull"):
        load_tokenizer(folder_of(tmp_path, b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"))


def test_characters_are_replaced_as_the_file_says(tmp_path: Path) -> None:
    """A charsmap is a double array, here of one key, with what it stands for behind: "x" becomes "ab"."""
    units = [0] * 0x179
    units[0], units[0x178] = 0x100 << 10, 0x100 << 10 | 1 << 8 | ord("x")  # a child at 0x100 ^ "x", its value at "x"
    charsmap = struct.pack(f"<I{len(units)}I", 4 * len(units), *units) + b"ab\0"
    model = made.unigram_like(precompiled_charsmap=charsmap)
    tokenizer = load_tokenizer(folder_of(tmp_path, model))
    assert tokenizer.encode("thex  an", add_special_tokens=False) == Twin(model).encode("theab  an")


def test_the_reader_needs_no_schema_of_sentencepiece(tmp_path: Path) -> None:
    model = read_model(folder_of(tmp_path, made.unigram_like()) / "tokenizer.model")
    assert [piece.piece for piece in model.pieces][:3] == ["<unk>", "<s>", "</s>"]
    assert to_tokenizer(model, {}, {}).token_to_id("</s>") == 2
