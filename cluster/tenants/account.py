"""One tenant in one gateway: what its requests hold here, the last answer of Redis, and the share to use without it.

Pure arithmetic over times in seconds that are passed in. Redis has the truth of the whole tenant; this file has the
truth of this gateway, and reports it in absolute numbers. While Redis is unavailable the gateway admits from its share:
the last known state of the buckets over the gateways that were there, refilled at that fraction of the rate.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec

from tandem.cluster.state import keys
from tandem.cluster.tenants.tenant import Limits, Tenant
from tandem.cluster.tenants.tenant_admission import Reason, Reservation

MINUTE_S = 60.0
LEASE_MS = 5000
"""Five heartbeats."""


class QuotaReport(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One gateway's report and request, of one tenant, in tokens and requests."""

    gateway: str
    number: int  # grows with every report of the gateway
    # absolute, this gateway's, without requests that await an answer
    running: int
    reserved: int
    used: int
    budget_id: int
    ttl_s: int
    lease_ms: int
    # what the buckets do not know yet
    delta_requests: float
    delta_tokens: float
    known_base: float  # budget tokens of gateways that are gone, for a Redis that has lost it
    need: int  # tokens that the request reserves
    charge: int  # of those, taken from the minute's bucket
    wanted: int  # of those, what the bucket must hold
    admit: bool = False
    now_ms: int | None = None  # stands in for the server's clock
    # limits; None: no such limit
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None
    token_budget: int | None = None
    kv_tokens: int | None = None
    # what this gateway last knew of the buckets, for a Redis that has lost it
    known_requests: float | None = None
    known_tokens: float | None = None
    awaited: list[int] = []  # the reports that asked for requests without an answer, but for this one


class QuotaVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The script's answer."""

    ok: bool
    reason: str
    wait_ms: float
    gateways: int  # with a lease, this one too
    base: float  # budget tokens used by gateways that are gone
    used_elsewhere: float  # budget tokens used by all gateways but this one
    # how full the tenant's buckets are now
    requests: float | None = None
    tokens: float | None = None


@dataclass
class Bucket:
    """A token bucket of `size` that fills at size / minute. May be overdrawn to -size. Starts full."""

    size: float
    level: float
    at_s: float

    def fill(self, now_s: float) -> float:
        """Returns its level now."""
        self.level = min(self.size, self.level + max(0.0, now_s - self.at_s) * self.size / MINUTE_S)
        self.at_s = now_s
        return self.level

    def add(self, amount: float, now_s: float) -> None:
        self.level = max(-self.size, min(self.size, self.fill(now_s) + amount))

    def wait_s(self, wanted: float, now_s: float) -> float:
        """Seconds until it holds so much."""
        return max(0.0, wanted - self.fill(now_s)) * MINUTE_S / self.size


@dataclass
class Debt:
    """Bucket charges that Redis has not counted: negative what was taken, positive what was given back.

    What was taken fades at `rate` a minute: had Redis known in time, its bucket would have filled again.
    """

    rate: float = 0.0
    amount: float = 0.0
    at_s: float = 0.0

    def add(self, amount: float, now_s: float) -> None:
        self._fade(now_s)
        self.amount += amount

    def take(self, now_s: float) -> float:
        """All of it, for a report."""
        self._fade(now_s)
        amount, self.amount = self.amount, 0.0
        return amount

    def give_back(self, amount: float, now_s: float) -> None:
        """A report may not have arrived: what was taken is reported again, what was given back a minute replaces."""
        self.add(min(0.0, amount), now_s)

    def _fade(self, now_s: float) -> None:
        if self.amount < 0:
            self.amount = min(0.0, self.amount + self.rate / MINUTE_S * max(0.0, now_s - self.at_s))
        self.at_s = now_s


