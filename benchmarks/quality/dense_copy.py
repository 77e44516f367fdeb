"""A dense copy of a quantized checkpoint: the weights that its codes stand for, as safetensors.

What --quantization makes at load, and `tandem quantize`, are judged on it where a model is only to be had in 4 bits, as
that of `make real-model` is. Its matrices lie on the grid that they were rounded to.
"""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file

from tandem.parallel.checkpoint import ParameterSlot, load
from tandem.parallel.mesh import Mesh
from tandem.parallel.params import Param
from tandem.parallel.quantization.coded_weight import CodedWeight, undone
from tandem.parallel.quantization.stored_weights import StoredWeights, is_stored
from tandem.parallel.stored.safetensors_source import SafetensorsSource
from tandem.workers.models.spec.family_rows.families import parameters_of
from tandem.workers.offline.inputs import settings_of
from tandem.workers.planning.resolve import read_spec
from tandem.workers.planning.stored_model import open_checkpoint

CPU = torch.device("cpu")


class _Nobody(NamedTuple):
    """A Holder that keeps nothing: tensors are the caller's."""

    nbytes: int = 0


def dense_copy(model: str, out: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Returns `out`, a folder with the model's weights undone and its tokenizer; made now if it is missing.

    For families whose config.json needs no key beside those of the model's, such as Llama's. In float32 each weight is
    the value that its code stands for.
    """
    if (out / "model.safetensors").is_file():
        return out
    settings, _ = settings_of(model, {})
    folder, spec = Path(settings.model.model), read_spec(settings)
    checkpoint, mesh = open_checkpoint(folder, spec), Mesh()
    tensors: dict[str, torch.Tensor] = {}
    slots: list[ParameterSlot] = []
    for param in dict.fromkeys(parameters_of(spec)):
        if is_stored((param,)):
            slots += StoredWeights((param,), mesh, partial(_undo, tensors, param, dtype)).slots(_Nobody())
        else:
            slots.append(ParameterSlot((param,), partial(_keep, tensors, param, dtype)))
    load(slots, SafetensorsSource(checkpoint), dtype=torch.float32, device=CPU, progress=False)
    out.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if file.suffix == ".json" and file.name not in ("config.json", "tensors.json"):
            shutil.copy(file, out / file.name)
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    name = str(dtype).removeprefix("torch.")
    (out / "config.json").write_text(json.dumps({**config, "torch_dtype": name}, indent=1))
    save_file(tensors, out / "part", metadata={"format": "pt"})
    (out / "part").rename(out / "model.safetensors")
    return out


def _keep(tensors: dict[str, torch.Tensor], param: Param, dtype: torch.dtype, tensor: torch.Tensor) -> None:
    tensors[param.name] = tensor.to(dtype, copy=True).contiguous()


def _undo(tensors: dict[str, torch.Tensor], param: Param, dtype: torch.dtype, coded: list[CodedWeight]) -> None:
    _keep(tensors, param, dtype, undone(coded[0], torch.float32))
