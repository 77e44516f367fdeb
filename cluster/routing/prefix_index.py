"""PrefixIndex: which groups have the KV of a prompt's beginning, as far as they have told.

    apply <-- KvEvents of each group          expect <-- what the router has sent          overlap --> tokens by group

Pure: neither Ray nor a clock, and no lock. apply, drop, expect and tick belong to one thread, the event loop; overlap
may run on another meanwhile, as it only looks into dicts. A key's head stands for a set of groups, a bit each; a group
that leaves has its bit retired at once, and tick takes it out of the entries shard by shard. The idea of an index of KV
in the router is Dynamo's, which has a radix tree; chained keys need none, as a key stands for all tokens before it.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from tandem.workers.messages.kv_events import KvEvents

EXPECTED_S: Final = 6.0
"""Seconds for which a prompt that was sent counts as stored; by then the group has told that it is."""
SHARDS: Final = 1024
"""Parts of the tables, so that none grows or is cleaned for long at a time."""


class Overlap(NamedTuple):
    """Leading tokens of a prompt whose KV a group has: on the device, and further ones that are there or below it."""

    device_tokens: int
    below_tokens: int


class _Known(msgspec.Struct):
    """One life of a group. slot: of its bit. filling: the slot of a snapshot of which parts are still to come. next:
    the number of its next message, 0 while it must be a snapshot's first."""

    life: int
    slot: int
    filling: int | None = None
    next: int = 0


