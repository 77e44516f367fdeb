"""The two vocabulary tables, sharded over the TP axis by rows: the embedding and the LM head (Megatron-LM).

The vocabulary is padded to a multiple of tp; padded rows are zeros and their logits are dropped. A tied table takes one
copy where the head multiplies it as it is (CUDA, fp16). Where matrices are packed (CPU, bf16 and fp32) or quantized the
head keeps a form of its own beside the rows that the embedding looks up, which stay dense. With PP the tied table is
read on the first and on the last stage. T tokens, S rows that sample, V vocabulary, H hidden size.
"""

import torch
import torch.nn.functional as F

from tandem.parallel.checkpoint import ParameterSlot
from tandem.parallel.context import ParallelContext
from tandem.parallel.linear import LinearPart, LoraHook, Slots
from tandem.parallel.linear_methods import LinearMethod, MakeMethod
from tandem.parallel.params import Param


class VocabParallelEmbedding:
    """x_TH = table_VH[ids_T]: each rank looks up its own rows, and an all-reduce adds the others'."""

    def __init__(self, param: Param, context: ParallelContext) -> None:
        self._param = param
        self._context = context
        self._rows = param.span(0, context.mesh)
        self._table_VH: torch.Tensor | None = None
        self.lora_hook: LoraHook | None = None

    def __call__(self, ids_T: torch.Tensor) -> torch.Tensor:
        assert self._table_VH is not None, "not loaded"
        if self._context.tp_size == 1:
            x_TH = F.embedding(ids_T, self._table_VH)
            if self.lora_hook is not None:
                self.lora_hook(x_TH, ids_T)
            return x_TH
        local_T = ids_T - self._rows.start
        elsewhere_T = (local_T < 0) | (local_T >= self._rows.length)
        x_TH = F.embedding(local_T.masked_fill(elsewhere_T, 0), self._table_VH).masked_fill(elsewhere_T[:, None], 0)
        if self.lora_hook is not None:
            self.lora_hook(x_TH, ids_T)
        return self._context.tp.all_reduce(x_TH)

    def part(self, name: str) -> LinearPart:
        """Returns the table as a layer of vocabulary -> hidden with sharded inputs; adapters refer to it by `name`."""
        columns = self._param.span(1, self._context.mesh)
        return LinearPart(name, self._rows, columns, module=name)

    def slots(self) -> Slots:
        yield ParameterSlot((self._param,), self.accept)

    def accept(self, table_VH: torch.Tensor) -> None:
        self._table_VH = table_VH


class VocabParallelHead:
    """logits_SV = hidden_SH @ table_VH.T, + bias_V if there is one, in float32: all on the first rank of a stage, or on
    each rank its part."""

    def __init__(self, param: Param, context: ParallelContext, make: MakeMethod, bias: Param | None = None) -> None:
        self._param = param
        self._bias = bias
        self._bias_V: torch.Tensor | None = None
        self._context = context
        self._method: LinearMethod = make((param,), context)
        self._outputs = param.span(0, context.mesh)
        self.lora_hook: LoraHook | None = None

    def __call__(self, hidden_SH: torch.Tensor, out_SV: torch.Tensor | None = None) -> torch.Tensor:
        """Returns all logits, on other ranks than the first one of the stage none. out_SV: float32, takes them; None:
        new memory does."""
        part_SV, tp = self._part(hidden_SH), self._context.tp
        if self._context.tp_size > 1:
            parts_RSV = part_SV.new_empty(self._context.tp_size, *part_SV.shape) if self.gathers else None
            tp.gather(parts_RSV, part_SV.contiguous())
            if parts_RSV is None:
                return part_SV.new_empty((0, self._outputs.total), dtype=torch.float32)
            part_SV = torch.cat(parts_RSV.unbind(), dim=-1)
        part_SV = part_SV[:, : self._outputs.total]
        return part_SV.float() if out_SV is None else out_SV.copy_(part_SV)

    def own(self, hidden_SH: torch.Tensor, out_SV: torch.Tensor) -> torch.Tensor:
        """Fills out_SV, float32 [S, len(own_ids)], with the logits of this rank's part of the vocabulary."""
        return out_SV.copy_(self._part(hidden_SH)[:, : len(self.own_ids)])

    @property
    def own_ids(self) -> range:
        """The tokens of this rank's part, without padding."""
        start = min(self._outputs.start, self._outputs.total)
        return range(start, min(self._outputs.start + self._outputs.length, self._outputs.total))

    @property
    def gathers(self) -> bool:
        """True where calls return all logits."""
        return self._context.tp_rank == 0

    def _part(self, hidden_SH: torch.Tensor) -> torch.Tensor:
        part_SV = self._method.apply(hidden_SH)
        if self.lora_hook is not None:
            self.lora_hook(part_SV, hidden_SH)
        return part_SV

    def part(self, name: str) -> LinearPart:
        """Returns the table as a layer of hidden -> vocabulary with sharded outputs; adapters refer to it by `name`."""
        inputs = self._param.span(1, self._context.mesh)
        return LinearPart(name, inputs, self._outputs, module=name)

    def slots(self) -> Slots:
        yield from self._method.slots((self._param,), lambda: self._bias_V)

    def bias_slots(self) -> Slots:
        """Yields the bias, which comes before the table."""
        if self._bias is not None:
            yield ParameterSlot((self._bias,), self._accept_bias)

    def accept(self, table_VH: torch.Tensor) -> None:
        self._method.take(table_VH, self._bias_V)

    @property
    def reads_stored(self) -> bool:
        """True if accept() takes the table in the checkpoint's dtype."""
        return self._method.reads_stored

    def _accept_bias(self, bias_V: torch.Tensor) -> None:
        self._bias_V = bias_V

    # A packed matrix cannot be read by row, and an unpacked head would cost 2 to 3 times the time on every step.
    @property
    def copied_bytes(self) -> int:
        """Bytes that the head holds beyond its input tensor, when that is shared with the embedding."""
        return self._method.nbytes if self._method.is_copy else 0
