"""Traces of real services: when requests came, how long they were, and which blocks of their prompts they shared.

A file is JSON lines or CSV, by its suffix. Known are the fields of Mooncake's traces (with `hash_ids`: equal ids stand
for equal blocks, and all before them), Azure's, BurstGPT's and Vidur's; flags name those of others. A row may have its
`prompt` as text.
"""

import csv
import json
import math
import random
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from tandem.cluster.cli.bench.data_sets.data_flags import DataFlags
from tandem.cluster.cli.bench.data_sets.samples import Sample, SampleText
from tandem.configs.errors import SettingsError

PATH = "--dataset-path"
TIMES: Final = ("timestamp", "TIMESTAMP", "Timestamp")
INPUTS: Final = ("input_length", "ContextTokens", "Request tokens", "num_prefill_tokens")
OUTPUTS: Final = ("output_length", "GeneratedTokens", "Response tokens", "num_decode_tokens")


class TraceLine(NamedTuple):
    """One request of a trace, its lengths scaled. due_s: from the first one's; None where times are not asked for.
    hash_ids: of its blocks. prompt: its text, if the trace has it."""

    due_s: float | None
    input_len: int
    output_len: int
    hash_ids: Sequence[Any]
    prompt: str | None


def timed_trace_samples(flags: DataFlags, text: SampleText, *, needs_times: bool) -> tuple[list[Sample], int]:
    """Makes the first requests of a trace, and says how many rows without tokens it left out. needs_times: requests are
    sent when the trace says. SettingsError for rows that do not say enough."""
    reader = TraceReader(flags, needs_times=needs_times)
    prompts = _Prompts(flags, text)
    samples = [prompts.sample(line) for line in reader.lines(flags.num_prompts)]
    return samples, reader.num_empty


class TraceReader:
    """Reads the file of --dataset-path. path_flag: the flag that has named it. num_empty: rows without tokens so far,
    which are left out. The first row's time is the trace's beginning."""

    def __init__(self, flags: DataFlags, *, needs_times: bool, path_flag: str = PATH) -> None:
        self._flags, self._needs_times, self._path_flag = flags, needs_times, path_flag
        self._first_s: float | None = None
        self.num_empty = 0

    def lines(self, most: int | None) -> Iterator[TraceLine]:
        """Yields the requests, `most` at most. SettingsError for a row that does not say enough."""
        assert self._flags.dataset_path is not None
        left = most
        for number, row in _rows_of(Path(self._flags.dataset_path), self._path_flag):
            if left == 0:
                return
            line = self._line(row, f"{self._flags.dataset_path}, row {number}")
            if line is None:
                self.num_empty += 1
                continue
            left = None if left is None else left - 1
            yield line

    def _line(self, row: dict[str, Any], where: str) -> TraceLine | None:
        """The request of a row; None if it has no tokens."""
        flags, scale = self._flags, self._flags.timed_trace_length_scale
        lengths = (
            (flags.timed_trace_label_input_length, INPUTS, "input-length"),
            (flags.timed_trace_label_output_length, OUTPUTS, "output-length"),
        )
        input_len, output_len = (
            _length(_field(row, label, known, where, name), where, self._path_flag) for label, known, name in lengths
        )
        due_s = self._due_s(row, where) if self._needs_times else None
        if input_len <= 0 or output_len <= 0:
            return None
        hash_ids, size = self._hash_ids(row, where), flags.timed_trace_chunk_hash_size
        prompt = row.get("prompt") if isinstance(row.get("prompt"), str) else None
        if hash_ids and prompt is None and len(hash_ids) * size < input_len:
            held = f"{len(hash_ids)} hash_ids of {size} tokens hold less than its {input_len} input tokens"
            raise SettingsError(f"{where}: {held}", "--timed-trace-chunk-hash-size")
        wanted = max(1, round(input_len * scale))
        return TraceLine(due_s, wanted, max(1, round(output_len * scale)), hash_ids, prompt)

    def _hash_ids(self, row: dict[str, Any], where: str) -> Sequence[Any]:
        given = row.get(label := self._flags.timed_trace_label_hash_ids)
        if not given:
            return ()
        if not isinstance(given, list) or not all(isinstance(one, int | float | str) for one in given):
            raise SettingsError(f"{where}: {label} {given!r:.60} is no list of numbers or names", self._path_flag)
        return given

    def _due_s(self, row: dict[str, Any], where: str) -> float:
        given = _field(row, self._flags.timed_trace_label_timestamp, TIMES, where, "timestamp")
        try:
            seconds = float(given) * self._flags.timed_trace_sec_multiplier
        except (ValueError, TypeError, OverflowError):
            seconds = _clock_s(str(given), where) * self._flags.timed_trace_sec_multiplier
        if not math.isfinite(seconds):
            raise SettingsError(f"{where}: {given!r} is no time", "--timed-trace-label-timestamp")
        self._first_s = seconds if self._first_s is None else self._first_s
        return max(0.0, seconds - self._first_s)