@dataclass
class Account:
    """One tenant in one gateway, see the module."""

    name: str
    limits: Limits
    budget_id: int
    gateway: str
    gateways: int  # how many there are at least
    now_s: float
    # of this gateway's reports; they go on where an earlier account of the tenant ended, which Redis may remember
    numbers: Iterator[int] = field(default_factory=lambda: count(1))
    # budget tokens of gateways that are gone, and of all but this one, as last read
    base: float = 0.0
    used_elsewhere: float = 0.0
    # of requests that were granted; one that awaits an answer holds nothing, or requests would shut each other out
    running: int = 0
    reserved: int = 0
    used: int = 0
    is_unavailable: bool = False
    share_of: int = 1  # gateways that the limits are shared by
    _awaited: set[int] = field(default_factory=set)
    _used_when_left: int = 0
    _requests: Bucket | None = None
    _tokens: Bucket | None = None
    _debt_requests: Debt = field(default_factory=Debt)
    _debt_tokens: Debt = field(default_factory=Debt)

    def __post_init__(self) -> None:
        self.share_of = self.gateways
        self._set_limits(self.limits, self.now_s)

    def update(self, tenant: Tenant, now_s: float) -> None:
        """Takes over what was changed of the tenant. A new budget starts at nothing."""
        if tenant.budget_id != self.budget_id:
            self.budget_id = tenant.budget_id
            self.used = self._used_when_left = 0
            self.base = self.used_elsewhere = 0.0
        if tenant.limits != self.limits:
            self._set_limits(tenant.limits, now_s)

    # ---- what requests hold --------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """True while no request of it runs or awaits an answer."""
        return not self.running and not self._awaited

    def hold(self, tokens: int) -> None:
        self.running += 1
        self.reserved += tokens

    def release(self, tokens: int) -> None:
        self.running -= 1
        self.reserved -= tokens

    def bill(self, charge: int, used_tokens: int, now_s: float) -> None:
        """Counts the tokens that were used, of the `charge` tokens taken from the minute."""
        self.used += used_tokens
        self._take(self._tokens, self._debt_tokens, used_tokens - charge, now_s)

    def left(self, now_s: float) -> tuple[Bucket | None, Bucket | None]:
        """This gateway's copy of the buckets of requests and tokens: the tenant's, or its own share."""
        for bucket in (self._requests, self._tokens):
            if bucket is not None:
                bucket.fill(now_s)
        return self._requests, self._tokens

    @property
    def spent(self) -> int:
        """Tokens of the budget that all gateways used, as last read by this one."""
        return int(self.used_elsewhere) + self.used

    # ---- with Redis ----------------------------------------------------------------------------------------------

    def report(self, now_s: float, kv_tokens: int | None, asked: Reservation | None = None) -> QuotaReport:
        """The next report, which may request a reservation. It has the charges that the buckets in Redis lack, and
        these count as reported."""
        number, awaited = next(self.numbers), sorted(self._awaited)
        if asked is not None:
            self._awaited.add(number)
        return QuotaReport(
            gateway=self.gateway,
            number=number,
            running=self.running,
            reserved=self.reserved,
            used=self.used,
            budget_id=self.budget_id,
            ttl_s=keys.QUOTA_TTL_S,
            lease_ms=LEASE_MS,
            known_base=self.base,
            need=0 if asked is None else asked.tokens,
            charge=0 if asked is None else asked.charge,
            wanted=0 if asked is None else asked.wanted,
            admit=asked is not None,
            kv_tokens=kv_tokens,
            awaited=awaited,
            **self.limits.counted,
            **self._take_levels(now_s),
        )

    def _take_levels(self, now_s: float) -> dict[str, Any]:
        """The part of a report that is about buckets: charges that those in Redis lack, and how full they were here."""
        shared = self.share_of if self.is_unavailable else 1  # a share's level stands for that much of the whole
        requests, tokens = (None if bucket is None else bucket.level * shared for bucket in self.left(now_s))
        lacking = {"delta_requests": self._debt_requests.take(now_s), "delta_tokens": self._debt_tokens.take(now_s)}
        return {**lacking, "known_requests": requests, "known_tokens": tokens}

    def learn(self, report: QuotaReport, verdict: QuotaVerdict, now_s: float) -> None:
        """Takes the answer of Redis. A request that was granted is held before the next report is made."""
        self._awaited.discard(report.number)
        self.is_unavailable = False
        self.share_of = max(self.gateways, verdict.gateways)
        self.base, self.used_elsewhere = verdict.base, verdict.used_elsewhere
        self._used_when_left = self.used
        self._requests = self._known(self.limits.requests_per_minute, verdict.requests, now_s)
        self._tokens = self._known(self.limits.tokens_per_minute, verdict.tokens, now_s)
        self._set_rates()

    def unreported(self, report: QuotaReport, now_s: float) -> None:
        """Takes a report back that may not have arrived; nobody waits for its answer."""
        self._awaited.discard(report.number)
        self._debt_requests.give_back(report.delta_requests, now_s)
        self._debt_tokens.give_back(report.delta_tokens, now_s)

    # ---- without Redis -------------------------------------------------------------------------------------------

    def refusal_of_share(self, asked: Reservation, kv_tokens: int | None, now_s: float) -> tuple[Reason, float] | None:
        """The reason against it, and for how many seconds; None: there is room."""
        self._leave(now_s)
        reason = self._over_total(asked.tokens, kv_tokens)
        if reason is not None:
            return reason, 0.0
        requests, tokens = self.left(now_s)
        if requests is not None and requests.level < 1:
            return "requests", requests.wait_s(1, now_s)
        if tokens is not None and tokens.level < (wanted := min(float(asked.wanted), tokens.size)):
            return "tokens", tokens.wait_s(wanted, now_s)
        return None

    def take_from_share(self, charge: int, now_s: float) -> int:
        """Takes from the minute's share what the request may: its charge, or what the share may be overdrawn by. More
        would be given back at its end without having been taken."""
        requests, tokens = self.left(now_s)
        taken = charge if tokens is None else min(charge, int(tokens.level + tokens.size))
        self._take(requests, self._debt_requests, 1, now_s)
        self._take(tokens, self._debt_tokens, taken, now_s)
        return taken

    def _over_total(self, need: int, kv_tokens: int | None) -> Reason | None:
        """Limits that no minute refills, of which this gateway has its share of what was left."""
        limits, shared = self.limits, self.share_of
        if limits.token_budget is not None:
            if self.spent >= limits.token_budget:
                return "budget"
            left = limits.token_budget - self.used_elsewhere - self._used_when_left
            if self.used - self._used_when_left + self.reserved >= left / shared:
                return "budget_reserved"
        if limits.concurrency is not None and self.running >= max(1, limits.concurrency // shared):
            return "concurrency"
        if kv_tokens is not None and self.reserved > 0 and self.reserved + need > kv_tokens / shared:
            return "kv_share"
        return None

    def _leave(self, now_s: float) -> None:
        """Goes from the whole tenant's buckets to this gateway's share of them."""
        if self.is_unavailable:
            return
        self.is_unavailable = True
        for bucket in self.left(now_s):
            if bucket is not None:
                bucket.level /= self.share_of
                bucket.size = max(1.0, bucket.size / self.share_of)

    def _take(self, bucket: Bucket | None, debt: Debt, amount: float, now_s: float) -> None:
        if bucket is not None:
            bucket.add(-amount, now_s)
            debt.add(-amount, now_s)

    # ---- limits --------------------------------------------------------------------------------------------------

    def _set_limits(self, limits: Limits, now_s: float) -> None:
        self.limits = limits
        self._requests = self._changed(self._requests, limits.requests_per_minute, now_s)
        self._tokens = self._changed(self._tokens, limits.tokens_per_minute, now_s)
        self._set_rates()

    def _set_rates(self) -> None:
        """All gateways' debts together fade as fast as the bucket fills."""
        self._debt_requests.rate = (self.limits.requests_per_minute or 0) / self.share_of
        self._debt_tokens.rate = (self.limits.tokens_per_minute or 0) / self.share_of

    def _changed(self, before: Bucket | None, limit: int | None, now_s: float) -> Bucket | None:
        """A bucket of the new limit, as full as before, until Redis answers next."""
        if limit is None:
            return None
        size = max(1.0, limit / self.share_of) if self.is_unavailable else float(limit)
        return Bucket(size, size if before is None else min(size, before.fill(now_s)), now_s)

    def _known(self, limit: int | None, level: float | None, now_s: float) -> Bucket | None:
        return None if limit is None else Bucket(float(limit), float(limit) if level is None else level, now_s)
