"""Student: what learns to guess a target's tokens, in torch; the parts that several kinds are made of.

Places count from the first token behind those that are known: at place j behind token s a student guesses token
s + 1 + j, while the tokens between are those that it has guessed itself, which were right so far, or nothing counts.
B answers of up to W tokens, N places of them, H hidden size, V tokens that a student knows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import nn
from torch.nn import functional

from tandem.workers.distill.target_model import AnswerStates
from tandem.workers.models.spec.family_rows.families import family_of
from tandem.workers.models.spec.parameter_names import Role

STEMS: Final = family_of("LlamaForCausalLM").names.stems
ROLES: Final = (
    Role.ATTENTION_NORM, Role.Q, Role.K, Role.V, Role.O, Role.MLP_NORM, Role.GATE, Role.UP, Role.DOWN
)  # fmt: skip
SPREAD: Final = 0.02
"""Standard deviation of new matrices."""


class Student(Protocol):
    """A pupil of the target. module: its parameters. taps: the target's layers before which it reads the residual
    stream. ids: the target's ids of its own vocabulary, ascending; None: all. trained_places: how many places a step
    learns. learning_rate: the highest that suits it, less for wider ones."""

    module: nn.Module
    taps: tuple[int, ...]
    ids: torch.Tensor | None
    trained_places: int
    learning_rate: float

    def hidden(self, states: AnswerStates, places: int) -> list[torch.Tensor]:
        """Returns for each place what its head reads, [B, W, H], by the token s that the chain starts behind."""
        ...

    def logits(self, hidden_NH: torch.Tensor, place: int) -> torch.Tensor:
        """Returns logits [N, V] of rows of hidden()."""
        ...

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Returns what is written, float32 where it was learned, by the names that vLLM reads."""
        ...

    def config(self) -> Mapping[str, Any]:
        """Returns what config.json says beside dtype and what every method has."""
        ...


class LearnedNorm(nn.Module):
    """x / rms(x) * weight (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self._eps)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of a Llama layer, as config.json names them."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float


class LearnedLayer(nn.Module):
    """A Llama layer's parts. inputs: the width of what attention reads. Its parameters are called by their roles, and
    written by the names that checkpoints have for these."""

    def __init__(self, shape: LayerShape, inputs: int) -> None:
        super().__init__()
        self._shape = shape
        size, dim, eps = shape.hidden_size, shape.head_dim, shape.rms_norm_eps
        outputs, kv_outputs = shape.num_attention_heads * dim, shape.num_key_value_heads * dim
        self.attention_norm = LearnedNorm(size, eps)
        self.q = nn.Linear(inputs, outputs, bias=False)
        self.k = nn.Linear(inputs, kv_outputs, bias=False)
        self.v = nn.Linear(inputs, kv_outputs, bias=False)
        self.o = nn.Linear(outputs, size, bias=False)
        self.mlp_norm = LearnedNorm(size, eps)
        self.gate = nn.Linear(size, shape.intermediate_size, bias=False)
        self.up = nn.Linear(size, shape.intermediate_size, bias=False)
        self.down = nn.Linear(shape.intermediate_size, size, bias=False)

    def projected(self, x_BWI: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns q, k and v, [B, heads, W, D], rotated for positions from `first` on, k and v for each query head."""
        shape, dim = self._shape, self._shape.head_dim
        parts = (matrix(x_BWI).unflatten(-1, (-1, dim)) for matrix in (self.q, self.k, self.v))
        q_BhWD, k_BhWD, v_BhWD = (part.transpose(1, 2) for part in parts)
        half = torch.arange(0, dim, 2, device=x_BWI.device) / dim
        angles_WD = torch.arange(first, first + x_BWI.shape[1], device=x_BWI.device)[:, None] / shape.rope_theta**half
        cos_WD, sin_WD = (torch.cat([part, part], -1) for part in (angles_WD.cos(), angles_WD.sin()))
        q_BhWD, k_BhWD = (_rotated(one, cos_WD, sin_WD) for one in (q_BhWD, k_BhWD))
        group = shape.num_attention_heads // shape.num_key_value_heads
        return q_BhWD, k_BhWD.repeat_interleave(group, 1), v_BhWD.repeat_interleave(group, 1)

    def merged(self, heads_BhWD: torch.Tensor) -> torch.Tensor:
        """Returns the output, [B, W, H], of what the heads have taken."""
        return self.o(heads_BhWD.transpose(1, 2).flatten(2))

    def attended(self, x_BWI: torch.Tensor) -> torch.Tensor:
        """Returns attention's output, [B, W, H], each token over those up to it."""
        q_BhWD, k_BhWD, v_BhWD = self.projected(x_BWI, 0)
        return self.merged(functional.scaled_dot_product_attention(q_BhWD, k_BhWD, v_BhWD, is_causal=True))

    def fed(self, x_BWH: torch.Tensor) -> torch.Tensor:
        """Returns the MLP's output behind its norm."""
        x_BWH = self.mlp_norm(x_BWH)
        return self.down(functional.silu(self.gate(x_BWH)) * self.up(x_BWH))

    def tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        """Returns its parameters by a checkpoint's names."""
        own = dict(self.named_parameters(recurse=True))
        return {f"{prefix}{STEMS[role]}.weight": own[f"{role}.weight"].detach() for role in ROLES}


def shifted(x_BW: torch.Tensor, by: int) -> torch.Tensor:
    """Returns what stands `by` places later, zeros where that is beyond the end; `by` below 0: earlier ones."""
    if by == 0:
        return x_BW
    out = torch.zeros_like(x_BW)
    if by > 0:
        out[:, :-by] = x_BW[:, by:]
    else:
        out[:, -by:] = x_BW[:, :by]
    return out


def rate_of(highest: float, width: int, hidden_size: int) -> float:
    """Returns a learning rate: the highest up to a width, and behind it the less the wider a student is."""
    return highest * min(1.0, width / hidden_size)


def begin(module: nn.Module, generator: torch.Generator) -> None:
    """Fills all matrices from Normal(0, SPREAD)."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, SPREAD, generator=generator)


def _rotated(x_BhWD: torch.Tensor, cos_WD: torch.Tensor, sin_WD: torch.Tensor) -> torch.Tensor:
    first, second = x_BhWD.chunk(2, -1)
    return x_BhWD * cos_WD + torch.cat([-second, first], -1) * sin_WD
