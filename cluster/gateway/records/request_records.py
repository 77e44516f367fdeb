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
Ask = Callable[[str], Awaitable[bytes | None]]


async def _nobody(request_id: str) -> bytes | None:
    del request_id
    return None


class RequestRecords:
    """One event loop. write_line: takes each record too. gateway: the name of this one in records. ask: other
    gateways. export: takes the record of a request with a trace."""

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
        self._records: OrderedDict[str, bytes] = OrderedDict()
        self._encode = msgspec.msgpack.Encoder().encode
        self.held_bytes = 0

    def add(self, record: RequestRecord, trace: TraceContext | None = None) -> None:
        """Keeps the record of a request that has ended, in place of an older one with this id, and forgets the oldest.
        trace: its place in a trace."""
        if trace is not None and trace.is_sampled:
            record = msgspec.structs.replace(record, trace_id=trace.trace_name)
            self._export(record, trace)
        self._write_line(record)
        self._forget(record.request_id)
        self._records[record.request_id] = encoded = self._encode(record)
        self.held_bytes += len(encoded) + OVERHEAD_BYTES
        while self.held_bytes > self._most_bytes:
            self._forget(next(iter(self._records)))

    def encoded(self, request_id: str) -> bytes | None:
        """Returns a record of this gateway as others read it (msgpack); None when there is none any more."""
        return self._records.get(request_id)

    async def find(self, request_id: str) -> RequestRecord | None:
        """Returns the record of a request, of whichever gateway had it; None when nobody has one. Waits for the others
        for a second or so."""
        own = self._records.get(request_id)
        found, where = (own, self._gateway) if own is not None else (await self._ask(request_id), "")
        if found is None:
            return None
        record = msgspec.msgpack.decode(found, type=RequestRecord)
        return msgspec.structs.replace(record, gateway=where) if where else record

    def _forget(self, request_id: str) -> None:
        if (old := self._records.pop(request_id, None)) is not None:
            self.held_bytes -= len(old) + OVERHEAD_BYTES
