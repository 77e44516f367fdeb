"""Param: one parameter of a model as data: its shape, how ranks share it, where it stands in a checkpoint. Torch-free.

A model's table of Params (workers/models/spec/parameters.py) is the one place that knows its parameters. Decoder,
checkpoint reader, planner, adapters and weight streaming read it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Final, Literal, Protocol

from tandem.parallel.mesh import Mesh

if TYPE_CHECKING:
    import torch

    from tandem.parallel.quantization.coded_weight import CodedWeight

ITEM_BITS: Final = {"int4": 4, "int8": 8, "uint8": 8, "int32": 32, "float32": 32}
"""Bits of an element of parameters that have a dtype of their own."""
FLOATS: Final = ("BF16", "F16", "F32")
"""The dtypes, as safetensors names them, that a checkpoint may have stored a parameter in unless it says otherwise."""


class Init(Enum):
    """The values of a parameter in a random checkpoint (load_format dummy)."""

    NORMAL = "normal"  # mean 0, deviation 0.02
    ONES = "ones"
    ZEROS = "zeros"


@dataclass(frozen=True, slots=True)
class Span:
    """The range [start, start + length) of `total` indices of a dimension. It may extend beyond them (a padded
    vocabulary)."""

    total: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Each:
    """The meaning of a dimension's indices: `per` elements each, such as those of a group with one scale, or of a
    word. total: elements that are shared among ranks; the first index has `before` others ahead of them. width: indices
    that stand for these elements together, such as the bytes of a block."""

    total: int
    per: int
    before: int = 0
    width: int = 1


@dataclass(frozen=True, slots=True)
class Shard:
    """The way in which the ranks of an axis share a parameter. Unless it is padded or replicated, they divide its
    units."""

    axis: Literal["tp"] | None = None  # None: each rank holds all of it
    dim: int = 0  # that is divided
    unit: int = 1  # indices that stay together, such as those of a head
    replicate: bool = False  # with more ranks than units, several ranks hold one unit
    pads: bool = False  # the size is rounded up to a multiple of the ranks, by zeros
    each: Each | None = None  # elements are divided, and a rank has every index that stands for some of its own

    def span(self, size: int, rank: int, num_ranks: int) -> Span:
        """Returns the indices along `dim` of a rank of the axis. size: all of them."""
        if self.axis is None:
            return Span(size, 0, size)
        if (each := self.each) is not None:
            inside = replace(self, each=None).span(each.total, rank, num_ranks)
            first = inside.start + each.before
            start = first // each.per
            count = -(-(first + inside.length) // each.per) - start if inside.length else 0
            return Span(size, start * each.width, count * each.width)
        units = size // self.unit
        if self.pads:
            share = -(-units // num_ranks)
            first = rank * share
        elif self.replicate and num_ranks > units:
            assert num_ranks % units == 0, (units, num_ranks)
            share, first = 1, rank // (num_ranks // units)
        else:
            assert units % num_ranks == 0, (units, num_ranks)
            share = units // num_ranks
            first = rank * share
        return Span(size, first * self.unit, share * self.unit)


WHOLE = Shard()


@dataclass(frozen=True, slots=True)
class Source:
    """A parameter's place in a checkpoint.

    Row r of the parameter is row `start + (r // run) * stride + r % run` of the stored tensor: so fused projections are
    read (start), and projections that are interleaved by heads (run, stride).
    """

    names: tuple[str, ...]  # of the stored tensor, any of which it may have; under `joined` all of them
    rows: int | None = None  # of the stored tensor; None: as many as the parameter has
    start: int = 0
    run: int | None = None  # None: rows follow one another
    stride: int = 0
    transposed: bool = False  # the stored tensor is [columns, rows], as GPT-2's
    add: float = 0.0  # is added to each stored value, as Gemma's norms store w - 1
    order: tuple[int, ...] = ()  # of the rows within each as many of a run: the r-th is stored as the order[r]-th
    index: int | None = None  # of a stored stack of tensors, the one that is meant
    # of the stored tensor where it has more dimensions than the parameter; but for `index` it is read as if flat
    shape: tuple[int, ...] = ()
    joined: bool = False  # names are those of several tensors, one behind another
    reshaped: bool = False  # the stored tensor may have any shape with as many elements
    whole: bool = False  # all of the stored tensor, however long, as if flat

    def stored(self, first: int, count: int) -> Iterator[tuple[int, int]]:
        """Yields (first row, rows) of the stored tensor for `count` rows of the parameter, in order."""
        if not self.order:
            yield from self._in_order(first, count)
            return
        assert first % len(self.order) == 0 and count % len(self.order) == 0, (first, count, len(self.order))
        for start, taken in self._in_order(first, count):
            for unit in range(start, start + taken, len(self.order)):
                yield from ((unit + low, length) for low, length in _runs(self.order))

    def _in_order(self, first: int, count: int) -> Iterator[tuple[int, int]]:
        """Yields (first row, rows) as if there were no order."""
        if self.run is None:
            if count:
                yield self.start + first, count
            return
        end = first + count
        while first < end:
            group, inside = divmod(first, self.run)
            taken = min(self.run - inside, end - first)
            yield self.start + group * self.stride + inside, taken
            first += taken


class Layout(Protocol):
    """A way in which a producer's checkpoints store a matrix, in one or several tensors (layouts/)."""

    def stored(self, weight: "Param") -> tuple["Param", ...]:
        """Returns these tensors, the largest last. SettingsError for a matrix that it cannot have stored."""
        ...

    def coded(self, weight: "Param", found: Sequence["torch.Tensor"], mesh: Mesh) -> "CodedWeight":
        """Returns this rank's part of the matrix, in memory of its own. found: its shares of what stored() returned, in
        that order and as they were stored."""
        ...


