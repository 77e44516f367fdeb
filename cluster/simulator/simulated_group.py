"""SimulatedGroup: one worker group: the product's engine over SimulatedRanks, turned when an answer of them is due.

    request --> add() --> engine -- plan --> ranks ... due --> turn() --> deltas and ends --> gateways

As in EngineLoop a result is applied, then what has come meanwhile is taken in, then the next plan is made.
"""

from collections.abc import Callable, Mapping
from functools import partial
from math import inf, isinf

import msgspec

from tandem.cluster.group.owed_tokens import OwedTokens, produced_by
from tandem.cluster.routing.residency import adapter_key
from tandem.cluster.scaling.scaling_figures import ScalingFigures
from tandem.cluster.simulator.simulated_links import SimulatedLinks, TakesTold, link_of
from tandem.cluster.simulator.simulated_ranks import SimulatedRanks
from tandem.cluster.simulator.simulated_router import GroupTells
from tandem.cluster.simulator.virtual_clock import VirtualClock
from tandem.configs.schema import EngineSettings
from tandem.offload.kv.eviction import make_policy
from tandem.offload.kv.host_tier import HostTier
from tandem.offload.kv.kv_groups import KVGroups
from tandem.offload.kv.tiered_store import TieredStore
from tandem.workers.engine.admission import ModelFacts
from tandem.workers.engine.build_engine import build_engine
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.executor import ExecutorReady
from tandem.workers.engine.thread.kv_teller import KvTeller
from tandem.workers.messages.errors import RequestRefused
from tandem.workers.messages.refusals import lost, refused
from tandem.workers.messages.request import Ended, GenerationRequest, Loss, TokenDelta

POLL_S = 0.005
"""Between two looks of an engine that waits for something that no answer tells (COPY_POLL_S of EngineLoop)."""
OnEnded = Callable[[Ended], None]


