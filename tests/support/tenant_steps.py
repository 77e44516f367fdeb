"""Tenants beside each other on one engine over ranks that compute nothing, counted in steps.

A tenant keeps `clients` requests going, each begun `pause` steps after one of its has ended, in all of its phases. What
it asks is what it is served when it is alone; what it may claim is the lesser of that and its weighted share of all
that is served while it is there. Served is what the engine charges (fairness.py).
"""

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from tandem.configs.schema import CacheSettings, EngineSettings, LoraSettings, ModelSettings, SchedulerSettings
from tandem.workers.engine.admission import ModelFacts
from tandem.workers.engine.base.blockers import Blocker
from tandem.workers.engine.base.in_flight_step import InFlightStep
from tandem.workers.engine.base.step_observer import StepObserver
from tandem.workers.engine.build_engine import build_engine
from tandem.workers.messages.request import AdapterRef, Ended, GenerationRequest, SamplingParams, TokenDelta
from tandem.workers.messages.step import StepPlan
from tests.support.no_ranks import NoRanks


@dataclass(frozen=True)
class Tenant:
    """One tenant. tokens: least and most output tokens. adapters: its requests take them in turn, 0: none. there: the
    phases in which it asks; None: all."""

    name: str
    clients: int
    pause: int = 2
    prompt: int = 8
    tokens: tuple[int, int] = (120, 120)
    weight: float = 1.0
    adapters: int = 0
    there: tuple[int, ...] | None = None

    def is_there(self, phase: int) -> bool:
        return self.there is None or phase in self.there


@dataclass(frozen=True)
class Room:
    """What tenants share. blocks: of 16 tokens; 0: as many as rows can want. budget: tokens of a step. knows_tenants:
    False: the engine takes all for one tenant."""

    rows: int = 16
    blocks: int = 0
    budget: int = 2048
    asynchronous: bool = True
    caching: bool = True
    knows_tenants: bool = True


class Recomputed(StepObserver):
    """Counts tokens of plans, and those that an earlier plan had computed for the same sequence."""

    def __init__(self) -> None:
        self.computed = self.again = 0
        self._most: dict[object, int] = {}

    @property
    def part(self) -> float:
        """Of the tokens in plans, those that had been in one before."""
        return self.again / max(1, self.computed)

    def submitted(self, step: InFlightStep, plan: StepPlan) -> None:
        for seq, work in zip(step.sequences, step.work, strict=True):
            most = self._most.get(seq, 0)
            end = seq.num_scheduled
            self.computed += work.num_tokens
            if end - work.num_tokens < most:
                self.again += min(most, end) - (end - work.num_tokens)
            self._most[seq] = max(most, end)


@dataclass
class Count:
    """What one tenant was served in each phase; steps to first tokens of requests that came while its share was not
    used up, from when their adapter was there."""

    served: list[float] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)

    def wait(self, part: float) -> int:
        """Returns the steps within which this part of the first tokens came; 0 without any."""
        waits = sorted(self.waits)
        return waits[min(len(waits) - 1, int(part * len(waits)))] if waits else 0


