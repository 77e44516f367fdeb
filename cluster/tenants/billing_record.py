"""Billing records: what each request was billed, and reading them back for `tandem usage`. Writing is ledger.py's."""

import datetime
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from typing import NamedTuple

import msgspec

from tandem.cluster.state import keys
from tandem.cluster.state.redis_client import Commands
from tandem.configs.errors import SettingsError, TandemError
from tandem.workers.messages.request import Usage

DAY_S, HOUR_S = 86400, 3600
LONGEST_S = 400 * DAY_S
PAGE = 1000
TRIES = 100
"""Readings of a day until its sums stay as they are: one that is being summed up has fewer rows at each."""
CLIENT_LOST = "client_lost"
"""Terminal state of a request whose gateway died: nothing that was delivered can be shown, so nothing is billed."""
_SPAN = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": DAY_S}


class BillingRecord(msgspec.Struct, frozen=True, kw_only=True, tag="bill"):
    """One accepted request: a line of the journal, and, once it has ended, a row of the ledger."""

    id: str
    time_s: float  # wall clock of its end; until then of its admission
    tenant: str
    model: str
    adapter: str | None = None  # name@digest
    terminal: str | None = None  # stop, length, abort, error, rejected or client_lost; None until it has ended
    # tokens that were delivered, which an aborted request pays too
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt's
    completion_tokens: int = 0

    @property
    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, self.completion_tokens, self.cached_tokens)

    def ended(self, terminal: str, usage: Usage, time_s: float) -> "BillingRecord":
        """Returns the record of the same request at its end."""
        return msgspec.structs.replace(
            self,
            terminal=terminal,
            time_s=time_s,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
        )


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    """A row as Redis has it, under its id."""

    time_s: float
    tenant: str
    model: str
    adapter: str | None
    terminal: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class UsageSum(NamedTuple):
    """Rows of one tenant, model and adapter together."""

    tenant: str
    model: str
    adapter: str | None
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


def pack(row: BillingRecord) -> bytes:
    """The row as Redis has it. Its id is left out: it is the field's name."""
    values = msgspec.structs.asdict(row)
    del values["id"]
    return msgspec.msgpack.encode(_Packed(**values))


def unpack(row_id: bytes, data: bytes) -> BillingRecord:
    """The row that pack() made."""
    return BillingRecord(id=row_id.decode(), **msgspec.structs.asdict(msgspec.msgpack.decode(data, type=_Packed)))


def day_of(time_s: float) -> str:
    """The UTC day of a moment, 20260131."""
    return datetime.datetime.fromtimestamp(time_s, datetime.UTC).strftime("%Y%m%d")


def parse_since(text: str, now_s: float) -> float:
    """'24h', '90m', '7d', '30s': so long before now; '2026-01-31' or '2026-01-31T12:00': that moment (UTC). Wall clock
    seconds. SettingsError otherwise."""
    if match := _SPAN.fullmatch(text):
        return now_s - float(match[1]) * _SECONDS[match[2]]
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError as error:
        raise SettingsError(f"{text!r} is neither a time like 24h nor a date like 2026-01-31", "--since") from error
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=datetime.UTC)).timestamp()


def summed(rows: Iterable[BillingRecord], earlier: Iterable[UsageSum] = ()) -> list[UsageSum]:
    """One line for each tenant, model and adapter, by name. earlier: sums of rows that are not there any more."""
    sums: dict[tuple[str, str, str], UsageSum] = {}
    of_rows = (
        UsageSum(r.tenant, r.model, r.adapter, 1, r.prompt_tokens, r.cached_tokens, r.completion_tokens) for r in rows
    )
    for one in (*earlier, *of_rows):
        place = (one.tenant, one.model, one.adapter or "")
        before = sums.get(place, UsageSum(*one[:3]))
        sums[place] = UsageSum(*one[:3], *(a + b for a, b in zip(before[3:], one[3:], strict=True)))
    return [sums[place] for place in sorted(sums)]


KINDS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
"""The amounts that are summed."""


class _Part(NamedTuple):
    """The field of a sum."""

    hour_s: int  # its first second
    tenant: str
    model: str
    adapter: str | None
    kind: str  # one of KINDS


