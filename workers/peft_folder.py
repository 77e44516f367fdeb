"""A PEFT LoRA folder, read and checked whole: configuration, names, shapes, dtypes, every number. Torch-free.

Called by ranks before an adapter is used (workers/lora/host_copy.py) and by whoever lists adapters. What is wrong is an
AdapterRefused in plain words. The file's bytes are read once, and that reading is what is hashed, checked and used, so
content that changes meanwhile cannot pass. A header is 8 bytes of length (little endian), then JSON.
"""

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from workers.errors import AdapterRefused, AdapterUnreadable
from workers.models.registry import family_of
from workers.models.sizes import layer_linears
from workers.models.spec import ArchSpec
from workers.peft_config import CONFIG_FILE, MOST_CONFIG_BYTES, LoraConfig, parse_config, parse_json

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


class Shape(NamedTuple):
    """Of a layer of the base model that adapters may change, whole. The embedding is one of vocabulary -> hidden."""

    outputs: int
    inputs: int
    is_embedding: bool = False
    is_table: bool = False


@dataclass(frozen=True, slots=True)
class TensorAt:
    """One tensor of the file: its name there, dtype as safetensors spells it, shape, bytes [start, end) of the data."""

    name: str
    dtype: str
    shape: tuple[int, int]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class LoraModule:
    """What the adapter adds to the layer `name`: scale * (x @ A.T) @ B.T, A [rank, inputs], B [outputs, rank].

    base: the base model's own table, which PEFT saves beside an adapter of it; [vocabulary, hidden].
    """

    name: str
    rank: int
    scale: float
    a: TensorAt
    b: TensorAt
    base: TensorAt | None = None


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """A whole and usable adapter. digest: hex SHA-256 of what decides its numbers; weight_bytes: of its tensors;
    base_model: what it says it was trained on, which is not checked: shapes are."""

    digest: str
    modules: tuple[LoraModule, ...]
    weight_bytes: int
    base_model: str | None

    @property
    def highest_rank(self) -> int:
        return max(module.rank for module in self.modules)


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """An adapter in memory. `data`: uint8, the file's tensors as they lie there."""

    facts: AdapterFacts
    data: Bytes

    def bytes_of(self, tensor: TensorAt) -> Bytes:
        """A view of one tensor's bytes."""
        return self.data[tensor.start : tensor.end]


def adapted_linears(spec: ArchSpec) -> dict[str, Shape]:
    """The layers of the model that an adapter may change, by name: the linears, the embedding and the head."""
    names = family_of(spec.architecture).names
    vocab, hidden = spec.vocab_size, spec.hidden_size
    stems = (names.q, names.k, names.v, names.o, names.gate, names.up, names.down)
    shapes = [Shape(linear.outputs, linear.inputs) for linear in layer_linears(spec, tp_size=1)]
    of_layers = {
        names.of_layer(layer, stem): shape
        for layer in range(spec.num_layers)
        for stem, shape in zip(stems, shapes, strict=True)
    }
    embedding = Shape(hidden, vocab, is_embedding=True, is_table=True)
    return {names.embedding: embedding, **of_layers, names.head: Shape(vocab, hidden, is_table=True)}


def most_file_bytes(spec: ArchSpec, max_rank: int) -> int:
    """The largest weight file that an adapter of this model may have."""
    shapes = adapted_linears(spec).values()
    elements = sum(shape.inputs + shape.outputs for shape in shapes) * max_rank
    elements += sum(shape.inputs * shape.outputs for shape in shapes if shape.is_table)
    return elements * max(ELEMENT_BYTES.values()) + MOST_OTHER_BYTES


def read_adapter(folder: Path, spec: ArchSpec, max_rank: int) -> PeftAdapter:
    """The adapter in `folder`, checked against the base model and --max-lora-rank; AdapterRefused otherwise."""
    config_bytes = _read_config(folder)
    config = parse_config(config_bytes)
    with _open(folder, WEIGHT_FILE) as file:
        header, tensors = _read_header(file)
        modules = _pair(tensors, adapted_linears(spec), config, max_rank)
        size = max(tensor.end for tensor in tensors)
        data = _read_all(file, size)
    for tensor in tensors:
        if not _is_finite(data[tensor.start : tensor.end], tensor.dtype):
            raise AdapterRefused(f"tensor {tensor.name} holds NaN or infinity")
    digest = _start_digest(config)
    digest.update(header)
    digest.update(data.data)
    return PeftAdapter(AdapterFacts(digest.hexdigest(), modules, size, config.base_model), data)


