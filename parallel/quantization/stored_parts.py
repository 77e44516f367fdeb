"""part_of(): one tensor of a layout, sharded as its matrix is; Cut: what a rank needs of the indices that it read.
Torch-free.

Tensors are described as [output-like, input-like], also where they are stored the other way round. An index may stand
for several outputs or inputs: those of a word, a block or a group. Ranks read every index that they need a part of.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Final

from tandem.configs.errors import SettingsError
from tandem.parallel.mesh import Mesh
from tandem.parallel.params import FLOATS, WHOLE, Each, Param, Shard, Source

ALL: Final = 0
"""One index stands for all outputs, or all inputs."""
CROSSING: Final = -1
"""Codes cross words, so that every rank reads all of them: see part_of()."""
WORD_BITS: Final = 32


def part_of(
    weight: Param,
    suffix: str | tuple[str, ...],
    *,
    rows: int = 1,
    columns: int = 1,
    dtype: str | None = None,
    stored: tuple[str, ...] = FLOATS,
    transposed: bool = False,
    reshaped: bool = False,
    bits: int = 0,
) -> Param:
    """Returns the parameter of a tensor that is stored beside others of the same layer.

    suffix: the end of its name, or several that it may have. rows, columns: outputs and inputs that an index stands
    for; CROSSING: codes of so many bits follow one another across words. reshaped: any shape with as many elements is
    read.
    """
    source = weight.source
    if source.index is not None or source.joined:
        raise SettingsError(f"{weight.name}: a stack of quantized matrices is not read in this layout", "MODEL")
    suffixes = (suffix,) if isinstance(suffix, str) else suffix
    names = tuple(f"{name.rpartition('.')[0]}.{end}" for name in source.names for end in suffixes)
    num_rows, of_rows, shard = _rows(weight, rows, bits)
    num_columns, of_columns = _columns(weight, columns, bits)
    shard = of_columns or shard
    return replace(
        weight,
        name=f"{weight.stem}.{suffixes[0]}",
        shape=(num_rows, num_columns),
        source=replace(of_rows, names=names, transposed=transposed, reshaped=reshaped),
        shard=shard,
        dtype=dtype,
        stored=stored,
        scheme=None,
    )


def by_input(weight: Param, suffix: str, dtype: str, stored: tuple[str, ...]) -> Param:
    """Returns the parameter of a tensor with one element for each input."""
    shard = replace(weight.shard, dim=0) if weight.shard.dim == 1 else WHOLE
    names = tuple(f"{name.rpartition('.')[0]}.{suffix}" for name in weight.source.names)
    named: dict[str, Any] = {"name": f"{weight.stem}.{suffix}", "dtype": dtype, "stored": stored, "scheme": None}
    return replace(weight, shape=weight.shape[1:], source=Source(names), shard=shard, **named)


def whole_of(weight: Param, suffix: str, dtype: str | None, stored: tuple[str, ...] = FLOATS) -> Param:
    """Returns the parameter of a tensor that every rank reads, however long it is, as if flat."""
    names = tuple(f"{name.rpartition('.')[0]}.{suffix}" for name in weight.source.names)
    source = Source(names, whole=True)
    named: dict[str, Any] = {"name": f"{weight.stem}.{suffix}", "dtype": dtype, "stored": stored, "scheme": None}
    return replace(weight, shape=(1,), source=source, shard=WHOLE, **named)


@dataclass(frozen=True, slots=True)
class Cut:
    """The elements that a rank has of those that its indices stand for. pieces: (first, count), in order, from the
    first element of the first index on. length: of the rank's part, padding included."""

    pieces: tuple[tuple[int, int], ...]
    length: int


def row_cut(weight: Param, mesh: Mesh, rows: int) -> Cut:
    """Returns a rank's outputs of a part with `rows` outputs for each index."""
    span, source = weight.span(0, mesh), weight.source
    present = max(0, min(span.start + span.length, span.total) - span.start)
    if rows == 1:
        return Cut(((0, present),), span.length)
    if not _is_plain(source):
        return Cut(tuple(source.stored(span.start, present)) if present else (), span.length)
    if rows == CROSSING:
        return Cut(((source.start + span.start, present),), span.length)
    count, of_rows, shard = _rows(weight, rows)
    is_whole = span.length == span.total  # with expert parallelism too
    first = 0 if is_whole else shard.span(count, mesh.tp_rank, mesh.tp_size).start
    base = (of_rows.start + first) * rows
    return Cut(((source.start + span.start - base, present),), span.length)


def column_cut(weight: Param, mesh: Mesh, columns: int) -> Cut:
    """Returns a rank's inputs of a part with `columns` inputs for each index."""
    span = weight.span(1, mesh)
    first = 0 if columns == CROSSING else span.start // columns * columns
    return Cut(((span.start - first, span.length),), span.length)


def _is_plain(source: Source) -> bool:
    return source.run is None and not source.order


def _rows(weight: Param, rows: int, bits: int = 0) -> tuple[int, Source, Shard]:
    """Returns a part's indices along outputs, where they are stored, and how ranks share them."""
    source, shard = weight.source, weight.shard if weight.shard.dim == 0 else WHOLE
    if rows == ALL:
        return 1, Source(()), WHOLE
    if rows == 1:
        return weight.shape[0], replace(source, shape=()), shard
    total = weight.shape[0] if source.rows is None else source.rows
    if rows == CROSSING:
        return num_words(total, bits), Source(()), WHOLE
    if not _is_plain(source):
        return -(-total // rows), Source(()), WHOLE
    start, before = divmod(source.start, rows)
    count, stored = -(-(before + weight.shape[0]) // rows), -(-total // rows)
    if shard.axis is not None:
        shard = replace(shard, each=Each(weight.shape[0], rows, before))
    return count, Source((), rows=None if stored == count else stored, start=start), shard


def _columns(weight: Param, columns: int, bits: int) -> tuple[int, Shard | None]:
    """Returns a part's indices along inputs, and how ranks share them; None where inputs are not shared."""
    inputs, shared = weight.shape[1], weight.shard.dim == 1 and weight.shard.axis is not None
    if columns == ALL:
        return 1, WHOLE if shared else None
    if columns == CROSSING:
        return num_words(inputs, bits), WHOLE if shared else None
    if columns == 1:
        return inputs, weight.shard if shared else None
    count = -(-inputs // columns)
    return count, replace(weight.shard, each=Each(inputs, columns)) if shared else None


def words_per(bits: int) -> int:
    """Returns the codes of a word, CROSSING where some are in two words."""
    return WORD_BITS // bits if WORD_BITS % bits == 0 else CROSSING


def num_words(codes: int, bits: int) -> int:
    """Returns the words of so many codes that follow one another bit by bit."""
    return math.ceil(codes * bits / WORD_BITS)
