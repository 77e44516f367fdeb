"""Reads a PEFT LoRA folder and checks it whole: configuration, names, shapes, dtypes, every number. Torch-free.

Called by ranks before an adapter is used (workers/rank/transfers/adapter_lanes.py) and by AdapterChecker. Errors are
AdapterRefused with the reason. The file's bytes are read once, then hashed, checked and used, so content that changes
meanwhile cannot pass. A safetensors header is 8 bytes of length (little endian), then JSON.
"""

import hashlib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tandem.workers.lora.peft.peft_config import CONFIG_FILE, MOST_CONFIG_BYTES, LoraConfig, parse_config, parse_json
from tandem.workers.messages.errors import AdapterRefused, AdapterUnreadable
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.family_rows.families import family_of, parameters_of

WEIGHT_FILE: Final = "adapter_model.safetensors"
PICKLED_FILE: Final = "adapter_model.bin"
PREFIX: Final = "base_model.model."
DIGEST_VERSION: Final = b"tandem lora 1\n"
MOST_HEADER_BYTES: Final = 2**23
CHUNK_BYTES: Final = 2**20
MOST_OTHER_BYTES: Final = 2**23
ELEMENT_BYTES: Final = {"F32": 4, "F16": 2, "BF16": 2}
BF16_EXPONENT: Final = 0x7F80
Bytes = npt.NDArray[np.uint8]


EXPERT: Final = re.compile(r"[._]experts?\.")
"""The mark of a mixture's experts in names of tensors."""


class Shape(NamedTuple):
    """Shape of a layer of the base model that adapters may change, whole. The embedding's inputs are the vocabulary.
    is_table: embedding or head.
    """

    outputs: int
    inputs: int
    is_embedding: bool = False
    is_table: bool = False


@dataclass(frozen=True, slots=True)
class TensorAt:
    """One tensor of the file: name, dtype in safetensors' spelling, shape, and its bytes [start, end) of the data."""

    name: str
    dtype: str
    shape: tuple[int, int]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class LoraModule:
    """LoRA weights of the layer `name`, which add scale * (x @ A.T) @ B.T; A [rank, inputs], B [outputs, rank].

    base: the base model's table [vocabulary, hidden], which PEFT saves beside an adapter of embedding or head.
    """

    name: str
    rank: int
    scale: float
    a: TensorAt
    b: TensorAt
    base: TensorAt | None = None


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """Facts of an adapter that passed all checks. digest: hex SHA-256 of all that decides what it computes.
    weight_bytes: of its tensors. base_model: the model named in its configuration; not checked (shapes are). note: a
    line about what is not read of it, if there is something."""

    digest: str
    modules: tuple[LoraModule, ...]
    weight_bytes: int
    base_model: str | None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """An adapter in memory. `data`: uint8, the file's tensors in the file's layout."""

    facts: AdapterFacts
    data: Bytes

    def bytes_of(self, tensor: TensorAt) -> Bytes:
        """Returns a view of one tensor's bytes."""
        return self.data[tensor.start : tensor.end]


@lru_cache(maxsize=2)
def adapted_linears(spec: ArchSpec) -> Mapping[str, Shape]:
    """Returns the layers that an adapter may change, by name: the linear layers, the embedding and the head. Kept, as
    each adapter that is read asks for them, and a model's table takes longer than the adapter's file."""
    table = parameters_of(spec)
    vocab, hidden = table.embedding.shape
    of_layers = {
        param.module: Shape(param.source.rows or param.shape[0], param.shape[1])
        for layer in table.layers
        for param in layer.adaptable
    }
    embedding = Shape(hidden, vocab, is_embedding=True, is_table=True)
    head = Shape(vocab, hidden, is_table=True)
    return MappingProxyType({table.embedding.stem: embedding, **of_layers, table.head_name: head})


