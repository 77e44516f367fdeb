"""GrammarMask against brute force: a token is allowed where a fresh matcher takes the output and that token, and a text
may end exactly where the grammar is complete. Also what happens to rows whose grammar fails."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLParserLimits

from tandem.workers.kernels.sampling_ops import SamplingOps, TorchSampling
from tandem.workers.kernels.step_arrays import sending_with
from tandem.workers.messages.step import GRAMMAR_FAILED, NOTHING_LEFT, RowSampling
from tandem.workers.platforms.cpu import CpuPlatform
from tandem.workers.sampling.sampler import Sampled, sample
from tandem.workers.sampling.sampling_table import SamplingTable
from tandem.workers.structured import grammar_store
from tandem.workers.structured.grammar_store import GrammarRefused, GrammarStore
from tandem.workers.text.grammars import choice, json_schema, lark, regex
from tandem.workers.text.tokenizer import load_tokenizer

MODEL = Path(__file__).resolve().parents[3] / "configs" / "demo" / "model"
VOCAB = 775  # more than the tokenizer's 768
EOS, END = 0, 2
PROMPT = [5, 6, 7]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "ages": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "ages"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": json_schema(SCHEMA),
    "regex": regex(r"(ab|c)*\d?"),
    "choice": choice(["yes", "yesterday", "no", "ä\x01"]),
    "lark": lark('start: "a" b* "c"?\nb: "b" | "[" b* "]"'),
}


@cache
def store() -> GrammarStore:
    made = GrammarStore(MODEL, VOCAB, (EOS, END))
    for name, text in GRAMMARS.items():
        made.compile(name, text)
    return made


def table_of(*rows: RowSampling) -> SamplingTable:
    table = SamplingTable(len(rows), VOCAB, grammars=store())
    for number, each in enumerate(rows):
        table.bind(number, each)
    return table


def asks(grammar: str | None, **more: Any) -> RowSampling:
    return RowSampling(**{"temperature": 0.0, "stop_token_ids": (EOS, END), "grammar": grammar, **more})


def run(
    table: SamplingTable, outputs: list[list[int]], places: list[tuple[int, int]], logits: torch.Tensor | None = None
) -> tuple[torch.Tensor, Sampled]:
    """Logits after the chain and what is sampled. places: (row, number of its output tokens that are there)."""

    def history(row: int, position: int) -> tuple[npt.NDArray[np.int32], int]:
        return np.array((PROMPT + outputs[row])[:position], np.int32), len(PROMPT)

    at = np.array(places)
    changed = torch.zeros(len(places), VOCAB) if logits is None else logits.clone()
    drawn = sample(changed, at[:, 0], at[:, 1] + len(PROMPT), table, history, CpuPlatform())
    return changed, drawn.collect()


def allowed(logits_V: torch.Tensor) -> set[int]:
    return set(torch.isfinite(logits_V).nonzero().flatten().tolist())


@cache
def by_force(grammar: str, output: tuple[int, ...]) -> frozenset[int]:
    """What may follow an output: the tokens that a fresh matcher takes behind it, and the ends where it is complete.
    Where it says that a text must follow, only the token that the tokenizer begins that text with."""
    start = store().start(grammar)
    assert start is not None
    fresh = start.deep_copy()
    assert not output or fresh.consume_tokens(list(output))
    inside = {i for i in range(3, 768) if fresh.validate_tokens([i]) == 1}
    ends = {EOS, END} if fresh.is_accepting() else set()
    if not ends and (forced := fresh.compute_ff_tokens()):
        assert forced[0] in inside
        inside = {forced[0]}
    return frozenset(inside | ends)


@given(data=st.data(), name=st.sampled_from(sorted(GRAMMARS)))
def test_every_step_of_a_text_allows_what_brute_force_allows(data: st.DataObject, name: str) -> None:
    table, output = table_of(asks(name)), []
    for _ in range(data.draw(st.integers(1, 6))):
        changed, _ = run(table, [output], [(0, len(output))])
        wanted = by_force(name, tuple(output))
        assert allowed(changed[0]) == wanted
        token = data.draw(st.sampled_from(sorted(wanted)))
        output.append(token)
        if token in (EOS, END):
            changed, _ = run(table, [output], [(0, len(output))])
            assert allowed(changed[0]) == {EOS, END}, "behind the end is nothing but the end"
            return


@given(data=st.data())
def test_drafts_rollbacks_and_rebinds_leave_no_trace(data: st.DataObject) -> None:
    """Rows grow by what drafts bring, lose their last tokens and are bound to other texts, in any order."""
    names = [data.draw(st.sampled_from(sorted(GRAMMARS))) for _ in range(2)]
    table, outputs = table_of(*(asks(name) for name in names)), [[], []]
    for _ in range(data.draw(st.integers(1, 8))):
        row = data.draw(st.integers(0, 1))
        match data.draw(st.sampled_from(["step", "step", "back", "bind"])):
            case "back":
                del outputs[row][data.draw(st.integers(0, len(outputs[row]))) :]
            case "bind":
                names[row] = data.draw(st.sampled_from(sorted(GRAMMARS)))
                outputs[row] = []
                table.bind(row, asks(names[row]))
            case _:
                step_with_drafts(data, table, names, outputs)


def step_with_drafts(data: st.DataObject, table: SamplingTable, names: list[str], outputs: list[list[int]]) -> None:
    """One step of both rows, each with some drafts, right ones and others; a text that has ended begins anew."""
    counts, tried = [len(output) for output in outputs], [list(output) for output in outputs]
    for row, output in enumerate(tried):
        for _ in range(data.draw(st.integers(0, 3))):
            follows = tuple(output) if is_text(names[row], output) else None
            options = sorted(by_force(names[row], follows))[:20] if follows is not None else [3]
            output.append(data.draw(st.sampled_from([*options, 100, EOS])))
    places = [(row, n) for row in range(2) for n in range(counts[row], len(tried[row]) + 1)]
    changed, sampled = run(table, tried, places)
    assert not table.grammars.errors
    for row in range(2):
        own = [place for place, (of, _) in enumerate(places) if of == row]
        for offset, place in enumerate(own):
            text = tried[row][: counts[row] + offset]
            if not is_text(names[row], text):
                break
            assert allowed(changed[place]) == by_force(names[row], tuple(text))
            token = sampled.token_ids[place]
            outputs[row] = [*text, token]
            if offset == len(own) - 1 or token != tried[row][counts[row] + offset]:
                break
        if outputs[row][-1] in (EOS, END):
            outputs[row] = []


def is_text(name: str, output: list[int]) -> bool:
    """Whether an output follows the grammar and has not ended."""
    return all(token not in (EOS, END) and token in by_force(name, tuple(output[:n])) for n, token in enumerate(output))


def test_rows_without_a_grammar_are_as_they_were() -> None:
    table = table_of(asks(None), asks("choice"), asks(None), asks("regex"))
    changed, _ = run(table, [[]] * 4, [(0, 0), (1, 0), (2, 0), (3, 0)])
    assert [len(allowed(row)) for row in changed] == [
        VOCAB, len(by_force("choice", ())), VOCAB, len(by_force("regex", ()))
    ]  # fmt: skip


def test_many_rows_get_the_masks_of_one() -> None:
    """Enough for other threads to be woken."""
    names = sorted(GRAMMARS) * 4
    changed, _ = run(table_of(*map(asks, names)), [[]] * len(names), [(row, 0) for row in range(len(names))])
    for name, logits in zip(names, changed, strict=True):
        assert allowed(logits) == by_force(name, ())


def encode(text: str) -> list[int]:
    return load_tokenizer(MODEL).encode(text, add_special_tokens=False)


def test_a_complete_text_ends_although_min_tokens_and_others_forbid_it() -> None:
    """Where more may follow, min_tokens holds."""
    table = table_of(
        asks("choice", min_tokens=9),
        asks("choice", min_tokens=9, allowed_token_ids=(100,)),
        asks("lark", min_tokens=9),
        asks("regex", min_tokens=9, logit_bias=((EOS, float("-inf")), (END, float("-inf")))),
    )
    outputs = [encode("no"), encode("no"), encode("a"), encode("ab1")]
    changed, sampled = run(table, outputs, [(row, len(output)) for row, output in enumerate(outputs)])
    assert [sampled.token_ids[row] for row in (0, 1, 3)] == [EOS, EOS, EOS] and not any(sampled.failed)
    assert not allowed(changed[2]) & {EOS, END} and allowed(changed[2])


def test_parameters_that_leave_nothing_end_their_row_alone() -> None:
    table = table_of(asks("choice", allowed_token_ids=(100,)), asks("choice"))
    _, sampled = run(table, [[], []], [(0, 0), (1, 0)])
    assert sampled.failed == [True, False] and sampled.reasons == {0: NOTHING_LEFT}


def test_ignored_ends_are_all_that_follows_a_complete_text() -> None:
    table = table_of(asks("choice", stop_token_ids=()))
    output = encode("no")
    for _ in range(3):
        changed, sampled = run(table, [output], [(0, len(output))])
        assert allowed(changed[0]) == {EOS, END}
        output.append(sampled.token_ids[0])


def test_drafts_behind_the_end_change_nothing() -> None:
    """A row that ignores ends goes on behind a draft that is one."""
    table = table_of(asks("choice", stop_token_ids=()), asks("choice", stop_token_ids=()))
    output = encode("no")
    done = len(output)
    places = [(0, done), (0, done + 1), (0, done + 2), (1, done + 1), (1, done + 2)]
    changed, _ = run(table, [[*output, EOS, EOS], [*output, EOS, EOS]], places)
    assert all(allowed(logits) == {EOS, END} for logits in changed)


def test_a_row_whose_grammar_is_missing_or_is_left_gets_an_error() -> None:
    table = table_of(asks("nowhere"), asks("choice"), asks("choice"))
    assert list(table.grammars.errors) == [0]
    run(table, [[], [100], []], [(0, 0), (1, 1), (2, 0)])
    assert sorted(table.grammars.errors) == [0, 1]
    assert all(error.startswith(GRAMMAR_FAILED) for error in table.grammars.errors.values())
    table.bind(0, asks("choice"))
    table.free(1)
    assert not table.grammars.errors


MANY_STATES = regex(r"x{1,80}|(a|b)*a(a|b){12}c")
"""Each place behind its first a may be the one that 12 letters must follow."""


def limited(monkeypatch: pytest.MonkeyPatch, rows: int) -> SamplingTable:
    monkeypatch.setattr(grammar_store, "LIMITS", LLParserLimits(max_lexer_states=30, verbose_errors=False))
    own = GrammarStore(MODEL, VOCAB, (EOS, END))
    own.compile("g", MANY_STATES)
    table = SamplingTable(rows, VOCAB, grammars=own)
    for row in range(rows):
        table.bind(row, asks("g"))
    return table


def up_to_the_limit(table: SamplingTable) -> tuple[list[int], str]:
    """A text of row 0 without drafts, behind whose next token the grammar fails, and why."""
    output = encode("a")
    while not table.grammars.errors:
        run(table, [[*output, *encode("b")]], [(0, len(output) + 1)])
        output += encode("b")
        assert len(output) < 30
    return output[:-1], table.grammars.errors[0]


def test_a_limit_behind_a_draft_ends_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft may be wrong; if it is right its place has no token, for the reason that a step without drafts has."""
    output, reason = up_to_the_limit(limited(monkeypatch, 1))
    assert "too many states" in reason and len(output) > 2
    table, places = limited(monkeypatch, 1), [(0, len(output) + i) for i in range(3)]
    for _ in range(2):
        changed, sampled = run(table, [output + 2 * encode("b")], places)
        assert sampled.failed[:2] == [False, True] and not table.grammars.errors
        assert table.grammars.take_behind_drafts() == {1: reason} and not table.grammars.take_behind_drafts()
        assert allowed(changed[0]) == set(encode("ab"))
        changed, sampled = run(table, [output], [(0, len(output))])
        assert allowed(changed[0]) == set(encode("ab")) and not table.grammars.errors, "another token was chosen"


