"""RecentOutputs: the token ids of answers that have ended, and where a sequence's last tokens occur in them.

Used by suffix.py. Their ids lie behind one another in a ring. Chains through it, as in LZ77 compressors, lead from each
place to the one before whose last tokens have the same hash, for a few lengths of such grams. So an answer costs the
same bytes whatever it says, and the oldest ones make room by a step of one number. N tokens, P places, M tokens that
are looked for.
"""

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
Places = npt.NDArray[np.int64]
MAX_TOKENS = 1 << 20
"""A power of two. 52 bytes each: 4 of the id, and 8 for a link and a head of each length."""
LENGTHS = (8, 3, 1)
"""Lengths of the grams that have chains."""
MOST_PLACES = 32
"""Places that one search looks at, the latest ones."""
NO_TOKEN = -1

_FACTORS = np.random.default_rng(2411).integers(1, 1 << 63, LENGTHS[0], np.uint64) * np.uint64(2) + np.uint64(1)
_MIX = np.uint64(0x9E3779B97F4A7C15)


class Match(NamedTuple):
    """Places where the longest match ends, the latest first, and its length in tokens; 0: there is none."""

    places_P: Places
    length: int


class RecentOutputs:
    """At most max_outputs answers of at most max_tokens tokens in all, less one between any two; those that came first
    go first."""

    def __init__(self, max_outputs: int, max_tokens: int = MAX_TOKENS) -> None:
        assert max_tokens & (max_tokens - 1) == 0, f"max_tokens {max_tokens}: a power of two"
        self._max_outputs, self._room = max_outputs, max_tokens
        self._shift = np.uint64(64 - max_tokens.bit_length() + 1)
        self._tokens = np.full(max_tokens, NO_TOKEN, np.int32)
        self._links = np.zeros((len(LENGTHS), max_tokens), np.int64)
        self._heads = np.zeros((len(LENGTHS), max_tokens), np.int64)
        self._starts: deque[int] = deque()
        self._end = 1  # places count on from 1, so that 0 is none

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, token_ids: Tokens) -> None:
        """Keeps int32 [N] as one answer; of a longer one than there is room for its end."""
        if not self._max_outputs:
            return
        tokens_N = token_ids[-(self._room - 2) :]
        start, count = self._end, len(tokens_N) + 1
        self._end += count
        while self._starts and (self._end - self._starts[0] >= self._room or len(self._starts) >= self._max_outputs):
            self._starts.popleft()
        self._starts.append(start)
        slots = self._slots(np.arange(start, start + count + 1))
        self._tokens[slots[1:-1]] = tokens_N
        self._tokens[slots[[0, -1]]] = NO_TOKEN
        hashes_N = np.zeros(len(tokens_N), np.uint64)
        words_N = tokens_N.astype(np.uint64)
        for back in range(min(LENGTHS[0], len(tokens_N))):
            hashes_N[back:] += words_N[: len(words_N) - back] * _FACTORS[back]
            if back + 1 in LENGTHS:  # the last token has none behind it, and needs no link
                self._link(LENGTHS.index(back + 1), hashes_N[back:-1], start + 1 + back)

    def find(self, last_M: Tokens) -> Match:
        """Returns the longest match of the end of int32 [M], of the latest MOST_PLACES places where its last 8, else 3,
        else 1 tokens occur with a token behind them."""
        backwards_M = last_M[::-1]
        words = backwards_M[: LENGTHS[0]].astype(np.uint64)
        buckets = self._bucket(np.cumsum(words * _FACTORS[: len(words)], dtype=np.uint64)).tolist()
        for chain, length in enumerate(LENGTHS):
            if length > len(words) or not (found := self._chain(chain, buckets[length - 1])):
                continue
            places_P = np.array(found)
            same_PM = self._tokens[self._slots(places_P[:, None] - np.arange(len(last_M)))] == backwards_M
            lengths_P = np.logical_and.accumulate(same_PM, 1).sum(1)
            longest = int(lengths_P.max())
            if longest >= length:
                return Match(places_P[lengths_P == longest], longest)
        return Match(np.empty(0, np.int64), 0)

    def behind(self, places_P: Places, count: int) -> Tokens:
        """Returns the `count` tokens behind each place, int32 [P, count]; from the end of an answer on anything, but
        first NO_TOKEN."""
        return self._tokens[self._slots(places_P[:, None] + np.arange(1, 1 + count))]

    def _chain(self, chain: int, bucket: int) -> list[int]:
        """The latest places of a bucket."""
        if not self._starts:
            return []
        links, oldest, mask = self._links[chain], self._starts[0], self._room - 1
        place = int(self._heads[chain, bucket])
        found: list[int] = []
        while place >= oldest and len(found) < MOST_PLACES:
            found.append(place)
            place = int(links[place & mask])
        return found

    def _link(self, chain: int, hashes_N: npt.NDArray[np.uint64], start: int) -> None:
        """Puts grams that end at `start` and the places behind it at the head of their chains."""
        if not len(hashes_N):
            return
        buckets_N = self._bucket(hashes_N)
        order_N = np.argsort(buckets_N, kind="stable")
        sorted_N, places_N = buckets_N[order_N], start + order_N
        again_N = np.append(False, sorted_N[1:] == sorted_N[:-1])
        before_N = np.where(again_N, np.roll(places_N, 1), self._heads[chain, sorted_N])
        self._links[chain, self._slots(places_N)] = before_N
        is_last_N = np.append(~again_N[1:], True)
        self._heads[chain, sorted_N[is_last_N]] = places_N[is_last_N]

    def _bucket(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        return ((hashes * _MIX) >> self._shift).astype(np.int64)

    def _slots(self, places: Places) -> Places:
        return places & (self._room - 1)
