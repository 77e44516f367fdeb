"""What llguidance knows of a model's tokens: added tokens that are not special are text, special ones are not."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from tandem.workers.structured.grammar_store import GrammarRefused, GrammarStore
from tandem.workers.structured.masks import MaskWriter
from tandem.workers.structured.row_grammar import Position
from tandem.workers.text import grammars

DEMO = Path(__file__).resolve().parents[3] / "configs" / "demo" / "model"
VOCAB = 800
ADDED = {"content": "<new_mark>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def save(folder: Path, special: bool) -> int:
    """The demo's tokenizer with one more token, whose id is returned."""
    fields = json.loads((DEMO / "tokenizer.json").read_text())
    new = max(t["id"] for t in fields["added_tokens"] + [{"id": i} for i in fields["model"]["vocab"].values()]) + 1
    fields["added_tokens"].append({**ADDED, "id": new, "special": special})
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    (folder / "tokenizer_config.json").write_text((DEMO / "tokenizer_config.json").read_text())
    return new


@pytest.mark.parametrize("special", [False, True])
def test_an_added_token_is_text_unless_it_is_special(tmp_path: Path, special: bool) -> None:
    token = save(tmp_path, special)
    store = GrammarStore(tmp_path, VOCAB, ())
    store.compile("text", 'start: "<new_mark>" /[a-z]+/')
    start = store.start("text")
    assert start is not None
    assert start.deep_copy().validate_tokens([token]) == (0 if special else 1)
    store.compile("named", "start: <new_mark> /[a-z]+/" if special else f"start: <[{token}]> /[a-z]+/")
    named = store.start("named")
    assert named is not None and named.deep_copy().validate_tokens([token]) == 1


def test_tokens_with_a_space_in_front_do_not_stand_for_text_without(tmp_path: Path) -> None:
    """A tokenizer that adds a space to each text (SentencePiece): forced text is still spelled with its own tokens."""
    pieces = ["<unk>", "</s>", "\n", *'▁{}":abc', '▁{"', '{"', '":', "▁a"]
    merges = [("{", '"'), ("▁", '{"'), ('"', ":"), ("▁", "a")]
    model = models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    store = GrammarStore(tmp_path, len(pieces), ())
    store.compile("forced", 'start: "{\\"a\\":" /[abc]/ "}"')
    start = store.start("forced")
    assert start is not None
    ids = [tokenizer.token_to_id(piece) for piece in ('{"', "a", '":', "b", "}")]
    assert start.deep_copy().validate_tokens(ids) == len(ids)
    assert start.deep_copy().validate_tokens([tokenizer.token_to_id('▁{"')]) == 0


NO_BEGIN = "no token of the model's vocabulary can begin it: its texts begin with "
FORMS = [
    (grammars.choice(["cab", "x"]), NO_BEGIN + "'c', 'x'"),
    (grammars.regex("[x-z]+"), NO_BEGIN + "'x', 'y', 'z'"),
    (grammars.regex("[A-Z]"), NO_BEGIN + "'A', 'B', 'C', 'D', 'E', ..."),
    (grammars.lark('start: "c" /[ab]/'), NO_BEGIN + "'c'"),
    (grammars.lark('start: "é"'), NO_BEGIN + "byte 0xc3"),
    (grammars.json_schema({"type": "object"}), NO_BEGIN + "'{'"),
    ("start: /[^\\x{0}-\\x{10FFFF}]/", "it allows no text"),
]


def test_a_form_that_no_token_can_begin_is_refused_by_saying_so(tmp_path: Path) -> None:
    pieces = ["<unk>", "</s>", "a", "b", "ab", "1"]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    store, demo = GrammarStore(tmp_path, len(pieces), ()), GrammarStore(DEMO, VOCAB, ())
    for grammar, reason in FORMS:
        with pytest.raises(GrammarRefused) as refusal:
            store.compile("none", grammar)
        assert str(refusal.value) == reason
        if reason != "it allows no text":
            demo.compile("some", grammar)
    for grammar in (grammars.choice(["xa", "ab"]), grammars.regex("x*"), grammars.json_schema({"type": "integer"})):
        store.compile("some", grammar)
    store.compile("stuck", grammars.choice(["aca"]))
    row = store.row("stuck", (1,))
    assert row is not None
    assert row.move_to(np.array([2], np.int32)) is Position.OPEN and row.error() is None
    row.matcher.compute_bitmask()
    assert row.error() == "no token of the model's vocabulary can follow the text so far"


def test_tokens_that_the_model_has_not_are_left_out() -> None:
    """A tokenizer may have more tokens than the model: masks have a bit for each of the model's."""
    vocab = 600  # of 768
    store = GrammarStore(DEMO, vocab, (2,))
    store.compile("text", 'start: "<new_mark>" /[a-z]+/')
    start = store.start("text")
    assert start is not None
    matcher = start.deep_copy()
    bits = np.zeros((1, -(-vocab // 32)), np.uint32)
    MaskWriter().fill(bits, [(matcher, 0)], threads=1)
    assert bits.any() and not matcher.is_error()
