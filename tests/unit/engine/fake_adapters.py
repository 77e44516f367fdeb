"""The ranks' side of moves of adapters without bytes: host copies, device pages and slots of each rank; strict about
what may be written while a plan in flight, or about to run, names it.

Each rank has three lanes, for folders, for URLs and for memory; each takes its moves in the order in which they were
sent and answers for itself. A page holds the digest whose bytes were copied there last; a slot is good as long as all
its pages hold its digest.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tandem.workers.messages.transfer import DropAdapter, Failure, FetchAdapter, PlaceAdapter, TransferResult, lane_of

AdapterOp = FetchAdapter | PlaceAdapter | DropAdapter
KINDS: dict[type[AdapterOp], str] = {FetchAdapter: "fetch", PlaceAdapter: "place", DropAdapter: "drop"}


def kind_of(move: AdapterOp) -> str:
    return KINDS[type(move)]


def two_pages(digest: str, rank: int) -> int:
    del digest, rank
    return 2


def never(move: AdapterOp, rank: int) -> str | None:
    del move, rank
    return None


def promptly(move: AdapterOp, rank: int) -> int | None:
    del move, rank
    return 0


@dataclass(frozen=True)
class AdapterPlan:
    """What the fake ranks have. pages: what a digest takes on a rank. refuses: why a rank cannot carry out a move.
    is_unreadable: not because of its content. delay: how often a rank is looked at before it does (None: never yet)."""

    num_pages: int = 8
    num_ranks: int = 1
    max_loras: int = 4
    max_cpu_loras: int = 16
    pages: Callable[[str, int], int] = two_pages
    refuses: Callable[[AdapterOp, int], str | None] = never
    delay: Callable[[AdapterOp, int], int | None] = promptly
    is_unreadable: bool = False


class FakeAdapters:
    """All ranks' slabs, host copies and lanes."""

    def __init__(self, plan: AdapterPlan) -> None:
        self.plan = plan
        ranks = range(plan.num_ranks)
        self.host: list[set[str]] = [set() for _ in ranks]
        self.page: list[list[str | None]] = [[None] * plan.num_pages for _ in ranks]
        self.slots: list[dict[int, tuple[str, list[int]]]] = [{} for _ in ranks]
        self.sent: list[AdapterOp] = []
        self.under_way: dict[int, AdapterOp] = {}
        self._awaiting: dict[int, set[int]] = {}
        self._lanes = [(rank, kind) for rank in ranks for kind in ("folder", "url", "placement")]
        self._queues: list[deque[AdapterOp]] = [deque() for _ in self._lanes]
        self._looked = [0 for _ in self._lanes]

    # ---- the executor's side ----

    def send(self, move: AdapterOp, named: set[int]) -> None:
        """named: slots that plans in flight use."""
        assert move.ticket not in self.under_way and move.ticket > 0
        others = [other for other in self.under_way.values() if other.adapter.digest == move.adapter.digest]
        assert not others, f"a {kind_of(move)} of {move.adapter.digest} beside a {kind_of(others[0])} of it"
        if isinstance(move, PlaceAdapter):
            self._check_place(move, named)
        self.sent.append(move)
        self.under_way[move.ticket] = move
        self._awaiting[move.ticket] = set(range(self.plan.num_ranks))
        for (_, kind), waiting in zip(self._lanes, self._queues, strict=True):
            if kind == lane_of(move):
                waiting.append(move)

    def check_plan(self, slots: set[int]) -> None:
        """A plan names only slots that are whole, and none that is being written."""
        for move in self._places():
            assert move.slot not in slots, f"a plan names slot {move.slot} while it is being placed"
        for slot in slots:
            pages = self._pages_of(slot)
            for move in self._places():
                assert not pages & set(move.pages), f"a plan names slot {slot} while its pages are being written"

    def content(self, rank: int, slot: int) -> str:
        """The digest that a rank computes with for this slot."""
        assert slot in self.slots[rank], f"rank {rank} knows no slot {slot}"
        digest, pages = self.slots[rank][slot]
        need = self.plan.pages(digest, rank)
        held = [self.page[rank][page] for page in pages[:need]]
        assert held == [digest] * need, f"rank {rank}, slot {slot} of {digest}: its pages hold {held}"
        return digest

    def pump(self) -> list[TransferResult]:
        """Every rank is looked at once; returns their answers."""
        done: list[TransferResult] = []
        for lane, waiting in enumerate(self._queues):
            rank = self._lanes[lane][0]
            while waiting:
                delay = self.plan.delay(waiting[0], rank)
                if delay is None or self._looked[lane] < delay:
                    self._looked[lane] += 1
                    break
                self._looked[lane] = 0
                done.append(self._carry_out(waiting.popleft(), rank))
        return done

    def taken(self, result: TransferResult) -> None:
        """The engine has taken an answer."""
        self._awaiting[result.ticket].remove(result.rank)
        if not self._awaiting[result.ticket]:
            del self._awaiting[result.ticket], self.under_way[result.ticket]

    # ---- a rank's lane ----

    def _places(self) -> list[PlaceAdapter]:
        return [move for move in self.under_way.values() if isinstance(move, PlaceAdapter)]

    def _check_place(self, move: PlaceAdapter, named: set[int]) -> None:
        pages = set(move.pages)
        assert pages and len(pages) == len(move.pages) and pages <= set(range(self.plan.num_pages))
        assert move.slot not in named, f"slot {move.slot} is placed anew under a plan in flight"
        for slot in named:
            shared = pages & self._pages_of(slot)
            assert not shared, f"page(s) {shared} are rewritten under a plan in flight"
        for other in self._places():
            assert not pages & set(other.pages) and move.slot != other.slot, "two places write one page or slot"

    def _pages_of(self, slot: int) -> set[int]:
        return set(self.slots[0][slot][1]) if slot in self.slots[0] else set()

    def _carry_out(self, move: AdapterOp, rank: int) -> TransferResult:
        digest = move.adapter.digest
        error = self.plan.refuses(move, rank)
        if isinstance(move, DropAdapter):
            self.host[rank].discard(digest)
            return TransferResult(rank=rank, ticket=move.ticket)
        if error is not None:
            failure = Failure("source" if self.plan.is_unreadable else "content", error)
            return TransferResult(rank=rank, ticket=move.ticket, failure=failure)
        need = self.plan.pages(digest, rank)
        if isinstance(move, FetchAdapter):
            self.host[rank].add(digest)
            return TransferResult(rank=rank, ticket=move.ticket, pages=need)
        assert digest in self.host[rank], f"rank {rank} has no host copy of {digest} to place"
        assert len(move.pages) >= need, "fewer pages than the rank asked for"
        for page in move.pages[:need]:
            self.page[rank][page] = digest
        self.slots[rank][move.slot] = (digest, move.pages)
        return TransferResult(rank=rank, ticket=move.ticket)

    # ---- for tests ----

    def kinds(self) -> dict[str, int]:
        """Moves sent, by kind."""
        counts = dict.fromkeys(("fetch", "place", "drop"), 0)
        for move in self.sent:
            counts[kind_of(move)] += 1
        return counts
