"""The tokenizer against transformers' AutoTokenizer, and the files that it reads beside tokenizer.json."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from tandem.workers.messages.errors import ContextLengthExceeded, RequestRefused, SettingsError
from tandem.workers.text.tokenizer import ModelTokenizer, check_token_ids, load_tokenizer
from tests.unit.text.data import TOKENIZERS, needs_data, tokenizer_folder

TEXTS = (
    "",
    " ",
    "Hello, world!",
    "  two leading and trailing  ",
    "Ünïcödé, 日本語 and 😀👩‍👩‍👧 and \u0301combining",
    "line\nbreaks\r\n\ttabs\x00nul",
    "1234567890 don't 'quote' <s> </s> <|im_start|> <|endoftext|>",
    "\u2581lower one eighth block",
    "a" * 300,
    "\ufffd replacement",
)


@cache
def ours(name: str) -> ModelTokenizer:
    return load_tokenizer(tokenizer_folder(name))


@cache
def theirs(name: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_folder(name))


@needs_data
@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_encodes_as_transformers_does(name: str, add_special_tokens: bool) -> None:
    for text in TEXTS:
        expected = theirs(name)(text, add_special_tokens=add_special_tokens).input_ids
        assert ours(name).encode(text, add_special_tokens=add_special_tokens) == expected, text


@needs_data
@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_decodes_as_transformers_does(name: str, skip_special_tokens: bool) -> None:
    for text in TEXTS:
        ids = ours(name).encode(text, add_special_tokens=True)
        expected = theirs(name).decode(ids, skip_special_tokens=skip_special_tokens)
        assert ours(name).decode(ids, skip_special_tokens=skip_special_tokens) == expected


@needs_data
@pytest.mark.parametrize("name", TOKENIZERS)
def test_knows_the_special_tokens(name: str) -> None:
    other = theirs(name)
    assert ours(name).bos_token == other.bos_token
    assert ours(name).eos_token == other.eos_token
    assert other.eos_token_id in ours(name).eos_token_ids
    assert ours(name).hidden_token_ids == set(other.all_special_ids) | {
        i for i, token in other.added_tokens_decoder.items() if token.special
    }


def small_tokenizer() -> Tokenizer:
    """Byte-level, 256 bytes and three special tokens."""
    alphabet = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<bos>", "<eos>", "<end>")])
    return tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    def write(**files: Any) -> Path:
        small_tokenizer().save(str(tmp_path / "tokenizer.json"))
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tmp_path

    return write


@needs_data
def test_older_files_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    """vocab.json, merges.txt and added_tokens.json, as OPT and early GPT-2 fine-tunes have them."""
    from transformers import AutoTokenizer

    saved = json.loads((tokenizer_folder("gpt2") / "tokenizer.json").read_text())["model"]
    merges = (merge if isinstance(merge, str) else " ".join(merge) for merge in saved["merges"])
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (tmp_path / "vocab.json").write_text(json.dumps(saved["vocab"]))
    named = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**named, "unk_token": "<|endoftext|>"}))
    old, new = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = old.encode(text, add_special_tokens=True)
        assert ids == new(text).input_ids and old.decode(ids) == new.decode(ids, skip_special_tokens=True)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|b|>": 50258, "<|a|>": 50257}))
    assert load_tokenizer(tmp_path).encode("<|a|><|b|>", add_special_tokens=False) == [50257, 50258]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("vocab.txt", "which is not read. Make one of it: python -c"),
        ("vocab.json", "which is not read without merges.txt or for its tokenizer_class. Make one of it: python -c"),
        ("spiece.model", r"which is not read. Make one of it: .* \(first `pip install sentencepiece`\)"),
        ("tokenizer.model.v3", r"which is not read. Make one of it: .* \(first `pip install sentencepiece`\)"),
        ("qwen.tiktoken", "which does not say how texts are split. Take the tokenizer.json"),
        ("tiktoken.model", "which does not say how texts are split. Take the tokenizer.json"),
    ],
)
def test_files_that_are_not_read_say_what_to_do(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(SettingsError, match=rf"no tokenizer.json, but {name}, {words}") as refused:
        load_tokenizer(tmp_path)
    assert ("Make one" in words) == (f"T.from_pretrained('{tmp_path}').save_pretrained('NEW')" in str(refused.value))


def test_a_declared_id_that_the_vocabulary_does_not_give_is_refused(folder: Callable[..., Path]) -> None:
    at = folder(tokenizer_config={"added_tokens_decoder": {"300": {"content": "<far>", "special": True}}})
    with pytest.raises(SettingsError, match="token '<far>' is declared with id 300, but the vocabulary gives it 259"):
        load_tokenizer(at)


def test_reads_defaults_and_all_eos_ids(folder: Callable[..., Path]) -> None:
    tokenizer = load_tokenizer(
        folder(
            tokenizer_config={"eos_token": {"content": "<eos>"}, "bos_token": "<bos>"},
            generation_config={
                "eos_token_id": [258],
                "temperature": 0.5,
                "top_k": 20,
                "top_p": None,
            },
        )
    )
    assert tokenizer.eos_token_ids == {257, 258}
    assert tokenizer.defaults.temperature == 0.5
    assert tokenizer.defaults.top_k == 20
    assert tokenizer.defaults.top_p == 1.0


CLASSES = (
    *("PreTrainedTokenizerFast", "LlamaTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer", "CohereTokenizerFast"),
    *("GemmaTokenizerFast", "GPTNeoXTokenizerFast", "OPTTokenizer", "BloomTokenizerFast", None),
)
FLAGS: tuple[dict[str, Any], ...] = (
    *({"add_bos_token": value} for value in (True, False, None)),
    *({}, {"add_eos_token": True}, {"add_bos_token": False, "add_eos_token": False}),
)


def framed_as_theirs(at: Path, saved: Tokenizer, config: dict[str, Any], model_type: str) -> tuple[ModelTokenizer, int]:
    """Our tokenizer of a folder, checked against AutoTokenizer, and how many tokens it adds."""
    from transformers import AutoTokenizer

    saved.save(str(at / "tokenizer.json"))
    (at / "tokenizer_config.json").write_text(json.dumps(config))
    (at / "config.json").write_text(json.dumps({"model_type": model_type}))
    mine, other = load_tokenizer(at), AutoTokenizer.from_pretrained(at)
    rest = other("ab", add_special_tokens=False).input_ids
    whole = other("ab").input_ids
    before = whole.index(rest[0])
    bare = mine.encode("ab", add_special_tokens=False)
    ids = mine.encode("ab", add_special_tokens=True)
    assert ids == [*whole[:before], *bare, *whole[before + len(rest) :]], (config, model_type)
    return mine, len(ids) - len(bare)


@pytest.mark.parametrize("of_class", CLASSES)
def test_bos_and_eos_are_those_of_transformers(of_class: str | None, tmp_path: Path) -> None:
    """tokenizer.json decides, not add_bos_token and add_eos_token, and in one class neither does."""
    named = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<end>"}
    plain, framed = small_tokenizer(), small_tokenizer()
    framed.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B:1", special_tokens=[("<bos>", 256)]
    )
    for flags in FLAGS:
        config = {**named, **({} if of_class is None else {"tokenizer_class": of_class}), **flags}
        assert framed_as_theirs(tmp_path, plain, config, "llama")[1] == 0
        for model_type in ("gpt_neox", "olmo2") if "NeoX" in str(of_class) else ("llama",):
            mine, count = framed_as_theirs(tmp_path, framed, config, model_type)
            assert count == (model_type != "gpt_neox")
            said = [line.split()[1] for line in mine.remarks]
            wrong = {"add_bos_token": bool(count), "add_eos_token": False}
            assert said == [key for key, value in flags.items() if value not in (None, wrong[key])]


def test_stated_bos_and_eos_frame_texts_of_older_files(tmp_path: Path) -> None:
    alphabet = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    (tmp_path / "vocab.json").write_text(json.dumps({**alphabet, "<bos>": 256, "<eos>": 257}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    for flags, expected in (({"add_bos_token": True}, [256]), ({"add_bos_token": None}, []), ({}, [])):
        named = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<bos>", "eos_token": "<eos>"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**named, **flags}))
        assert load_tokenizer(tmp_path).encode("a", add_special_tokens=True)[:-1] == expected


def test_adds_tokens_that_only_the_config_declares(folder: Callable[..., Path]) -> None:
    declared = {"259": {"content": "<new>", "special": True}, "256": {"content": "<bos>", "special": True}}
    tokenizer = load_tokenizer(folder(tokenizer_config={"added_tokens_decoder": declared, "pad_token": "<pad>"}))
    assert tokenizer.encode("<new>", add_special_tokens=False) == [259]
    assert tokenizer.token_id("<pad>") == 260
    assert {259, 260} <= tokenizer.hidden_token_ids
    assert tokenizer.vocab_size == 261


@pytest.mark.parametrize("content", ["", "[]", "{", '{"version":"1.0"}'])
def test_broken_files_are_settings_errors(tmp_path: Path, content: str) -> None:
    with pytest.raises(SettingsError):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(SettingsError):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_broken_neighbours_are_settings_errors(tmp_path: Path, content: str) -> None:
    small_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(SettingsError, match=r"tokenizer_config\.json") as refusal:
        load_tokenizer(tmp_path, flag="MODEL")
    assert refusal.value.flag == "MODEL", "the folder of the model, not one that --tokenizer gave"


def test_refuses_what_no_tokens_can_spell_before_tokenizing(folder: Callable[..., Path]) -> None:
    tokenizer = load_tokenizer(folder())
    tokenizer.check_bytes("a" * 50, 10, "prompt")
    with pytest.raises(ContextLengthExceeded) as refusal:
        tokenizer.check_bytes("ä" * 40, 10, "prompt")
    assert refusal.value.param == "prompt"


def test_names_the_token_id_outside_the_vocabulary() -> None:
    check_token_ids([], 10, "prompt")
    check_token_ids([0, 9], 10, "prompt")
    with pytest.raises(RequestRefused, match="Token id 10"):
        check_token_ids([3, 10], 10, "prompt")
    with pytest.raises(RequestRefused, match="Token id -1"):
        check_token_ids([-1], 10, "prompt")