class GroupKind(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that all groups of a service have in common. host_slots: KV blocks of each group's host tier.
    adapter_pages: of one adapter. adapter_s: seconds to read an adapter from its source."""

    settings: EngineSettings
    facts: ModelFacts
    ready: ExecutorReady
    host_slots: int = 0
    adapter_pages: int = 1
    adapter_s: float = 1.0

    @property
    def num_slots(self) -> int:
        """Tokens of the longest sequence that a group's KV blocks hold."""
        groups = self.facts.kv_groups or KVGroups(self.settings.cache.block_size)
        return groups.longest(self.ready.num_blocks)

    def executor_ready(self) -> ExecutorReady:
        """Returns what a new group has, with tiers of its own."""
        if not self.host_slots:
            return self.ready
        tier = HostTier(self.host_slots, make_policy(self.settings.cache.kv_eviction))
        return msgspec.structs.replace(self.ready, store=TieredStore(tier))


class SimulatedGroup:
    """Group `name`, from when it serves. load_s: how long it has loaded before. on_deltas: gets the tokens of each
    step. on_begun: gets this group's name, each request with a row, and how many tokens of its prompt were found.
    gateways: what takes its words about KV, by name."""

    def __init__(
        self,
        name: str,
        kind: GroupKind,
        clock: VirtualClock,
        ranks: SimulatedRanks,
        load_s: float,
        on_deltas: Callable[[list[TokenDelta]], None],
        on_begun: Callable[[str, GenerationRequest, int], None],
        gateways: Mapping[str, TakesTold],
    ) -> None:
        self.name, self.load_s = name, load_s
        self._clock, self._ranks = clock, ranks
        self._on_deltas = on_deltas
        self._owed = OwedTokens()
        self._on_ended: dict[tuple[str, int], OnEnded] = {}
        self._wakes_s = inf
        self.began_s = clock.now_s
        self.ended_s: float | None = None
        self._figures = ScalingFigures(kind.settings.scheduler.max_num_seqs, clock)
        begun = partial(on_begun, name)
        self.engine: Engine = build_engine(kind.settings, kind.facts, ranks, ranks.start(), self, clock, begun)
        self.links = SimulatedLinks(name, clock, gateways)
        self._teller = None if self.engine.kv is None else KvTeller(self.engine.kv, self.links, clock)
        if self._teller is not None:
            self._teller.follow(map(link_of, gateways))
            self._wake_at(clock.now_s)

    # ---- from gateways ----

    def add(self, request: GenerationRequest, gateway: str, tokens: int, on_ended: OnEnded) -> None:
        """Takes a request, whose end on_ended gets once. gateway, tokens: as in its RouteHint."""
        key = request.request_id, request.attempt
        try:
            self.engine.add_request(request)
        except RequestRefused as error:
            end = refused(request, error.status, error.code, error.param, str(error))
            on_ended(msgspec.structs.replace(end, group=self.name))
            return
        self._owed.begin(request, gateway, tokens)
        self._on_ended[key] = on_ended
        self._wake_at(self._clock.now_s)

    @property
    def num_requests(self) -> int:
        """Requests that have not ended here."""
        return len(self._owed)

    @property
    def busy_s(self) -> float:
        """Seconds in which its ranks computed, of steps that have ended or begun."""
        return self._ranks.busy_s

    def scaling_figures(self) -> dict[str, float]:
        """Returns what it reports for the choice of the number of groups."""
        return self._figures.read(self.engine.stats())

    def report(self) -> GroupTells:
        """Returns what routers hear of it from time to time."""
        tiers, offload = self.engine.adapter_residency(), self.engine.offload
        return GroupTells(
            owed=self._owed.charged(),
            left=self._owed.left(produced_by(self.engine.requests)),
            on_device=[adapter_key(digest) for digest, tier in tiers.items() if tier == "device"],
            on_host=[adapter_key(digest) for digest, tier in tiers.items() if tier == "host"],
            copy_share=None if offload is None else offload.stats(self.engine.ready.block_bytes).copy_share,
        )

    def die(self, message: str) -> list[tuple[OnEnded, Ended]]:
        """Ends the group as the death of a rank does. Returns the answers to its requests, with the part that each had
        in the loss."""
        self.ended_s = self._clock.now_s
        losses: dict[str, Loss] = self.engine.losses()
        requests = {(state.request.request_id, state.request.attempt): state.request for state in self.engine.requests}
        self._ranks.close()
        ends = []
        for key, on_ended in self._on_ended.items():
            end = lost(requests[key], message, losses.get(key[0], "unknown"))
            ends.append((on_ended, msgspec.structs.replace(end, group=self.name)))
        self._on_ended.clear()
        return ends

    def leave(self) -> None:
        """Ends a group without requests, as Serve takes it down."""
        self.ended_s = self._clock.now_s
        self._ranks.close()

    # ---- OutputSink of the engine ----

    def deltas(self, deltas: list[TokenDelta]) -> None:
        """Implements OutputSink."""
        self._on_deltas(deltas)

    def ended(self, ended: Ended, request: GenerationRequest) -> None:
        """Implements OutputSink."""
        key = ended.request_id, ended.attempt
        self._owed.end(key)
        if (on_ended := self._on_ended.pop(key, None)) is not None:
            on_ended(ended if ended.refused is None else msgspec.structs.replace(ended, group=self.name))

    # ---- the loop ----

    def _wake_at(self, when_s: float) -> None:
        if when_s < self._wakes_s:
            self._wakes_s = when_s
            self._clock.at(when_s, self._wake)

    def _wake(self) -> None:
        now_s = self._clock.now_s
        if now_s < self._wakes_s or self.ended_s is not None:
            return  # it has been woken earlier, or is gone
        self._wakes_s = inf
        engine, ranks = self.engine, self._ranks
        while ranks.due_s <= now_s:
            engine.turn(0.0)
        engine.turn(0.0)
        if self._teller is not None:
            self._teller.tell()
        self._wake_at(self._next_s(engine, ranks.due_s))

    def _next_s(self, engine: Engine, due_s: float) -> float:
        if not isinf(due_s):
            return due_s
        now_s, idle_s = self._clock.now_s, engine.idle_s
        if engine.has_work():
            return now_s + max(POLL_S, min(idle_s, 10 * POLL_S))
        tells_s = inf if self._teller is None else self._teller.wait_s()
        return now_s + max(POLL_S, min(idle_s, tells_s))
