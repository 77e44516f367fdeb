"""RanksBeside: real ranks that compute the plans of a replay, whose token ids are compared with the recorded ones."""

import time
from collections import deque
from collections.abc import Callable
from typing import Self

import msgspec
from msgspec.structs import replace

from tandem.configs.schema import EngineSettings
from tandem.workers.build import open_executor
from tandem.workers.engine.recording.call_records import RankMessage
from tandem.workers.engine.recording.recording_file import Recording, RecordingError
from tandem.workers.engine.recording.replay import RecordedRanks, engine_of, outside_of
from tandem.workers.messages.step import RowResult, StepPlan, StepResult
from tandem.workers.messages.transfer import TransferOp, TransferResult

ANSWER_S = 600.0
POLL_S = 0.5


class RanksBeside:
    """The ranks of a recorded group, on this machine, with the model of a folder. RecordingError for a recording whose
    plans cannot be computed: without token ids, or with KV that nothing in it computes."""

    def __init__(self, recording: Recording, model: str) -> None:
        header = recording.header
        if header.mode != "full":
            raise RecordingError("a redacted recording has no token ids to compute: record with --record full")
        settings = msgspec.msgpack.decode(header.settings, type=EngineSettings)
        if settings.cache.kv_disk_path is not None or _has_earlier_kv(recording.state):
            raise RecordingError("the group has used KV of an earlier one, which nothing in the recording computes")
        if not header.is_whole:
            raise RecordingError(
                "the recording begins in the middle of the group's life, with KV that nothing in it computes; with "
                "a larger --record-mib it begins where the group does"
            )
        cache = replace(settings.cache, num_blocks=header.num_blocks)
        settings = replace(settings, model=replace(settings.model, model=model), cache=cache, step_log=None)
        self.num_tokens = 0
        self._executor = open_executor(settings)
        self._results: deque[StepResult] = deque()
        self._moved: dict[tuple[int, int], TransferResult] = {}

    def __enter__(self) -> Self:
        self._executor.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._executor.close()

    # ---- Beside ----

    def submit(self, plan: StepPlan) -> None:
        """Implements Beside."""
        self._executor.submit(plan)

    def transfer(self, op: TransferOp) -> None:
        """Implements Beside."""
        self._executor.transfer(op)

    def answered(self, message: RankMessage) -> str | None:
        """Implements Beside: waits until the ranks here have answered the same."""
        if isinstance(message, StepResult):
            return self._compare_step(message)
        return self._compare_move(message) if isinstance(message, TransferResult) else None

    # ---- inside ----

    def _compare_step(self, recorded: StepResult) -> str | None:
        if recorded.failure is not None:
            raise RecordingError(f"step {recorded.step_id} has failed in the recording, which ranks here do not repeat")
        self._wait(lambda: bool(self._results), f"step {recorded.step_id}")
        result = self._results.popleft()
        if result.failure is not None:
            return f"step {recorded.step_id}\n  recorded: it was computed\n  computed: {result.failure}"
        before = {row.row: _shown(row) for row in recorded.rows}
        now = {row.row: _shown(row) for row in result.rows}
        self.num_tokens += sum(len(row.token_ids) for row in result.rows)
        if before == now:
            return None
        row = next(row for row in before.keys() | now.keys() if before.get(row) != now.get(row))
        words = f"\n  recorded: {before.get(row)}\n  computed: {now.get(row)}"
        return f"step {recorded.step_id}, token ids of row {row}{words}"

    def _compare_move(self, recorded: TransferResult) -> str | None:
        key = recorded.ticket, recorded.rank
        self._wait(lambda: key in self._moved, f"ticket {recorded.ticket}")
        moved = self._moved.pop(key)
        if (moved.failure is None, moved.failed) == (recorded.failure is None, recorded.failed):
            return None
        return f"ticket {recorded.ticket} of rank {recorded.rank}\n  recorded: {recorded}\n  computed: {moved}"

    def _wait(self, has_come: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + ANSWER_S
        while not has_come():
            message = self._executor.poll(POLL_S)
            if isinstance(message, StepResult):
                self._results.append(message)
            elif isinstance(message, TransferResult):
                self._moved[message.ticket, message.rank] = message
            if time.monotonic() > deadline_s:
                raise RecordingError(f"the ranks have not answered {what} in {ANSWER_S:.0f} s")


def _shown(row: RowResult) -> list[int] | str:
    """Returns what a row has given, as far as it is compared: its ids, or what there is in place of ids."""
    if row.error is not None:
        return f"error: {row.error}"
    return row.token_ids if row.embedding is None else f"an embedding of {len(row.embedding)} bytes"


def _has_earlier_kv(state: bytes) -> bool:
    """Returns whether the tiers below the device hold something already."""
    offload = engine_of(state, outside_of(RecordedRanks())).stats().offload
    return offload is not None and offload.host_blocks > 0
