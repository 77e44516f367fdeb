"""Quantized checkpoints of tiny models, packed by code of its own, and the same models with the weights that the codes
stand for, for transformers.

Each pack function takes a matrix [outputs, inputs] and returns its tensors, by the ends of their names, and the matrix
that they stand for. Bits are packed by numpy's bit strings, so that nothing is shared with what unpacks them.
"""

import json
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.models.spec.family_rows.families import parameters_of
from tandem.workers.models.spec.parameter_names import Role

Packed = tuple[dict[str, torch.Tensor], torch.Tensor]
Pack = Callable[[torch.Tensor], Packed]


@dataclass(frozen=True, slots=True)
class Format:
    """A quantized form. config: quantization_config; head: the head is in it too; stacks: only stacks of experts are,
    whose tensors are called NAME_end."""

    name: str
    config: Mapping[str, Any]
    pack: Pack
    head: bool = False
    rounds_inputs: bool = False
    stacks: bool = False


def save_quantized(
    folder: Path, target: Path, form: Format, dense: Collection[str] = (), config: Mapping[str, Any] | None = None
) -> tuple[Path, Path]:
    """The model of `folder` in that form, and with the weights that it stands for. dense: parts of names of layers that
    stay as they are. config: in place of the form's own."""
    spec = load_spec(folder)
    table, tensors = parameters_of(spec), load_file(folder / "model.safetensors")
    turned = {p.source.names[0] for layer in table.layers for p in layer.matrices if p.source.transposed}
    names = [param.source.names[0] for layer in table.layers for param in layer.matrices]
    if form.stacks:
        names = [name for name in names if tensors[name].dim() == 3]
    names += [f"{table.head_name}.weight"] * (form.head and not spec.tie_word_embeddings)
    unread = [
        param.source.names[0] for layer in table.layers for param in layer.matrices if param.role == Role.SHARED_GATE
    ]
    quantized, plain = dict(tensors), dict(tensors)
    for name in dict.fromkeys(names):
        if name in unread or any(part in name for part in dense):
            continue
        stem = name.removesuffix(".weight")
        weight = quantized.pop(name).float()
        is_turned = name in turned and not form.stacks
        parts, found = form.pack(weight.T if is_turned else weight)
        plain[name] = found.T if is_turned else found
        joint = "_" if form.stacks else "."
        quantized |= {f"{stem}{joint}{end}": tensor.contiguous() for end, tensor in parts.items()}
    folders = []
    for kind, given in (("quantized", quantized), ("dequantized", plain)):
        folders.append(target / f"{form.name}-{kind}")
        shutil.copytree(folder, folders[-1])
        save_file(
            {name: t.contiguous() for name, t in given.items()}, folders[-1] / "model.safetensors", {"format": "pt"}
        )
    written = json.loads((folder / "config.json").read_text())
    (folders[0] / "config.json").write_text(json.dumps({**written, "quantization_config": {**(config or form.config)}}))
    return folders[0], folders[1]


# ---- bits ----


