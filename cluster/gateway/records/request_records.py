"""RequestRecords: the last requests that have ended, of this gateway, and through others' answers of all.

Bounded in bytes; a record is a few hundred. Nothing is done for a token, and once a request one record is encoded.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable

import msgspec

from tandem.cluster.gateway.records.request_log import OnRecord
from tandem.cluster.gateway.records.request_record import RequestRecord
from tandem.cluster.gateway.records.trace_context import TraceContext

MOST_BYTES = 4 * 2**20
OVERHEAD_BYTES = 200
"""Roughly what a record and its id take besides their bytes."""
Export = Callable[[RequestRecord, TraceContext], None]
Ask = Callable[[str, str], Awaitable[bytes | None]]


async def _nobody(request_id: str, tenant: str) -> bytes | None:
    del request_id, tenant
    return None


class RequestRecords:
    """One event loop. Ids are their clients' own, so records are kept by tenant and id: none takes the place of another
    tenant's. write_line: takes each record too. gateway: the name of this one in records. ask: other gateways, for an
    id and a tenant, as encoded(). export: takes the record of a request with a trace."""

    def __init__(
        self,
        write_line: OnRecord = lambda record: None,
        gateway: str = "",
        ask: Ask = _nobody,
        export: Export = lambda record, trace: None,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._write_line = write_line
        self._gateway = gateway
        self._ask = ask
        self._export = export
        self._most_bytes = most_bytes
        self._records: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._encode = msgspec.msgpack.Encoder().encode
        self.held_bytes = 0

    def add(self, record: RequestRecord, trace: TraceContext | None = None) -> None:
        """Keeps the record of a request that has ended, in place of its tenant's older one with this id, and forgets
        the oldest. trace: its place in a trace."""
        if trace is not None and trace.is_sampled:
            record = msgspec.structs.replace(record, trace_id=trace.trace_name)
            self._export(record, trace)
        self._write_line(record)
        self._forget(place := (record.tenant, record.request_id))
        self._records[place] = encoded = self._encode(record)
        self.held_bytes += len(encoded) + OVERHEAD_BYTES
        while self.held_bytes > self._most_bytes:
            self._forget(next(iter(self._records)))

    def encoded(self, request_id: str, tenant: str = "") -> bytes | None:
        """Returns a record of this gateway as others read it (msgpack); None when there is none any more. tenant: whose
        it is; empty: the last one with this id, rather of a request that had a valid key."""
        if tenant:
            return self._records.get((tenant, request_id))
        places = [place for place in self._records if place[1] == request_id]
        known = [place for place in places if place[0]] or places
        return self._records[known[-1]] if known else None

    async def find(self, request_id: str, tenant: str = "") -> RequestRecord | None:
        """Returns the record of a request, of whichever gateway had it; None when nobody has one. tenant: as encoded().
        Waits for the others for a second or so."""
        own = self.encoded(request_id, tenant)
        found, where = (own, self._gateway) if own is not None else (await self._ask(request_id, tenant), "")
        if found is None:
            return None
        record = msgspec.msgpack.decode(found, type=RequestRecord)
        return msgspec.structs.replace(record, gateway=where) if where else record

    def _forget(self, place: tuple[str, str]) -> None:
        if (old := self._records.pop(place, None)) is not None:
            self.held_bytes -= len(old) + OVERHEAD_BYTES
