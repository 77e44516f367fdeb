"""quantize(): a model becomes codes, layer by layer, from a folder to a folder. The steps, and what is kept of each.

Memory has one layer at a time; hidden states of the calibration text lie on the disk, of the quantized model, and of a
few sequences of the dense one too, by which the result is judged. Each finished layer is durable (work_folder.py).
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from tandem.configs.errors import SettingsError, UnsupportedModelError
from tandem.workers.evaluation.judgement import verdict_of
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.models.spec.family_rows.families import family_of
from tandem.workers.platforms.base import Platform
from tandem.workers.quantize.calibration_text import Sequences, length_of, num_sequences, of_file, written_by_model
from tandem.workers.quantize.files.tensor_file import write_text
from tandem.workers.quantize.head_quantizer import NAME as HEAD_NAME
from tandem.workers.quantize.head_quantizer import QuantizedHead, check_head, head_grid, quantize_head
from tandem.workers.quantize.head_scores import scores_by_parts
from tandem.workers.quantize.layer_quantizer import LayerQuantizer
from tandem.workers.quantize.layer_walk import LayerWalk, OpenLayer
from tandem.workers.quantize.packed_checkpoint import PackedCheckpoint
from tandem.workers.quantize.quantize_settings import OWN, QuantizeSettings
from tandem.workers.quantize.rounding.integer_grid import IntegerGrid
from tandem.workers.quantize.rounding.mixed_bits import MIXED, MeasuredUnit, choose_bits, unit_of
from tandem.workers.quantize.rounding.recorded_linear import RecordedLinear
from tandem.workers.quantize.work_folder import FLAG, REPORT, WorkFolder, weights_digest

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SourceModel:
    """A model to quantize. model: as the user named it, for the engine that writes its own text; folder: its files."""

    model: str
    folder: Path
    spec: ArchSpec


def open_source(model: str, folder: Path) -> SourceModel:
    """Returns a model that can be quantized. SettingsError and UnsupportedModelError for one that cannot."""
    spec = load_spec(folder)
    plan = spec.weights
    if plan.method is not None and plan.departures is None:
        raise SettingsError(
            f"{model} is quantized already, with {plan.method} ({plan.words}); take the model that it was made of",
            "MODEL",
        )
    names = family_of(spec.architecture).names
    if names.transposed or (spec.has_experts and (names.stacked_experts or names.interleaved_experts)):
        kind = "turned around" if names.transposed else "in stacks of experts"
        raise UnsupportedModelError(
            f"{spec.architecture} stores matrices {kind}, which compressed-tensors has no form for; "
            "--quantization int4 and int8 of `tandem serve` are made of it at load",
            "MODEL",
        )
    return SourceModel(model, folder, spec)


def quantize(
    source: SourceModel,
    settings: QuantizeSettings,
    output: Path,
    platform: Platform,
    say: Say = print,
    sequences: Sequences | None = None,
) -> dict[str, Any]:
    """Writes the quantized model into a folder and returns the report, which lies there too.

    say: takes lines about progress. sequences: in place of settings.calib. A run that was ended is gone on with: the
    same settings write the same bytes. SettingsError, by flag.
    """
    settings = settings.checked()
    work = WorkFolder(output, _made_of(source, settings, sequences))
    try:
        if (report := work.finished) is not None:
            say(f"{output} is complete")
            return report
        work.open()
        with torch.inference_mode():
            return _QuantizeRun(source, settings, work, platform, say, sequences).run()
    except OSError as error:
        where = error.filename or output
        words = f"{where}: {error.strerror or error}; the same command goes on where it was"
        raise SettingsError(words, FLAG) from error
    finally:
        work.close()


class _QuantizeRun:
    def __init__(
        self,
        source: SourceModel,
        settings: QuantizeSettings,
        work: WorkFolder,
        platform: Platform,
        say: Say,
        given: Sequences | None,
    ) -> None:
        self._source = source
        self._settings = settings
        self._work = work
        self._say = say
        self._length = length_of(settings, source.spec.max_position_embeddings)
        if given is not None:
            self._length = len(given.judged[0])
        self._walk = LayerWalk(source.folder, source.spec, platform, self._length)
        self._checkpoint = PackedCheckpoint(self._walk, source.folder, settings)
        if settings.head:
            check_head(source.spec, self._checkpoint.module_of(self._checkpoint.table.head))
        settings.check_ignored([*(param.module for param in self._checkpoint.table), self._checkpoint.table.head_name])
        self._shape = (self._length, source.spec.hidden_size)
        self._bits: Mapping[str, int] = {}
        self._sequences = given or self._text()

    def run(self) -> dict[str, Any]:
        started_s, state = time.monotonic(), self._work.state
        if state["layers"] == 0:
            self._begin("dense", self._judged)
        if self._settings.is_mixed:
            self._bits = self._mixed()
        if state["layers"] == 0:
            self._begin("quantized", range(len(self._sequences.all)))
        first, count = state["layers"], self._source.spec.num_layers
        for index in range(first, count):
            row = self._layer(index)
            state["rows"].append(row)
            state["layers"] = index + 1
            self._work.save()
            for stream in ("dense", "quantized"):
                self._work.hidden(stream, index, self._shape).remove()
            done = index + 1 - first
            left_s = (time.monotonic() - started_s) / done * (count - index - 1)
            error = max((one["error"] for one in row["linears"]), default=0.0)
            self._say(
                f"layer {index + 1} of {count}: error {error:.4f}, hidden states {row['drift']:.4f} off, "
                f"{row['seconds']:.1f} s; about {left_s:.0f} s left"
            )
        return self._finish()

    # ---- steps ----

    def _text(self) -> Sequences:
        """Returns the sequences, which are kept."""
        found = self._work.kept("text")
        if found is None:
            if self._settings.calib == OWN:
                count = sum(num_sequences(self._settings, self._length))
                self._say(
                    f"the model writes its own calibration text: {count} texts of {self._length} tokens, all at once, "
                    "so they end together; --calib FILE needs no writing"
                )
                own = written_by_model(self._settings, self._source.model, self._source.folder, self._length)
            else:
                own = of_file(self._settings, self._source.folder, self._length)
            found = {"calibration": own.calibration, "judged": own.judged}
            self._work.put("text", found)
        sequences = Sequences(**found)
        own_tokens = len(sequences.calibration) * self._length
        wanted = self._settings.calib_tokens
        if own_tokens <= wanted - self._length:
            self._say(f"{self._settings.calib} has {own_tokens} tokens to calibrate with, not {wanted}")
        return sequences

    @property
    def _judged(self) -> range:
        """The places of the sequences that judge."""
        return range(len(self._sequences.calibration), len(self._sequences.all))

    def _begin(self, stream: str, places: range) -> None:
        ids_NW = torch.tensor([self._sequences.all[place] for place in places])
        self._work.hidden(stream, 0, self._shape).write(self._walk.embedded(ids_NW))

    def _mixed(self) -> Mapping[str, int]:
        """Returns the bits of each unit, which are kept."""
        found = self._work.kept("bits")
        if found is None:
            count = len(self._sequences.calibration)
            self._begin("measured", range(count))
            units: list[MeasuredUnit] = []
            for index in range(self._source.spec.num_layers):
                layer = OpenLayer(self._walk, index)
                hidden, behind = (self._work.hidden("measured", place, self._shape) for place in (index, index + 1))
                layer.begin_record(layer.linears)
                behind.write(map(layer.run, hidden.read(range(count))))
                layer.end_record(layer.linears)
                units += [self._measured(linear) for linear in self._quantized(layer)]
                hidden.remove()
                self._say(f"layer {index + 1} of {self._source.spec.num_layers} measured")
            behind.remove()
            found = dict(choose_bits(units, self._settings.bits))
            self._work.put("bits", found)
        return found  # type: ignore[no-any-return]

    def _measured(self, linear: RecordedLinear) -> MeasuredUnit:
        quantizer = LayerQuantizer(self._settings, lambda _: MIXED[0], self._checkpoint.dtype_of)
        few = quantizer.grid_of(linear)
        many = IntegerGrid(MIXED[1], few.group, few.symmetric, few.scale_dtype)
        elements = sum(param.num_elements for param in linear.params)
        errors = map(linear.error_by_nearest, (few, many))
        return MeasuredUnit(unit_of(linear), elements, *errors)

    def _quantized(self, layer: OpenLayer) -> Iterator[RecordedLinear]:
        yield from (one for one in layer.linears if not all(map(self._settings.leaves, one.params)))

    def _bits_of(self, linear: RecordedLinear) -> int:
        return self._bits[unit_of(linear)] if self._settings.is_mixed else int(self._settings.bits)

    def _layer(self, index: int) -> dict[str, Any]:
        """Quantizes a layer; all that it leaves is durable. Returns its part of the report."""
        started_s = time.monotonic()
        work, layer = self._work, OpenLayer(self._walk, index)
        dense, quantized = (work.hidden(stream, index, self._shape) for stream in ("dense", "quantized"))
        new_dense, new = (work.hidden(stream, index + 1, self._shape) for stream in ("dense", "quantized"))
        new_dense.write(map(layer.run, dense.read(range(len(self._judged)))))
        quantizer = LayerQuantizer(self._settings, self._bits_of, self._checkpoint.dtype_of)
        calibration = partial(quantized.read, range(len(self._sequences.calibration)))
        outcome = quantizer(self._source.spec.layers[index], layer, calibration)
        new.write(map(layer.run, quantized.read(range(len(self._sequences.all)))))
        self._checkpoint.write_layer(work.shard(index), layer, outcome)
        return {
            "layer": index,
            "seconds": time.monotonic() - started_s,
            "drift": _drift(new_dense.read(range(len(self._judged))), new.read(self._judged)),
            "linears": outcome.rows,
            "folds": outcome.folds,
            "names": sorted({*outcome.matrices, *outcome.changed}),
            "matrices": sorted(outcome.matrices),
        }

    def _finish(self) -> dict[str, Any]:
        work, rows = self._work, self._work.state["rows"]
        grids = self._grids()
        if work.kept("report") is None:
            head = self._head()
            names = [name for row in rows for name in row["names"]]
            if head is not None:
                self._checkpoint.write_head(work.shard(len(rows) + 1), head.matrix)
                names.append(self._checkpoint.table.head.name)
            self._checkpoint.write_rest(work.shard(len(rows)), self._checkpoint.names_of(names))
            work.put("report", self._report(grids, head))
        report = work.kept("report")
        shards = [work.shard(place) for place in range(len(rows) + 1 + self._settings.head)]
        report["bytes"] = self._checkpoint.finish(work.output, shards, grids)
        report["source_bytes"] = sum(tensor.nbytes for tensor in self._walk.checkpoint.tensors)
        write_text(work.output / REPORT, f"{json.dumps(report, indent=1)}\n")
        work.remove()
        return report  # type: ignore[no-any-return]

    def _grids(self) -> dict[str, IntegerGrid]:
        """Returns the grids of the quantized layers, by module."""
        found, table = {}, self._checkpoint.table
        params = {param.name: param for layer in table.layers for param in layer.matrices}
        for row in self._work.state["rows"]:
            grid_of = {module: one for one in row["linears"] for module in one["layers"]}
            for name in row["matrices"]:
                own = grid_of[params[name].module]
                dtype = self._checkpoint.dtype_of(params[name])
                found[self._checkpoint.module_of(params[name])] = IntegerGrid(
                    own["bits"], own["group"], self._settings.symmetric, dtype
                )
        if self._settings.head:
            found[HEAD_NAME] = self._head_grid
        return found

    @property
    def _head_grid(self) -> IntegerGrid:
        dtype = self._checkpoint.dtype_of(self._checkpoint.table.head)
        return head_grid(self._settings, self._source.spec.hidden_size, dtype)

    def _head(self) -> QuantizedHead | None:
        if not self._settings.head:
            return None
        hidden = self._work.hidden("quantized", self._source.spec.num_layers, self._shape)
        calibration = hidden.read(range(len(self._sequences.calibration)))
        return quantize_head(self._walk, self._settings, self._head_grid, calibration)

    def _report(self, grids: Mapping[str, IntegerGrid], head: QuantizedHead | None) -> dict[str, Any]:
        judged = self._verdict(head)
        rows = [{k: v for k, v in row.items() if k not in ("names", "matrices")} for row in self._work.state["rows"]]
        return {
            "model": self._source.model,
            "settings": self._settings.as_json(),
            "calibration_tokens": len(self._sequences.calibration) * self._length,
            "seconds": sum(row["seconds"] for row in rows),
            "quantized_layers": len(grids),
            "judged": judged,
            "layers": rows,
            "head": head and head.row,
            "made_of": self._work.state["made_of"],
        }

    def _verdict(self, head: QuantizedHead | None) -> dict[str, Any]:
        """Returns how the result differs from the dense model on text that it was not calibrated with."""
        count = self._source.spec.num_layers
        dense, quantized = (self._work.hidden(stream, count, self._shape) for stream in ("dense", "quantized"))
        streams = zip(dense.read(range(len(self._judged))), quantized.read(self._judged), strict=True)
        return verdict_of(scores_by_parts(self._walk, self._sequences.judged, streams, head), 0).as_json()


def _drift(dense: Iterator[torch.Tensor], quantized: Iterator[torch.Tensor]) -> float:
    """Returns the length of the difference of hidden states, as a share of theirs."""
    change = length = 0.0
    for dense_WH, quantized_WH in zip(dense, quantized, strict=True):
        change += float((dense_WH - quantized_WH).square().sum(dtype=torch.float64))
        length += float(dense_WH.square().sum(dtype=torch.float64))
    return float((change / length) ** 0.5) if length > 0 else 0.0


def _made_of(source: SourceModel, settings: QuantizeSettings, sequences: Sequences | None) -> dict[str, Any]:
    """Returns all that decides what is written: settings, and digests of the model and of the calibration text."""
    made = {**settings.as_json(), "weights": weights_digest(source.folder)}
    if sequences is not None:
        made["calib"] = blake2b(repr(sequences.all).encode(), digest_size=8).hexdigest()
    elif settings.calib != OWN:
        try:
            text = Path(settings.calib).expanduser().read_bytes()
        except OSError as error:
            raise SettingsError(f"{settings.calib}: {error.strerror}", "--calib") from error
        made["calib"] = f"{settings.calib} ({blake2b(text, digest_size=8).hexdigest()})"
    return made
