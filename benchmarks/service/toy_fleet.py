"""A fleet of toy groups behind gateways with the product's routing policies, on its own clock. For route_replay.py.

A group computes prompts one after the other at RATE tokens a second, tenants in turn; what it has computed lies in a
pool of blocks that forgets the least recently used ones, to a second pool below it if there is one. Answers take a
fixed time a token and disturb nobody. A gateway has the product's counts of outstanding tokens, forecast of outputs,
residency of adapters and homes; it sees other gateways' requests as late as reports are, and what groups hold at once
(as sent prompts count as stored there). So this compares policies, and sizes no service.
"""

import heapq
import itertools
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tandem.cluster.routing.group_loads import GroupLoads
from tandem.cluster.routing.outstanding import Outstanding, elsewhere
from tandem.cluster.routing.policies.policy_names import policy_by_name
from tandem.cluster.routing.policies.routing_policy import choose
from tandem.cluster.routing.residency import Homes, Residency, Tier
from tandem.cluster.routing.route_charges import RouteCharges
from tandem.cluster.routing.route_hint import RouteHint, session_key
from tandem.workers.messages.request import AdapterRef, GenerationRequest, SamplingParams

BLOCK = 512
REPORT_S, LATE_S = 2.0, 0.5
"""Between two reports of a group, and how long one is under way."""
TOKEN_S = 0.02
COPY_SHARE = 0.2
LOAD_S = 0.3
"""Seconds that loading an adapter keeps a group from computing."""
MOST_OUTPUT = 4096


@dataclass(frozen=True)
class Asked:
    """One request. blocks: ids of its prompt's blocks; an id stands for a block and all before it."""

    time_s: float
    prompt: int
    output: int
    blocks: Sequence[int]
    tenant: str = "t"
    adapter: str | None = None
    session: str = ""


@dataclass
class Fleet:
    """Sizes. below: blocks of each group's second pool."""

    groups: int
    blocks: int
    rate: float
    below: int = 0
    gateways: int = 2
    adapters: int = 16


@dataclass
class Outcome:
    """What became of the requests: first tokens in seconds, by tenant; tokens found, and all of the prompts."""

    first_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    found: Counter[str] = field(default_factory=Counter)
    prompts: Counter[str] = field(default_factory=Counter)
    loads: int = 0
    sent: Counter[str] = field(default_factory=Counter)

    def hit_rate(self, tenants: Iterable[str]) -> float:
        names = list(tenants)
        return sum(self.found[name] for name in names) / max(1, sum(self.prompts[name] for name in names))

    def first_token(self, share: float, tenants: Iterable[str]) -> float:
        """Seconds within which this share of the requests had their first token."""
        times = sorted(itertools.chain.from_iterable(self.first_s[name] for name in tenants))
        return times[int(share * (len(times) - 1))]


class ToyGroup:
    """One group: pools, adapters, and a queue for each tenant."""

    def __init__(self, name: str, fleet: Fleet) -> None:
        self.name = name
        self.fleet = fleet
        self.device: OrderedDict[int, None] = OrderedDict()
        self.below: OrderedDict[int, None] = OrderedDict()
        self.adapters: OrderedDict[str, None] = OrderedDict()
        self.queues: dict[str, deque[tuple[str, float]]] = defaultdict(deque)
        self.served: Counter[str] = Counter()
        self.is_busy = False
        self.owed: dict[str, tuple[str, int]] = {}

    def holds(self, blocks: Sequence[int], prompt: int) -> tuple[int, int]:
        """Tokens of a prompt's beginning on the device, and behind them below it. The last token is always computed."""
        count = next((i for i, one in enumerate(blocks) if one not in self.device), len(blocks))
        more = next((i for i, one in enumerate(blocks[count:]) if one not in self.below), len(blocks) - count)
        device = min(prompt - 1, count * BLOCK)
        return device, min(prompt - 1 - device, more * BLOCK)

    def store(self, blocks: Sequence[int]) -> None:
        for one in reversed(blocks):  # the beginning is used last: it goes last
            self.device[one] = None
            self.device.move_to_end(one)
            self.below.pop(one, None)
        while len(self.device) > self.fleet.blocks:
            gone, _ = self.device.popitem(last=False)
            self.below[gone] = None
        while len(self.below) > self.fleet.below:
            self.below.popitem(last=False)

    def load(self, adapter: str) -> bool:
        """Takes an adapter in. True if it was not there."""
        is_new = adapter not in self.adapters
        self.adapters[adapter] = None
        self.adapters.move_to_end(adapter)
        while len(self.adapters) > self.fleet.adapters:
            self.adapters.popitem(last=False)
        return is_new

    def next_prompt(self) -> tuple[str, float] | None:
        """The next prompt to compute, of the tenant that has had least, and its seconds."""
        waiting = [tenant for tenant, queue in self.queues.items() if queue]
        if not waiting:
            return None
        tenant = min(waiting, key=self.served.__getitem__)
        call, seconds = self.queues[tenant].popleft()
        self.served[tenant] += seconds  # type: ignore[assignment]
        return call, seconds

    def enqueue(self, tenant: str, call: str, seconds: float) -> None:
        if not self.queues[tenant]:  # who begins to wait anew is owed nothing for the time before
            others = [self.served[name] for name, queue in self.queues.items() if queue]
            self.served[tenant] = max(self.served[tenant], min(others, default=0))
        self.queues[tenant].append((call, seconds))