class PrefixIndex:
    """The groups of one model, KV type and block size. tokens: between two keys that are told."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._device: list[dict[bytes, int]] = [{} for _ in range(SHARDS)]
        self._below: list[dict[bytes, int]] = [{} for _ in range(SHARDS)]
        self._groups: dict[str, _Known] = {}
        self._names: list[str | None] = []  # by slot, None for one that does not count
        self._bits: list[int] = []  # one object each, which most entries share
        self._free: list[int] = []
        self._retired: dict[int, int] = {}  # slots and the shards that may still have them
        self._seen = 0  # bits that count
        self._swept = 0
        self._expected: dict[bytes, int] = {}
        self._until: dict[tuple[bytes, int], float] = {}
        self._ends: deque[tuple[float, bytes, int]] = deque()
        self._num_expected: Counter[int] = Counter()  # by slot

    def __len__(self) -> int:
        """Returns the number of keys, on the device and below it."""
        return sum(map(len, self._device)) + sum(map(len, self._below))

    @property
    def groups(self) -> Iterable[str]:
        """The groups that have told something."""
        return self._groups.keys()

    # ---- what groups tell ----

    def apply(self, group: str, life: int, events: KvEvents) -> bool:
        """Takes a message of a group. Returns False when one before it was lost, until a snapshot has begun; what was
        known before stays meanwhile. A later life of the group takes the place of an earlier one."""
        self._sweep()
        known = self._groups.get(group)
        if known is not None and known.life > life:
            return True  # the last words of a life that is over
        if known is None or known.life != life:
            self.drop(group)
            known = self._groups[group] = _Known(life, self._new_slot(group))
        if events.is_snapshot and events.number == 1:
            self._drop_filling(known)
            known.filling, known.next = self._new_slot(None), 1
        elif events.number != known.next or not known.next:
            self._drop_filling(known)
            known.next = 0
            return False
        known.next += 1
        if known.filling is None:
            self._enter(known.slot, events)
            return True
        self._enter(known.filling, events)
        if events.is_last:
            self._retire(known.slot)
            known.slot, known.filling = known.filling, None
            self._names[known.slot] = group
            self._seen |= self._bits[known.slot]
        return True

    def drop(self, group: str) -> None:
        """Forgets a group. O(1): its entries go later."""
        known = self._groups.pop(group, None)
        if known is not None:
            self._drop_filling(known)
            self._retire(known.slot)

    # ---- what was sent ----

    def expect(self, group: str, keys: Sequence[bytes], now_s: float) -> None:
        """Counts these heads as stored by a group for EXPECTED_S, or until it tells that they are. No effect on a group
        that has told nothing."""
        known = self._groups.get(group)
        if known is None:
            return
        bit, until_s = self._bits[known.slot], now_s + EXPECTED_S
        for head in keys:
            if not self._device[_shard(head)].get(head, 0) & bit:
                self._expected[head] = self._expected.get(head, 0) | bit
                self._num_expected[known.slot] += (head, known.slot) not in self._until
                self._until[head, known.slot] = until_s
                self._ends.append((until_s, head, known.slot))

    def tick(self, now_s: float) -> None:
        """Forgets what was expected for too long, and cleans one shard of the entries of groups that have left. Call it
        about twice a second."""
        self._sweep()
        while self._ends and self._ends[0][0] <= now_s:
            _, head, slot = self._ends.popleft()
            if self._until.get((head, slot), now_s) <= now_s:
                self._came(head, slot)

    # ---- the question ----

    def overlap(self, keys: Iterable[bytes]) -> dict[str, Overlap]:
        """Returns, for each group that has any, how much it has of a prompt. keys: the heads of its chain, which are
        taken one by one until no group has the next."""
        on_device = somewhere = self._seen
        ends_on_device: list[tuple[int, int]] = []  # (groups, keys that they have)
        ends: list[tuple[int, int]] = []
        count, expected = 0, self._expected
        for head in keys:
            shard = _shard(head)
            device = self._device[shard].get(head, 0)
            if expected:
                device |= expected.get(head, 0)
            some = somewhere & (device | self._below[shard].get(head, 0))
            if count and (lost := on_device & ~device):
                ends_on_device.append((lost, count))
            if count and (lost := somewhere & ~some):
                ends.append((lost, count))
            on_device, somewhere = on_device & device, some
            if not somewhere:
                break
            count += 1
        ends_on_device.append((on_device, count))
        ends.append((somewhere, count))
        device_keys = {slot: n for mask, n in ends_on_device for slot in _slots(mask)}
        return self._by_group(device_keys, ends)

    # ---- inside ----

    def _by_group(self, device_keys: dict[int, int], ends: list[tuple[int, int]]) -> dict[str, Overlap]:
        found: dict[str, Overlap] = {}
        for mask, keys in ends:
            for slot in _slots(mask):
                if (name := self._names[slot]) is not None and keys:
                    device = device_keys.get(slot, 0)
                    found[name] = Overlap(device * self._tokens, (keys - device) * self._tokens)
        return found

    def _enter(self, slot: int, events: KvEvents) -> None:
        bit = self._bits[slot]
        for head in events.stored:
            shard = _shard(head)
            self._add(self._device[shard], head, bit)
            _take(self._below[shard], head, bit)
            if self._expected:
                self._came(head, slot)
        for head in events.kept:
            shard = _shard(head)
            self._add(self._below[shard], head, bit)
            _take(self._device[shard], head, bit)
        for head in events.gone:
            shard = _shard(head)
            _take(self._device[shard], head, bit)
            _take(self._below[shard], head, bit)

    def _add(self, shard: dict[bytes, int], head: bytes, bit: int) -> None:
        have = shard.get(head, 0)
        shard[head] = have | bit if have else bit  # alone it is the one object of its slot

    def _came(self, head: bytes, slot: int) -> None:
        if self._until.pop((head, slot), None) is not None:
            _take(self._expected, head, self._bits[slot])
            self._num_expected[slot] -= 1

    def _new_slot(self, name: str | None) -> int:
        if self._free:
            slot = self._free.pop()
            self._names[slot] = name
        else:
            slot = len(self._names)
            self._names.append(name)
            self._bits.append(1 << slot)
        if name is not None:
            self._seen |= self._bits[slot]
        return slot

    def _retire(self, slot: int) -> None:
        self._names[slot] = None
        self._seen &= ~self._bits[slot]
        self._retired[slot] = SHARDS

    def _drop_filling(self, known: _Known) -> None:
        if known.filling is not None:
            self._retire(known.filling)
            known.filling = None

    def _sweep(self) -> None:
        """Cleans one shard of retired slots. One that has left all shards can be given to a group again, when
        nothing is expected there."""
        if not self._retired:
            return
        gone = sum(self._bits[slot] for slot in self._retired)
        for shard in (self._device[self._swept], self._below[self._swept]):
            for head in [head for head, bits in shard.items() if bits & gone]:
                _take(shard, head, gone)
        self._swept = (self._swept + 1) % SHARDS
        for slot, left in list(self._retired.items()):
            if left > 1 or self._num_expected[slot]:
                self._retired[slot] = max(1, left - 1)
            else:
                del self._retired[slot], self._num_expected[slot]
                self._free.append(slot)


def _shard(head: bytes) -> int:
    return head[0] | (head[1] & 3) << 8


def _take(shard: dict[bytes, int], head: bytes, bits: int) -> None:
    """Takes bits out of an entry, and the entry if none is left."""
    have = shard.get(head)
    if have is not None and have & bits:
        if left := have & ~bits:
            shard[head] = left
        else:
            del shard[head]


def _slots(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
