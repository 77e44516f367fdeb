"""The pipelines of compiled Triton kernels: whether an inner loop fetches the next keys while it multiplies others.

Triton decides it, without a word where it does not: a load whose address depends on another load of the same step takes
the place of a stage. So tools/check_kernels.py reads it from what was compiled (Triton's IR for GPUs).
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

PRODUCT = re.compile(r"\w+\.(warp_group_)?dot\b")
FETCH = re.compile(r"async_copy_global_to_local|tt\.load\b")
LOADED = re.compile(
    r"(?:async_copy_global_to_local|tt\.load) .*?tensor<(?P<sizes>(?:\d+x)+)!tt\.ptr<(?P<kind>[a-z]+)(?P<bits>\d+)>"
)


class Loop(NamedTuple):
    """An innermost loop that multiplies two tensors, as keys and values. buffers: the fewest that one has in shared
    memory. under_way: the fewest fetches that go on while the loop waits for one. None: not both are fetched ahead."""

    buffers: int | None
    under_way: int | None

    @property
    def fault(self) -> str | None:
        """Return why the loop fetches nothing while it multiplies, if so."""
        if self.buffers is None or self.under_way is None:
            return "fetches nothing ahead in its inner loop"
        if self.buffers < 2:
            return "has one buffer in its inner loop"
        return None if self.under_way else "waits for all fetches in its inner loop"


def loops_of(ir: str) -> tuple[Loop, ...]:
    """Return the innermost loops of a kernel with products by tensor cores, of one that has none those that load, as
    Triton prints it: a body is what is indented further."""
    return tuple(map(_read, _loop_bodies(ir)))


def _loop_bodies(ir: str) -> list[list[str]]:
    """Return the lines of the innermost loops with products, or else with loads."""
    lines = ir.splitlines()
    bodies = [_body(lines, place) for place, line in enumerate(lines) if "scf.for " in line]
    innermost = [body for body in bodies if not any("scf.for " in line for line in body)]
    products, fetches = ([body for body in innermost if any(map(of.search, body))] for of in (PRODUCT, FETCH))
    return products or fetches


def bytes_of_loop(ir: str) -> Mapping[str, int]:
    """Return the bytes that a turn of the innermost loop with products loads from the device's memory, by the type of
    elements as Triton names it."""
    found: Counter[str] = Counter()
    for body in _loop_bodies(ir):
        for line in body:
            loaded = LOADED.search(line)
            if loaded is not None:
                sizes, kind, bits = loaded["sizes"].split("x"), loaded["kind"], int(loaded["bits"])
                found[kind + loaded["bits"]] += math.prod(map(int, filter(None, sizes))) * bits // 8
    return found


def _body(lines: list[str], place: int) -> list[str]:
    indent = _indent(lines[place])
    end = next(i for i in range(place + 1, len(lines)) if lines[i].strip() and _indent(lines[i]) <= indent)
    return lines[place + 1 : end]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _read(body: list[str]) -> Loop:
    text = "\n".join(body)
    fetched = re.findall(r"async_copy_global_to_local .*", text)
    buffers = [int(count) for count in re.findall(r"memdesc_(?:index|subview) .*?: !ttg\.memdesc<(\d+)x", text)]
    waits = [int(count) for count in re.findall(r"async_wait .*\{num = (\d+)", text)]
    if len(fetched) < 2 or not buffers or not waits:
        return Loop(None, None)
    return Loop(min(buffers), min(waits))