class _Prompts:
    """Makes prompts of a trace's requests: its texts, else token ids."""

    def __init__(self, flags: DataFlags, text: SampleText) -> None:
        self._flags, self._text = flags, text
        self._draw = random.Random(flags.seed)

    def sample(self, line: TraceLine) -> Sample:
        if line.prompt is not None:
            return Sample(line.prompt, self._text.length(line.prompt), line.output_len, line.due_s)
        ids = self._ids(line.hash_ids, line.input_len)
        return Sample(ids, len(ids), line.output_len, line.due_s)

    def _ids(self, hash_ids: Sequence[Any], wanted: int) -> list[int]:
        """Token ids: for each block those that its id stands for, or random ones where no row has ids of blocks."""
        allowed = self._text.allowed
        if not hash_ids:
            return [int(allowed[self._draw.randrange(len(allowed))]) for _ in range(wanted)]
        block, ids = scaled_block(self._flags), list[int]()
        for one in hash_ids:
            draw = random.Random(f"{self._flags.seed}:{one}")
            ids += (int(allowed[draw.randrange(len(allowed))]) for _ in range(min(block, wanted - len(ids))))
        return ids


def scaled_block(flags: DataFlags) -> int:
    """Returns the tokens of a block in prompts that are scaled."""
    return max(1, round(flags.timed_trace_chunk_hash_size * flags.timed_trace_length_scale))


def _rows_of(path: Path, flag: str) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            yield from enumerate(csv.DictReader(file), 1)
            return
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise SettingsError(f"{path}, row {number} is no JSON: {error}", flag) from error
            if not isinstance(row, dict):
                raise SettingsError(f"{path}, row {number} is no JSON object", flag)
            yield number, row


def _field(row: dict[str, Any], label: str | None, known: tuple[str, ...], where: str, name: str) -> Any:
    names = known if label is None else (label,)
    for one in names:
        if row.get(one) is not None:
            return row[one]
    flag = f"--timed-trace-label-{name}"
    raise SettingsError(f"{where} has no field {' or '.join(names)}; it has {', '.join(map(str, row))}", flag)


def _length(given: Any, where: str, flag: str) -> int:
    try:
        return int(given)
    except (ValueError, TypeError, OverflowError) as error:
        raise SettingsError(f"{where}: {given!r} is no number of tokens", flag) from error


def _clock_s(text: str, where: str) -> float:
    """The seconds of a date and time, as in Azure's traces, which have seven digits behind the seconds."""
    head, dot, fraction = text.partition(".")
    try:
        return datetime.fromisoformat(f"{head}{dot}{fraction[:6]}").timestamp()
    except ValueError as error:
        raise SettingsError(f"{where}: {text!r} is no time", "--timed-trace-label-timestamp") from error
