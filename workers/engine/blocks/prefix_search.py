"""The longest prefix that can be reused, when layers have groups with windows.

A group without a window needs every block of the prefix, one with a window those alone that the first token behind it
sees (SlidingWindowManager.find_longest_cache_hit of vLLM). A shorter prefix may lack what a longer one does not need,
so the search goes from the end to the beginning; each block is looked up once at most.
"""

from collections.abc import Callable, Sequence

from tandem.offload.kv.kv_groups import KVGroups

Has = Callable[[bytes], bool]
"""Says whether the block of a key exists."""


def longest_prefix(groups: KVGroups, keys: Sequence[bytes], count: int, has: Has) -> int:
    """Returns how many of `count` leading places can be reused. keys: of each group in turn for each place."""
    whole = [group for group, window in enumerate(groups.windows) if window is None]
    partly = [group for group, window in enumerate(groups.windows) if window is not None]
    found = count
    if whole:
        lacking = (place for place in range(count) if not all(has(keys[place * groups.count + g]) for g in whole))
        found = next(lacking, count)
    run = dict.fromkeys(partly, found)  # from there on the group has all blocks up to `found`
    while found:
        hole = next((hole for g in partly if (hole := _hole(groups, keys, g, found, run, has)) is not None), None)
        if hole is None:
            return found
        found = hole
    return 0


def _hole(groups: KVGroups, keys: Sequence[bytes], group: int, found: int, run: dict[int, int], has: Has) -> int | None:
    """Returns the last place that a group lacks of those that a prefix of `found` places needs; None if it has all."""
    run[group] = min(run[group], found)
    for place in range(run[group] - 1, groups.first_seen(group, found) - 1, -1):
        if not has(keys[place * groups.count + group]):
            return place
        run[group] = place
    return None
