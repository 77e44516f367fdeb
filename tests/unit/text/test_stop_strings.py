"""Stop strings against a search of the whole text, for any split into tokens."""

from hypothesis import example, given
from hypothesis import strategies as st

from tandem.workers.text.stop_strings import StopMatcher, first_complete, possible_beginning

ALPHABET = st.text("ab ", max_size=8)
STOPS = st.lists(st.text("ab ", min_size=1, max_size=4), min_size=1, max_size=4)


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[str, str | None, int, list[str]]:
    matcher = StopMatcher(stops, include_stop=include)
    shown: list[str] = []
    for piece in pieces:
        step = matcher.push(piece)
        shown.append(step.text)
        if step.stop is not None:
            return "".join(shown), step.stop, matcher.tokens_kept, shown
    end = matcher.flush()
    shown.append(end.text)
    return "".join(shown), end.stop, matcher.tokens_kept, shown


def naive(stops: list[str], pieces: list[str], include: bool) -> tuple[str, str | None, int]:
    """Character by character over the whole text."""
    text = "".join(pieces)
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            count = next(i for i in range(len(pieces) + 1) if len("".join(pieces[:i])) >= end)
            return text[: end if include else end - len(stop)], stop, count
    return text, None, len(pieces)


@given(STOPS, st.lists(ALPHABET, max_size=12), st.booleans())
@example(["ab", "b"], ["a", "b"], False)
@example(["aab"], ["a", "a", "a", "b"], False)
def test_equals_a_search_of_the_whole_text(stops: list[str], pieces: list[str], include: bool) -> None:
    assert run(stops, pieces, include)[:3] == naive(stops, pieces, include)


@given(STOPS, st.lists(ALPHABET, max_size=12))
def test_withholds_only_what_may_begin_a_stop_string(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen = shown = ""
    for piece in pieces:
        step = matcher.push(piece)
        seen += piece
        shown += step.text
        if step.stop is not None:
            return
        held = seen[len(shown) :]
        assert seen.startswith(shown)
        assert not held or any(stop.startswith(held) for stop in stops)


def test_text_of_the_first_tokens_is_not_searched() -> None:
    matcher = StopMatcher(["x"], min_tokens=2)
    assert [matcher.push(t).stop for t in ("x", "x", "x")] == [None, None, "x"]
    assert matcher.tokens_kept == 3


def test_the_end_may_complete_a_stop_string_with_held_back_bytes() -> None:
    matcher = StopMatcher(["a\ufffd"])
    assert matcher.push("za").text == "z"
    assert matcher.flush("\ufffd") == ("", "a\ufffd")


def test_long_stop_strings_stay_cheap() -> None:
    stop = "a" * 255 + "b"
    matcher = StopMatcher([stop] * 4)
    shown = "".join(matcher.push("a").text for _ in range(3000))
    assert len(shown) == 3000 - 255
    assert possible_beginning("a" * 300, [stop]) == 255
    assert first_complete("xx" + stop, [stop]) == (2, stop)


def test_the_longest_beginning_of_any_stop_string_counts_whatever_their_order() -> None:
    for stops in (["abc", "bcde"], ["bcde", "abc"]):
        assert possible_beginning("xab", stops) == 2
    assert possible_beginning("xab", ["ab"]) == 0, "a whole stop string is no beginning"
    assert possible_beginning("aab", ["b", "ac"]) == 0
