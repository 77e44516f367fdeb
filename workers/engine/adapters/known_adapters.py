"""KnownAdapters: the adapters that somebody uses, waits for or has pinned, or that a rank holds, by digest.

Shared by AdapterCache, which owns it, and its two parts, HostCopies and DevicePlaces.
"""

import logging
import math
from collections.abc import Collection, Iterator

from tandem.workers.engine.adapters.adapter_state import Adapter, AdapterOp, Move, Refusals
from tandem.workers.engine.base.sequence import Sequence
from tandem.workers.engine.waiting.waited import Waited
from tandem.workers.messages.request import AdapterRef
from tandem.workers.messages.transfer import Failure, FetchAdapter

log = logging.getLogger("tandem.engine")
UNREADABLE = "its files cannot be read at the moment, or are not those that were listed"


class KnownAdapters:
    """Adapters by digest, who wants each, and their refusals."""

    def __init__(self, waited: Waited) -> None:
        self.waited = waited
        self.refusals = Refusals(waited.clock)
        self.pinned: dict[str, AdapterRef] = {}
        self._by_digest: dict[str, Adapter] = {}

    def __iter__(self) -> Iterator[Adapter]:
        return iter(self._by_digest.values())

    # ---- queries ----

    def get(self, digest: str) -> Adapter | None:
        """Returns an adapter if it is known."""
        return self._by_digest.get(digest)

    def of(self, seq: Sequence) -> Adapter:
        """Returns the adapter of a sequence that has or had a row."""
        adapter = self._by_digest.get(ref_of(seq).digest)
        assert adapter is not None, "an adapter that is used is not known"
        return adapter

    def waiters(self, adapter: Adapter) -> Collection[Sequence]:
        """Returns the sequences that wait for it, longest first."""
        return self.waited.waiters(adapter.digest)

    def queued(self, adapter: Adapter) -> list[Sequence]:
        """Returns the sequences that it admitted to the queue and that may still wait for it again."""
        return [seq for seq in self.waited.waiting.with_adapter(adapter.digest) if seq.state not in adapter.users]

    def is_pinned(self, adapter: Adapter) -> bool:
        """Returns whether it is to be loaded when there is room, and evicted last."""
        return adapter.digest in self.pinned

    def is_idle(self, adapter: Adapter) -> bool:
        """Returns whether it is on the device and no request uses it or is queued for it."""
        return adapter.is_resident and not adapter.users and not self.queued(adapter)

    def is_refused_pin(self, adapter: Adapter) -> bool:
        """Returns whether only a pin wants it, and its refusal is still in force."""
        refusal = None if self.waiters(adapter) else self.refusals.of(adapter.ref)
        if refusal is not None:
            self.waited.look_again_at(refusal.until_s)
        return refusal is not None

    # ---- commands ----

    def entry(self, ref: AdapterRef) -> Adapter:
        """Returns an adapter, which is known from now on."""
        return self._by_digest.setdefault(ref.digest, Adapter(ref))

    def touch(self, adapter: Adapter) -> None:
        """Notes a use."""
        adapter.used = self.waited.next_use()

    def start(self, adapter: Adapter, op: AdapterOp, late_s: float = math.inf) -> None:
        """Starts a move; an adapter has one at a time."""
        adapter.move = Move(self.waited.start(op, late_s), op)

    def refuse_moved(self, adapter: Adapter, source: str | None, op: AdapterOp, failure: Failure) -> None:
        """Refuses it after a rank failed to move it. Clients read only failures of its content."""
        ref, what = op.adapter, "fetch" if isinstance(op, FetchAdapter) else "place"
        log.warning("%s of adapter %s (%.12s) failed: %s", what, ref.name, ref.digest, failure.message)
        is_passing = failure.kind != "content"
        self.refuse(adapter, source, UNREADABLE if is_passing else failure.message, is_passing=is_passing)

    def refuse(self, adapter: Adapter, source: str | None, reason: str, *, is_passing: bool = False) -> None:
        """Unblocks its waiters with that source (None: any); the engine ends their requests."""
        refusal = self.refusals.add(adapter.ref, source, reason, is_passing=is_passing)
        failure = Failure("source" if is_passing else "content", reason)
        for seq in self.waited.unblock_refused(
            adapter.digest, failure, lambda seq: source in (None, ref_of(seq).source)
        ):
            self.waited.refuse(seq.state, refusal.of(ref_of(seq)))

    def forget_gone(self) -> None:
        """Forgets those that have no user, waiter or pin, and that no rank holds."""
        for adapter in [a for a in self if self._is_gone(a) and not self.is_pinned(a)]:
            del self._by_digest[adapter.digest]

    def _is_gone(self, adapter: Adapter) -> bool:
        wanted = self.waiters(adapter) or adapter.users or self.queued(adapter)
        return not (wanted or adapter.on_host or adapter.move or adapter.allocation)


def ref_of(seq: Sequence) -> AdapterRef:
    """Returns the adapter of a sequence that has one, by the name and source that its request gives."""
    ref = seq.state.request.adapter
    assert ref is not None
    return ref
