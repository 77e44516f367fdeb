"""GrammarCache: the compiled grammars of one group, for the scheduler, by digest of their text.

    unknown --a request comes--> wanted --its turn--> compiling --> ready --least recently used, no request--> dropped
                                                         `--error, or too late--> its requests are refused

A request wants its grammar from its arrival to its end, so that what runs or was preempted keeps it. A sequence whose
grammar is not ready is blocked (GRAMMAR). At most MAX_COMPILING are compiled at once; next is the one of the tenant
that was served least, then the one that waits longest. Owned by the engine's thread; compiles nothing (TransferManager,
and the ranks' grammar lanes).
"""

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from tandem.workers.engine.base.blockers import Awaited, Blocker
from tandem.workers.engine.base.sequence import RequestState, Sequence
from tandem.workers.engine.transfers.transfer_manager import TransferManager, TransferOutcome
from tandem.workers.engine.waiting.admission_rule import AdmissionRule
from tandem.workers.engine.waiting.waited import NO_EVENTS, CacheEvents, Waited
from tandem.workers.engine.waiting.waiting_queue import WaitingQueue
from tandem.workers.messages.errors import RequestRefused
from tandem.workers.messages.transfer import CompileGrammar, DropGrammar

log = logging.getLogger("tandem.engine")
MAX_COMPILING = 2
MAX_READY = 256
"""Grammars on the rank, in use or not; beyond it requests wait until others end."""
MAX_IDLE_BYTES = 4 * 2**20
"""Text of ready grammars that no request wants."""
MAX_REFUSED = 256
FIRST_EXTRA_S = 60.0
"""More time for the first grammar: the rank may have to read the tokenizer for it."""


@dataclass(slots=True, eq=False)
class _Grammar:
    """One grammar."""

    text: str
    since_s: float  # when the first of its users came
    users: dict[RequestState, None] = field(default_factory=dict)  # live requests that want it
    ticket: int | None = None  # of the order to compile it; None: not ordered
    is_ready: bool = False
    is_late: bool = False  # the order has taken too long, and the requests so far are refused
    used: int = 0  # its last use


