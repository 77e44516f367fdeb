"""PackedCheckpoint: the folder of a quantized model in compressed-tensors: its tensors, config.json, and the files
beside them.

Each layer's tensors are a file of their own, written when the layer is done; a last file has what is as it was, byte by
byte from a checkpoint in safetensors, or of GGUF in the model's dtype.
"""

import json
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from tandem.parallel.checkpoint import ParameterSlot
from tandem.parallel.params import Param
from tandem.parallel.quantization.weight_plan import DENSE
from tandem.parallel.stored.headers import INDEX, read_header
from tandem.parallel.stored.safetensors_source import DTYPES
from tandem.workers.models.spec.family_rows.families import parameters_of
from tandem.workers.models.spec.parameter_names import Role
from tandem.workers.planning.hub import BESIDE_WEIGHTS
from tandem.workers.quantize.files.stored_forms import QuantizedParam, dense_tensor, quantized_tensors
from tandem.workers.quantize.files.tensor_file import WrittenTensor, of_file, of_memory, write_tensors, write_text
from tandem.workers.quantize.layer_quantizer import LayerOutcome
from tandem.workers.quantize.layer_walk import LayerWalk, OpenLayer
from tandem.workers.quantize.quantize_settings import QuantizeSettings
from tandem.workers.quantize.rounding.integer_grid import IntegerGrid, RoundedMatrix

UNCOPIED: Final = ("config.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json")
HEAD: Final = "lm_head"
VERSION: Final = "0.20.0"
"""The release of compressed-tensors whose format this is."""


