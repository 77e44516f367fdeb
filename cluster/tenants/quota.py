"""Quotas of one gateway: each request is admitted by one script call, and settled when it ends.

The owner task of a request calls admit and settle. Redis counts for all gateways (quota.lua); while it is
unavailable each goes on with its share (account.py). A heartbeat reports changes to Redis: freed concurrency and unused
tokens at once, everything that runs once a second, which renews this gateway's lease. The heartbeat also finds out that
Redis is back: while it is unavailable, no request waits for it.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count

import msgspec

from tandem.cluster.state import keys
from tandem.cluster.state.lua import load_lua
from tandem.cluster.state.redis_client import RedisUnavailable, RequestClient
from tandem.cluster.tenants.account import Account, Bucket, QuotaReport, QuotaVerdict
from tandem.cluster.tenants.directory import TenantDirectory
from tandem.cluster.tenants.tenant import NO_LIMITS, Limits
from tandem.cluster.tenants.tenant_admission import Header, OverLimit, Reason, Reservation, Tenancy

log = logging.getLogger("tandem.tenants")
QUOTA_SCRIPT = load_lua(__file__, "quota.lua")
"""Runs once to admit a request, and by the heartbeat to report changes since."""
HEARTBEAT_S = 1.0
LEAST_PERIOD_S = 0.05
AT_ONCE = 32
"""Script calls in flight: a burst waits here instead of running into the client's deadline."""
MAX_RETRY_S = 60.0
LEAST_RETRY_S = 1.0
LEAST_SPREAD_S = 4.0
OPEN_OUTPUT_TOKENS = 64
"""Tokens that must be left for the answer of a request without max_tokens. It is charged all that it may take, so the
others wait until that is known; the bucket is overdrawn by one such request at most."""
WORDS: Mapping[Reason, str] = {
    "requests": "Too many requests: {limit} a minute are allowed.",
    "tokens": "Too many tokens: {limit} a minute are allowed, prompt and output together; this asks for {tokens}.",
    "concurrency": "Too many requests at once: {limit} are allowed.",
    "kv_share": "The requests in flight hold all of the cache that is this tenant's; this asks for {tokens} tokens.",
    "budget": "The token budget of {limit} is used up.",
    "budget_reserved": "What is left of the token budget of {limit} is held by requests in flight.",
}