@lru_cache(maxsize=2)
def refused_linears(spec: ArchSpec) -> frozenset[str]:
    """Returns the linear layers outside of experts that an adapter may not change, by name."""
    layers = parameters_of(spec).layers
    return frozenset(
        param.module
        for layer in layers
        for param in layer.weights.values()
        if param.is_matrix and param not in layer.adaptable
    )


def most_file_bytes(spec: ArchSpec, max_rank: int) -> int:
    """Returns the largest size in bytes of a weight file for this model."""
    shapes = adapted_linears(spec).values()
    elements = sum(shape.inputs + shape.outputs for shape in shapes) * max_rank
    elements += sum(shape.inputs * shape.outputs for shape in shapes if shape.is_table)
    return elements * max(ELEMENT_BYTES.values()) + MOST_OTHER_BYTES


def read_adapter(folder: Path, spec: ArchSpec, max_rank: int) -> PeftAdapter:
    """Reads the adapter in `folder` and checks it against the base model and --max-lora-rank.

    Raises AdapterRefused with the reason, AdapterUnreadable if a file cannot be read now.
    """
    config_bytes = _read_config(folder)
    config = parse_config(config_bytes)
    with _open(folder, WEIGHT_FILE) as file:
        header, tensors = _read_header(file)
        modules = _pair(tensors, _Names(spec, tensors), config, max_rank)
        size = max(tensor.end for tensor in tensors)
        data = _read_all(file, size)
    for tensor in tensors:
        if not _is_finite(data[tensor.start : tensor.end], tensor.dtype):
            raise AdapterRefused(f"tensor {tensor.name} holds NaN or infinity")
    digest = _start_digest(config)
    digest.update(header)
    digest.update(data.data)
    unread = f"{CONFIG_FILE}: {', '.join(config.unread)}: not known, not read" if config.unread else None
    return PeftAdapter(AdapterFacts(digest.hexdigest(), modules, size, config.base_model, unread), data)


def adapter_digest(folder: Path) -> str:
    """Returns the digest of a folder, without other checks: hex SHA-256 of its weight file and of the fields of its
    configuration that decide what it computes. AdapterRefused if either cannot be read."""
    digest = _start_digest(parse_config(_read_config(folder)))
    with _open(folder, WEIGHT_FILE) as file:
        for chunk in file.chunks():
            digest.update(chunk)
    return digest.hexdigest()


def _start_digest(config: LoraConfig) -> "hashlib._Hash":
    return hashlib.sha256(DIGEST_VERSION + config.canonical() + b"\n")


# ---- files ----