def sums_by_hour(rows: Iterable[BillingRecord]) -> dict[bytes, int]:
    """The rows as fields and values of keys.usage_sums()."""
    sums: Counter[_Part] = Counter()
    for row in rows:
        place = (int(row.time_s // HOUR_S) * HOUR_S, row.tenant, row.model, row.adapter)
        sums[_Part(*place, "requests")] += 1
        for kind in KINDS[1:]:
            sums[_Part(*place, kind)] += getattr(row, kind)
    return {msgspec.json.encode(part): amount for part, amount in sums.items()}


async def read_rows_and_sums(
    redis: Commands, tenant: str | None, since_s: float, until_s: float
) -> tuple[list[BillingRecord], list[UsageSum]]:
    """The rows that ended in [since_s, until_s], oldest first, of one tenant or of all, and what the rows that are not
    there any more have used, of the hours that overlap the period, for summed().

    No request is in both, and none in neither, also when rows become sums meanwhile: every row that does raises a sum
    of its day, so the sums are read before the rows and after, until they are the same. TandemError when they are not
    after TRIES, RedisUnavailable."""
    rows: list[BillingRecord] = []
    sums: list[UsageSum] = []
    for day in _days(since_s, until_s):
        after = await _sums_of(redis, tenant, day, since_s, until_s)
        for _ in range(TRIES):
            before = after
            of_day = [row async for row in _read_day(redis, tenant, day) if since_s <= row.time_s <= until_s]
            after = await _sums_of(redis, tenant, day, since_s, until_s)
            if after == before:
                break
        else:
            raise TandemError(f"usage rows of {day} are becoming sums (--usage-rows): ask again in a minute")
        rows += of_day
        sums += [UsageSum(*p[1:4], *(n * (kind == p.kind) for kind in KINDS)) for p, n in after.items()]
    return sorted(rows, key=lambda row: (row.time_s, row.id)), sums


async def _sums_of(redis: Commands, tenant: str | None, day: str, since_s: float, until_s: float) -> dict[_Part, int]:
    fields = await redis.command("HGETALL", keys.usage_sums(day))
    assert isinstance(fields, dict), fields
    parts = ((msgspec.json.decode(field, type=_Part), int(amount)) for field, amount in fields.items())
    return {
        part: amount
        for part, amount in parts
        if part.hour_s + HOUR_S > since_s and part.hour_s <= until_s and tenant in (None, part.tenant)
    }


async def _read_day(redis: Commands, tenant: str | None, day: str) -> AsyncIterator[BillingRecord]:
    tenants = [tenant] if tenant is not None else await tenants_of(redis, day)
    for name in tenants:
        seen: set[bytes] = set()  # a scan may show a field twice
        cursor: object = 0
        while True:
            answer = await redis.command("HSCAN", keys.usage(name, day), str(cursor), "COUNT", PAGE)
            assert isinstance(answer, list | tuple), answer
            cursor, page = answer
            for field, value in page.items():
                if field not in seen:
                    seen.add(field)
                    yield unpack(field, value)
            if int(str(cursor)) == 0:
                break


async def tenants_of(redis: Commands, day: str) -> list[str]:
    """The tenants that have rows on a UTC day, sorted. RedisUnavailable."""
    answer = await redis.command("SMEMBERS", keys.usage_tenants(day))
    assert isinstance(answer, set | list), answer
    return sorted(name.decode() for name in answer)


def _days(since_s: float, until_s: float) -> list[str]:
    """The UTC days of a period, sorted; of a longer one the last LONGEST_S."""
    first_s = min(until_s, max(since_s, until_s - LONGEST_S))
    whole_days = int((until_s - first_s) // DAY_S)
    return sorted({day_of(until_s), *(day_of(first_s + day * DAY_S) for day in range(whole_days + 1))})


class Ledger:
    """Takes two records of each accepted request: at its admission, and at its end. As it is it keeps nothing:
    `tandem run-batch`, and tests."""

    def accepted(self, record: BillingRecord) -> None:
        """A row is owed from now on. Never waits."""

    async def settle(self, record: BillingRecord) -> None:
        """Writes the row of a request that has ended. Called by the request's task, never by an HTTP handler."""