class GrammarCache(AdmissionRule):
    """Grammars of the requests of one engine. timeout_s: how long one may take to compile."""

    cause = "grammar"

    def __init__(
        self,
        transfers: TransferManager,
        waiting: WaitingQueue,
        clock: Callable[[], float],
        timeout_s: float,
        *,
        max_ready: int = MAX_READY,
        max_idle_bytes: int = MAX_IDLE_BYTES,
    ) -> None:
        self._waited = Waited(Blocker.GRAMMAR, transfers, waiting, clock)
        self._timeout_s = timeout_s
        self._max_ready, self._max_idle_bytes = max_ready, max_idle_bytes
        self._known: dict[str, _Grammar] = {}
        self._refused: dict[str, str] = {}
        self._has_compiled = False

    # ---- the engine's side ----

    @property
    def look_again_s(self) -> float:
        """Implements WaitedCache."""
        return self._waited.look_again_s

    def check(self, state: RequestState) -> None:
        """Implements WaitedCache: grammars that are known to be wrong are refused."""
        if state.grammar in self._refused:
            raise _refusal(self._refused[state.grammar])

    def enter(self, state: RequestState) -> None:
        """Implements WaitedCache: its sequences will want its grammar."""
        text = state.request.sampling.grammar
        if state.grammar is None or text is None:
            return
        grammar = self._known.get(state.grammar)
        if grammar is None:
            grammar = self._known[state.grammar] = _Grammar(text, self._waited.clock())
        grammar.users[state] = None
        grammar.used = self._waited.next_use()
        self._waited.has_changed = True

    def leave(self, state: RequestState) -> None:
        """Implements WaitedCache."""
        grammar = None if state.grammar is None else self._known.get(state.grammar)
        if grammar is not None and state in grammar.users:
            del grammar.users[state]
            grammar.used = self._waited.next_use()
            self._waited.has_changed = True

    def advance(self, done_step: int, late: Collection[int] = ()) -> CacheEvents:
        """Implements WaitedCache: applies what the ranks have answered, and gives the next orders."""
        waited = self._waited
        if not (waited.has_changed or waited.outcomes or late):
            return NO_EVENTS
        for outcome in waited.take_outcomes():
            self._finish(outcome)
        for digest, grammar in self._known.items() if late else ():
            if grammar.ticket in late and not grammar.is_late:
                grammar.is_late = waited.has_changed = True
                log.warning("grammar %.12s takes longer than %g s to compile", digest, self._timeout_s)
        if waited.has_changed:
            waited.has_changed = False
            self._refuse_late()
            self._forget_unwanted()
            self._order_next()
        return waited.take_events()

    def texts(self) -> list[str]:
        """Returns the grammars that it knows."""
        return [grammar.text for grammar in self._known.values()]

    # ---- the scheduler's side ----

    def before_queue(self, seq: Sequence) -> Awaited | None:
        """Implements AdmissionRule: a sequence waits until its grammar is compiled."""
        if seq.grammar is None:
            return None
        grammar = self._known.get(seq.grammar)
        return None if grammar is not None and grammar.is_ready else Awaited(Blocker.GRAMMAR, seq.grammar)

    # ---- inside ----

    def _finish(self, outcome: TransferOutcome) -> None:
        op, failure = outcome.op, outcome.failure
        if not isinstance(op, CompileGrammar):
            return  # nobody waits for a drop
        self._waited.has_changed = self._has_compiled = True
        grammar = self._known[op.digest]
        grammar.ticket, grammar.is_late = None, False
        if failure is None:
            grammar.is_ready = True
            self._waited.admit(op.digest)
            return
        if failure.kind == "content":
            self._refused[op.digest] = failure.message
            if len(self._refused) > MAX_REFUSED:
                del self._refused[next(iter(self._refused))]
            self._refuse(grammar, _refusal(failure.message))
        else:
            log.warning("grammar %.12s was not compiled: %s", op.digest, failure.message)
            message = "Structured output is not possible at the moment: the grammar could not be compiled."
            self._refuse(grammar, RequestRefused(message, code="service_unavailable", status=503))
        del self._known[op.digest]

    def _refuse_late(self) -> None:
        for grammar in self._known.values():
            if grammar.is_late and grammar.users:
                message = f"it takes longer to compile than the limit of {self._timeout_s:g} s (--grammar-timeout)"
                self._refuse(grammar, _refusal(message))

    def _refuse(self, grammar: _Grammar, refusal: RequestRefused) -> None:
        """Refuses its requests: the engine ends them, and they leave()."""
        for state in grammar.users:
            self._waited.refuse(state, refusal)
        grammar.users.clear()

    def _forget_unwanted(self) -> None:
        """Forgets what nobody wants and no rank has, and drops idle grammars, least recently used first, while they are
        too many or too large."""
        for digest in [d for d, g in self._known.items() if not (g.users or g.is_ready or g.ticket is not None)]:
            del self._known[digest]
        idle = sorted(((g.used, d) for d, g in self._known.items() if g.is_ready and not g.users), reverse=True)
        room = self._max_ready - sum(
            g.ticket is not None or (g.is_ready and bool(g.users)) for g in self._known.values()
        )
        wanted = sum(not g.is_ready and g.ticket is None for g in self._known.values())
        num_kept = max(0, room - min(wanted, MAX_COMPILING))
        num_bytes = 0
        for place, (_, digest) in enumerate(idle):
            num_bytes += len(self._known[digest].text)
            if place >= num_kept or num_bytes > self._max_idle_bytes:
                del self._known[digest]
                self._waited.start(DropGrammar(digest=digest))

    def _order_next(self) -> None:
        """Orders grammars that requests want, as long as there is room. Among equals the one that came first, never by
        digest: a redacted recording has others (recording/redaction.py)."""
        line = [(digest, g) for digest, g in self._known.items() if not g.is_ready and g.ticket is None]
        line.sort(
            key=lambda one: (self._waited.least_served(state.sequences[0] for state in one[1].users), one[1].since_s)
        )
        compiling = sum(g.ticket is not None and not g.is_late for g in self._known.values())
        taken = sum(g.ticket is not None or g.is_ready for g in self._known.values())
        most = min(MAX_COMPILING - compiling, self._max_ready - taken)
        for digest, grammar in line[: max(0, most)]:
            late_s = self._timeout_s if self._has_compiled else self._timeout_s + FIRST_EXTRA_S
            order = CompileGrammar(digest=digest, text=grammar.text)
            grammar.ticket = self._waited.start(order, late_s)

    # ---- invariants, for tests ----

    def check_users(self, states: Iterable[RequestState]) -> None:
        """Asserts that live requests, and no others, are counted as users, and that those with a row are ready."""
        wanted: dict[str, set[RequestState]] = {}
        for state in states:
            if state.grammar is not None:
                wanted.setdefault(state.grammar, set()).add(state)
                grammar = self._known[state.grammar]
                assert grammar.is_ready or all(seq.row < 0 for seq in state.sequences), "a row without its grammar"
        assert wanted == {d: set(g.users) for d, g in self._known.items() if g.users}, "users are miscounted"
        for digest, grammar in self._known.items():
            assert not (grammar.is_ready and self._waited.waiters(digest)), "blocked for nothing"
        assert sum(g.is_ready for g in self._known.values()) <= self._max_ready, "more grammars than there is room for"


def _refusal(message: str) -> RequestRefused:
    return RequestRefused(f"The grammar cannot be used: {message}", code="invalid_grammar")
