"""Which variants of Triton's kernels launches ask for, by Triton's own specialization, without a GPU: nothing is
compiled, and nothing computed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tandem.workers.attention.prompts.varlen_attention import FlashVarlen, SdpaVarlen
from tests.support.platforms import GpuOnHost


class GpuWithTriton(GpuOnHost):
    """GpuOnHost with the kernels that a GPU's ranks launch, and the twin of torch's flash kernel."""

    def has_triton(self) -> bool:
        return True

    def _flash(self, dtype: torch.dtype, head_dim: int, kv_dtype: torch.dtype) -> Any:
        return SdpaVarlen() if FlashVarlen().takes(dtype, head_dim) else None


@contextmanager
def variants_told(capability: int = 90) -> Iterator[set[str]]:
    """Yields the variants that were launched: the kernel with its types, constants and what is known of its arguments.
    What kernels would have written is zeros: new memory is, meanwhile."""
    import triton
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from tools.check_kernels import NoDevice

    found: set[str] = set()
    run, before = JITFunction.run, driver._active
    empty, new_empty, empty_like = torch.empty, torch.Tensor.new_empty, torch.empty_like

    def note(*, key: str, fn: Any, **_: object) -> bool:
        found.add(f"{fn.module}.{fn.name} {key}")
        return True  # as if it were compiled

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        del warmup
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    def zeros(*size: Any, pin_memory: bool = False, **of: Any) -> torch.Tensor:
        del pin_memory
        return torch.zeros(*size, **of)

    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_cache_hook = note
        JITFunction.run = launch
        torch.empty, torch.Tensor.new_empty, torch.empty_like = zeros, torch.Tensor.new_zeros, torch.zeros_like  # type: ignore[assignment]
        driver.set_active(NoDevice(capability))
        try:
            yield found
        finally:
            JITFunction.run = run
            torch.empty, torch.Tensor.new_empty, torch.empty_like = empty, new_empty, empty_like  # type: ignore[method-assign]
            driver._active = before