def test_a_limit_that_one_row_reaches_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matchers of a grammar share what the limit is of."""
    table, short = limited(monkeypatch, 3), encode("ab")
    output, _ = up_to_the_limit(table)
    for row in (1, 2):
        changed, _ = run(table, [short] * 3, [(row, 2), (row, 3)][: 3 - row])
        assert allowed(changed[0]) == set(encode("ab"))
    table.bind(0, asks("g"))
    run(table, [[*output, *encode("b")]], [(0, len(output))])
    assert not table.grammars.errors, "the row has the limit for itself"


def test_a_grammar_that_is_dropped_stays_with_the_rows_that_have_it() -> None:
    own = GrammarStore(MODEL, VOCAB, (EOS, END))
    own.compile("g", GRAMMARS["choice"], ticket=5)
    own.drop("g", ticket=4)
    assert len(own) == 1, "it was compiled again since"
    table = SamplingTable(1, VOCAB, grammars=own)
    table.bind(0, asks("g"))
    own.drop("g", ticket=6)
    assert not len(own)
    changed, _ = run(table, [[]], [(0, 0)])
    assert allowed(changed[0]) == by_force("choice", ())


def test_what_cannot_be_compiled_is_refused_with_the_reason() -> None:
    with pytest.raises(GrammarRefused, match="uniqueItems"):
        store().compile("x", json.dumps({"grammars": [{"json_schema": {"type": "array", "uniqueItems": True}}]}))
    assert store().start("x") is None


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 775, 20_000])
@pytest.mark.parametrize("kind", ["own", "torch"])
def test_keep_leaves_the_logits_whose_bits_are_set(kind: str, vocab: int) -> None:
    ops: SamplingOps = CpuPlatform().sampling_ops() if kind == "own" else TorchSampling()
    rng = np.random.default_rng(vocab)
    logits = torch.from_numpy(rng.normal(size=(5, vocab + 3)).astype(np.float32))[:, :vocab]
    bits = rng.integers(0, 2**32, (3, -(-vocab // 32)), np.uint32) | (rng.integers(0, 2, (3, 1)) * 0xFFFFFFFF).astype(
        np.uint32
    )
    places, wanted = np.array([4, 0, 2]), logits.clone()
    for place, words in zip(places, bits, strict=True):
        kept = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab].astype(bool)
        wanted[place, torch.from_numpy(~kept)] = float("-inf")
    ops.prepare_keep(places, bits, sending_with(lambda host: host))(logits)
    assert torch.equal(logits, wanted)