def words_of(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of codes as rows of 32-bit words, bit behind bit from the lowest on."""
    rows = codes.numpy().astype(np.uint8)
    strings = np.unpackbits(rows[..., None], axis=-1, bitorder="little", count=bits).reshape(len(rows), -1)
    strings = np.pad(strings, ((0, 0), (0, -strings.shape[1] % 32)))
    return torch.from_numpy(np.packbits(strings, axis=-1, bitorder="little").view("<i4").copy())


def grouped(weight: torch.Tensor, group: int | None, top: int, *, symmetric: bool) -> tuple[torch.Tensor, ...]:
    """Codes [O, I], scales [O, G] that float16 holds, zeros [O, G], of groups of inputs that follow one another."""
    size, codes, scales, zeros = group or weight.shape[1], [], [], []
    for part in weight.split(size, 1):
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        middle = (top + 1) // 2
        scale = (part.abs().amax(1) / (middle - 0.5) if symmetric else (high - low) / top).half().float()
        zero = torch.full_like(scale, middle) if symmetric else (-low / scale).round()
        codes.append(((part / scale[:, None]).round() + zero[:, None]).clamp(0, top))
        scales.append(scale)
        zeros.append(zero)
    return torch.cat(codes, 1), torch.stack(scales, 1), torch.stack(zeros, 1)


def undone(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, group: int | None) -> torch.Tensor:
    size = group or codes.shape[1]
    index = torch.arange(codes.shape[1]) // size
    return (codes - zero[:, index]) * scale[:, index]


def _places(inputs: int) -> torch.Tensor:
    """An order of inputs."""
    return torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))


# ---- integers in words ----


def gptq(bits: int = 4, group: int | None = 32, *, sym: bool = False, order: bool = False, v2: bool = False) -> Format:
    config = {
        "quant_method": "gptq", "bits": bits, "group_size": group or -1, "desc_act": order, "sym": sym,
        "damp_percent": 0.01, "checkpoint_format": "gptq_v2" if v2 else "gptq",
    }  # fmt: skip

    def pack(weight: torch.Tensor) -> Packed:
        inputs = weight.shape[1]
        places = (
            torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs)) if order else torch.arange(inputs)
        )
        codes, scale, zero = grouped(weight[:, places], group, 2**bits - 1, symmetric=sym)
        dense, stored, index = torch.empty_like(weight), torch.empty_like(codes), torch.empty(inputs, dtype=torch.int32)
        dense[:, places], stored[:, places] = undone(codes, scale, zero, group), codes
        index[places] = (torch.arange(inputs) // (group or inputs)).int()
        return {
            "qweight": words_of(stored, bits).T,
            "qzeros": words_of((zero if v2 else (zero - 1) % 2**bits).T, bits),
            "scales": scale.half().T,
            "g_idx": index,
        }, dense

    kind = f"gptq{'_v2' if v2 else ''}-{bits}-{group}{'-sym' if sym else ''}{'-order' if order else ''}"
    return Format(kind, config, pack)


def awq(group: int = 32) -> Format:
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}

    def words(codes: torch.Tensor) -> torch.Tensor:  # [outputs, ...] to [..., words]
        eights = codes.T.reshape(codes.shape[1], -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        return words_of(eights.reshape(codes.shape[1], -1), 4)

    def pack(weight: torch.Tensor) -> Packed:
        codes, scale, zero = grouped(weight, group, 15, symmetric=False)
        parts = {"qweight": words(codes), "qzeros": words(zero), "scales": scale.half().T}
        return parts, undone(codes, scale, zero, group)

    return Format(f"awq-{group}", config, pack)


def group_of(num_bits: int, group: int | None, *, symmetric: bool, **more: Any) -> dict[str, Any]:
    weights = {
        "num_bits": num_bits, "type": "int", "strategy": "channel" if group is None else "group", "group_size": group,
        "symmetric": symmetric, "dynamic": False, "observer": "minmax", "observer_kwargs": {},
    }  # fmt: skip
    return {
        "targets": ["Linear"],
        "weights": {**weights, **more},
        "input_activations": None,
        "output_activations": None,
    }


def tensors_config(form: str, group: Mapping[str, Any], ignore: Collection[str] = ("lm_head",)) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {**group}},
        "ignore": [*ignore], "kv_cache_scheme": None, "quantization_status": "compressed",
        "global_compression_ratio": 1.5,
    }  # fmt: skip


def packed(bits: int = 4, group: int | None = 32, *, sym: bool = True, order: bool = False) -> Format:
    own = group_of(bits, group, symmetric=sym, **({"actorder": "group"} if order else {}))

    def pack(weight: torch.Tensor) -> Packed:
        inputs = weight.shape[1]
        places = _places(inputs) if order else torch.arange(inputs)
        codes, scale, zero = grouped(weight[:, places], group, 2**bits - 1, symmetric=sym)
        dense, stored, index = torch.empty_like(weight), torch.empty_like(codes), torch.empty(inputs, dtype=torch.int32)
        dense[:, places], stored[:, places] = undone(codes, scale, zero, group), codes
        index[places] = (torch.arange(inputs) // (group or inputs)).int()
        parts = {
            "weight_packed": words_of(stored, bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not sym:
            parts["weight_zero_point"] = words_of(zero.T, bits).T
        if order:
            parts["weight_g_idx"] = index
        return parts, dense

    name = f"packed-{bits}-{group}{'-sym' if sym else ''}{'-order' if order else ''}"
    return Format(name, tensors_config("pack-quantized", own), pack)


def bytes_of(*, a8: bool = False, group: int | None = None, sym: bool = True) -> Format:
    """int-quantized of compressed-tensors. a8: inputs are rounded too."""
    own = group_of(8, group, symmetric=sym)
    if a8:
        inputs = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
        own["input_activations"] = inputs

    def pack(weight: torch.Tensor) -> Packed:
        codes, scale, zero = grouped(weight, group, 255, symmetric=sym)
        parts = {"weight": (codes - 128).to(torch.int8), "weight_scale": scale}
        if not sym:
            parts["weight_zero_point"] = (zero - 128).to(torch.int8)
        return parts, undone(codes, scale, zero, group)

    name = f"bytes-{group}{'-sym' if sym else ''}{'-a8' if a8 else ''}"
    return Format(name, tensors_config("int-quantized", own), pack, rounds_inputs=a8)


# ---- small floats ----

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip


def nearest(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The codes whose values are nearest, uint8."""
    return (values[..., None] - table).abs().argmin(-1).to(torch.uint8)


def low_first(codes: torch.Tensor) -> torch.Tensor:
    return codes[:, 0::2] | codes[:, 1::2] << 4


def spread(scale: torch.Tensor, shape: torch.Size, rows: int, columns: int) -> torch.Tensor:
    return scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: shape[0], : shape[1]]