class Quota(Tenancy):
    """The limits of tenants over all gateways. gateway: id of this life of the gateway. gateways: how many there are at
    least.

    kv_tokens: KV tokens of all groups, 0 when not known. random: 0 to 1, spreads those who come back. server_ms: stands
    in for the server's clock in tests.
    """

    def __init__(
        self,
        redis: RequestClient,
        directory: TenantDirectory,
        gateway: str,
        *,
        gateways: int = 1,
        kv_tokens: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
        random: Callable[[], float] = random.random,
        server_ms: Callable[[], int] | None = None,
    ) -> None:
        self._redis, self._directory = redis, directory
        self._gateway, self._gateways = gateway, gateways
        self._kv_tokens = kv_tokens
        self._clock = clock
        self._random = random
        self._server_ms = server_ms
        self._accounts: dict[str, Account] = {}
        self._numbers = count(1)
        self._unreported: set[str] = set()
        self._triggered = asyncio.Event()
        self._renew_at_s = clock()
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._saved_spent: Mapping[str, tuple[int, int]] = {}

    # ---- Tenancy -------------------------------------------------------------------------------------------------

    def limits(self, tenant: str) -> Limits:
        known = self._directory.tenants.get(tenant)
        return known.limits if known is not None else NO_LIMITS

    async def admit(
        self, tenant: str, prompt_tokens: int, output_tokens: int, *, is_open_ended: bool = False
    ) -> Reservation:
        account = self._account(tenant)
        if account is None:
            return Reservation(tenant)
        expected = min(output_tokens, OPEN_OUTPUT_TOKENS) if is_open_ended else output_tokens
        reservation = _reservation(account.limits, tenant, prompt_tokens, output_tokens, expected)
        async with self._turns:
            # while this waited the tenant may have been removed, and its account with it
            account = self._accounts.get(tenant) or self._put(account)
            try:
                granted = await self._reserve(account, reservation)
            except OverLimit:
                raise
            except BaseException:
                self._say_soon(tenant)  # Redis may have granted it
                raise
            account.hold(reservation.tokens)
            return granted

    def settle(self, reservation: Reservation, used_tokens: int) -> None:
        if not reservation.is_counted:
            return
        account = self._accounts[reservation.tenant]
        account.release(reservation.tokens)
        account.bill(reservation.charge, used_tokens, self._clock())
        self._say_soon(reservation.tenant)

    def headers(self, tenant: str) -> Sequence[Header]:
        account = self._account(tenant)
        if account is None:
            return ()
        requests, tokens = account.left(self._clock())
        limits = account.limits
        return [
            *_headers(b"requests", limits.requests_per_minute, requests),
            *_headers(b"tokens", limits.tokens_per_minute, tokens),
        ]

    # ---- heartbeat ------------------------------------------------------------------------------------------------

    def restore(self, spent: Mapping[str, tuple[int, int]]) -> None:
        """Takes what an earlier life knew of budgets (budget id, tokens), for a Redis that has lost it."""
        self._saved_spent = dict(spent)

    def spent(self) -> dict[str, tuple[int, int]]:
        """The same of this life."""
        return dict(self._saved_spent) | {a.name: (a.budget_id, a.spent) for a in self._accounts.values()}

    async def run(self) -> None:
        """Sends heartbeats until it is cancelled; none while no tenant has an account."""
        while True:
            try:
                await self.send_heartbeat()
            except Exception:
                log.exception("quotas were not reported to Redis")
            await asyncio.sleep(LEAST_PERIOD_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S - LEAST_PERIOD_S if self._accounts else None):
                    await self._triggered.wait()

    async def send_heartbeat(self) -> None:
        """Reports every changed account to Redis. A report that fails is sent with the next heartbeat."""
        self._triggered.clear()
        self._forget_removed()
        if self._clock() >= self._renew_at_s:  # however often others have news
            self._renew_at_s = self._clock() + HEARTBEAT_S - LEAST_PERIOD_S
            self._unreported.update(name for name, account in self._accounts.items() if account.running)
        for name in list(self._unreported):
            account = self._account(name)
            self._unreported.discard(name)
            if account is None:
                continue
            try:
                await self._ask(account, account.report(self._clock(), None))
            except RedisUnavailable:
                self._unreported.add(name)
                return

    def tell_again(self) -> None:
        """Reports every account at the next heartbeat, which is soon."""
        self._unreported.update(self._accounts)
        self._triggered.set()

    def _say_soon(self, tenant: str) -> None:
        self._unreported.add(tenant)
        self._triggered.set()

    def _forget_removed(self) -> None:
        known = self._directory.tenants
        for name in [n for n, account in self._accounts.items() if n not in known and account.is_idle]:
            del self._accounts[name]
            self._unreported.discard(name)

    # ---- one call ------------------------------------------------------------------------------------------------

    def _account(self, name: str) -> Account | None:
        """The account of a tenant with limits that are counted; an account that is there stays while requests run."""
        tenant = self._directory.tenants.get(name)
        if tenant is None or not tenant.limits.are_counted:
            return None
        account = self._accounts.get(name)
        if account is None:
            now_s = self._clock()
            account = Account(
                name, tenant.limits, tenant.budget_id, self._gateway, self._gateways, now_s, self._numbers
            )
            budget_id, spent = self._saved_spent.get(name, (0, 0))
            if budget_id == tenant.budget_id:
                account.base = account.used_elsewhere = float(spent)
            self._put(account)
        account.update(tenant, self._clock())
        return account

    def _put(self, account: Account) -> Account:
        """The account of a tenant; the first one starts the heartbeats."""
        self._accounts[account.name] = account
        self._triggered.set()
        return account

    async def _reserve(self, account: Account, reservation: Reservation) -> Reservation:
        """The reservation with the tokens that were charged."""
        kv_tokens = self._kv_limit(account)
        report = account.report(self._clock(), kv_tokens, reservation)
        try:
            verdict = await self._ask(account, report, may_probe=False)
        except RedisUnavailable as error:
            now_s = self._clock()
            if not account.is_unavailable:
                text = "quota of %s: Redis %s (%s); going on with a share of it"
                log.warning(text, account.name, error.state, error)
            refused = account.refusal_of_share(reservation, kv_tokens, now_s)
            if refused is not None:
                raise self._refusal(account.limits, *refused, reservation) from None
            self._unreported.add(account.name)
            return reservation._replace(charge=account.take_from_share(reservation.charge, now_s))
        if not verdict.ok:
            reason = msgspec.convert(verdict.reason, Reason)
            raise self._refusal(account.limits, reason, verdict.wait_ms / 1000, reservation)
        return reservation

    async def _ask(self, account: Account, report: QuotaReport, *, may_probe: bool = True) -> QuotaVerdict:
        report.now_ms = None if self._server_ms is None else self._server_ms()
        names = (keys.quota(account.name), keys.quota_gateways(account.name))
        try:
            answer = await self._redis.script(QUOTA_SCRIPT, names, [msgspec.json.encode(report)], may_probe=may_probe)
            verdict = msgspec.json.decode(answer, type=QuotaVerdict)
        except BaseException:
            account.unreported(report, self._clock())
            raise
        account.learn(report, verdict, self._clock())
        return verdict

    def _refusal(self, limits: Limits, reason: Reason, wait_s: float, reservation: Reservation) -> OverLimit:
        limit = {
            "requests": limits.requests_per_minute,
            "tokens": limits.tokens_per_minute,
            "concurrency": limits.concurrency,
            "budget": limits.token_budget,
            "budget_reserved": limits.token_budget,
        }.get(reason)
        is_open_ended = reservation.wanted < reservation.charge
        tokens = reservation.wanted if is_open_ended and reason == "tokens" else reservation.tokens
        message = WORDS[reason].format(limit=limit, tokens=tokens)
        if reason == "budget":
            return OverLimit(message, reason=reason, retry_after_s=None, code="insufficient_quota")
        spread_s = max(LEAST_SPREAD_S, wait_s / 10)
        soonest_s = min(max(wait_s, LEAST_RETRY_S), MAX_RETRY_S - spread_s)
        retry_s = soonest_s + self._random() * spread_s
        return OverLimit(message, reason=reason, retry_after_s=retry_s, code="rate_limit_exceeded")

    def _kv_limit(self, account: Account) -> int | None:
        share = account.limits.kv_share
        if share is None or (total := self._kv_tokens()) <= 0:
            return None
        return int(share * total)


