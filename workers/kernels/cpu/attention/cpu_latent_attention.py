"""Attention over latents for CPUs: each token's query reads its context's latents in place, once for many heads.

    absorb   q'[t, n] = (q[t, n, :P] @ W[n, :P], q[t, n, P:])
    attend   out[t, n] = softmax_j(scale * q'[t, n] . c[j]) c[j, :L]
    release  y[t, n] = out[t, n] @ W[n, P:].T

over the visible positions j of token t's row; c[j] is a latent of L elements and a key of R that rotates. All heads
share c, so this is bound by products more than by reading: a task takes 32 heads and one part of a context, which stays
in the caches; four heads share each read. Parts are those of cpu_decode_attention.py and are merged as there. A cache
whose elements are not multiplied as they are (quantized ones; bf16 on CPUs that multiply no pairs of it) is converted
part by part. bf16 and float32, summed in float32 (products of bf16 queries and latents by VDPBF16PS, if present),
rounded once per line above. A token's results have the same bits whatever is computed beside it, absorb and release
included.

Called by workers/attention/latents/cpu_latents.py; the torch twins are torch_latents.py and latent_heads.py there. T
tokens, N heads, P elements of a key that do not rotate, R that do, D = P + R, V of a value, L of a latent, E = L + R.
"""

import ctypes
from collections.abc import Iterable

import torch

from tandem.configs.platform_facts import MOST_LATENT
from tandem.workers.kernels.cpu.attention.cpu_decode_attention import LANES, DecodeTable, DecodeWork, up_to
from tandem.workers.kernels.cpu.cpu_build import cpu_latent_library
from tandem.workers.kernels.cpu.cpu_calls import COUNT, NUMBER, POINTER, REAL, Kernel, Scratch
from tandem.workers.kernels.cpu.cpu_kv_quant import address
from tandem.workers.kernels.kv_store import LayerKV
from tandem.workers.models.spec.arch import AttentionParams, Mla

TOGETHER = 32
"""Heads of a task."""
PARTS_BYTES = 512 * 2**10
"""Memory of each thread for the sums of parts of contexts, unless one row has more: beyond a core's cache they would
cost a third of a decode's time."""


class CpuLatentAttention:
    """The compiled kernels for one element type. It keeps scratch memory between calls, so it serves one thread."""

    together = 1

    def __init__(self, library: ctypes.CDLL) -> None:
        assert ctypes.c_int.in_dll(library, "latent_most_width").value == MOST_LATENT
        self._partials, self._scratch = Scratch(), Scratch()
        self._attend = Kernel(
            library, "latent_attention", POINTER, POINTER, POINTER, POINTER, POINTER, NUMBER, POINTER, POINTER, NUMBER,
            POINTER, NUMBER, POINTER, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, REAL, COUNT,
        )  # fmt: skip
        self._absorb = Kernel(
            library, "latent_absorb", POINTER, NUMBER, POINTER, POINTER, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER,
            COUNT,
        )  # fmt: skip
        self._release = Kernel(
            library, "latent_release", POINTER, POINTER, POINTER, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, COUNT
        )

    @classmethod
    def make(cls, dtype: torch.dtype, width: int, storage: torch.dtype) -> "CpuLatentAttention | None":
        """Returns the kernels; None for unsupported types or widths of the cache, or when compilation failed."""
        library = cpu_latent_library(dtype, storage) if width <= MOST_LATENT else None
        return None if library is None else cls(library)

    def reserve(self, work: DecodeWork, num_heads: int, width: int) -> None:
        """Reserves memory for this work, before each step's first call with it."""
        padded, length = up_to(2 * LANES, width), up_to(LANES, work.longest)
        part = up_to(LANES, num_heads * (padded + 2))
        threads = torch.get_num_threads()
        work.room.value = max(work.most_parts, min(work.num_tasks.value, threads * PARTS_BYTES // (4 * part)))
        # Of a thread: queries, scores, two pointers to each token, and tokens as floats.
        work.scratch_size.value = min(num_heads, TOGETHER) * (padded + length) + 4 * length + length * padded
        self._partials.reserve(work.room.value * part)
        self._scratch.reserve(threads * work.scratch_size.value)

    def attend(
        self,
        q_TND: torch.Tensor,
        kv: LayerKV,
        works: Iterable[DecodeWork],
        table: DecodeTable,
        params: AttentionParams,
        spec: Mla,
        weight_NXL: torch.Tensor,
    ) -> torch.Tensor:
        """Returns out_TNV of the tokens of all works, for which memory has been reserved. weight: for each head, what
        makes keys of latents, then values."""
        assert params.is_plain, "scores that the kernel does not compute"
        q_TNE = self.absorb(q_TND, spec, weight_NXL)
        out_TNL = torch.empty(*q_TND.shape[:2], spec.kv_rank, dtype=q_TND.dtype)
        for work in works:
            self._attend_rows(q_TNE, kv, out_TNL, work, table, params.scale)
        return self.release(out_TNL, spec, weight_NXL)

    def _attend_rows(
        self,
        q_TNE: torch.Tensor,
        kv: LayerKV,
        out_TNL: torch.Tensor,
        work: DecodeWork,
        table: DecodeTable,
        scale: float,
    ) -> None:
        """Fills the rows' tokens of out_TNL."""
        _, num_heads, width = q_TNE.shape
        assert q_TNE.is_contiguous() and kv.keys.is_contiguous() and kv.keys.shape[2:] == (1, width)
        self._attend(
            q_TNE.data_ptr(), kv.keys.data_ptr(), address(kv.key_scales), out_TNL.data_ptr(), table.address,
            table.stride, work.tasks, work.rows, work.num_rows, self._partials.address, work.room,
            self._scratch.address, work.scratch_size, num_heads, width, out_TNL.shape[2], kv.keys.shape[1], scale,
            torch.get_num_threads(),
        )  # fmt: skip

    def absorb(self, q_TND: torch.Tensor, spec: Mla, weight_NXL: torch.Tensor) -> torch.Tensor:
        """Returns q_TNE. The heads of q are contiguous per token."""
        tokens, num_heads, dim = q_TND.shape
        assert q_TND.stride()[1:] == (dim, 1) and weight_NXL.is_contiguous() and weight_NXL.dtype is q_TND.dtype
        q_TNE = torch.empty(tokens, num_heads, spec.head_dim, dtype=q_TND.dtype)
        self._absorb(
            q_TND.data_ptr(), q_TND.stride(0), weight_NXL.data_ptr(), q_TNE.data_ptr(), tokens, num_heads,
            spec.nope_dim, spec.v_dim, spec.rope_dim, spec.kv_rank, torch.get_num_threads(),
        )  # fmt: skip
        return q_TNE

    def release(self, out_TNL: torch.Tensor, spec: Mla, weight_NXL: torch.Tensor) -> torch.Tensor:
        """Returns out_TNV."""
        tokens, num_heads, _ = out_TNL.shape
        assert out_TNL.is_contiguous() and weight_NXL.is_contiguous() and weight_NXL.dtype is out_TNL.dtype
        out_TNV = torch.empty(tokens, num_heads, spec.v_dim, dtype=out_TNL.dtype)
        self._release(
            out_TNL.data_ptr(), weight_NXL.data_ptr(), out_TNV.data_ptr(), tokens, num_heads, spec.nope_dim,
            spec.v_dim, spec.kv_rank, torch.get_num_threads(),
        )  # fmt: skip
        return out_TNV