class PackedCheckpoint:
    """walk: the source. It is a checkpoint in safetensors, or GGUF."""

    def __init__(self, walk: LayerWalk, folder: Path, settings: QuantizeSettings) -> None:
        self._walk = walk
        self._folder = folder
        self._settings = settings
        spec = walk.spec
        self.is_gguf = spec.weights.departures is not None
        self.table = parameters_of(replace(spec, weights=DENSE))
        self._named = {param.name: param for param in self.table}
        self._own: torch.dtype = getattr(torch, spec.torch_dtype or "float32")

    def dtype_of(self, param: Param) -> torch.dtype:
        """Returns the dtype in which a parameter, or the scales of its codes, are written."""
        if self.is_gguf:
            return self._own
        dtype = DTYPES[self._walk.checkpoint.tensors_of(replace(param, scheme=None))[0].dtype]
        return dtype if dtype.is_floating_point else self._own

    def write_layer(self, file: Path, layer: OpenLayer, outcome: LayerOutcome) -> None:
        """Writes what has changed of a layer."""
        write_tensors(file, list(self._changed(layer, outcome)))

    def _changed(self, layer: OpenLayer, outcome: LayerOutcome) -> Iterator[WrittenTensor]:
        for name, params in self._by_tensor(self.table.layers[layer.index]).items():
            quantized = [one for one in params if one.name in outcome.matrices]
            if quantized:
                parts = [QuantizedParam(one, outcome.matrices[one.name]) for one in params]
                yield from quantized_tensors(name, parts, packs=not self._settings.rounds_inputs)
            elif any(one.name in outcome.changed for one in params):
                yield self._dense(name, params, layer.values)

    def write_head(self, file: Path, matrix: RoundedMatrix) -> None:
        """Writes a quantized head."""
        parts = [QuantizedParam(self.table.head, matrix)]
        name, packs = self._stored_name(self.table.head), not self._settings.rounds_inputs
        write_tensors(file, list(quantized_tensors(name, parts, packs=packs)))

    def write_rest(self, file: Path, written: set[str]) -> None:
        """Writes all that no layer's file has. written: names of stored tensors that are in these in some form."""
        tensors: list[WrittenTensor] = []
        if not self.is_gguf:
            stored = zip(self._walk.checkpoint.names, self._walk.checkpoint.tensors, strict=True)
            tensors = [of_file(name, tensor) for name, tensor in stored if name not in written]
        else:
            for name, params in self._by_tensor(self.table).items():
                if name not in written:
                    tensors.append(self._from_gguf(name, params))
        write_tensors(file, tensors)

    def _from_gguf(self, name: str, params: list[Param]) -> WrittenTensor:
        """Returns a tensor of GGUF as the family's checkpoints have it; a table of vocabulary is read as it is written,
        part by part."""
        own, param = {param.name: param for param in self._walk.table}, params[0]
        if param.role in (Role.EMBEDDING, Role.HEAD) and len(param.shape) == 2:
            size = self._own.itemsize * param.shape[0] * param.shape[1]

            def pieces() -> Iterator[memoryview]:
                for _, rows in self._walk.vocabulary(own[param.name]):
                    yield from of_memory(name, rows.to(self._own)).pieces()

            kind = of_memory(name, torch.empty(0, dtype=self._own)).dtype
            return WrittenTensor(name, kind, param.shape, size, pieces)
        found: dict[str, torch.Tensor] = {}
        self._walk.fill([ParameterSlot((own[one.name],), partial(found.__setitem__, one.name)) for one in params])
        return self._dense(name, params, found)

    def _dense(self, name: str, params: list[Param], values: Mapping[str, torch.Tensor]) -> WrittenTensor:
        dtype = self.dtype_of(params[0])
        if self.is_gguf:
            rows = params[0].source.rows or params[0].shape[0]
            return dense_tensor(name, params, values, dtype, (rows, *params[0].shape[1:]))
        stored = self._walk.checkpoint.tensors_of(params[0])[0]
        return dense_tensor(name, params, values, dtype, stored.shape)

    def _by_tensor(self, params: Any) -> dict[str, list[Param]]:
        """Returns parameters by the name of the tensor that they are stored in."""
        found: dict[str, list[Param]] = defaultdict(list)
        for param in params:
            found[self._stored_name(param)].append(param)
        return found

    def _stored_name(self, param: Param) -> str:
        if self.is_gguf:
            return param.source.names[0]
        return self._walk.checkpoint.name_of(replace(param, scheme=None))

    def module_of(self, param: Param) -> str:
        """Returns the name of the stored layer."""
        return self._stored_name(param).rpartition(".")[0]

    def names_of(self, params: Iterable[str]) -> set[str]:
        """Returns the stored tensors that parameters, by name, are written in otherwise than as they were."""
        return {self._stored_name(self._named[name]) for name in params}

    # ---- the files beside ----

    def config(self, grids: Mapping[str, IntegerGrid]) -> dict[str, Any]:
        """Returns config.json. grids: of the quantized layers, by the names of their modules."""
        config = json.loads((self._folder / "config.json").read_text(encoding="utf-8"))
        config.pop("quantization_config", None)
        form = "int-quantized" if self._settings.rounds_inputs else "pack-quantized"
        groups = {
            f"group_{place}": {
                "targets": targets,
                "weights": self._weights(grid),
                "input_activations": INT8_INPUTS if self._settings.rounds_inputs else None,
                "output_activations": None,
                "format": form,
            }
            for place, (grid, targets) in enumerate(_targets(grids, self._experts()).items())
        }
        return {
            **config,
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": form,
                "quantization_status": "compressed",
                "version": VERSION,
                "config_groups": groups,
                "ignore": self._ignored(grids),
                "kv_cache_scheme": None,
                "global_compression_ratio": None,
                "sparsity_config": {},
                "transform_config": {},
            },
        }

    def _weights(self, grid: IntegerGrid) -> dict[str, Any]:
        return {
            "num_bits": grid.bits,
            "type": "int",
            "symmetric": grid.symmetric,
            "strategy": "channel" if grid.group is None else "group",
            "group_size": grid.group,
            "block_structure": None,
            "dynamic": False,
            "actorder": "weight" if self._settings.act_order else None,
            "observer": "minmax",
            "observer_kwargs": {},
        }

    def _ignored(self, grids: Mapping[str, IntegerGrid]) -> list[str]:
        """Returns the linear layers that are not quantized."""
        matrices = [param for layer in self.table.layers for param in layer.matrices]
        routers = [layer.weights[Role.ROUTER] for layer in self.table.layers if Role.ROUTER in layer.weights]
        names = [self.module_of(param) for param in (*matrices, *routers)]
        names += [self.table.head_name, HEAD]  # transformers calls the head so, however it is stored
        return list(dict.fromkeys(name for name in names if name not in grids))

    def _experts(self) -> list[str]:
        layers = (expert for layer in self.table.layers for expert in layer.experts)
        return [self.module_of(param) for expert in layers for param in expert.matrices]

    def finish(self, output: Path, shards: list[Path], grids: Mapping[str, IntegerGrid]) -> int:
        """Puts the shards into a folder and writes what stands beside them, config.json last; returns the bytes of
        weights. It may run again after it broke off."""
        total, places = 0, {}
        for number, shard in enumerate(shards, 1):
            file = output / f"model-{number:05}-of-{len(shards):05}.safetensors"
            if shard.exists():
                shard.replace(file)
            for name, nbytes in _sizes(file):
                places[name] = file.name
                total += nbytes
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        write_text(output / INDEX, json.dumps(index, indent=1))
        for pattern in BESIDE_WEIGHTS:
            for found in sorted(self._folder.glob(pattern)):
                if found.name not in UNCOPIED:
                    target = output / found.relative_to(self._folder)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(found, target)
        write_text(output / "config.json", json.dumps(self.config(grids), indent=1))
        return total


INT8_INPUTS: Final = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "token",
    "group_size": None,
    "block_structure": None,
    "dynamic": True,
    "actorder": None,
    "observer": None,
    "observer_kwargs": {},
}


def _targets(grids: Mapping[str, IntegerGrid], experts: Sequence[str]) -> dict[IntegerGrid, list[str]]:
    """Returns the targets of each form: all linear layers for that of experts, which transformers takes from no other
    target, else for the most frequent one; names come before it: of others the last part of a name where all with it
    have that form, else whole names."""
    most = next((grids[name] for name in experts if name in grids), None)
    most = most or Counter(grids.values()).most_common(1)[0][0]
    by_leaf: dict[str, set[IntegerGrid]] = defaultdict(set)
    for module, grid in grids.items():
        by_leaf[module.rpartition(".")[2]].add(grid)
    found: dict[IntegerGrid, list[str]] = {most: ["Linear"]}
    for module, grid in grids.items():
        if grid == most:
            continue
        leaf = module.rpartition(".")[2]
        target = rf"re:.*\.{leaf}$" if len(by_leaf[leaf]) == 1 and leaf != module else module
        if target not in found.setdefault(grid, []):
            found[grid].append(target)
    return found


def _sizes(file: Path) -> Iterator[tuple[str, int]]:
    yield from ((name, tensor.nbytes) for name, tensor in read_header(file).items())
