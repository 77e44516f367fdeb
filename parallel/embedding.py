"""The two vocabulary tables cut over the TP axis by rows: the embedding and the LM head.

The vocabulary is padded so that tp divides it; padded rows are zeros and their logits are cut off. Memory of a tied
table: one copy where the head multiplies it as it is (CUDA, fp16); where matrices are packed (CPU, bf16 and fp32) the
head keeps a packed copy beside the rows that the embedding looks up, V * H / tp elements more, since a packed matrix
cannot be read by row and an unpacked head would cost 2 to 3 times the time on every step. With PP the tied table is
read on the first and the last stage. T tokens, S rows that sample, V vocabulary, H hidden.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from parallel.context import ParallelContext
from parallel.linear import Cut, Delta, LinearPart
from parallel.matmul import MakeMatrix, Matrix, PackedMatrix, make_matrix
from parallel.shard import ShardSpec, Slice, WeightSlot, padded_range


class VocabParallelEmbedding:
    """x_TH = table_VH[ids_T]; each rank looks up its own rows and the rest arrive by all-reduce."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int, context: ParallelContext) -> None:
        self._context = context
        self._size = (vocab_size, hidden_size)
        self._start, self._length = padded_range(vocab_size, context.tp_rank, context.tp_size)
        self._slice = Slice(f"{name}.weight", (vocab_size, hidden_size), 0, self._start, self._length)
        self._table_VH: torch.Tensor | None = None
        self.delta: Delta | None = None

    def __call__(self, ids_T: torch.Tensor) -> torch.Tensor:
        assert self._table_VH is not None, "not loaded"
        if self._context.tp_size == 1:
            x_TH = F.embedding(ids_T, self._table_VH)
            if self.delta is not None:
                self.delta(x_TH, ids_T)
            return x_TH
        local_T = ids_T - self._start
        elsewhere_T = (local_T < 0) | (local_T >= self._length)
        x_TH = F.embedding(local_T.masked_fill(elsewhere_T, 0), self._table_VH).masked_fill(elsewhere_T[:, None], 0)
        if self.delta is not None:
            self.delta(x_TH, ids_T)
        return self._context.tp.all_reduce(x_TH)

    def part(self, name: str) -> LinearPart:
        """As a layer of vocabulary -> hidden, its inputs cut; an adapter calls it `name`."""
        vocab_size, hidden_size = self._size
        return LinearPart(name, Cut(vocab_size, self._start, self._length), Cut(hidden_size, 0, hidden_size))

    def slots(self) -> Iterator[WeightSlot]:
        yield WeightSlot(ShardSpec((self._slice,)), self.accept)

    def accept(self, table_VH: torch.Tensor) -> None:
        self._table_VH = table_VH


class VocabParallelHead:
    """logits_SV = hidden_SH @ table_VH.T, whole and in float32 on every rank of the stage."""

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        context: ParallelContext,
        make: MakeMatrix = make_matrix,
    ) -> None:
        self._context = context
        self._make = make
        self._vocab_size = vocab_size
        self._hidden_size = hidden_size
        start, length = padded_range(vocab_size, context.tp_rank, context.tp_size)
        self._outputs = Cut(vocab_size, start, length)
        self._slice = Slice(f"{name}.weight", (vocab_size, hidden_size), 0, start, length)
        self._matrix: Matrix | None = None
        self.delta: Delta | None = None

    def __call__(self, hidden_SH: torch.Tensor) -> torch.Tensor:
        assert self._matrix is not None, "not loaded"
        part_SV = self._matrix(hidden_SH)
        if self.delta is not None:
            self.delta(part_SV, hidden_SH)
        return self._context.tp.all_gather_last_dim(part_SV)[:, : self._vocab_size].float()

    def part(self, name: str) -> LinearPart:
        """As a layer of hidden -> vocabulary, its outputs cut; an adapter calls it `name`."""
        return LinearPart(name, Cut(self._hidden_size, 0, self._hidden_size), self._outputs)

    def slots(self) -> Iterator[WeightSlot]:
        yield WeightSlot(ShardSpec((self._slice,)), self.accept)

    def accept(self, table_VH: torch.Tensor) -> None:
        self._matrix = self._make(table_VH, None)

    @property
    def copied_bytes(self) -> int:
        """Bytes that this head holds beyond the tensor it was given, when that is shared with the embedding."""
        return self._matrix.nbytes if isinstance(self._matrix, PackedMatrix) else 0