class SharedEngine:
    """One engine and the clients of its tenants."""

    def __init__(self, tenants: Sequence[Tenant], room: Room, seed: int = 0) -> None:
        self.tenants = {tenant.name: tenant for tenant in tenants}
        self.counts = {tenant.name: Count() for tenant in tenants}
        self.recomputed = Recomputed()
        self.room, self.step, self.phase = room, 0, 0
        self._draw = {tenant.name: random.Random(f"{tenant.name} {seed}") for tenant in tenants}
        self._owner: dict[str, str] = {}
        self._first: dict[str, int] = {}  # of those without a first token, the step since which nothing else lacks
        self._due: dict[str, list[int]] = {tenant.name: [0] * tenant.clients for tenant in tenants}
        self._live: Counter[str] = Counter()
        self._served: Counter[str] = Counter()
        adapters = sum(tenant.adapters for tenant in tenants)
        longest = max(tenant.prompt + tenant.tokens[1] for tenant in tenants)
        blocks = room.blocks or 2 * room.rows * (longest // 16 + 2)
        ranks = NoRanks(room.rows, blocks, 1, adapters, False)
        settings = EngineSettings(
            model=ModelSettings(model="none"),
            cache=CacheSettings(enable_prefix_caching=room.caching),
            scheduler=SchedulerSettings(
                max_num_seqs=room.rows,
                max_num_batched_tokens=room.budget,
                max_num_queued_reqs=100_000,
                async_scheduling=room.asynchronous,
            ),
            lora=LoraSettings(enable_lora=adapters > 0, max_loras=max(1, adapters), max_cpu_loras=max(1, adapters)),
        )
        facts = ModelFacts(10**6, 1000, (1,), "none", "none")
        self.engine = build_engine(settings, facts, ranks, ranks.start(), self)
        self.engine.observers += (self.recomputed,)
        self.engine.set_weights({tenant.name: tenant.weight for tenant in tenants})

    # ---- what the engine says ----

    def deltas(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            if delta.token_ids and (since := self._first.pop(delta.request_id, None)) is not None and since >= 0:
                self.counts[self._owner[delta.request_id]].waits.append(self.step - since)

    def ended(self, ended: Ended, request: GenerationRequest) -> None:
        name = self._owner[request.request_id]
        self._live[name] -= 1
        self._due[name].append(self.step + self.tenants[name].pause)

    # ---- steps ----

    def run(self, phases: int, steps: int, warm: int) -> None:
        """Runs `warm` steps of phase 0 that do not count, and then all phases."""
        for _ in range(warm):
            self.turn()
        self.forget()
        for _ in range(phases):
            for _ in range(steps):
                self.turn()
            self.end_phase()

    def forget(self) -> None:
        """Counts from now on."""
        self.take_charges()
        self._served.clear()
        for count in self.counts.values():
            count.waits.clear()

    def add_clients(self, name: str, count: int) -> None:
        """More clients of a tenant ask from now on."""
        self._due[name] += [self.step] * count

    def turn(self) -> None:
        """One step, after the clients that are due have asked."""
        self.step += 1
        for name, due in self._due.items():
            if self.tenants[name].is_there(self.phase):
                ready = [step for step in due if step <= self.step]
                due[:] = [step for step in due if step > self.step]
                for _ in ready:
                    self._ask(self.tenants[name])
        self._wait_for_adapters()
        self.engine.turn(0.0)

    def end_phase(self) -> None:
        """Notes what each tenant was served."""
        self.take_charges()
        for name, count in self.counts.items():
            count.served.append(self._served.pop(name, 0.0))
        self.phase += 1

    def take_charges(self) -> dict[str, float]:
        """Returns what each tenant was served since the last call."""
        charges = self.engine.drain_charges()
        self._served.update(charges)
        return charges

    def _ask(self, tenant: Tenant) -> None:
        number = len(self._owner)
        request_id = f"r{number}"
        adapter = f"{tenant.name}-{number % tenant.adapters}" if tenant.adapters else None
        self._owner[request_id] = tenant.name
        self._live[tenant.name] += 1
        if self._live[tenant.name] > self._rows_of(tenant) or tenant.prompt > self.room.budget:
            self._first[request_id] = -1  # it asks for more than its share
        else:
            self._first[request_id] = self.step
        self.engine.add_request(
            GenerationRequest(
                request_id=request_id,
                prompt_token_ids=[(number * 31 + place * 17) % 997 + 2 for place in range(tenant.prompt)],
                sampling=SamplingParams(max_tokens=self._draw[tenant.name].randint(*tenant.tokens), ignore_eos=True),
                tenant=tenant.name if self.room.knows_tenants else "all",
                adapter=None if adapter is None else AdapterRef(name=adapter, digest=adapter, source=adapter),
            )
        )

    def _rows_of(self, tenant: Tenant) -> int:
        there = [other.weight for other in self.tenants.values() if other.is_there(self.phase)]
        return max(1, int(self.room.rows * tenant.weight / sum(there) + 1e-9))

    def _wait_for_adapters(self) -> None:
        for request_id, since in self._first.items():
            if since >= 0 and self.tenants[self._owner[request_id]].adapters:
                state = self.engine.requests.get(request_id)
                if (
                    state is not None
                    and self.engine.scheduler.waiting.blocker_of(state.sequences[0]) is Blocker.ADAPTER
                ):
                    self._first[request_id] = self.step + 1


@dataclass(frozen=True)
class Share:
    """What one tenant got of what it may claim, over all phases in which it was there. wait: steps within which 95 of
    100 first tokens came, of those that came while its share was not used up."""

    name: str
    claim: float
    served: float
    wait: int

    @property
    def of_claim(self) -> float:
        return self.served / self.claim if self.claim else 1.0


@dataclass(frozen=True)
class Outcome:
    """Shares of all tenants. again: the part of all computed tokens that were computed before. for_tenants: how much of
    that there would not be if all were one tenant's; where blocks are scarce, who gives way costs work in any case."""

    shares: list[Share]
    again: float
    for_tenants: float


def measure(
    tenants: Sequence[Tenant], room: Room = Room(), phases: int = 1, steps: int = 2000, warm: int = 400, seed: int = 0
) -> Outcome:
    """Runs the tenants together, and alone each of those that do not ask for all there is (twice the rows)."""
    together = SharedEngine(tenants, room, seed)
    together.run(phases, steps, warm)
    shares = []
    for tenant in tenants:
        asked = [math.inf] * phases
        if tenant.clients < 2 * room.rows:
            alone = SharedEngine([tenant], room, seed)
            alone.run(phases, steps, warm)
            asked = alone.counts[tenant.name].served
        shares.append(share_of(tenant, asked, together))
    again = others = together.recomputed.part
    if room.blocks:
        merged = SharedEngine(tenants, replace(room, knows_tenants=False), seed)
        merged.run(phases, steps, warm)
        others = again - merged.recomputed.part
    return Outcome(shares, again, others)


def measure_groups(
    groups: Sequence[Sequence[Tenant]], room: Room = Room(), steps: int = 2000, warm: int = 400, period: int = 100
) -> Outcome:
    """Runs the same tenants, with other clients, in several groups, which tell each other every `period` steps what
    each tenant was served until the time before: as the fleet does once a second."""
    shared = [SharedEngine(tenants, room, seed) for seed, tenants in enumerate(groups)]
    charges: list[dict[str, float]] = [{} for _ in shared]
    for step in range(warm + steps):
        if step == warm:
            for group in shared:
                group.forget()
        if step % period == 0:
            for group in shared:
                told = Counter[str]()
                for other, of_other in zip(shared, charges, strict=True):
                    told.update(of_other if other is not group else {})
                group.engine.merge_remote_charges(told)
            charges = [group.take_charges() for group in shared]
        for group in shared:
            group.turn()
    for group in shared:
        group.end_phase()
    shares = []
    for number, tenant in enumerate(groups[0]):
        asked = sum(asked_of(of_group[number], room, steps, warm) for of_group in groups)
        shares.append(share_of(tenant, [asked], *shared))
    again = max(group.recomputed.part for group in shared)
    return Outcome(shares, again, again)


def asked_of(tenant: Tenant, room: Room, steps: int, warm: int) -> float:
    """Returns what a tenant is served when it is alone; inf if it asks for all there is (twice the rows)."""
    if tenant.clients >= 2 * room.rows:
        return math.inf
    alone = SharedEngine([tenant], room)
    alone.run(1, steps, warm)
    return sum(alone.counts[tenant.name].served)


def share_of(tenant: Tenant, asked: Sequence[float], *groups: SharedEngine) -> Share:
    """What a tenant got of what it may claim in each phase, in all groups together."""
    claim = served = 0.0
    for phase, most in enumerate(asked):
        there = [other for other in groups[0].tenants.values() if other.is_there(phase)]
        if tenant not in there:
            continue
        everything = sum(count.served[phase] for group in groups for count in group.counts.values())
        claim += min(most, everything * tenant.weight / sum(other.weight for other in there))
        served += sum(group.counts[tenant.name].served[phase] for group in groups)
    waits = [group.counts[tenant.name].wait(0.95) for group in groups]
    return Share(tenant.name, claim, served, max(waits))


def describe(outcome: Outcome) -> Iterable[str]:
    """Yields a line for each tenant, and one for what was computed again."""
    everything = sum(share.served for share in outcome.shares)
    for share in outcome.shares:
        yield (
            f"  {share.name:8} may claim {share.claim / everything:.3f}, got {share.served / everything:.3f}"
            f" ({share.of_claim:.3f} of it), first token p95 {share.wait} steps"
        )
    yield f"  computed again: {outcome.again:.2%} of all tokens, {outcome.for_tenants:.2%} more than for one tenant"