def fp8(block: tuple[int, int] | None = (32, 32), config: Mapping[str, Any] | None = None, **more: Any) -> Format:
    """FP8 with scales by block; by matrix with block None. more: quantization_config's."""
    given = config or {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block, **more}

    def pack(weight: torch.Tensor) -> Packed:
        rows, columns = block or weight.shape
        padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
        tiles = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        scale = tiles.abs().amax((1, 3)) / 448
        wide = spread(scale, weight.shape, rows, columns)
        codes = (weight / wide).to(torch.float8_e4m3fn)
        name = "weight_scale" if block is None else "weight_scale_inv"
        parts = {"weight": codes, name: scale[0, 0] if block is None else scale}
        if given.get("activation_scheme") == "static":
            parts["input_scale"] = torch.tensor(0.5)
        return parts, codes.float() * wide

    kind = "block" if block else "matrix"
    return Format(f"{given['quant_method']}-{kind}-{given.get('activation_scheme', '')}", given, pack)


def fp8_rows(name: str, config: Mapping[str, Any]) -> Format:
    """FP8 with a scale for each output."""

    def pack(weight: torch.Tensor) -> Packed:
        scale = weight.abs().amax(1, keepdim=True) / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": scale}, codes.float() * scale

    return Format(name, config, pack)


def float_group(bits: int, strategy: str, group: int | None = None) -> dict[str, Any]:
    return group_of(bits, group, symmetric=True, type="float", strategy=strategy)


def fp4(
    name: str, config: Mapping[str, Any], *, outer: str | None, multiplies: bool = False, group: int = 16
) -> Format:
    """E2M1 with scales by group: FP8 and one of the matrix, or powers of two."""

    def pack(weight: torch.Tensor) -> Packed:
        largest = weight.unflatten(1, (-1, group)).abs().amax(2)
        if outer is None:
            stored = (largest / 6).log2().ceil().clamp(-127, 127)
            scale, parts = 2**stored, {"weight_scale": (stored + 127).to(torch.uint8)}
        else:
            whole = largest.max() / (6 * 448)
            fp8_scale = (largest / 6 / whole).to(torch.float8_e4m3fn)
            scale = fp8_scale.float() * whole if multiplies else fp8_scale.float() / (1 / whole)
            parts = {"weight_scale": fp8_scale, outer: whole if multiplies else (1 / whole).reshape(1)}
        wide = scale.repeat_interleave(group, 1)
        codes = nearest(weight / wide, E2M1)
        parts["weight" if multiplies else "weight_packed"] = low_first(codes)
        return parts, E2M1[codes.long()] * wide

    return Format(name, config, pack)