def _reservation(
    limits: Limits, tenant: str, prompt_tokens: int, output_tokens: int, expected_tokens: int
) -> Reservation:
    """The reservation that a request needs. Its charge is at most a full minute; a prompt beyond that never fits.
    expected_tokens: of the output, what must be left now."""
    tokens = prompt_tokens + output_tokens
    minute = limits.tokens_per_minute
    if minute is not None and prompt_tokens > minute:
        message = f"The prompt has {prompt_tokens} tokens; this tenant may use {minute} a minute."
        raise OverLimit(message, reason="tokens", retry_after_s=None, code="rate_limit_exceeded")
    if minute is None:
        return Reservation(tenant, tokens, tokens, tokens, is_counted=True)
    wanted = min(prompt_tokens + expected_tokens, minute)
    return Reservation(tenant, tokens, min(tokens, minute), wanted, is_counted=True)


def _headers(what: bytes, limit: int | None, bucket: Bucket | None) -> list[Header]:
    """remaining: whole units now. reset: until the bucket is full again, as OpenAI writes it."""
    if limit is None or bucket is None:
        return []
    full_s = bucket.wait_s(bucket.size, bucket.at_s)
    return [
        (b"x-ratelimit-limit-" + what, b"%d" % limit),
        (b"x-ratelimit-remaining-" + what, b"%d" % max(0, int(bucket.level + 1e-6))),
        (b"x-ratelimit-reset-" + what, f"{full_s:.3f}".rstrip("0").rstrip(".").encode() + b"s"),
    ]
