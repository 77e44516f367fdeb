"""BatchOutput: the rows of a batch as files, in the order of their lines."""

from collections.abc import Awaitable, Callable, Collection
from typing import Any

from tandem.cluster.gateway.batches.batch_records import BatchFacts
from tandem.cluster.gateway.batches.batch_store import BatchPlace, BatchStore
from tandem.cluster.gateway.files.file_store import FileStore, FileWriter

ROWS_AT_ONCE = 8
"""Rows that are read together."""
OUTPUT, ERRORS = "output", "errors"
Patiently = Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]
"""Returns the result of a call to Redis, however long that is away."""


class BatchOutput:
    """The files of one batch, written once by who has its lease; others get LeaseLost."""

    def __init__(self, store: BatchStore, files: FileStore, facts: BatchFacts, patiently: Patiently) -> None:
        self._store = store
        self._files = files
        self._facts = facts
        self._place = BatchPlace(facts.tenant, facts.id)
        self._patiently = patiently

    async def write(self, now_s: int) -> Collection[str]:
        """Writes the rows, those with status 200 into the output. Returns the kinds of files that there are."""
        numbers = await self._patiently(lambda: self._store.numbers(self._place))
        written: dict[str, FileWriter] = {}
        for start in range(0, len(numbers), ROWS_AT_ONCE):
            some = numbers[start : start + ROWS_AT_ONCE]
            for succeeded, row in await self._patiently(lambda: self._store.rows(self._place, some)):  # noqa: B023
                kind = OUTPUT if succeeded else ERRORS
                if kind not in written:
                    written[kind] = self._writer(kind)
                    await self._patiently(written[kind].begin)
                written[kind].hold(row + b"\n")
                await self._patiently(written[kind].flush)
        for kind, writer in written.items():
            await self._finished(writer, f"{self._facts.id}_{kind}.jsonl", now_s)
        if OUTPUT not in written:
            await self._patiently(self._writer(OUTPUT).drop)  # the bytes of rows were counted there
        return written

    def _writer(self, kind: str) -> FileWriter:
        file_id = self._facts.output_file_id if kind == OUTPUT else self._facts.error_file_id
        return FileWriter(self._files, self._place.tenant, file_id, self._store.right(self._place))

    async def _finished(self, writer: FileWriter, filename: str, now_s: int) -> None:
        life_s = self._facts.output_life_s
        await self._patiently(lambda: writer.finish(filename, "batch_output", now_s, life_s))
