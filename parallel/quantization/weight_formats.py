"""Weight formats: the parameters that hold the matrix of a linear layer, as data. Torch-free.

Sizes and the planner count bytes by them; linear_methods.py and its neighbours multiply with them. All formats here are
made at load from the checkpoint's own tensors, so no checkpoint holds their parameters.
"""

from dataclasses import replace
from typing import Final, Protocol

from tandem.parallel.mesh import Mesh
from tandem.parallel.params import WHOLE, Param


class WeightFormat(Protocol):
    """The form in which weights are held. is_dense: in that of the checkpoint, so a tied table can be shared."""

    is_dense: bool

    def parameters(self, weight: Param) -> tuple[Param, ...]:
        """Returns the parameters that hold a projection's weight [outputs, inputs]."""
        ...


class Dense:
    """The weight as it is, in the model's dtype."""

    is_dense = True

    def parameters(self, weight: Param) -> tuple[Param, ...]:
        return (weight,)


class Int8:
    """Integers from -127 to 127 and one scale per output, for all of its inputs: weight = qweight * scale."""

    is_dense = False

    def parameters(self, weight: Param) -> tuple[Param, ...]:
        by_output = weight.shard if weight.shard.dim == 0 else WHOLE
        return (
            replace(weight, name=f"{weight.stem}.qweight", dtype="int8"),
            replace(weight, name=f"{weight.stem}.scale", shape=weight.shape[:1], dtype="float32", shard=by_output),
        )


DENSE: Final[WeightFormat] = Dense()
FORMATS: Final[dict[str, WeightFormat]] = {"int8": Int8(), "w8a8": Int8()}
"""Formats by --quantization. w8a8 holds the same weights as int8, and multiplies them by rounded inputs."""


def weight_format(quantization: str | None) -> WeightFormat:
    """Returns the format of the weights of linear layers. None: dense."""
    return DENSE if quantization is None else FORMATS[quantization]


def held_bytes(form: WeightFormat, weight: Param, mesh: Mesh, element_bytes: int) -> int:
    """Returns the bytes of a linear layer's weight on a rank. element_bytes: of an element in the model's dtype."""
    params = form.parameters(weight) if weight.takes_format else (weight,)
    return sum(param.local_bytes(mesh, element_bytes) for param in params)
