"""What compiled products with quantized weights load from the device's memory: each packed byte once, ahead of its use.
Compiled for an H100, without one, in a process that has no interpreter.
"""

import os
import subprocess
import sys
from typing import Final

import pytest

from tests.support.interpreted import INTERPRETED, ROOT

pytest.importorskip("triton")

SCRIPT: Final = """
import sys
from tools.check_kernels import compiling
from tools.code_launches import CodeLaunch, launch_codes

with compiling(90) as found:
    for scheme in ({"group": 128}, {"codes": "E2M1", "group": 32}, {}):
        launch_codes(CodeLaunch("bfloat16", 1024, 4096, scheme, rows=(1,)))
for one in found:
    if one.kernel == "triton_code_gemm.multiply_codes":
        print(one.spilled, one.loops[0].under_way, *(one.loaded.get(kind, 0) for kind in ("i32", "i8", "bf16", "f32")))
"""
OUTPUTS, ROWS = 64, 16
"""Of a program."""


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_each_packed_byte_is_loaded_once_and_ahead() -> None:
    """Per turn: half a byte for each weight of int4 and E2M1, a byte for each of int8; a scale for each output and
    group, of which a turn has several; the inputs of one tile of rows."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    found = [tuple(map(int, line.split())) for line in ran.stdout.splitlines()]
    steps = ((128, 4, 0, 1), (128, 4, 0, 4), (128, 0, 8, 0))
    assert len(found) == len(steps)
    for (spilled, under_way, words, bytes_, inputs, scales), (step, bits, wide_bits, groups) in zip(
        found, steps, strict=True
    ):
        weights = OUTPUTS * step
        assert (words, bytes_) == (weights * bits // 8, weights * wide_bits // 8)
        assert inputs == ROWS * step * 2 and spilled == 0 and under_way > 0
        assert scales == OUTPUTS * groups * 4