class _File:
    """An open regular file. All is read through one descriptor, so a file put in its place later is not read."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        found = os.fstat(self._descriptor)
        self.size = found.st_size
        if not stat.S_ISREG(found.st_mode):
            self.close()
            raise AdapterRefused(f"{path.name} is not a regular file")

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._descriptor)

    def read(self, size: int) -> bytes:
        """Returns the next `size` bytes; AdapterRefused if the file ends before."""
        parts, left = [], size
        while left and (part := os.read(self._descriptor, left)):
            parts.append(part)
            left -= len(part)
        if left:
            raise AdapterRefused(f"{self.name} ends {left} bytes too early")
        return b"".join(parts)

    def fill(self, target: memoryview) -> None:
        """Reads the next len(target) bytes into `target`; AdapterRefused if the file ends before."""
        start = 0
        while start < len(target):
            count = os.readv(self._descriptor, [target[start : start + CHUNK_BYTES * 64]])
            if not count:
                raise AdapterRefused(f"{self.name} ends {len(target) - start} bytes too early")
            start += count

    def chunks(self) -> Iterator[bytes]:
        """Yields the rest of the file in chunks."""
        while part := os.read(self._descriptor, CHUNK_BYTES):
            yield part


def _open(folder: Path, name: str) -> _File:
    try:
        return _File(folder / name)
    except FileNotFoundError as error:
        if name == WEIGHT_FILE and (folder / PICKLED_FILE).exists():
            raise AdapterRefused(f"{PICKLED_FILE} is a pickle: only {WEIGHT_FILE} is read") from error
        if not folder.is_dir():
            raise AdapterUnreadable("it is not a folder") from error
        raise AdapterRefused(f"it holds no {name}") from error
    except OSError as error:
        raise AdapterUnreadable(f"{name} cannot be read: {error.strerror}") from error


def _read_config(folder: Path) -> bytes:
    with _open(folder, CONFIG_FILE) as file:
        if file.size > MOST_CONFIG_BYTES:
            raise AdapterRefused(f"{CONFIG_FILE} has {file.size} bytes")
        return file.read(file.size)


def _read_all(file: _File, size: int) -> Bytes:
    data = np.empty(size, np.uint8)
    file.fill(data.data)
    return data


# ---- the header ----


def _read_header(file: _File) -> tuple[bytes, list[TensorAt]]:
    """Returns the file's bytes up to its data, and its tensors, which fill the data without gap or overlap."""
    first = file.read(8)
    length = int.from_bytes(first, "little")
    if length > min(MOST_HEADER_BYTES, file.size - len(first)):
        raise AdapterRefused(f"{file.name} has {file.size} bytes and claims a header of {length}")
    header = file.read(length)
    fields = parse_json(header, f"the header of {file.name}")
    fields.pop("__metadata__", None)
    tensors = [_tensor(name, entry) for name, entry in fields.items()]
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.start):
        if tensor.start != end:
            raise AdapterRefused(f"tensor {tensor.name} begins at byte {tensor.start}, the one before ends at {end}")
        end = tensor.end
    if not tensors:
        raise AdapterRefused(f"{file.name} holds no tensor")
    if (size := file.size - len(first) - length) != end:
        raise AdapterRefused(f"{file.name} holds {size} bytes of tensors, its header names {end}")
    return first + header, tensors


def _tensor(name: str, entry: Any) -> TensorAt:
    """Parses one header entry: a matrix whose bytes match its shape and dtype."""
    match entry:
        case {"dtype": str(dtype), "shape": [int(rows), int(columns)], "data_offsets": [int(start), int(end)]}:
            if dtype not in ELEMENT_BYTES:
                raise AdapterRefused(f"tensor {name} is of dtype {dtype}, not one of {', '.join(ELEMENT_BYTES)}")
            if rows < 1 or columns < 1 or start < 0 or end - start != rows * columns * ELEMENT_BYTES[dtype]:
                raise AdapterRefused(f"tensor {name} of shape [{rows}, {columns}] lies in {end - start} bytes")
            return TensorAt(name, dtype, (rows, columns), start, end)
        case {"shape": list(shape)} if len(shape) != 2:
            raise AdapterRefused(f"tensor {name} has shape {shape[:8]}, not that of a matrix")
    raise AdapterRefused(f"the header's entry of tensor {name} is not one of safetensors")


# ---- modules ----


class _Names:
    """The names that an adapter's tensors have for the layers of a model. Adapters of a model without its head, as
    embedding models are trained (FEATURE_EXTRACTION), leave the prefix of the base model away."""

    def __init__(self, spec: ArchSpec, tensors: list[TensorAt]) -> None:
        prefix = family_of(spec.architecture).names.base_prefix
        has_prefix = any(tensor.name.startswith(PREFIX + prefix) for tensor in tensors)
        self._left_away = "" if has_prefix else prefix
        self.linears = adapted_linears(spec)
        self.refused = frozenset(map(self.own, refused_linears(spec)))

    def own(self, module: str) -> str:
        """Returns the adapter's name for a layer."""
        return module.removeprefix(self._left_away)

    def places(self) -> Iterator[tuple[str, tuple[str, str]]]:
        """Yields every tensor that an adapter of this model may hold: its name, and (module, "A", "B" or "base")."""
        for module, shape in self.linears.items():
            for half in ("A", "B"):
                suffix = f"lora_embedding_{half}" if shape.is_embedding else f"lora_{half}.weight"
                yield f"{PREFIX}{self.own(module)}.{suffix}", (module, half)
            if shape.is_table:
                yield f"{PREFIX}{self.own(module)}.base_layer.weight", (module, "base")


