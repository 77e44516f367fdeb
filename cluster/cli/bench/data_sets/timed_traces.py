"""Traces of real services: when requests came, how long they were, and which blocks of their prompts they shared.

A file is JSON lines or CSV, by its suffix. Known are the fields of Mooncake's traces (with `hash_ids`: equal ids stand
for equal blocks, and all before them), Azure's, BurstGPT's and Vidur's; flags name those of others. A row may have its
`prompt` as text.
"""

import csv
import json
import random
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from tandem.cluster.cli.bench.data_sets.data_flags import DataFlags
from tandem.cluster.cli.bench.data_sets.samples import Sample, SampleText
from tandem.configs.errors import SettingsError

PATH = "--dataset-path"
TIMES: Final = ("timestamp", "TIMESTAMP", "Timestamp")
INPUTS: Final = ("input_length", "ContextTokens", "Request tokens", "num_prefill_tokens")
OUTPUTS: Final = ("output_length", "GeneratedTokens", "Response tokens", "num_decode_tokens")


def timed_trace_samples(flags: DataFlags, text: SampleText, *, needs_times: bool) -> tuple[list[Sample], int]:
    """Makes the first requests of a trace, and says how many rows without tokens it left out. needs_times: requests are
    sent when the trace says. SettingsError for rows that do not say enough."""
    assert flags.dataset_path is not None
    reader = _TraceReader(flags, text, needs_times)
    samples: list[Sample] = []
    empty = 0
    for number, row in _rows_of(Path(flags.dataset_path)):
        if len(samples) == flags.num_prompts:
            break
        sample = reader.sample(row, f"{flags.dataset_path}, row {number}")
        if sample is None:
            empty += 1
        else:
            samples.append(sample)
    return samples, empty


class _TraceReader:
    """Makes samples of rows. The first row's time is the trace's beginning."""

    def __init__(self, flags: DataFlags, text: SampleText, needs_times: bool) -> None:
        self._flags, self._text, self._needs_times = flags, text, needs_times
        self._first_s: float | None = None
        self._draw = random.Random(flags.seed)

    def sample(self, row: dict[str, Any], where: str) -> Sample | None:
        """The request of a row; None if it has no tokens. SettingsError for a row that does not say enough."""
        flags, scale = self._flags, self._flags.timed_trace_length_scale
        input_len = _length(_field(row, flags.timed_trace_label_input_length, INPUTS, where, "input-length"), where)
        output_len = _length(_field(row, flags.timed_trace_label_output_length, OUTPUTS, where, "output-length"), where)
        due_s = self._due_s(row, where) if self._needs_times else None
        if input_len <= 0 or output_len <= 0:
            return None
        output_len = max(1, round(output_len * scale))
        if isinstance(prompt := row.get("prompt"), str):
            return Sample(prompt, self._text.length(prompt), output_len, due_s)
        hash_ids = row.get(flags.timed_trace_label_hash_ids) or ()
        ids = self._prompt(hash_ids, input_len, max(1, round(input_len * scale)), where)
        return Sample(ids, len(ids), output_len, due_s)

    def _due_s(self, row: dict[str, Any], where: str) -> float:
        given = _field(row, self._flags.timed_trace_label_timestamp, TIMES, where, "timestamp")
        try:
            seconds = float(given) * self._flags.timed_trace_sec_multiplier
        except ValueError:
            seconds = _clock_s(str(given), where) * self._flags.timed_trace_sec_multiplier
        self._first_s = seconds if self._first_s is None else self._first_s
        return max(0.0, seconds - self._first_s)

    def _prompt(self, hash_ids: Any, full: int, wanted: int, where: str) -> list[int]:
        """Token ids: for each block those that its id stands for, or random ones where no row has ids of blocks."""
        size, allowed = self._flags.timed_trace_chunk_hash_size, self._text.allowed
        if not hash_ids:
            return [int(allowed[self._draw.randrange(len(allowed))]) for _ in range(wanted)]
        if len(hash_ids) * size < full:
            held = f"{len(hash_ids)} hash_ids of {size} tokens hold less than its {full} input tokens"
            raise SettingsError(f"{where}: {held}", "--timed-trace-chunk-hash-size")
        block = max(1, round(size * self._flags.timed_trace_length_scale))
        ids: list[int] = []
        for one in hash_ids:
            draw = random.Random(f"{self._flags.seed}:{one}")
            ids += (int(allowed[draw.randrange(len(allowed))]) for _ in range(min(block, wanted - len(ids))))
        return ids


def _rows_of(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            yield from enumerate(csv.DictReader(file), 1)
            return
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise SettingsError(f"{path}, row {number} is no JSON: {error}", PATH) from error
            if not isinstance(row, dict):
                raise SettingsError(f"{path}, row {number} is no JSON object", PATH)
            yield number, row


def _field(row: dict[str, Any], label: str | None, known: tuple[str, ...], where: str, name: str) -> Any:
    names = known if label is None else (label,)
    for one in names:
        if row.get(one) is not None:
            return row[one]
    flag = f"--timed-trace-label-{name}"
    raise SettingsError(f"{where} has no field {' or '.join(names)}; it has {', '.join(map(str, row))}", flag)


def _length(given: Any, where: str) -> int:
    try:
        return int(given)
    except (ValueError, TypeError) as error:
        raise SettingsError(f"{where}: {given!r} is no number of tokens", PATH) from error


def _clock_s(text: str, where: str) -> float:
    """The seconds of a date and time, as in Azure's traces, which have seven digits behind the seconds."""
    head, dot, fraction = text.partition(".")
    try:
        return datetime.fromisoformat(f"{head}{dot}{fraction[:6]}").timestamp()
    except ValueError as error:
        raise SettingsError(f"{where}: {text!r} is no time", "--timed-trace-label-timestamp") from error
