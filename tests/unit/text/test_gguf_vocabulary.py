"""Tokenizers of GGUF files: ids as those of the folders that the files were made of, and what is refused.

Metadata is made as llama.cpp's converter makes it: tokens by id, their types, merges as text, scores.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tandem.configs.bundled import DEMO_MODEL
from tandem.workers.messages.errors import SettingsError
from tandem.workers.text.chat_template import find_chat_template
from tandem.workers.text.tokenizer import ModelTokenizer, load_tokenizer
from tandem.workers.text.vocabulary.gguf_vocabulary import text_files
from tandem.workers.text.vocabulary.sentencepiece_model import read_model
from tests.support import sentencepiece_file as made
from tests.unit.text.data import needs_data, tokenizer_folder
from tests.unit.text.test_tokenizer import TEXTS

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
SPLIT = (
    *TEXTS,
    "It's 12345.67 can't\n\n  x  =  'y'",
    "e\u0301 \u00e9",
    "<|im_start|>user\nhi<|im_end|>\n",
    "   a\t\tb",
)


def of_bytes(folder: Path, split: str, **more: Any) -> dict[str, Any]:
    """The metadata of a folder with tokenizer.json."""
    file = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    added = {token["content"]: CONTROL if token["special"] else USER_DEFINED for token in file["added_tokens"]}
    merges = [one if isinstance(one, str) else " ".join(one) for one in file["model"]["merges"]]
    found = {
        "model": "gpt2", "pre": split, "tokens": tokens, "token_type": [added.get(token, NORMAL) for token in tokens],
        "merges": merges, **more,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def of_pieces(pieces: Any, **more: Any) -> dict[str, Any]:
    """The metadata of SentencePiece's."""
    found = {
        "model": "llama", "tokens": [piece.piece for piece in pieces], "scores": [piece.score for piece in pieces],
        "token_type": [piece.type for piece in pieces], **more,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def loaded(metadata: Mapping[str, Any], folder: Path) -> ModelTokenizer:
    folder.mkdir(exist_ok=True)
    for name, text in text_files(metadata).items():
        (folder / name).write_text(text)
    return load_tokenizer(folder)


def check_same(ours: ModelTokenizer, theirs: ModelTokenizer, *, specials: bool = False) -> None:
    for text in SPLIT:
        ids = ours.encode(text, add_special_tokens=specials)
        assert ids == theirs.encode(text, add_special_tokens=specials), text
        assert ours.decode(ids) == theirs.decode(ids), text
    assert ours.hidden_token_ids == theirs.hidden_token_ids


def test_the_demos_ids_template_and_ends(tmp_path: Path) -> None:
    template = (DEMO_MODEL / "chat_template.jinja").read_text()
    metadata = of_bytes(DEMO_MODEL, "smollm", eos_token_id=2, padding_token_id=0)
    metadata |= {"tokenizer.chat_template": template, "general.sampling.temp": 0.5, "general.sampling.top_k": 7}
    found, demo = loaded(metadata, tmp_path), load_tokenizer(DEMO_MODEL)
    check_same(found, demo, specials=True)
    assert found.eos_token_ids == demo.eos_token_ids == {0, 2}  # 0 by its name, as llama.cpp has it
    assert (found.defaults.temperature, found.defaults.top_k) == (0.5, 7)
    ours, theirs = find_chat_template(tmp_path, None, found), find_chat_template(DEMO_MODEL, None, demo)
    assert ours is not None and theirs is not None
    messages = [{"role": "user", "content": "Hi"}]
    assert ours.render(messages) == theirs.render(messages)


@needs_data
@pytest.mark.parametrize(("name", "pre"), [("gpt2", "gpt-2"), ("qwen2.5", "qwen2")])
def test_ids_of_real_vocabularies(name: str, pre: str, tmp_path: Path) -> None:
    folder = tokenizer_folder(name)
    check_same(loaded(of_bytes(folder, pre), tmp_path), load_tokenizer(folder))


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_ids_of_sentencepiece(kind: str, tmp_path: Path) -> None:
    model = made.llama_like() if kind == "llama" else made.gemma_like()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.model").write_bytes(model.SerializeToString())
    pieces = read_model(tmp_path / "model" / "tokenizer.model").pieces
    ids = {name: getattr(model.trainer_spec, f"{key}_id") for name, key in (("bos", "bos"), ("eos", "eos"))}
    more = {f"{name}_token_id": i for name, i in ids.items()} | {"add_space_prefix": kind == "llama"}
    found = loaded(of_pieces(pieces, unknown_token_id=model.trainer_spec.unk_id, **more), tmp_path / "gguf")
    check_same(found, load_tokenizer(tmp_path / "model"))
    assert found.encode("the", add_special_tokens=True)[0] == ids["bos"]
    for text in (*made.WORDS, "the  and\u2581\u2581 in"):
        assert found.encode(text, add_special_tokens=False) == made.Twin(model).encode(text)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "rwkv"}, "a tokenizer of the kind 'rwkv' is not read; serve with --tokenizer and the folder"),
        ({"pre": "poro"}, "how texts are split, 'poro', is not known"),
        ({"tokens": []}, "it holds no tokenizer"),
        ({"merges": ["un known"]}, "cannot be read"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=f"GGUF: .*{words}"):
        loaded(of_bytes(DEMO_MODEL, "smollm", **changes), tmp_path)


def test_bos_is_added_as_the_file_says(tmp_path: Path) -> None:
    for adds in (True, False):
        found = loaded(of_bytes(DEMO_MODEL, "smollm", bos_token_id=1, add_bos_token=adds), tmp_path)
        assert (found.encode("a", add_special_tokens=True)[0] == 1) is adds
        assert found.encode("a", add_special_tokens=False)[0] != 1