class ToyGateway:
    """What a gateway's router knows; the same parts as in router/serve_router.py."""

    def __init__(self, name: str, policy: str, groups: Sequence[ToyGroup], rng: random.Random) -> None:
        self.name = name
        self.policy = policy_by_name(policy, rng)
        self.rng = rng
        self.groups = groups
        self.names = [group.name for group in groups]
        self.index = {name: place for place, name in enumerate(self.names)}
        self.outstanding = Outstanding()
        self.charges = RouteCharges(self.outstanding.correct)
        self.residency, self.homes = Residency(), Homes()
        self.homes.set_groups(self.names)
        self.outstanding.set_groups(self.names)
        self.elsewhere = np.zeros(len(self.names), np.int64)

    def read(self, reports: Sequence[dict[str, int]], held: Sequence[Sequence[str]]) -> None:
        """Takes reports of the groups, which are late."""
        self.elsewhere = np.array([elsewhere(report, self.name) for report in reports], np.int64)
        for name, keys in zip(self.names, held, strict=True):
            self.residency.report(name, keys)

    def route(self, call: str, asked: Asked, now_s: float) -> tuple[int, int]:
        """Chooses a group, and counts the request there. Its place, and the request's cost for reports."""
        adapter = AdapterRef(name=asked.adapter, digest=asked.adapter, source="/") if asked.adapter else None
        limit = SamplingParams(max_tokens=MOST_OUTPUT)
        request = GenerationRequest(
            request_id=call, prompt_token_ids=[], sampling=limit, adapter=adapter, tenant=asked.tenant
        )
        cost = asked.prompt + self.charges.begin(request)
        overlaps = {}
        for group in self.groups:
            if asked.blocks and (asked.blocks[0] in group.device or asked.blocks[0] in group.below):
                overlaps[group.name] = group.holds(asked.blocks, asked.prompt)
        hint = RouteHint(
            request_id=call,
            cost_tokens=cost,
            gateway=self.name,
            adapter=asked.adapter,
            tenant=asked.tenant,
            overlaps=overlaps,
            session=session_key(asked.tenant, asked.session),
        )
        place = choose(self.policy, self._loads(hint, now_s), hint, self.rng.choice)[0]
        group = self.names[place]
        self.policy.sent(group)
        at_group = hint.cost_at(group)
        self.outstanding.begin(call, group, asked.tenant, at_group, now_s, reported=cost, request_id=call)
        if asked.adapter is not None:
            self.residency.sent(group, asked.adapter, now_s)
        return place, cost

    def _loads(self, hint: RouteHint, now_s: float) -> GroupLoads:
        others = int(self.elsewhere.sum())
        tiers: dict[Tier, list[int]] = {tier: [] for tier in Tier}
        if hint.adapter is not None:
            holders = self.residency.holders(hint.adapter, now_s)
            for name, tier in holders.items():
                tiers[tier].append(self.index[name])
            if (home := self.homes.home(hint.adapter)) not in holders:
                tiers[Tier.HOME].append(self.index[home])
        return GroupLoads(
            groups=self.names,
            outstanding=self.outstanding.here_by_group() + self.elsewhere,
            own=self.outstanding.of_tenant(hint.tenant),
            tiers=tiers if hint.adapter is not None else {},
            copy_share=[COPY_SHARE] * len(self.names),
            late_share=others / max(1, self.outstanding.total + others),
            tenants=self.outstanding.tenants_with(hint.tenant),
            home=self.index[self.homes.home(hint.session)] if hint.session else None,
            index=self.index,
        )


