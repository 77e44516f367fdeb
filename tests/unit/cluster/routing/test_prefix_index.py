"""PrefixIndex by itself: what is applied, expected, lost and swept, and what a question then says."""

import random
import threading
from collections.abc import Sequence

import pytest

from tandem.cluster.routing.prefix_index import EXPECTED_S, SHARDS, Overlap, PrefixIndex
from tandem.workers.messages.kv_events import KvEvents

TOKENS = 128
HEADS = [bytes([place * 37 % 256]) + place.to_bytes(7, "little") for place in range(50)]


def snapshot(stored: Sequence[bytes] = (), kept: Sequence[bytes] = ()) -> KvEvents:
    return KvEvents("n", 1, stored=list(stored), kept=list(kept), is_snapshot=True)


def index_of(**groups: list[bytes]) -> PrefixIndex:
    index = PrefixIndex(TOKENS)
    for group, stored in groups.items():
        assert index.apply(group, 1, snapshot(stored))
    return index


def test_each_group_has_its_own_share_of_a_prompt() -> None:
    index = index_of(a=HEADS[:3], b=HEADS[:7], c=HEADS[1:9], d=HEADS[20:])
    assert index.overlap(HEADS[:10]) == {"a": Overlap(3 * TOKENS, 0), "b": Overlap(7 * TOKENS, 0)}
    assert index.overlap([]) == {}
    assert index.overlap(HEADS[10:20]) == {}


def test_the_walk_ends_at_the_first_key_that_nobody_has() -> None:
    index = index_of(a=[*HEADS[:3], *HEADS[4:8]])
    taken: list[bytes] = []
    assert index.overlap(taken.append(head) or head for head in HEADS) == {"a": (3 * TOKENS, 0)}
    assert taken == HEADS[:4]


def test_what_is_below_the_device_counts_apart() -> None:
    index = PrefixIndex(TOKENS)
    index.apply("a", 1, snapshot(HEADS[:2], HEADS[2:5]))
    index.apply("b", 1, snapshot([*HEADS[:1], *HEADS[2:3]], HEADS[1:2]))
    assert index.overlap(HEADS) == {"a": (2 * TOKENS, 3 * TOKENS), "b": (TOKENS, 2 * TOKENS)}
    assert index.apply("a", 1, KvEvents("n", 2, stored=HEADS[2:3], kept=HEADS[1:2], gone=HEADS[4:5]))
    assert index.overlap(HEADS) == {"a": (TOKENS, 3 * TOKENS), "b": (TOKENS, 2 * TOKENS)}
    assert index.apply("a", 1, KvEvents("n", 3, gone=HEADS[:4]))
    assert index.overlap(HEADS) == {"b": (TOKENS, 2 * TOKENS)}
    assert len(index) == 3, "no entry stays without a group"


def test_after_a_hole_only_a_snapshot_is_taken() -> None:
    index = index_of(a=HEADS[:2])
    assert index.apply("a", 1, KvEvents("n", 2, stored=HEADS[2:3]))
    assert not index.apply("a", 1, KvEvents("n", 4, stored=HEADS[4:5]))
    assert not index.apply("a", 1, KvEvents("n", 5, gone=HEADS[:1]))
    assert index.overlap(HEADS) == {"a": (3 * TOKENS, 0)}, "what was known stays"
    assert index.apply("a", 1, snapshot(HEADS[:1]))
    assert index.apply("a", 1, KvEvents("n", 2))
    assert index.overlap(HEADS) == {"a": (TOKENS, 0)}


def test_a_snapshot_counts_once_it_is_whole() -> None:
    index = index_of(a=HEADS[:2])
    assert index.apply("a", 1, KvEvents("n", 1, stored=HEADS[:5], is_snapshot=True, is_last=False))
    assert index.overlap(HEADS) == {"a": (2 * TOKENS, 0)}
    assert not index.apply("a", 1, KvEvents("n", 3, is_snapshot=True)), "its second part is missing"
    assert index.overlap(HEADS) == {"a": (2 * TOKENS, 0)}
    assert index.apply("a", 1, KvEvents("n", 1, stored=HEADS[:3], is_snapshot=True, is_last=False))
    assert index.apply("a", 1, KvEvents("n", 2, stored=HEADS[3:6], is_snapshot=True))
    assert index.overlap(HEADS) == {"a": (6 * TOKENS, 0)}


def test_a_group_that_is_not_known_must_begin_with_a_snapshot() -> None:
    index = PrefixIndex(TOKENS)
    assert not index.apply("a", 1, KvEvents("n", 7, stored=HEADS[:1]))
    assert not index.apply("a", 1, KvEvents("n", 0, stored=HEADS[:1]))
    assert index.overlap(HEADS) == {}


