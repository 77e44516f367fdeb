"""Folds: where a scale of a linear layer's inputs can be divided out of what makes them, so that no outputs change.

Behind a norm the scale goes into its weight; the input of an MLP's second projection is a product with rows of its
first; the input of attention's output projection is a sum of rows of v. AWQ (Lin et al. 2023) and SmoothQuant (Xiao et
al. 2022) scale inputs so. Read from the table of families: no model has code of its own here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tandem.parallel.params import Param
from tandem.workers.models.spec.arch import Activation, Gated, Gqa, LayerSpec, Mla, Moe, NormPlace
from tandem.workers.models.spec.parameter_names import Role
from tandem.workers.models.spec.parameters import LayerParams
from tandem.workers.quantize.rounding.recorded_linear import RecordedLinear

ROUTING = (Role.ROUTER, Role.SHARED_GATE)
BEFORE_BOTH = (NormPlace.PRE, NormPlace.SANDWICH, NormPlace.PARALLEL_TWO)


@dataclass(frozen=True, slots=True)
class Fold:
    """linears: whose inputs are scaled, all that read them; further: other parameters that do, a router's among them.
    before: parameters whose elements, or rows, are divided; norm: the first of them is a norm's weight. heads: (heads,
    heads of before) where several heads of inputs are made of one; None: as many."""

    name: str
    linears: tuple[RecordedLinear, ...]
    before: tuple[Param, ...]
    further: tuple[Param, ...] = ()
    norm: bool = False
    heads: tuple[int, int] | None = None

    def shared(self, given_I: torch.Tensor) -> torch.Tensor:
        """Returns the mean over inputs that are made of one row, for each of these inputs."""
        if self.heads is None:
            return given_I
        heads, of_before = self.heads
        groups = given_I.view(of_before, heads // of_before, -1)
        return groups.mean(1, keepdim=True).expand_as(groups).flatten()

    def rows(self, scale_I: torch.Tensor) -> torch.Tensor:
        """Returns the scale of each row of `before`."""
        if self.heads is None:
            return scale_I
        heads, of_before = self.heads
        return scale_I.view(of_before, heads // of_before, -1)[:, 0].flatten()


def folds_of(spec: LayerSpec, params: LayerParams, linears: Sequence[RecordedLinear]) -> Iterator[Fold]:
    """Yields the folds of a layer, those behind norms first. linears: all that it has."""
    yield from _behind_norms(spec, params, linears)
    if isinstance(spec.attention, Gqa):
        heads = spec.attention.num_heads, spec.attention.num_kv_heads
        yield Fold("v", _of(linears, params, "o"), _both(params, Role.V), heads=heads)
    if isinstance(spec.mlp, Moe):
        for expert in params.all_experts:
            if spec.mlp.swiglu is None or expert is params.shared:  # that of gpt-oss adds to a clamped up
                yield _of_mlp(linears, expert, f"up of expert {_name(expert)}")
    elif isinstance(spec.mlp, Gated) or spec.mlp.activation is Activation.RELU:
        yield _of_mlp(linears, params, "up")


def _behind_norms(spec: LayerSpec, params: LayerParams, linears: Sequence[RecordedLinear]) -> Iterator[Fold]:
    attention: tuple[str, ...] = ("qkv",) if isinstance(spec.attention, Gqa) else ("latents",)
    if isinstance(spec.attention, Mla) and spec.attention.q_rank is None:
        attention = ("latents", "q")
    readers = _of(linears, params, *attention)
    mlp = _of(linears, params, "up")
    further: tuple[Param, ...] = ()
    if isinstance(spec.mlp, Moe):
        mlp = tuple(one for expert in params.all_experts for one in _of(linears, expert, "up"))
        further = tuple(params.weights[role] for role in ROUTING if role in params.weights)
    if not spec.norm.weight:
        return
    if spec.place is NormPlace.PARALLEL:
        yield Fold("attention_norm", (*readers, *mlp), _both(params, Role.ATTENTION_NORM), further, norm=True)
    if spec.place in BEFORE_BOTH:
        yield Fold("attention_norm", readers, _both(params, Role.ATTENTION_NORM), norm=True)
        yield Fold("mlp_norm", mlp, _both(params, Role.MLP_NORM), further, norm=True)
    if isinstance(spec.attention, Mla) and spec.attention.q_rank is not None:
        yield Fold("q_a_norm", _of(linears, params, "q"), _both(params, Role.Q_A_NORM), norm=True)


def _of_mlp(linears: Sequence[RecordedLinear], params: LayerParams, name: str) -> Fold:
    return Fold(name, _of(linears, params, "down"), _both(params, Role.UP))


def _of(linears: Sequence[RecordedLinear], params: LayerParams, *merges: str) -> tuple[RecordedLinear, ...]:
    """Returns the linears that these parameters' matmuls are."""
    own = {id(param) for param in params.weights.values() if param.merge in merges}
    return tuple(linear for linear in linears if id(linear.params[0]) in own)


def _both(params: LayerParams, role: Role) -> tuple[Param, ...]:
    """Returns a weight and its bias, if it has one."""
    return tuple(group[role] for group in (params.weights, params.biases) if role in group)


def _name(params: LayerParams) -> str:
    expert = params.weights[Role.UP].expert
    return "shared" if expert is None else str(expert[0])
