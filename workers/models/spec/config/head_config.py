"""HeadSpec: a head that guesses tokens from what the model it was made for has computed (EAGLE-3, Medusa).

Torch-free. A head's folder has a config.json and tensors as its makers publish them and vLLM reads them; the model's
own parts that it uses, such as the embedding, are not in it. Read by draft_config.py, computed by
workers/rank/drafters. H hidden size of the head, X elements of the model's vectors that it reads.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tandem.configs.errors import UnsupportedModelError
from tandem.parallel.params import Init, Param, Source
from tandem.parallel.stored.headers import read_header, weight_files
from tandem.workers.models.spec.arch import ArchSpec, Gqa, LayerSpec
from tandem.workers.models.spec.config.config_reader import spec_from_config
from tandem.workers.models.spec.family_rows.families import parameters_of
from tandem.workers.models.spec.parameter_names import Role
from tandem.workers.models.spec.parameters import LayerParams, NormParams
from tandem.workers.models.spec.weights.weight_config import chosen_plan

IGNORED: Final = ("d2t", "t2d", "rotary_emb.inv_freq")
"""Tensors of a head's files that are no parameters; d2t is read apart."""
LLAMA: Final = "LlamaForCausalLM"


@dataclass(frozen=True, slots=True)
class EagleParams:
    """The parameters of an EAGLE-3 head. embedding: None where the head reads the model's."""

    fc: Param
    hidden_norm: NormParams
    layer: LayerParams
    norm: NormParams
    head: Param
    embedding: Param | None

    def __iter__(self) -> Iterator[Param]:
        yield self.fc
        yield from self.hidden_norm
        yield from self.layer
        yield from self.norm
        yield self.head
        if self.embedding is not None:
            yield self.embedding


@dataclass(frozen=True, slots=True)
class MedusaParams:
    """The parameters of Medusa's heads: of each the layers of its block, weight and bias, and its vocabulary table."""

    blocks: tuple[tuple[tuple[Param, Param], ...], ...]
    tables: tuple[Param, ...]

    def __iter__(self) -> Iterator[Param]:
        for block in self.blocks:
            for layer in block:
                yield from layer
        yield from self.tables


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """A head. spec: of its layer, as a Llama of one; None without a layer, and so without KV. taps: layers of the model
    before which it reads the residual stream; (): it reads the last hidden state. most: guesses of a row that it can
    make; None: any number. vocab_size: ids among which it guesses, mapped to the model's by d2t where they are fewer.
    normed_residual: the layer adds to the normed vector (norm_before_residual)."""

    params: EagleParams | MedusaParams
    vocab_size: int
    spec: ArchSpec | None = None
    taps: tuple[int, ...] = ()
    most: int | None = None
    normed_residual: bool = False

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return () if self.spec is None else self.spec.layers


def read_eagle3(folder: Path, model: ArchSpec, quantization: str | None) -> HeadSpec:
    """Reads an EAGLE-3 head (Li et al. 2025) for a model. UnsupportedModelError for one that is none, or that is for
    another model."""
    config = _config(folder)
    if "Eagle3" not in "".join(config.get("architectures") or ()):
        raise UnsupportedModelError(f"{folder}: {config.get('architectures')} is no EAGLE-3 head", "MODEL")
    size, reads = int(config["hidden_size"]), int(config.get("target_hidden_size") or model.hidden_size)
    if reads != model.hidden_size:
        words = f"{folder} is a head for models of hidden size {reads}; this one has {model.hidden_size}"
        raise UnsupportedModelError(words, "MODEL")
    own = config.get("eagle_config") or {}
    half = model.num_layers // 2
    taps = tuple(own.get("eagle_aux_hidden_state_layer_ids") or (2, half, model.num_layers - 3))
    if any(not 0 <= tap <= model.num_layers for tap in taps):
        raise UnsupportedModelError(f"{folder} reads layers {taps} of a model of {model.num_layers}", "MODEL")
    vocab = int(config.get("draft_vocab_size") or config["vocab_size"])
    as_llama = {**config, "architectures": [LLAMA], "model_type": "llama", "vocab_size": vocab}
    spec = spec_from_config({**as_llama, "tie_word_embeddings": False, "num_hidden_layers": 1})
    spec = replace(spec, weights=chosen_plan(spec.weights, quantization))
    params = _eagle_params(folder, spec, model, size, len(taps) * reads)
    return HeadSpec(params, vocab, spec, taps, None, bool(config.get("norm_before_residual", False)))