class Scheme(Protocol):
    """A form of weights. layout: of checkpoints that have it; None: it is made at load of dense ones.

    apart: each matrix is multiplied by itself, also where others share its inputs.
    """

    @property
    def layout(self) -> Layout | None: ...

    @property
    def apart(self) -> bool: ...

    @property
    def words(self) -> str:
        """Its name in lines for the user."""
        ...

    def parts(self, weight: "Param") -> tuple["Param", ...]:
        """Returns the parameters that hold a matrix [outputs, inputs] on a rank."""
        ...

    def unstored(self) -> "Scheme":
        """Returns the scheme of the same form that is made of dense weights."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """One parameter, whole: [outputs, inputs] of a matrix, [outputs] of a bias, [size] of a norm."""

    name: str  # as the checkpoint's layer is called, with `.weight` or `.bias`
    shape: tuple[int, ...]
    role: str  # the part of its layer that it is
    source: Source
    shard: Shard = WHOLE
    layer: int | None = None  # the layer's index; None: outside of layers
    merge: str | None = None  # names the matmul that it shares with others of its layer; None: it is no linear layer's
    init: Init = Init.NORMAL
    expert: tuple[int, int] | None = None  # (index, number of experts) of an expert's parameter
    dtype: str | None = None  # a key of ITEM_BITS; None: the model's
    stored: tuple[str, ...] = FLOATS  # dtypes in which a checkpoint may have it
    scheme: Scheme | None = None  # how it is held and multiplied, as the weight of a linear layer; None: dense
    packs: bool = True  # it may be held in a form whose elements cannot be read
    family: Source | None = None  # as source, in the family's checkpoints, whose rows adapters have; None: the same

    @property
    def stem(self) -> str:
        """Its name without suffix."""
        return self.name.rpartition(".")[0]

    @property
    def module(self) -> str:
        """The name of the stored layer, which a fused projection shares with others."""
        return self.source.names[0].rpartition(".")[0]

    @property
    def is_matrix(self) -> bool:
        """True if it is the weight of a linear layer."""
        return self.merge is not None and len(self.shape) == 2

    @property
    def num_elements(self) -> int:
        """Elements of the whole parameter."""
        return _product(self.shape)

    def span(self, dim: int, mesh: Mesh) -> Span:
        """Returns the indices along `dim` that a rank holds. With expert parallelism it holds an expert or does not."""
        if self.expert is not None and mesh.expert_parallel:
            index, count = self.expert
            is_here = index * mesh.tp_size // count == mesh.tp_rank
            return Span(self.shape[dim], 0, self.shape[dim] if is_here else 0)
        shard = self.shard if self.shard.dim == dim else WHOLE
        return shard.span(self.shape[dim], mesh.tp_rank, mesh.tp_size)

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """Returns the shape on a rank, padding included."""
        return tuple(self.span(dim, mesh).length for dim in range(len(self.shape)))

    def local_elements(self, mesh: Mesh) -> int:
        """Returns the elements on a rank, padding included."""
        return _product(self.local_shape(mesh))

    def local_bytes(self, mesh: Mesh, element_bytes: int) -> int:
        """Returns the bytes on a rank, padding included. element_bytes: of an element in the model's dtype."""
        bits = 8 * element_bytes if self.dtype is None else ITEM_BITS[self.dtype]
        return -(-self.local_elements(mesh) * bits // 8)

    def held_bytes(self, mesh: Mesh, element_bytes: int) -> int:
        """Returns the bytes that a rank holds in place of it, by its scheme."""
        parts = (self,) if self.scheme is None else self.scheme.parts(self)
        return sum(part.local_bytes(mesh, element_bytes) for part in parts)


def _runs(order: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yields (first, length) of each run of numbers that follow one another."""
    start = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or order[end] != order[end - 1] + 1:
            yield order[start], end - start
            start = end


def _product(shape: tuple[int, ...]) -> int:
    elements = 1
    for size in shape:
        elements *= size
    return elements
