"""What the coordinator knows of one LoRA adapter, and of those that were refused. Called by the adapter pool alone."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from workers.engine.adapter_memory import Place
from workers.engine.adapter_moves import Move
from workers.engine.sequence import RequestState, Sequence
from workers.errors import RequestRefused
from workers.messages import AdapterRef

REFUSED_S = 30.0
"""How long a refused adapter is refused unseen; then its source may have been mended."""


@dataclass(slots=True, eq=False)
class Adapter:
    """One content. place: pages that it has or is being copied to. waiters: sequences in line for it, since since_s.
    queued: sequences that it let into the queue. holders: requests that have had a row with it. guests: those of
    `queued` that had waited for it when it was placed; has_served: some sequence has run since. used: when, in uses of
    all adapters. last_step: the newest plan that names its slot. load_s: what its moves to the device have taken."""

    ref: AdapterRef
    on_host: bool = False
    num_pages: int = 0
    move: Move | None = None
    place: Place | None = None
    is_resident: bool = False
    is_closed: bool = False
    has_served: bool = False
    last_step: int = 0
    used: int = 0
    since_s: float = 0.0
    placed_s: float = 0.0
    load_s: float = 0.0
    waiters: dict[Sequence, None] = field(default_factory=dict)
    queued: dict[Sequence, None] = field(default_factory=dict)
    guests: set[Sequence] = field(default_factory=set)
    holders: set[RequestState] = field(default_factory=set)

    @property
    def is_gone(self) -> bool:
        """Nobody wants it, no rank has it."""
        wanted = self.waiters or self.queued or self.holders
        return not (wanted or self.on_host or self.move or self.place)

    @property
    def is_idle(self) -> bool:
        return self.is_resident and not self.queued and not self.holders


class Turnover(NamedTuple):
    """What tend() leaves to the engine: sequences that may go on to the queue, those that have to leave it and wait in
    line, and requests to end with a reason. In this order: withdrawn, ready, refused."""

    withdrawn: list[Sequence]
    ready: list[Sequence]
    refused: list[tuple[RequestState, RequestRefused]]


class Refusal(NamedTuple):
    """source None: whatever it is read from. is_passing: not because of its content, so trying again may help."""

    until_s: float
    source: str | None
    reason: str
    is_passing: bool

    def of(self, ref: AdapterRef) -> RequestRefused:
        """What a request for it is told, which knows the adapter by a name of its own."""
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
        """source None: it is refused from wherever it is read."""
        now_s = self._clock()
        self._by_digest = {digest: old for digest, old in self._by_digest.items() if now_s < old.until_s}
        refusal = self._by_digest[ref.digest] = Refusal(now_s + REFUSED_S, source, reason, is_passing)
        self.count += 1
        return refusal

    def of(self, ref: AdapterRef) -> Refusal | None:
        """Why this adapter is refused unseen, and until when; None: it may be tried."""
        refusal = self._by_digest.get(ref.digest)
        if refusal is None or self._clock() >= refusal.until_s or refusal.source not in (None, ref.source):
            return None
        return refusal