def read_medusa(folder: Path, model: ArchSpec, quantization: str | None) -> HeadSpec:
    """Reads Medusa's heads (Cai et al. 2024) for a model. UnsupportedModelError for what are none, and for heads of
    another model."""
    config = _config(folder)
    if quantization is not None:
        raise UnsupportedModelError(f"quantization {quantization!r} is not made of Medusa's heads", "MODEL")
    if "medusa_num_heads" not in config:
        raise UnsupportedModelError(f"{folder}: its config.json has no medusa_num_heads", "MODEL")
    heads, layers = int(config["medusa_num_heads"]), int(config.get("medusa_num_layers", 1))
    size, vocab = int(config.get("hidden_size", model.hidden_size)), int(config.get("vocab_size", model.vocab_size))
    kept = int(config.get("truncated_vocab_size") or vocab)
    if (size, vocab, kept) != (model.hidden_size, model.vocab_size, model.vocab_size):
        words = f"{folder} has heads of {size} x {vocab} ({kept} kept), the model {model.hidden_size} x "
        raise UnsupportedModelError(f"{words}{model.vocab_size}", "MODEL")
    blocks = tuple(tuple(_medusa_layer(size, head, layer) for layer in range(layers)) for head in range(heads))
    tables = tuple(_matrix(f"lm_heads.{head}.weight", (vocab, size)) for head in range(heads))
    return HeadSpec(MedusaParams(blocks, tables), vocab, most=heads)


HEADS: Final[Mapping[str, Callable[[Path, ArchSpec, str | None], HeadSpec]]] = {
    "eagle3": read_eagle3,
    "medusa": read_medusa,
}
"""Readers of heads, by the `method` of --speculative-config."""


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"{folder / 'config.json'} cannot be read: {error}", "MODEL") from error
    return found if isinstance(found, dict) else {}


def _eagle_params(folder: Path, spec: ArchSpec, model: ArchSpec, size: int, reads: int) -> EagleParams:
    """Returns the parameters. size: H; reads: X."""
    table = parameters_of(spec)
    (layer,) = table.layers
    assert isinstance(spec.layers[0].attention, Gqa)
    weights = {role: _within(param) for role, param in layer.weights.items()}
    for role in (Role.Q, Role.K, Role.V):  # they read the embedding beside the vector
        weights[role] = replace(weights[role], shape=(weights[role].shape[0], 2 * size))
    own = LayerParams(weights, {role: _within(param) for role, param in layer.biases.items()})
    norm = weights[Role.ATTENTION_NORM]
    names = tuple(f"{prefix}hidden_norm.weight" for prefix in PREFIXES)
    hidden_norm = replace(norm, name=names[0], role="hidden_norm", source=Source(names))
    fc = replace(weights[Role.Q], role="fc", merge="fc", shape=(size, reads), **_named("fc.weight"))
    embedding = replace(table.embedding, shape=(model.vocab_size, size), **_named("embed_tokens.weight"))
    assert table.final_norm.weight is not None
    return EagleParams(
        fc=fc,
        hidden_norm=NormParams(hidden_norm),
        layer=own,
        norm=NormParams(replace(table.final_norm.weight, **_named("norm.weight"))),
        head=replace(table.head, **_named("lm_head.weight")),
        embedding=embedding if _has(folder, embedding.source.names) else None,
    )


PREFIXES: Final = ("midlayer.", "layers.0.", "model.layers.0.", "model.midlayer.")
"""Beginnings of the names of the layer's tensors, as different makers write them."""


def _within(param: Param) -> Param:
    """Returns a parameter of a Llama's layer as one of the head's."""
    stem = param.name.removeprefix("model.layers.0.")
    names = tuple(prefix + stem for prefix in PREFIXES)
    return replace(param, name=names[0], source=replace(param.source, names=names))


def _named(name: str) -> dict[str, Any]:
    return {"name": name, "source": Source((name, f"model.{name}"))}


def _matrix(name: str, shape: tuple[int, int], *others: str) -> Param:
    return Param(name=name, shape=shape, role="head", source=Source((name, *others)), merge=name)


def _medusa_layer(size: int, head: int, layer: int) -> tuple[Param, Param]:
    stem = f"blocks.{head}.layers.{layer}"
    weight = _matrix(f"{stem}.weight", (size, size), f"{stem}.linear.weight")
    names = (f"{stem}.bias", f"{stem}.linear.bias")
    bias = Param(name=names[0], shape=(size,), role="head", source=Source(names), merge=weight.merge, init=Init.ZEROS)
    return weight, bias


def _has(folder: Path, names: tuple[str, ...]) -> bool:
    """Returns whether a folder's files have a tensor of one of these names."""
    return any(name in read_header(file) for file in weight_files(folder) for name in names)
