"""The JSON of bodies: a long body is read in turns, and is what json's own decoder makes of it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.gateway.serving import json_body
from tandem.cluster.gateway.serving.json_body import RUN_CHARS, parse_object
from tandem.workers.messages.errors import RequestRefused

DEPTH = 6
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(SCALARS, lambda v: st.lists(v) | st.dictionaries(st.text(), v), max_leaves=40)
SPOILS = [",", "]", "[", "{", "}", '"', "1", "e", ".", "-", " ", "NaN", "1e999", "\\ud800", ":", "٣", "\x00", "\\"]


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs end everywhere, also in the middle of small examples."""
    monkeypatch.setattr(json_body, "RUN_CHARS", 12)


def outcome(text: str, *, is_long: bool) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "LONG_BYTES", 0 if is_long else 2**30)
        try:
            return parse_object(text.encode(), DEPTH)
        except RequestRefused as refusal:
            return refusal.code, str(refusal)


def is_early(said: Any) -> bool:
    """What is found where it stands, and not after errors behind it."""
    return isinstance(said, tuple) and ("deeper" in said[1] or "surrogate" in said[1])


@given(
    st.dictionaries(st.text(), VALUES, max_size=4),
    st.booleans(),
    st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t:\r")]),
    st.lists(st.tuples(st.integers(0, 10_000), st.sampled_from(SPOILS), st.booleans()), max_size=2),
)
def test_a_long_body_is_read_as_a_short_one(
    value: dict[str, Any], ascii: bool, separators: tuple[str, str], spoils: list[tuple[int, str, bool]]
) -> None:
    text = json.dumps(value, ensure_ascii=ascii, separators=separators)
    for place, what, replaces in spoils:
        at = place % (len(text) + 1)
        text = text[:at] + what + text[at + replaces :]
    short, long = outcome(text, is_long=False), outcome(text, is_long=True)
    assert long == short or (isinstance(short, tuple) and is_early(long)), text


@pytest.mark.parametrize(
    "item",
    ["7", "-1.5e3", '"a, ]b"', '"\\"\\\\"', "[]", "[1, 2]", "{}", '{"role": "user", "content": "[hi]"}', "true"],
)
def test_no_run_is_long(item: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two calls of json's scanner other threads may go on: none sees much of a list."""
    monkeypatch.setattr(json_body, "RUN_CHARS", RUN_CHARS)
    seen: list[int] = []

    class Decoder(json.JSONDecoder):
        def decode(self, text: str) -> Any:  # type: ignore[override]
            seen.append(len(text))
            return super().decode(text)

    monkeypatch.setattr(json_body, "_STRICT", Decoder())
    text = f'{{"x": [{", ".join([item] * 30_000)}]}}'
    assert parse_object(text.encode(), DEPTH) == json.loads(text)
    assert max(seen) <= RUN_CHARS + 2 and len(seen) <= 2 + 20 * len(text) // RUN_CHARS, "bounded, and not item by item"


def lists(levels: int) -> str:
    return "[" * levels + "]" * levels


@pytest.mark.parametrize("levels", [DEPTH - 2, DEPTH - 1, DEPTH, 3000])
@pytest.mark.parametrize("is_long", [False, True])
def test_the_depth_is_counted_alike(levels: int, is_long: bool) -> None:
    said = outcome(f'{{"x": [{lists(levels)}, 1]}}', is_long=is_long)
    assert is_early(said) == (levels + 2 > DEPTH), said