def test_a_later_life_takes_the_place_of_an_earlier_one() -> None:
    index = index_of(a=HEADS[:4])
    assert not index.apply("a", 2, KvEvents("n", 2, stored=HEADS[:1])), "it has told nothing yet"
    assert index.overlap(HEADS) == {}
    assert index.apply("a", 2, snapshot(HEADS[:2]))
    assert index.apply("a", 1, KvEvents("n", 2, stored=HEADS[2:9])), "nothing is asked of a life that is over"
    assert index.overlap(HEADS) == {"a": (2 * TOKENS, 0)}


def test_what_was_sent_counts_for_six_seconds_or_until_it_is_told() -> None:
    index = index_of(a=HEADS[:2], b=[])
    index.expect("b", HEADS[:2], 10.0)
    index.expect("nobody", HEADS[:2], 10.0)
    assert index.overlap(HEADS) == {"a": (2 * TOKENS, 0), "b": (2 * TOKENS, 0)}
    index.expect("b", HEADS[:1], 12.0)
    index.tick(10.0 + EXPECTED_S)
    assert index.overlap(HEADS) == {"a": (2 * TOKENS, 0), "b": (TOKENS, 0)}
    index.tick(12.0 + EXPECTED_S)
    assert index.overlap(HEADS) == {"a": (2 * TOKENS, 0)}
    index.expect("b", HEADS[:1], 20.0)
    assert index.apply("b", 1, KvEvents("n", 2, stored=HEADS[:1]))
    assert index.apply("b", 1, KvEvents("n", 3, gone=HEADS[:1]))
    assert index.overlap(HEADS) == {"a": (2 * TOKENS, 0)}, "it came, and has gone since"


def test_a_group_that_leaves_is_forgotten_at_once_and_swept_later() -> None:
    index = index_of(a=HEADS[:30], b=HEADS[:10])
    for _ in range(SHARDS):
        index.tick(0.0)  # the slots before the snapshots
    index.drop("a")
    index.drop("a")
    assert index.overlap(HEADS) == {"b": (10 * TOKENS, 0)} and list(index.groups) == ["b"]
    assert len(index) == 30
    assert index.apply("c", 1, snapshot()), "it cannot have got the bits of one that is still there"
    assert index.overlap(HEADS) == {"b": (10 * TOKENS, 0)}
    for _ in range(SHARDS + 1):
        index.tick(0.0)
    assert len(index) == 10
    assert index.apply("d", 1, snapshot(HEADS[:1])) and index.overlap(HEADS)["d"] == (TOKENS, 0)


def test_bits_are_not_given_away_while_something_is_expected_there() -> None:
    index = index_of(a=[])
    index.expect("a", HEADS[:1], 0.0)
    index.drop("a")
    for _ in range(3 * SHARDS):
        index.tick(EXPECTED_S - 1)
    for number in range(4):
        assert index.apply(f"b{number}", 1, snapshot())
    assert index.overlap(HEADS) == {}


def test_many_lives_take_no_more_bits_than_there_are_groups() -> None:
    index = PrefixIndex(TOKENS)
    for life in range(1, 40):
        assert index.apply("a", life, snapshot(HEADS[: life % 5]))
        for _ in range(SHARDS):
            index.tick(0.0)
    assert max(bits for shard in index._device for bits in shard.values()).bit_length() <= 6


def test_a_question_may_be_asked_on_another_thread_meanwhile() -> None:
    index = index_of(**{f"g{n}": HEADS[:20] for n in range(8)})
    over, failures = threading.Event(), list[BaseException]()

    def ask() -> None:
        try:
            while not over.is_set():
                found = index.overlap(HEADS)
                assert all(0 <= o.device_tokens <= 20 * TOKENS for o in found.values())
        except BaseException as error:
            failures.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    draw = random.Random(1)
    for number in range(600):
        group = f"g{draw.randrange(8)}"
        if number % 7 == 0:
            index.drop(group)
        elif number % 3 == 0:
            index.expect(group, HEADS[:5], number / 100)
        else:
            index.apply(group, number, snapshot(HEADS[: draw.randrange(20)]))
        index.tick(number / 100)
    over.set()
    asking.join(20)
    assert not failures and not asking.is_alive()


@pytest.mark.parametrize("count", [1, 256])
def test_a_prompt_that_all_have_is_told_for_all(count: int) -> None:
    index = index_of(**{f"g{n}": HEADS[: n % 40 + 1] for n in range(count)})
    found = index.overlap(HEADS)
    assert found == {f"g{n}": ((n % 40 + 1) * TOKENS, 0) for n in range(count)}
