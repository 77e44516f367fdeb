"""State of one LoRA adapter at the coordinator, and of recent refusals. Used by the files beside it alone."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.workers.engine.adapters.adapter_memory import Allocation
from tandem.workers.engine.base.sequence import RequestState, Sequence
from tandem.workers.messages.errors import RequestRefused
from tandem.workers.messages.request import AdapterRef
from tandem.workers.messages.transfer import DropAdapter, FetchAdapter, PlaceAdapter

REFUSED_S = 30.0
"""Time for which requests for a refused adapter are refused without another attempt to read it."""


AdapterOp = FetchAdapter | PlaceAdapter | DropAdapter


@dataclass(slots=True, eq=False)
class Move:
    """An op in flight."""

    ticket: int
    op: AdapterOp
    is_late: bool = False  # its source has not answered for so long that nobody waits for it

    @property
    def is_fetch(self) -> bool:
        """True for a copy from the source to the host."""
        return isinstance(self.op, FetchAdapter)


@dataclass(slots=True, eq=False)
class Adapter:
    """One adapter content."""

    ref: AdapterRef
    on_host: bool = False
    num_pages: int = 0
    move: Move | None = None
    allocation: Allocation | None = None  # device memory that it has or is being copied to
    is_resident: bool = False
    is_draining: bool = False  # it accepts no new users
    served_s: float | None = None  # when the first sequence got a row since it was placed
    served_step: int = 0  # the plan of that
    last_step: int = 0  # the newest plan that names its slot
    used: int = 0  # its last use, in uses of all adapters
    since_s: float = 0.0  # when the first of those that wait for it began to
    placed_s: float = 0.0
    load_s: float = 0.0  # seconds that its moves to the device have taken
    pending: set[Sequence] = field(default_factory=set)  # waiting sequences that it admitted when it was placed
    users: dict[RequestState, None] = field(default_factory=dict)  # requests that have had a row with it, in order

    @property
    def digest(self) -> str:
        """The name of its content."""
        return self.ref.digest

    @property
    def in_use_s(self) -> float:
        """The moment from which its present slice counts."""
        return self.placed_s if self.served_s is None else self.served_s

    def used_by(self) -> list[Sequence]:
        """Returns the sequences of the requests that use it, in the order of their arrival."""
        return [seq for state in sorted(self.users, key=_arrival) for seq in state.sequences]


def _arrival(state: RequestState) -> tuple[int, ...]:
    return state.sequences[0].order


class Refusal(NamedTuple):
    """Refusal of an adapter. source None: for any source. is_passing: not for its content, so it may be tried again."""

    until_s: float
    source: str | None
    reason: str
    is_passing: bool

    def of(self, ref: AdapterRef) -> RequestRefused:
        """Returns the error for a request, with the name by which the request knows the adapter."""
        message = f"adapter {ref.name!r} cannot be served: {self.reason}"
        if self.is_passing:
            return RequestRefused(message, code="service_unavailable", status=503)
        return RequestRefused(message, code="invalid_value", param="model")


class Refusals:
    """Adapters that were refused lately, by digest."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._by_digest: dict[str, Refusal] = {}
        self.count = 0

    def add(self, ref: AdapterRef, source: str | None, reason: str, *, is_passing: bool) -> Refusal:
        """Refuses an adapter; source None: whatever its source is."""
        now_s = self._clock()
        self._by_digest = {digest: old for digest, old in self._by_digest.items() if now_s < old.until_s}
        refusal = self._by_digest[ref.digest] = Refusal(now_s + REFUSED_S, source, reason, is_passing)
        self.count += 1
        return refusal

    def of(self, ref: AdapterRef) -> Refusal | None:
        """Returns the refusal in force for this adapter, None if it may be tried."""
        refusal = self._by_digest.get(ref.digest)
        if refusal is None or self._clock() >= refusal.until_s or refusal.source not in (None, ref.source):
            return None
        return refusal
