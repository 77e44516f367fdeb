"""HeadSpec: a head that guesses tokens from what the model it was made for has computed (EAGLE, MTP, Medusa).

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
from tandem.parallel.stored.headers import read_header, unfinished_words, weight_files
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
class StreamParams:
    """The parameters of an EAGLE-1 or EAGLE-2 head, or of an MTP layer. mix: makes one vector of the embedding and the
    hidden state; bare_first: no norm stands before the first layer's attention. head, embedding: None where the head
    reads the model's."""

    mix: Param
    mix_bias: Param | None
    token_norm: NormParams | None
    hidden_norm: NormParams | None
    layers: tuple[LayerParams, ...]
    bare_first: bool
    norm: NormParams | None
    head: Param | None
    embedding: Param | None

    def __iter__(self) -> Iterator[Param]:
        yield self.mix
        for norm in (self.token_norm, self.hidden_norm, self.norm):
            yield from norm or ()
        for layer in self.layers:
            yield from layer
        yield from (param for param in (self.mix_bias, self.head, self.embedding) if param is not None)


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
    normed_residual: the layer adds to the normed vector (norm_before_residual). ignored: endings of tensors of its
    files that are not its own."""

    params: EagleParams | StreamParams | MedusaParams
    vocab_size: int
    spec: ArchSpec | None = None
    taps: tuple[int, ...] = ()
    most: int | None = None
    normed_residual: bool = False
    ignored: tuple[str, ...] = IGNORED

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return () if self.spec is None else self.spec.layers


def read_eagle3(folder: Path, model: ArchSpec, quantization: str | None) -> HeadSpec:
    """Reads an EAGLE-3 head (Li et al. 2025) for a model. UnsupportedModelError for one that is none, or that is for
    another model."""
    config = _config(folder)
    if "Eagle3" not in str(config.get("architectures")):
        raise UnsupportedModelError(f"{folder}: {config.get('architectures')} is no EAGLE-3 head", "MODEL")
    size = _whole(folder, config, "hidden_size")
    reads = _whole(folder, config, "target_hidden_size", model.hidden_size)
    if reads != model.hidden_size:
        words = f"{folder} is a head for models of hidden size {reads}; this one has {model.hidden_size}"
        raise UnsupportedModelError(words, "MODEL")
    taps = _taps(folder, config, model.num_layers)
    vocab = _whole(folder, config, "draft_vocab_size", _whole(folder, config, "vocab_size", model.vocab_size))
    if vocab > model.vocab_size:
        words = f"{folder}: draft_vocab_size {vocab} is more than the model's {model.vocab_size} tokens"
        raise UnsupportedModelError(words, "MODEL")
    as_llama = {**config, "architectures": [LLAMA], "model_type": "llama", "vocab_size": vocab}
    spec = spec_from_config({**as_llama, "tie_word_embeddings": False, "num_hidden_layers": 1})
    spec = replace(spec, weights=chosen_plan(spec.weights, quantization))
    params = _eagle_params(folder, spec, model, size, len(taps) * reads)
    if params.embedding is None and size != model.hidden_size:
        words = f"{folder} has no embedding, and its hidden_size {size} is not the model's {model.hidden_size}"
        raise UnsupportedModelError(words, "MODEL")
    return HeadSpec(params, vocab, spec, taps, None, bool(config.get("norm_before_residual", False)))


def read_medusa(folder: Path, model: ArchSpec, quantization: str | None) -> HeadSpec:
    """Reads Medusa's heads (Cai et al. 2024) for a model. UnsupportedModelError for what are none, and for heads of
    another model."""
    config = _config(folder)
    if quantization is not None:
        raise UnsupportedModelError(f"quantization {quantization!r} is not made of Medusa's heads", "MODEL")
    if "medusa_num_heads" not in config:
        raise UnsupportedModelError(f"{folder}: its config.json has no medusa_num_heads", "MODEL")
    heads, layers = _whole(folder, config, "medusa_num_heads"), _whole(folder, config, "medusa_num_layers", 1)
    size = _whole(folder, config, "hidden_size", model.hidden_size)
    vocab = _whole(folder, config, "vocab_size", model.vocab_size)
    kept = _whole(folder, config, "truncated_vocab_size", vocab)
    if (size, vocab, kept) != (model.hidden_size, model.vocab_size, model.vocab_size):
        words = f"{folder} has heads of {size} x {vocab} ({kept} kept), the model {model.hidden_size} x "
        raise UnsupportedModelError(f"{words}{model.vocab_size}", "MODEL")
    blocks = tuple(tuple(_medusa_layer(size, head, layer) for layer in range(layers)) for head in range(heads))
    tables = tuple(_matrix(f"lm_heads.{head}.weight", (vocab, size)) for head in range(heads))
    return HeadSpec(MedusaParams(blocks, tables), vocab, most=heads)


def read_eagle(folder: Path, model: ArchSpec, quantization: str | None) -> HeadSpec:
    """Reads an EAGLE-1 or EAGLE-2 head (Li et al. 2024) for a model, which shares the model's head and, without one of
    its own, the embedding. UnsupportedModelError for one of another model, and for an EAGLE-3 head."""
    config = _config(folder)
    if "Eagle3" in str(config.get("architectures")):
        raise UnsupportedModelError(f"{folder} is no head of EAGLE-1 or EAGLE-2", "MODEL")
    as_llama = {**config, "architectures": [LLAMA], "model_type": "llama", "tie_word_embeddings": False}
    spec = spec_from_config(as_llama)
    if (spec.hidden_size, spec.vocab_size) != (model.hidden_size, model.vocab_size):
        words = f"{folder} is a head for models of {spec.hidden_size} x {spec.vocab_size}, not "
        raise UnsupportedModelError(f"{words}{model.hidden_size} x {model.vocab_size}", "MODEL")
    spec = replace(spec, weights=chosen_plan(spec.weights, quantization))
    table, size, fc = parameters_of(spec), spec.hidden_size, ("fc.weight", "model.fc.weight")
    if weight_files(folder) and not _has(folder, fc):
        words = f"{folder} has no tensor {fc[0]}: it is no EAGLE head; a model of its own is given as draft_model"
        raise UnsupportedModelError(words, "MODEL")
    first = replace(table.layers[0], weights=_without(table.layers[0].weights, Role.ATTENTION_NORM))
    mix = replace(table.layers[0].weights[Role.Q], role="fc", merge="fc", shape=(size, 2 * size), **_named(fc[0]))
    names = ("fc.bias", "model.fc.bias")
    bias = replace(mix, shape=(size,), name=names[0], source=Source(names), scheme=None, init=Init.ZEROS)
    embedding = replace(table.embedding, **_named("embed_tokens.weight"))
    params = StreamParams(
        mix=mix,
        mix_bias=bias if _has(folder, names) else None,
        token_norm=None,
        hidden_norm=None,
        layers=tuple(_renamed(layer) for layer in (first, *table.layers[1:])),
        bare_first=True,
        norm=None,
        head=None,
        embedding=embedding if _has(folder, embedding.source.names) else None,
    )
    return HeadSpec(params, spec.vocab_size, spec)


def read_mtp(folder: Path, model: ArchSpec, quantization: str | None) -> HeadSpec:
    """Reads the first layer behind a model's last that was trained to guess the next token but one (DeepSeek-V3, 2024),
    from the model's own folder. UnsupportedModelError for a model without any."""
    del quantization  # the model's own
    if not model.extra_layers:
        raise UnsupportedModelError(f"{folder}: its config.json names no layer that guesses (MTP)", "MODEL")
    number = model.num_layers
    longer = replace(model, layers=(*model.layers, model.layers[-1]), tie_word_embeddings=False)
    table = parameters_of(longer)
    stem, layer = f"model.layers.{number}.", table.layers[number]
    size, norm = model.hidden_size, layer.weights[Role.ATTENTION_NORM]

    def normed(name: str) -> NormParams:
        return NormParams(replace(norm, role=name, name=stem + name, source=Source((f"{stem}{name}.weight",))))

    mix = replace(norm, role="eh_proj", merge="eh_proj", shape=(size, 2 * size), init=Init.NORMAL)
    head, embedding = f"{stem}shared_head.head.weight", f"{stem}embed_tokens.weight"
    params = StreamParams(
        mix=replace(mix, name=f"{stem}eh_proj.weight", source=Source((f"{stem}eh_proj.weight",))),
        mix_bias=None,
        token_norm=normed("enorm"),
        hidden_norm=normed("hnorm"),
        layers=(layer,),
        bare_first=False,
        norm=normed("shared_head.norm"),
        head=replace(table.head, name=head, source=Source((head,))) if _has(folder, (head,)) else None,
        embedding=replace(table.embedding, name=embedding, source=Source((embedding,)))
        if _has(folder, (embedding,))
        else None,
    )
    return HeadSpec(params, model.vocab_size, replace(longer, layers=longer.layers[-1:]), ignored=("",))


