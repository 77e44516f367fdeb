"""Batches: events of a response as they are kept, and what readers make of them.

A batch is some whole events in a row, compressed. Its number counts the events of the response up to its end, so that
its last event has the sequence number below. The event that ends a response is in none: all readers make the same one
of the response as it is stored, whatever has ended it.
"""

import asyncio
import zlib
from typing import Any, NamedTuple

import msgspec

from tandem.workers.messages.errors import RequestRefused

ENDS = b"\n\n"
"""The end of an event; inside it JSON has none."""
INLINE_BYTES = 16 * 1024


class Batch(NamedTuple):
    """Some events in a row. number: of events up to the end of these."""

    number: int
    packed: bytes


class Seen(NamedTuple):
    """A response that keeps its events, as it was at one moment. number: of its events so far; 0: it keeps none.
    batches: the next ones, perhaps not all."""

    is_running: bool
    number: int
    batches: list[Batch]


async def batch_of(events: bytes, before: int = 0) -> Batch:
    """Packs events. before: events of the response that are in batches already."""
    number = before + events.count(ENDS)
    if len(events) <= INLINE_BYTES:
        return Batch(number, zlib.compress(events, 1))
    return Batch(number, await asyncio.to_thread(zlib.compress, events, 1))


async def events_from(batch: Batch, first: int) -> bytes:
    """The events of a batch from the sequence number `first` on."""
    if len(batch.packed) <= INLINE_BYTES:
        events = zlib.decompress(batch.packed)
    else:
        events = await asyncio.to_thread(zlib.decompress, batch.packed)
    too_many = first - (batch.number - events.count(ENDS))
    return events if too_many <= 0 else events.split(ENDS, too_many)[too_many]


def closing_event(response: bytes, sequence_number: int) -> bytes:
    """The event that ends a response, of its object."""
    kind = f"response.{msgspec.json.decode(response)['status']}"
    return event_of(kind, sequence_number, response=msgspec.Raw(response))


def error_event(error: RequestRefused, sequence_number: int) -> bytes:
    """The event of a stream that cannot go on, though its response may."""
    return event_of("error", sequence_number, code=error.code, message=str(error), param=None)


def event_of(kind: str, sequence_number: int, **fields: Any) -> bytes:
    """One event."""
    data = {"type": kind, "sequence_number": sequence_number, **fields}
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(data))
