"""The tensors of a checkpoint folder, checked against the model's table of parameters before any is read. Torch-free.

Ranks read weights through it; the launcher and `tandem plan` make one to refuse, with the same words, what ranks could
not load. It reads headers only.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from tandem.configs.errors import SettingsError
from tandem.parallel.params import FLOATS, Param
from tandem.parallel.stored.headers import FETCH, INDEX, StoredTensor, find_weights, read_header
from tandem.parallel.stored.idle_tensors import Idle, check_idle

QUANTIZED: Final[dict[str, tuple[str, ...]]] = {
    "GPTQ or AWQ": (".qweight", ".qzeros", ".g_idx"),
    "MXFP4": ("_blocks", "_scales"),
    "a scheme with scales, such as fp8,": ("weight_scale_inv", "weight_scale", "input_scale"),
    "bitsandbytes": (".absmax", ".quant_map", "bitsandbytes__nf4", "bitsandbytes__fp4", ".SCB"),
}
"""Endings of names of tensors that only quantized checkpoints have."""


class StoredCheckpoint:
    """A folder's tensors by the names that the model has for them. SettingsError for missing, foreign or unreadable
    tensors, for dtypes that weights are not read from, and for shapes unlike config.json's.

    `expected`: all parameters of the model, on whatever rank; tensors with one of ignored_suffixes or ignored_prefixes
    may be present too.
    base_prefix: what names begin with unless the checkpoint is of the model without its head, as embedding models are
    saved (model.layers.0... and layers.0...). described_by: what `expected` was made of, for errors. idle: endings
    of tensors that may be present with values that change nothing.
    """

    def __init__(
        self,
        folder: Path,
        expected: Iterable[Param],
        ignored_suffixes: tuple[str, ...] = (),
        base_prefix: str = "",
        ignored_prefixes: tuple[str, ...] = (),
        described_by: str = "config.json",
        idle: tuple[tuple[str, Idle], ...] = (),
    ) -> None:
        self._folder = folder
        self._described_by = described_by
        params = tuple(stored for param in expected for stored in stored_params(param))
        wanted = {name for param in params for name in param.source.names}
        self.files, stored = _stored_tensors(folder)
        self._tensors = dict(zip(_whole_names(stored, wanted, base_prefix), stored.values(), strict=True))
        for name, tensor in sorted(self._tensors.items()):
            is_ignored = name.endswith(ignored_suffixes) or name.startswith(ignored_prefixes)
            if name in wanted or is_ignored:
                continue
            if (values := next((values for ending, values in idle if name.endswith(ending)), None)) is not None:
                check_idle(tensor, values)
            else:
                words = f"tensor {name} does not belong to the model{_quantized(name, wanted)}"
                raise SettingsError(f"{tensor.file}: {words}", "MODEL")
        for param in sorted(params, key=lambda param: param.source.names):
            self.tensors_of(param)

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        """All tensors of the files."""
        return tuple(self._tensors.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Their names, in the same order, as the model has them."""
        return tuple(self._tensors)

    def name_of(self, param: Param) -> str:
        """Returns the name of the stored tensor in which a parameter stands, of several the first."""
        return self._stored(*param.source.names)

    def tensors_of(self, param: Param) -> tuple[StoredTensor, ...]:
        """Returns the stored tensor in which a parameter stands, or several for one that is joined of them."""
        source = param.source
        if not source.joined:
            return (self._checked(param, self._stored(*source.names), param.shape[0]),)
        share = param.shape[0] // len(source.names)
        return tuple(self._checked(param, self._stored(name), share) for name in source.names)

    def _stored(self, *names: str) -> str:
        """Returns the first of the names that is stored. SettingsError when none is."""
        for name in names:
            if name in self._tensors:
                return name
        words = " or ".join(names)
        # with overrides the folder may be whole
        advice = f"; if a file is missing, {FETCH}" if self._described_by == "config.json" else ""
        raise SettingsError(f"{self._folder}: tensor {words} is in none of its safetensors files{advice}", "MODEL")

    def _checked(self, param: Param, name: str, rows: int) -> StoredTensor:
        """Returns a stored tensor whose dtype and shape are those of the model."""
        tensor, source = self._tensors[name], param.source
        if tensor.dtype not in param.stored:
            of_scheme = "" if param.stored != FLOATS else ", unless config.json says how they are quantized"
            raise SettingsError(
                f"{tensor.file}: tensor {name} is stored as {tensor.dtype}; it is read from "
                f"{', '.join(param.stored)}{of_scheme}",
                "MODEL",
            )
        if source.whole:
            return tensor
        wanted = (rows if source.rows is None else source.rows, *param.shape[1:])
        wanted = source.shape or (wanted[::-1] if source.transposed else wanted)
        if source.reshaped and math.prod(tensor.shape) == math.prod(wanted):
            return replace(tensor, shape=wanted)
        if tensor.shape != wanted:
            raise SettingsError(
                f"{tensor.file}: tensor {name} has shape {list(tensor.shape)}, {self._described_by} makes it "
                f"{list(wanted)}",
                "MODEL",
            )
        return tensor


def stored_params(param: Param) -> tuple[Param, ...]:
    """Returns what a checkpoint stores in place of a parameter: itself, or the parts of its scheme's layout."""
    layout = None if param.scheme is None else param.scheme.layout
    return (param,) if layout is None else layout.stored(param)


def _stored_tensors(folder: Path) -> tuple[list[Path], dict[str, StoredTensor]]:
    """Returns the files and their tensors by name, those of the index where there is one."""
    files, index = find_weights(folder)
    headers = {file.name: read_header(file) for file in files}
    if index is None:
        tensors = {name: tensor for header in headers.values() for name, tensor in header.items()}
        return sorted({tensor.file for tensor in tensors.values()}), tensors
    for name, file in index.items():
        if name not in headers[file]:
            raise SettingsError(f"{folder / file}: tensor {name} is not in it, where {INDEX} has it; {FETCH}", "MODEL")
    return files, {name: headers[file][name] for name, file in index.items()}


def _whole_names(stored: Iterable[str], wanted: set[str], base_prefix: str) -> list[str]:
    """Returns the stored names, in their order, as a checkpoint with a head would have them."""
    names = list(stored)
    if any(name.startswith(base_prefix) for name in names):
        return names
    return [base_prefix + name if base_prefix + name in wanted else name for name in names]


def _quantized(name: str, wanted: set[str]) -> str:
    """Returns a remark on a tensor of a quantized checkpoint."""
    stem, _, end = name.rpartition(".")
    if end == "weight" and any(other.startswith(f"{stem}.") and not other.endswith(".bias") for other in wanted):
        return ": its layer is stored dense, where config.json says that it is quantized"
    scheme = next((scheme for scheme, ends in QUANTIZED.items() if name.endswith(ends)), None)
    if scheme is None:
        return ""
    return (
        f": the checkpoint is quantized with {scheme}, of which its config.json says nothing that fits this tensor; "
        "fetch its config.json again, or take the model that it was made of"
    )
