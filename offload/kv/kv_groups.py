"""KVGroups: how many KV blocks sequences need when layers with a window give theirs back.

Layers of one group share a block table, and all groups share one pool of blocks of equal bytes, as in vLLM's hybrid KV
cache manager (docs/decisions/037-kv-groups.md). Read by the block manager, `tandem plan` and the sizing of the pool.
Torch-free. A block here is one of one group; a place is the range of block_size tokens for which each group has a
block.
"""

import sys
from dataclasses import dataclass

UNLIMITED = sys.maxsize


@dataclass(frozen=True, slots=True)
class KVGroups:
    """windows: of each group, the last tokens (itself included) that a token attends to; None: all. most_in_flight:
    tokens of one sequence that plans in flight compute, at most."""

    block_size: int
    windows: tuple[int | None, ...] = (None,)
    most_in_flight: int = 0

    @property
    def count(self) -> int:
        return len(self.windows)

    @property
    def has_windows(self) -> bool:
        """True if some group gives blocks back."""
        return any(window is not None for window in self.windows)

    def places(self, num_tokens: int) -> int:
        """Returns the places of num_tokens tokens."""
        return -(-num_tokens // self.block_size)

    def first_seen(self, group: int, num_full: int) -> int:
        """Returns the first place that any token behind num_full whole places sees in a group."""
        window = self.windows[group]
        return 0 if window is None else max(0, num_full * self.block_size - window + 1) // self.block_size

    def most_held(self, group: int) -> int:
        """Returns the most blocks of a group that a sequence holds at once: from the first that is seen from behind
        its last full place, to the last that plans in flight fill."""
        window = self.windows[group]
        if window is None:
            return UNLIMITED
        return self.places(window - 1) + self.places(self.block_size - 1 + self.most_in_flight)

    def needed(self, num_tokens: int) -> int:
        """Returns the most blocks that a sequence which grows to num_tokens tokens holds at once."""
        places = self.places(num_tokens)
        return sum(min(places, self.most_held(group)) for group in range(self.count))

    def longest(self, num_blocks: int) -> int:
        """Returns the number of tokens of the longest sequence that num_blocks blocks can hold; a multiple of
        block_size. UNLIMITED if no length needs more."""
        at_most = [self.most_held(group) for group in range(self.count)]
        left, places = num_blocks, 0
        for rank, most in enumerate(sorted(at_most)):  # up to `most` places, so many groups still grow
            growing = self.count - rank
            if left < (most - places) * growing:
                return (places + left // growing) * self.block_size
            left -= (most - places) * growing
            places = most
        return UNLIMITED

    def held(self, num_tokens: int) -> int:
        """Returns the blocks of a sequence whose num_tokens tokens have been computed and that decodes."""
        places, full = self.places(num_tokens), num_tokens // self.block_size
        return sum(places - self.first_seen(group, full) for group in range(self.count))

    def tokens_held(self, num_blocks: int, context: int) -> int:
        """Returns the tokens of KV that num_blocks blocks hold in decoding sequences of `context` tokens each, which
        are rounded up to whole places."""
        context = self.places(context) * self.block_size
        return num_blocks * context // self.held(context)