def nf4(*, double: bool) -> Format:
    """NF4 of bitsandbytes."""
    config = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": double, "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": ["lm_head"], "llm_int8_threshold": 6.0,
    }  # fmt: skip

    def pack(weight: torch.Tensor) -> Packed:
        blocks = weight.reshape(-1, 64)
        scale, parts = blocks.abs().amax(1), {}
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
        if double:
            offset, values = float(scale.mean()), torch.linspace(-1, 1, 256) ** 3
            parts_of = [part.abs().max() for part in (scale - offset).split(256)]
            outer = torch.stack(parts_of)
            codes = nearest((scale - offset) / outer.repeat_interleave(256)[: len(scale)], values)
            scale = values[codes.long()] * outer.repeat_interleave(256)[: len(scale)] + offset
            parts = {"weight.nested_absmax": outer, "weight.nested_quant_map": values.clone(), "weight.absmax": codes}
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        else:
            parts["weight.absmax"] = scale
        codes = nearest(blocks / scale[:, None], NF4).reshape(-1)
        parts["weight"] = (codes[0::2] << 4 | codes[1::2])[:, None]
        parts["weight.quant_map"] = NF4.clone()
        written = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        parts["weight.quant_state.bitsandbytes__nf4"] = written
        return parts, (NF4[codes.long()].view(-1, 64) * scale[:, None]).view(weight.shape)

    return Format(f"nf4{'-double' if double else ''}", config, pack)


def bnb8() -> Format:
    """Int8 of bitsandbytes."""
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False, "llm_int8_threshold": 6.0}

    def pack(weight: torch.Tensor) -> Packed:
        largest = weight.abs().amax(1)
        codes = (weight * 127 / largest[:, None]).round().to(torch.int8)
        parts = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return parts, codes * (largest / 127)[:, None]

    return Format("bnb8", config, pack)


def mxfp4() -> Format:
    """MXFP4 of experts in stacks: its pack takes a stack [experts, inputs, outputs], as gpt-oss stores dense ones."""

    def pack(stack: torch.Tensor) -> Packed:
        turned = stack.transpose(1, 2)
        blocks = turned.unflatten(2, (-1, 32))
        stored = (blocks.abs().amax(3) / 6).log2().ceil()
        codes = nearest(blocks / 2 ** stored[..., None], E2M1)
        parts = {"blocks": codes[..., 0::2] | codes[..., 1::2] << 4, "scales": (stored + 127).to(torch.uint8)}
        return parts, (E2M1[codes.long()] * 2 ** stored[..., None]).flatten(2).transpose(1, 2)

    return Format("mxfp4", {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, pack, stacks=True)


STATIC_INT8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


def floats() -> tuple[Format, ...]:
    """All of them that single matrices have."""
    nvfp4 = float_group(4, "tensor_group", 16)
    channel = {**float_group(8, "channel"), "input_activations": STATIC_INT8}
    return (
        fp8(),
        fp8(None, activation_scheme="static"),
        fp8(None, {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}),
        fp8_rows("fbgemm", {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
        fp8_rows("ct-fp8", tensors_config("float-quantized", channel)),
        fp4("ct-nvfp4", tensors_config("nvfp4-pack-quantized", nvfp4), outer="weight_global_scale"),
        fp4("ct-mxfp4", tensors_config("mxfp4-pack-quantized", float_group(4, "group", 32)), outer=None, group=32),
        fp4(
            "modelopt-nvfp4",
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]},
            outer="weight_scale_2",
            multiplies=True,
        ),
        bnb8(),
    )