class Replay:
    """Plays requests on a fleet under one policy."""

    def __init__(self, policy: str, fleet: Fleet, requests: Sequence[Asked], seed: int = 0) -> None:
        rng = random.Random(seed)
        self.fleet = fleet
        self.requests = requests
        self.groups = [ToyGroup(f"g{i:03}", fleet) for i in range(fleet.groups)]
        self.gateways = [
            ToyGateway(f"gw{i}", policy, self.groups, random.Random(seed + i)) for i in range(fleet.gateways)
        ]
        self.at = [rng.randrange(fleet.gateways) for _ in requests]
        self.outcome = Outcome()
        self._events: list[tuple[float, int, str, int, str]] = []  # time, order, kind, group or request, call
        self._order = itertools.count()
        self._taken: list[tuple[float, list[dict[str, int]], list[list[str]]]] = []

    def run(self) -> Outcome:
        """Plays all; returns what became of them."""
        for number, asked in enumerate(self.requests):
            self._at(asked.time_s, "arrival", number, "")
        self._at(0.0, "report", 0, "")
        left = len(self.requests)
        while left:
            now_s, _, kind, number, call = heapq.heappop(self._events)
            if kind == "arrival":
                self._arrive(number, now_s)
            elif kind == "computed":
                self._computed(number, call, now_s)
            elif kind == "step":
                self.gateways[self.at[int(call)]].charges.look(call, 1 + 256 * number)
            elif kind == "end":
                left -= 1
                self._end(number, call)
            else:
                self._report(now_s)
        return self.outcome

    def _at(self, time_s: float, kind: str, number: int, call: str) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), kind, number, call))

    def _arrive(self, number: int, now_s: float) -> None:
        asked, call = self.requests[number], str(number)
        place, cost = self.gateways[self.at[number]].route(call, asked, now_s)
        group, outcome = self.groups[place], self.outcome
        device, below = group.holds(asked.blocks, asked.prompt)
        outcome.found[asked.tenant] += device + below
        outcome.prompts[asked.tenant] += asked.prompt
        outcome.sent[group.name] += 1
        seconds = (asked.prompt - device - below + COPY_SHARE * below) / self.fleet.rate
        if asked.adapter is not None and group.load(asked.adapter):
            outcome.loads += 1
            seconds += LOAD_S
        group.store(asked.blocks)
        group.owed[call] = self.gateways[self.at[number]].name, cost
        group.enqueue(asked.tenant, call, seconds)
        if not group.is_busy:
            self._begin_next(place, now_s)

    def _begin_next(self, place: int, now_s: float) -> None:
        group = self.groups[place]
        found = group.next_prompt()
        group.is_busy = found is not None
        if found is not None:
            self._at(now_s + found[1], "computed", place, found[0])

    def _computed(self, place: int, call: str, now_s: float) -> None:
        asked = self.requests[int(call)]
        self.outcome.first_s[asked.tenant].append(now_s - asked.time_s)
        group, gateway = self.groups[place], self.gateways[self.at[int(call)]]
        group.owed[call] = gateway.name, max(0, group.owed[call][1] - asked.prompt)  # groups report what is left
        for step in range(1 + asked.output // 256):
            self._at(now_s + step * 256 * TOKEN_S, "step", step, call)
        self._at(now_s + asked.output * TOKEN_S, "end", place, call)
        self._begin_next(place, now_s)

    def _end(self, place: int, call: str) -> None:
        group, gateway = self.groups[place], self.gateways[self.at[int(call)]]
        del group.owed[call]
        gateway.outstanding.end(call, group.name)
        gateway.charges.end(call, self.requests[int(call)].output)

    def _report(self, now_s: float) -> None:
        """Groups report, and gateways read what was reported LATE_S ago."""
        owed = []
        for group in self.groups:
            total: Counter[str] = Counter()
            for gateway, tokens in group.owed.values():
                total[gateway] += tokens
            owed.append(dict(total))
        self._taken.append((now_s, owed, [list(group.adapters) for group in self.groups]))
        while self._taken and self._taken[0][0] <= now_s - LATE_S:
            _, reports, held = self._taken.pop(0)
            for one in self.gateways:
                one.read(reports, held)
        self._at(now_s + REPORT_S, "report", 0, "")
