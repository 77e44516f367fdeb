"""The reader of compiled kernels' pipelines, on Triton's IR cut to what it reads."""

import pytest

from tools.kernel_pipelines import Loop, loops_of

KERNEL = """\
    scf.for %work = %0 to %1 step %2  : i32 {{
      %keys = ttg.local_alloc : () -> !ttg.memdesc<{buffers}x128x64xbf16, #shared, #smem, mutable>
      %s:3 = scf.for %place = %3 to %4 step %5 iter_args(%a = %b) -> (tensor<16xf32>)  : i32 {{
        %w = ttg.async_wait %t, %u {{num = {wait} : i32}}
        %k = ttg.memdesc_index %keys[%i] : !ttg.memdesc<{buffers}x128x64xbf16, #shared> -> !ttg.memdesc<128x64xbf16>
        %d = tt.dot %q, %k, %z : tensor<16x128xbf16> * tensor<128x64xbf16> -> tensor<16x64xf32>
        %n = {fetch} %p, %k mask %m : tensor<128x64x!tt.ptr<bf16>> -> <128x64xbf16>
        %o = ttg.async_copy_global_to_local %r, %v mask %m : tensor<64x128x!tt.ptr<bf16>> -> <64x128xbf16>
        scf.yield %e : tensor<16xf32>
      }}
      %f = ttg.async_wait {{num = 0 : i32}}
    }}
    scf.for %part = %0 to %1 step %2  : i32 {{
      %x = arith.addf %y, %z : f32
    }}
"""


@pytest.mark.parametrize(
    ("buffers", "wait", "fetch", "wanted", "fault"),
    [
        (3, 2, "ttg.async_copy_global_to_local", Loop(3, 2), None),
        (1, 2, "ttg.async_copy_global_to_local", Loop(1, 2), "has one buffer in its inner loop"),
        (2, 0, "ttg.async_copy_global_to_local", Loop(2, 0), "waits for all fetches in its inner loop"),
        (2, 2, "tt.load", Loop(None, None), "fetches nothing ahead in its inner loop"),
    ],
)
@pytest.mark.parametrize("product", ["tt.dot", "arith.mulf"])
def test_the_innermost_loop_with_a_product_is_read(
    product: str, buffers: int, wait: int, fetch: str, wanted: Loop, fault: str | None
) -> None:
    """Or, in a kernel without tensor cores, the one that loads."""
    loops = loops_of(KERNEL.format(buffers=buffers, wait=wait, fetch=fetch).replace("tt.dot", product))
    assert loops == (wanted,) and loops[0].fault == fault
