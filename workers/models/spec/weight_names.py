"""Names of a checkpoint's tensors, as data: one WeightNames row per naming scheme; all registered families share one.

Used by decoder.py to load weights, and by checks of a whole checkpoint. Torch-free; reads no file.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tandem.workers.models.spec.arch import ArchSpec


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Stems without `.weight`/`.bias`; a layer's stems follow `layer_prefix` with the layer's index filled in.
    base_prefix: the beginning that names lack in a checkpoint without a head."""

    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    layer_prefix: str = "model.layers.{layer}."
    attention_norm: str = "input_layernorm"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    mlp_norm: str = "post_attention_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    base_prefix: str = "model."
    ignored_suffixes: tuple[str, ...] = ("rotary_emb.inv_freq",)

    def of_layer(self, layer: int, stem: str) -> str:
        """Returns `model.layers.3.self_attn.q_proj` for layer 3 and the stem `self_attn.q_proj`."""
        return self.layer_prefix.format(layer=layer) + stem


def all_tensor_names(spec: ArchSpec, names: WeightNames) -> Iterator[str]:
    """Yields every tensor name of this model's checkpoint, whatever rank reads it."""
    yield from (f"{names.embedding}.weight", f"{names.final_norm}.weight")
    if not spec.tie_word_embeddings:
        yield f"{names.head}.weight"
    for layer in range(spec.num_layers):
        for stem in _layer_tensors(spec, names):
            yield names.of_layer(layer, stem)


def _layer_tensors(spec: ArchSpec, names: WeightNames) -> Iterator[str]:
    for stem in (names.attention_norm, names.mlp_norm):
        yield f"{stem}.weight"
    if spec.qk_norm:
        yield from (f"{names.q_norm}.weight", f"{names.k_norm}.weight")
    biased = (
        (spec.qkv_bias, (names.q, names.k, names.v)),
        (spec.o_bias, (names.o,)),
        (spec.mlp_bias, (names.gate, names.up, names.down)),
    )
    for has_bias, stems in biased:
        for stem in stems:
            yield f"{stem}.weight"
            if has_bias:
                yield f"{stem}.bias"