def _pair(tensors: list[TensorAt], names: _Names, config: LoraConfig, max_rank: int) -> tuple[LoraModule, ...]:
    """Returns A and B of every module, in the order of the model's layers. AdapterRefused for any other tensor."""
    places = dict(names.places())
    halves: dict[str, dict[str, TensorAt]] = {}
    for tensor in tensors:
        if tensor.name not in places:
            raise _foreign(tensor.name, names.refused)
        module, half = places[tensor.name]
        halves.setdefault(module, {})[half] = tensor
    modules = []
    for name, shape in names.linears.items():
        found, wanted = halves.get(name), config.is_target(names.own(name))
        if found is None:
            if wanted:
                raise AdapterRefused(f"{CONFIG_FILE} targets {name}, {WEIGHT_FILE} has no tensors for it")
            continue
        if wanted is False:
            raise AdapterRefused(f"{WEIGHT_FILE} has tensors for {name}, {CONFIG_FILE} does not target it")
        modules.append(_module(name, names.own(name), shape, found, config, max_rank))
    return tuple(modules)


def _foreign(tensor: str, refused: frozenset[str]) -> AdapterRefused:
    """Returns the error for a tensor of an adapter that is of no layer that adapters may change."""
    if EXPERT.search(tensor):
        return AdapterRefused(f"tensor {tensor}: adapters of experts are not supported")
    stem = tensor.removeprefix(PREFIX).rpartition(".lora_")[0]
    if stem in refused:
        return AdapterRefused(f"tensor {tensor}: adapters of {stem.rpartition('.')[2]} are not supported")
    return AdapterRefused(f"tensor {tensor} is not the A or B of a layer of this model")


def _module(
    name: str, own: str, shape: Shape, halves: Mapping[str, TensorAt], config: LoraConfig, max_rank: int
) -> LoraModule:
    """own: the adapter's name for the layer, which its patterns are about."""
    if "A" not in halves or "B" not in halves:
        half = min(halves)
        raise AdapterRefused(f"tensor {halves[half].name} has no {'B' if half == 'A' else 'A'} beside it")
    a, b, base = halves["A"], halves["B"], halves.get("base")
    rank = a.shape[0]
    if a.shape[1] != shape.inputs or b.shape != (shape.outputs, rank):
        raise AdapterRefused(
            f"tensors {a.name} {list(a.shape)} and {b.name} {list(b.shape)} do not fit the model's layer of "
            f"{shape.inputs} inputs and {shape.outputs} outputs"
        )
    table = (shape.inputs, shape.outputs) if shape.is_embedding else (shape.outputs, shape.inputs)
    if base is not None and base.shape != table:
        raise AdapterRefused(f"tensor {base.name} has shape {list(base.shape)}, the model's table {list(table)}")
    if rank != config.rank_of(own):
        raise AdapterRefused(f"tensor {a.name} is of rank {rank}, {CONFIG_FILE} says {config.rank_of(own)}")
    if rank > max_rank:
        raise AdapterRefused(f"tensor {a.name} is of rank {rank}, --max-lora-rank is {max_rank}")
    return LoraModule(name, rank, config.scale_of(own), a, b, base)


def _is_finite(data: Bytes, dtype: str) -> bool:
    """Returns whether all numbers are finite (bf16: no exponent of ones). Data may begin at any byte."""
    for start in range(0, len(data), CHUNK_BYTES):
        chunk = data[start : start + CHUNK_BYTES]
        if dtype == "BF16":
            fine = ((np.frombuffer(chunk, "<u2") & BF16_EXPONENT) != BF16_EXPONENT).all()
        else:
            fine = np.isfinite(np.frombuffer(chunk, "<f4" if dtype == "F32" else "<f2")).all()
        if not fine:
            return False
    return True
