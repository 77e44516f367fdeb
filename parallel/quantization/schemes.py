"""Schemes: how the matrix of a linear layer is held and multiplied, and how a checkpoint stores it. Torch-free data.

A Scheme (parallel/params.py) travels with its parameter: sizes and the planner count bytes by it, a platform chooses
the product by its class (workers/platforms), and its Layout, if it has one, says what is read. Without a layout the
checkpoint's matrix is dense, and the form is made of it at load. Here are the classes that there are.
"""

from dataclasses import dataclass, replace
from enum import Enum

from tandem.parallel.params import WHOLE, Each, Layout, Param, Scheme, Shard


class Inputs(Enum):
    """The form in which inputs are multiplied."""

    AS_THEY_ARE = "a16"
    INT8 = "a8"  # each token's are rounded to 127 steps each way
    FP8 = "fp8"  # each token's may be rounded to E4M3, where a device multiplies that; else they stay as they are


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """Integers of a byte and one scale per output, for all of its inputs: weight = qweight * scale."""

    inputs: Inputs = Inputs.AS_THEY_ARE
    layout: Layout | None = None

    @property
    def apart(self) -> bool:
        return False

    @property
    def words(self) -> str:
        return "int8" if self.inputs is Inputs.AS_THEY_ARE else "w8a8"

    def parts(self, weight: Param) -> tuple[Param, ...]:
        by_output = weight.shard if weight.shard.dim == 0 else WHOLE
        return (
            replace(weight, name=f"{weight.stem}.qweight", dtype="int8", scheme=None),
            replace(
                weight,
                name=f"{weight.stem}.scale",
                shape=weight.shape[:1],
                dtype="float32",
                shard=by_output,
                scheme=None,
            ),
        )

    def unstored(self) -> "Int8Rows":
        return replace(self, layout=None)


class Codes(Enum):
    """The meaning of codes: integers, or the values of a table (parallel/quantization/code_tables.py)."""

    INTEGERS = "int"
    NF4 = "nf4"
    FP4 = "fp4"  # as bitsandbytes has it
    E2M1 = "e2m1"
    IQ4 = "iq4"  # of GGUF's IQ4_NL and IQ4_XS
    E4M3 = "e4m3"


@dataclass(frozen=True, slots=True)
class Coded:
    """Codes of `bits` bits, with a scale for each group of inputs of an output, and perhaps a zero.

    group: inputs that share a scale, None for all of an output. zeros: integers begin at a zero of their own for each
    group; else the middle code is 0. narrow: scales are E4M3, and one of each output in float32 multiplies them, as
    NVFP4 has them; without zeros. ordered: inputs are in groups by a list, as GPTQ with desc_act has them.
    """

    codes: Codes = Codes.INTEGERS
    bits: int = 4
    group: int | None = 128
    zeros: bool = False
    narrow: bool = False
    ordered: bool = False
    inputs: Inputs = Inputs.AS_THEY_ARE
    layout: Layout | None = None

    @property
    def apart(self) -> bool:
        return self.ordered

    @property
    def words(self) -> str:
        names = {Codes.INTEGERS: f"int{self.bits}", Codes.E4M3: "fp8", Codes.E2M1: "fp4"}
        kind = names.get(self.codes, self.codes.value)
        return f"{kind}{' a8' if self.inputs is Inputs.INT8 else ''}"

    @property
    def has_product(self) -> bool:
        """True if integers or a table of 16 values stand for its codes, as in the compiled product."""
        return self.codes is Codes.INTEGERS or self.bits <= 4

    def num_groups(self, inputs: int) -> int:
        """Returns the groups of an output with so many inputs."""
        return 1 if self.group is None else -(-inputs // self.group)

    def parts(self, weight: Param) -> tuple[Param, ...]:
        """Codes, scales, zeros or outer scales; where they are ordered, the inputs' order and the groups' ends too. A
        rank has every group that some of its inputs are in, of ordered ones all."""
        weight = replace(weight, scheme=None)
        outputs, inputs = weight.shape
        groups = self.num_groups(inputs)
        shard = weight.shard
        if shard.dim == 1:
            shard = WHOLE if self.ordered else replace(shard, each=Each(inputs, self.group or inputs))
        scale = replace(weight, shape=(outputs, groups), dtype="uint8" if self.narrow else "float32", shard=shard)
        held = [replace(scale, name=f"{weight.stem}.scale")]
        if self.narrow:
            by_output = weight.shard if weight.shard.dim == 0 else WHOLE
            outer = replace(weight, name=f"{weight.stem}.outer", shape=(outputs,), dtype="float32", shard=by_output)
            held.append(outer)
        if self.zeros:
            held.append(replace(scale, name=f"{weight.stem}.zero"))
        if self.ordered:
            by_input = replace(weight.shard, dim=0) if weight.shard.dim == 1 else Shard()
            held.append(replace(weight, name=f"{weight.stem}.order", shape=(inputs,), dtype="int32", shard=by_input))
            held.append(replace(weight, name=f"{weight.stem}.ends", shape=(groups,), dtype="int32", shard=WHOLE))
        dtype = "int4" if self.bits <= 4 else "uint8"
        return (*held, replace(weight, name=f"{weight.stem}.codes", dtype=dtype))

    def unstored(self) -> "Coded":
        return replace(self, layout=None)


@dataclass(frozen=True, slots=True)
class Undone:
    """A stored form that is undone at load, for matrices that are multiplied by parts: held dense, in the model's
    dtype. stored: the form."""

    stored: Scheme

    @property
    def layout(self) -> Layout | None:
        return self.stored.layout

    @property
    def apart(self) -> bool:
        return True

    @property
    def words(self) -> str:
        return f"{self.stored.words} undone at load"

    def parts(self, weight: Param) -> tuple[Param, ...]:
        return (replace(weight, scheme=None),)

    def unstored(self) -> Scheme:
        return self