def adapter_facts(folder: Path, spec: ArchSpec, max_rank: int) -> AdapterFacts:
    """As read_adapter, without keeping the weights."""
    return read_adapter(folder, spec, max_rank).facts


def adapter_digest(folder: Path) -> str:
    """What names the content of the folder, which is not checked any further: hex SHA-256 over the fields of its
    configuration that decide numbers, and its weight file. AdapterRefused when either cannot be read."""
    digest = _start_digest(parse_config(_read_config(folder)))
    with _open(folder, WEIGHT_FILE) as file:
        for chunk in file.chunks():
            digest.update(chunk)
    return digest.hexdigest()


def _start_digest(config: LoraConfig) -> "hashlib._Hash":
    return hashlib.sha256(DIGEST_VERSION + config.canonical() + b"\n")


# ---- files ----


class _File:
    """A regular file, open. Everything is read through this one descriptor: a file put in its place is not seen."""

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
        """The next `size` bytes; AdapterRefused when the file ends before."""
        parts, left = [], size
        while left and (part := os.read(self._descriptor, left)):
            parts.append(part)
            left -= len(part)
        if left:
            raise AdapterRefused(f"{self.name} ends {left} bytes too early")
        return b"".join(parts)

    def fill(self, target: memoryview) -> None:
        """The next len(target) bytes, in place."""
        start = 0
        while start < len(target):
            count = os.readv(self._descriptor, [target[start : start + CHUNK_BYTES * 64]])
            if not count:
                raise AdapterRefused(f"{self.name} ends {len(target) - start} bytes too early")
            start += count

    def chunks(self) -> Iterator[bytes]:
        """The rest, piece by piece."""
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
    """The file's bytes up to its data, and its tensors, which lie in the data without gap or overlap."""
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
    """One entry, with a shape of two sizes and as many bytes as those need."""
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


# ---- what the tensors mean ----


def _pair(
    tensors: list[TensorAt], linears: Mapping[str, Shape], config: LoraConfig, max_rank: int
) -> tuple[LoraModule, ...]:
    """A and B of every module, in the order of the model's layers; every tensor is one of these."""
    places = dict(_places(linears))
    halves: dict[str, dict[str, TensorAt]] = {}
    for tensor in tensors:
        if tensor.name not in places:
            raise AdapterRefused(f"tensor {tensor.name} is not the A or B of a layer of this model")
        module, half = places[tensor.name]
        halves.setdefault(module, {})[half] = tensor
    modules = []
    for name, shape in linears.items():
        found, wanted = halves.get(name), config.is_target(name)
        if found is None:
            if wanted:
                raise AdapterRefused(f"{CONFIG_FILE} targets {name}, {WEIGHT_FILE} has no tensors for it")
            continue
        if wanted is False:
            raise AdapterRefused(f"{WEIGHT_FILE} has tensors for {name}, {CONFIG_FILE} does not target it")
        modules.append(_module(name, shape, found, config, max_rank))
    return tuple(modules)


def _places(linears: Mapping[str, Shape]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Every tensor that an adapter of this model may hold: its name, and (module, "A", "B" or "base")."""
    for module, shape in linears.items():
        for half in ("A", "B"):
            suffix = f"lora_embedding_{half}" if shape.is_embedding else f"lora_{half}.weight"
            yield f"{PREFIX}{module}.{suffix}", (module, half)
        if shape.is_table:
            yield f"{PREFIX}{module}.base_layer.weight", (module, "base")


def _module(name: str, shape: Shape, halves: Mapping[str, TensorAt], config: LoraConfig, max_rank: int) -> LoraModule:
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
    if rank != config.rank_of(name):
        raise AdapterRefused(f"tensor {a.name} is of rank {rank}, {CONFIG_FILE} says {config.rank_of(name)}")
    if rank > max_rank:
        raise AdapterRefused(f"tensor {a.name} is of rank {rank}, --max-lora-rank is {max_rank}")
    return LoraModule(name, rank, config.scale_of(name), a, b, base)


def _is_finite(data: Bytes, dtype: str) -> bool:
    """bf16 by its bits: an exponent of ones is infinity or NaN. Data may begin at any byte."""
    for start in range(0, len(data), CHUNK_BYTES):
        chunk = data[start : start + CHUNK_BYTES]
        if dtype == "BF16":
            fine = ((np.frombuffer(chunk, "<u2") & BF16_EXPONENT) != BF16_EXPONENT).all()
        else:
            fine = np.isfinite(np.frombuffer(chunk, "<f4" if dtype == "F32" else "<f2")).all()
        if not fine:
            return False
    return True
