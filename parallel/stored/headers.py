"""Reads what a checkpoint folder holds: its weight files, and their tensors from the headers. Torch-free.

A safetensors header is 8 bytes of length (little endian), then JSON: name -> dtype, shape, data_offsets. Weights in
other formats are refused with what to do about them.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tandem.configs.errors import SettingsError
from tandem.parallel.stored.gguf_kinds import BLOCK_NAMES, BY_NAME

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
GGUF_INDEX: Final = "tensors.json"
"""Lists the tensors of GGUF files under the model's names, in the folder that is made of them (write_places())."""
UNFINISHED: Final = "unfinished"
"""Folder, within that of a result, of what `tandem distill` and `tandem quantize` have until it is complete."""
STATE: Final = "state.json"
OTHERS: Final = "consolidated"
"""Names of files with the same weights under the publisher's own names begin so; they lie beside the others."""
MOST_HEADER_BYTES: Final = 100_000_000
"""safetensors' own limit."""
STORED_BYTES: Final[dict[str, int]] = {
    "BF16": 2, "F16": 2, "F32": 4, "I8": 1, "U8": 1, "I32": 4, "I64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    **dict.fromkeys(BLOCK_NAMES, 1),
}  # fmt: skip
"""Bytes of an element in the dtypes that are read; of GGUF's blocks the bytes are elements."""
POINTER: Final = "git has left a pointer in its place; `git lfs pull` in its folder gets the file itself"
FETCH: Final = "fetch the model's folder again, or this file of it"
PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt")
OTHER_FORMATS: Final = (".h5", ".msgpack", ".onnx")
CONVERT: Final = (
    "python -c \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('{folder}', "
    "dtype='auto').save_pretrained('NEW')\", and copy config and tokenizer files to NEW"
)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file. name: as stored there. start: byte of the file at which its nbytes begin."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def num_elements(self) -> int:
        """Its elements, those of blocks too."""
        kind, count = BY_NAME.get(self.dtype), math.prod(self.shape)
        return count if kind is None or kind.elements == 1 else count // kind.bytes * kind.elements


def is_pointer(file: Path) -> bool:
    """Returns whether git has left a pointer where the file should be."""
    with file.open("rb") as stream:
        return stream.read(40).startswith(b"version https://git-lfs")


def unfinished_words(folder: Path) -> str:
    """Returns why a folder lacks what a model has, where the run is not through that makes it; empty for others."""
    if not (folder / UNFINISHED / STATE).is_file():
        return ""
    return "it is not finished: the command that began it (tandem distill, tandem quantize) goes on where it was"


def weight_names(names: Iterable[str]) -> list[str]:
    """Returns those of a folder's file names that hold the model's weights, where there is no index: model.safetensors
    alone, else every .safetensors file but the publisher's own format."""
    found = sorted(name for name in names if name.endswith(".safetensors"))
    if SINGLE in found:
        return [SINGLE]
    return [name for name in found if not name.startswith(OTHERS)] or found


def has_other_weights(names: Iterable[str]) -> bool:
    """Returns whether files are there that hold weights in a format that is not read."""
    return any(name.endswith((".gguf", *PICKLES, *OTHER_FORMATS)) for name in names)


def no_weights(folder: str, names: Iterable[str]) -> SettingsError:
    """Returns the error for a folder, or a model of the hub, without .safetensors files, which says what to do. names:
    of its files."""
    names = sorted(names)
    lack = f"{folder} holds no .safetensors file"
    if found := [name for name in names if name.endswith(".gguf")]:
        return SettingsError(
            f"{lack}, but GGUF, of which one file is served: hf download {folder} {found[0]} --local-dir DIR, then "
            f"tandem serve DIR/{Path(found[0]).name}",
            "MODEL",
        )
    if found := [name for name in names if name.endswith(PICKLES)]:
        return SettingsError(
            f"{lack}, but {found[0]}: such files are pickles, which can run code when they are read. "
            f"Convert those that you trust: {CONVERT.format(folder=folder)}",
            "MODEL",
        )
    others = [name for name in names if name.endswith(OTHER_FORMATS)]
    return SettingsError(f"{lack}{f', but {others[0]}, which is not read' if others else ''}", "MODEL")


def find_weights(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """Returns the files with a folder's weights, and the index (tensor name -> file name) if there is one.
    SettingsError when there are no files, or the index is broken."""
    index = folder / INDEX
    if (folder / GGUF_INDEX).is_file():
        return [folder / GGUF_INDEX], None
    if not index.exists():
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        if found := weight_names(names):
            return [folder / name for name in found], None
        raise no_weights(str(folder), names)
    try:
        file_of = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise SettingsError(f"{index} is not a safetensors index: {error!r}", "MODEL") from error
    for name in file_of.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise SettingsError(f"{index}: {name!r} is not the name of a file beside it", "MODEL")
    return [folder / name for name in sorted(set(file_of.values()))], file_of


def write_places(file: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Writes where tensors stand, by the names that a model has for them; read_header() reads it."""
    places = {
        name: (str(one.file), one.name, one.dtype, one.shape, one.start, one.nbytes) for name, one in tensors.items()
    }
    file.write_text(json.dumps(places), encoding="utf-8")


def _read_places(file: Path) -> dict[str, StoredTensor]:
    places = json.loads(file.read_text(encoding="utf-8"))
    return {
        name: StoredTensor(Path(of), own, dtype, tuple(shape), start, nbytes)
        for name, (of, own, dtype, shape, start, nbytes) in places.items()
    }


def weight_files(folder: Path) -> list[Path]:
    """Returns the files in which a folder's weights stand; none where there are none."""
    if (folder / GGUF_INDEX).is_file():
        return sorted({tensor.file for tensor in _read_places(folder / GGUF_INDEX).values()})
    return sorted(folder.glob("*.safetensors"))


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a file by name. SettingsError for a file that cannot be read, is no safetensors file or
    is shorter than its header says."""
    if file.name == GGUF_INDEX:
        return _read_places(file)
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if is_pointer(file):
                raise ValueError(POINTER)
            if size < 8 or (8 + length > size and length <= MOST_HEADER_BYTES):
                raise SettingsError(
                    f"{file} is cut off: it has {size} bytes, which is no whole header; {FETCH}", "MODEL"
                )
            if length > MOST_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(stream.read(length))
        tensors = [_tensor(file, 8 + length, *item) for item in header.items() if item[0] != "__metadata__"]
    except OSError as error:
        advice = f"; {FETCH}" if isinstance(error, FileNotFoundError) else ""
        raise SettingsError(f"cannot read {file}: {error.strerror}{advice}", "MODEL") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingsError(f"{file} is not a safetensors file: {error}", "MODEL") from error
    end = max((tensor.start + tensor.nbytes for tensor in tensors), default=0)
    if end > size:
        raise SettingsError(f"{file} is cut off: it has {size} bytes, and its tensors end at {end}; {FETCH}", "MODEL")
    return {tensor.name: tensor for tensor in tensors}


def _tensor(file: Path, data: int, name: str, entry: Any) -> StoredTensor:
    start, end = entry["data_offsets"]
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    if not (0 <= start <= end and all(size >= 0 for size in shape)):
        raise ValueError(f"tensor {name} with the offsets {start} and {end}, and the shape {list(shape)}")
    if dtype in STORED_BYTES and end - start != math.prod(shape) * STORED_BYTES[dtype]:
        raise ValueError(f"tensor {name} has {end - start} bytes, which are not {list(shape)} of {dtype}")
    return StoredTensor(file, name, dtype, shape, data + start, end - start)