HEADS: Final[Mapping[str, Callable[[Path, ArchSpec, str | None], HeadSpec]]] = {
    "eagle": read_eagle,
    "mtp": read_mtp,
    "eagle3": read_eagle3,
    "medusa": read_medusa,
}
"""Readers of heads, by the `method` of --speculative-config."""


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        words = f"{folder / 'config.json'} cannot be read: {unfinished_words(folder) or error}"
        raise UnsupportedModelError(words, "MODEL") from error
    return found if isinstance(found, dict) else {}


def _whole(folder: Path, config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Returns a key of config.json, a whole number from 1 on; the default where it is absent or null."""
    value = default if config.get(key) is None else config[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedModelError(f"{folder}: {key} {value!r} in config.json must be a whole number above 0", "MODEL")
    return value


def _taps(folder: Path, config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Returns the layers before which an EAGLE-3 head reads the stream; where none are named, those of its paper."""
    own = config.get("eagle_config")
    named = own.get("eagle_aux_hidden_state_layer_ids") if isinstance(own, dict) else None
    taps = (2, num_layers // 2, num_layers - 3) if named is None else named
    is_list = isinstance(taps, list | tuple) and len(set(map(str, taps))) == len(taps) > 0
    if not is_list or any(not isinstance(tap, int) or not 0 <= tap <= num_layers for tap in taps):
        words = f"{folder} reads before layers {taps!r} of a model that has {num_layers}"
        raise UnsupportedModelError(words, "MODEL")
    return tuple(taps)


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


def _without(weights: Mapping[Role, Param], left_out: Role) -> dict[Role, Param]:
    return {role: param for role, param in weights.items() if role is not left_out}


def _renamed(layer: LayerParams) -> LayerParams:
    """Returns the parameters of a Llama's layer under the names of an EAGLE head."""

    def named(param: Param) -> Param:
        stem = param.name.removeprefix("model.")
        return replace(param, source=replace(param.source, names=(stem, param.name)))

    weights, biases = ({role: named(one) for role, one in part.items()} for part in (layer.weights, layer.biases))
    return replace(layer, weights=weights, biases=biases)


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
