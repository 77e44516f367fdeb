"""Attention of a prefill chunk for CPUs: blocks of queries, two batched matmuls, and a compiled softmax between them.

    out[t, n] = softmax_j(cap(scale * q[t, n] . k[j, n / G]) - slope[n] * (p - j)) v[j, n / G]

over positions j up to p, that of t, within the window; a head's sink takes its share of the softmax and adds nothing.

A block of queries multiplies only the keys that some of them attend to, so what is masked is hardly computed, and the
matmul runs at full speed (SDPA took 2.8 times as long at 1,024 tokens in bf16). For bf16, whose scores are rounded to
bf16 as in transformers' eager attention, and fp32. x86 CPUs that do not multiply pairs of bf16 compute bf16 in float32,
as their matmuls are faster so; scores are not rounded then. The torch twin is attend_in_pieces of
workers/attention/pieces.py.
T tokens of the chunk, J context positions, N query heads, K KV heads, G = N / K, D dim of keys, V of values.
"""

import ctypes

import torch

from tandem.workers.kernels.cpu.cpu_build import cpu_chunk_library
from tandem.workers.kernels.cpu.cpu_calls import COUNT, NUMBER, POINTER, REAL, Kernel, OfHeads, Scratch
from tandem.workers.models.spec.arch import AttentionParams

QUERY_BLOCK, LEAST_BLOCK = 128, 16
BLOCK_BYTES = 64 * 2**20
"""Scores of a block of queries; of a long context it has fewer, down to LEAST_BLOCK."""
LANES = 16


class CpuChunkAttention:
    """ChunkAttention by the compiled softmax and a loop around it. It keeps scratch memory between calls, so it serves
    one thread. dtype: of the products and the softmax, for which the library was compiled."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._of_heads, self._scratch = OfHeads(), Scratch()
        self._softmax = Kernel(
            library, "causal_softmax", POINTER, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, REAL, REAL, POINTER, POINTER,
            POINTER, NUMBER, COUNT,
        )  # fmt: skip

    @classmethod
    def make(cls, dtype: torch.dtype) -> "CpuChunkAttention | None":
        """Returns the implementation; None for other dtypes, or when compilation failed."""
        library = cpu_chunk_library(dtype)
        if library is not None and ctypes.c_int.in_dll(library, "chunk_float32_is_faster").value:
            dtype, library = torch.float32, cpu_chunk_library(torch.float32)
        return None if library is None else cls(library, dtype)

    def attend(
        self, q_TND: torch.Tensor, k_JKD: torch.Tensor, v_JKD: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Returns out_TND, as wide as the values. The chunk's tokens are the last T of the J positions."""
        num_tokens, num_heads, head_dim = q_TND.shape
        before, num_kv_heads = k_JKD.shape[0] - num_tokens, k_JKD.shape[1]
        window = params.window
        slopes, sinks = self._of_heads.array(params.slopes), self._of_heads.array(params.sinks)
        width, threads = -(-k_JKD.shape[0] // LANES) * LANES, torch.get_num_threads()
        self._scratch.reserve(threads * width)
        k_KJD = self._by_head(k_JKD)  # a matmul reads it transposed as fast; a copy as D by J is slow
        v_KJV = self._by_head(v_JKD)
        out_TNV = torch.empty((*q_TND.shape[:2], v_JKD.shape[2]), dtype=q_TND.dtype)
        most_seen = k_JKD.shape[0] if window is None else min(k_JKD.shape[0], window + QUERY_BLOCK)
        block = BLOCK_BYTES // (num_heads * most_seen * self.dtype.itemsize)
        block = max(LEAST_BLOCK, min(QUERY_BLOCK, block))
        for start in range(0, num_tokens, block):
            stop = min(start + block, num_tokens)
            count, last = stop - start, before + stop
            first = 0 if window is None else max(0, before + start + 1 - window)
            q_BKGD = q_TND[start:stop].unflatten(1, (num_kv_heads, -1))
            q_KXD = q_BKGD.permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim).to(self.dtype)
            scores_KXJ = torch.bmm(q_KXD, k_KJD[:, first:last].transpose(1, 2))
            self._softmax(
                scores_KXJ.data_ptr(), num_heads * count, last - first, count, before + start + 1 - first,
                window or 0, params.scale, params.softcap or 0.0, slopes, sinks,
                self._scratch.address, width, threads,
            )  # fmt: skip
            out_KXV = torch.bmm(scores_KXJ, v_KJV[:, first:last])
            out_TNV[start:stop] = out_KXV.view(num_heads, count, -1).transpose(0, 1)
        return out_TNV

    def _by_head(self, x_JKD: torch.Tensor) -> torch.Tensor:
        """Returns x_KJD, contiguous, for the matmuls."""
        x_KJD = x_JKD.transpose(0, 1)
        if x_KJD.dtype is self.dtype:
            return x_KJD.contiguous()
        return torch.empty(x_KJD.shape, dtype=self.dtype).copy_(x_KJD)
