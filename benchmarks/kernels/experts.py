"""A mixture of experts on CPU: one layer by grouped products and by a loop over the experts used, beside the roofline.

    python -m benchmarks.kernels.experts [--shape qwen3-30b-a3b] [--tokens 1 4 16 64 512 2048] [--form int8]

Router, products and sums of one layer with random weights; both ways, a read of memory and a large dense product take
turns. The roofline of a step is the greater of two times: that of reading the weights of the experts that it uses, and
that of its operations, both at the rates measured in between. Times are medians by the wall and of the process's CPU
time over its threads: on a busy machine only the second says what the code needs. other_cpu is the share of the machine
that other processes took meanwhile. `touched` are the bytes of pages of expert weights that one step accesses, as the
processor marks them in the page table (/proc/self/clear_refs), over the bytes of the experts that it uses.
"""

import argparse
import mmap
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.machine import OtherCpu
from benchmarks.models import COMMON
from benchmarks.record import RESULTS, write_record
from tandem.parallel.checkpoint import ParameterSlot
from tandem.parallel.context import ParallelContext
from tandem.parallel.expert_methods import StackedExperts
from tandem.parallel.linear import Linear
from tandem.parallel.linear_methods import Arrive, Place, as_given
from tandem.parallel.mesh import Mesh
from tandem.workers.kernels.expert_ops import TorchExperts
from tandem.workers.models.layers.mlp import gating
from tandem.workers.models.layers.moe import MixtureOfExperts
from tandem.workers.models.layers.routing import Router
from tandem.workers.models.spec.arch import Moe
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.models.spec.family_rows.families import parameters_of
from tandem.workers.models.spec.parameters import LayerParams
from tandem.workers.platforms.cpu import CpuPlatform

ALONE = ParallelContext.single()
QWEN3_MOE = {
    **COMMON, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 1024,
    "num_hidden_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "intermediate_size": 6144, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
SHAPES: dict[str, dict[str, object]] = {
    "qwen3-30b-a3b": {
        **QWEN3_MOE, "hidden_size": 2048, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    },
    "16-experts": {
        **QWEN3_MOE, "hidden_size": 2048, "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 4096,
    },
}  # fmt: skip
INPUTS = 4
"""Different inputs that take turns, so that a step's experts are not those of the step before."""
Layer = Callable[[torch.Tensor], torch.Tensor]


class Loop:
    """The layer as it was before grouped products: a torch operation at a time, a linear layer per expert."""

    def __init__(self, spec: Moe, params: LayerParams, dtype: torch.dtype, form: str | None) -> None:
        platform = CpuPlatform()
        make, self._middle = (
            partial(platform.linear, dtype=dtype),
            gating(spec.activation, platform.fused_ops(dtype)),
        )
        self._router = Router(spec, params, TorchExperts(make, as_given))
        self._experts = [
            (Linear(*expert.merged("up"), ALONE, make), Linear(*expert.merged("down"), ALONE, make))
            for expert in params.experts
        ]

    def __call__(self, x_TH: torch.Tensor) -> torch.Tensor:
        weight_TK, expert_TK = self._router(x_TH)
        out_TH = torch.zeros_like(x_TH)
        for index in expert_TK.unique().tolist():
            up, down = self._experts[index]
            token, place = (expert_TK == index).nonzero(as_tuple=True)
            own_TH = down(self._middle(up(x_TH[token]))) * weight_TK[token, place, None].to(x_TH.dtype)
            out_TH.index_add_(0, token, own_TH)
        return out_TH

    def slots(self) -> Iterator[ParameterSlot]:
        yield from self._router.slots()
        for up, down in self._experts:
            yield from up.slots()
            yield from down.slots()


def grouped(
    spec: Moe, params: LayerParams, dtype: torch.dtype, form: str | None, place: Place = as_given
) -> MixtureOfExperts:
    platform = CpuPlatform()
    make, experts = partial(platform.linear, dtype=dtype), platform.experts(dtype, place)
    return MixtureOfExperts(spec, params, ALONE, platform.fused_ops(dtype), make, experts)


def load(layer: Loop | MixtureOfExperts, dtype: torch.dtype) -> None:
    """Gives every slot random weights; experts share theirs, which no time depends on."""
    drawn: dict[tuple[int, ...], torch.Tensor] = {}
    for slot in layer.slots():
        shape = slot.local_shape(Mesh())
        if shape not in drawn:
            drawn[shape] = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.02
        slot.accept(drawn[shape] if slot.params[0].dtype is not None else drawn[shape].to(dtype))


class Pages:
    """A Place in memory of its own, whose accessed pages can be counted."""

    def __init__(self) -> None:
        self._held: list[torch.Tensor] = []

    def place(self, stack: torch.Tensor) -> tuple[torch.Tensor, Arrive | None]:
        room = torch.frombuffer(mmap.mmap(-1, stack.nbytes), dtype=torch.uint8)
        self._held.append(room.view(stack.dtype).view(stack.shape).copy_(stack))
        return self._held[-1], None

    def touched_by(self, call: Callable[[], object]) -> int:
        """Returns the bytes of the pages that a call accesses."""
        Path("/proc/self/clear_refs").write_text("1")
        call()
        starts, found, total = {held.data_ptr() for held in self._held}, False, 0
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if head := re.match(r"([0-9a-f]+)-[0-9a-f]+ ", line):
                found = int(head[1], 16) in starts
            elif found and line.startswith("Referenced:"):
                total += int(line.split()[1]) * 1024
        return total

    def bytes_of(self, experts: int) -> int:
        """Returns the bytes of so many experts."""
        return sum(held[0].nbytes for held in self._held) * experts


def count_touched(
    spec: Moe, params: LayerParams, dtype: torch.dtype, form: str | None, hidden: int, tokens: Sequence[int]
) -> dict[int, float]:
    """Returns, by number of tokens, the bytes touched over the bytes of the experts used."""
    pages = Pages()
    layer = grouped(spec, params, dtype, form, pages.place)
    load(layer, dtype)
    shares = {}
    for count in tokens:
        x_TH = torch.randn(count, hidden).to(dtype)
        layer(x_TH)
        layer.loads_E.zero_()
        touched = pages.touched_by(partial(layer, x_TH))
        shares[count] = touched / pages.bytes_of(int((layer.loads_E > 0).sum()))
    return shares


def in_turn(ways: dict[str, Sequence[Callable[[], object]]], seconds: float) -> dict[str, dict[str, float]]:
    """Returns median milliseconds of each way, by the wall and of CPU per thread, when each has had `seconds`."""
    threads, times = torch.get_num_threads(), {name: ([], []) for name in ways}  # type: ignore[var-annotated]
    turn = 0
    while turn < 5 or min(sum(wall) for wall, _ in times.values()) < seconds:
        for name, calls in ways.items():
            began = time.perf_counter(), time.process_time()
            calls[turn % len(calls)]()
            for kept, value in zip(times[name], (time.perf_counter(), time.process_time() / threads), strict=True):
                kept.append(value - (began[0] if kept is times[name][0] else began[1] / threads))
        turn += 1
    return {
        name: {"wall_ms": 1e3 * statistics.median(wall[1:]), "cpu_ms": 1e3 * statistics.median(cpu[1:])}
        for name, (wall, cpu) in times.items()
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Prints a line per number of tokens and returns the figures."""
    dtype = getattr(torch, options.dtype)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(msgspec.json.encode(SHAPES[options.shape]))
        arch = load_spec(folder)
    spec, params, hidden = arch.layers[0].mlp, parameters_of(arch).layers[0], arch.hidden_size
    assert isinstance(spec, Moe)
    touched = count_touched(spec, params, dtype, options.form, hidden, options.tokens)
    new, old = grouped(spec, params, dtype, options.form), Loop(spec, params, dtype, options.form)
    for layer in (new, old):
        load(layer, dtype)
    assert isinstance(new._up, StackedExperts), "this CPU or compiler lacks a feature that the kernel needs"
    expert_bytes = sum(method.weights()[0].nbytes for method in (new._up, new._down))
    side = torch.randn(2048, 2048).to(dtype)
    dense = CpuPlatform().linear((), ALONE, dtype=dtype)
    dense.take(side, None)
    memory = torch.ones(2**26, dtype=torch.int64)
    figures = {}
    for tokens in options.tokens:
        inputs = [torch.randn(tokens, hidden).to(dtype) for _ in range(INPUTS)]
        used, flop = [], 2 * 3 * spec.width * hidden * spec.top_k * tokens
        for x_TH in inputs:
            new.loads_E.zero_()
            torch.testing.assert_close(new(x_TH).float(), old(x_TH).float(), rtol=0.05, atol=0.02)
            used.append(int((new.loads_E > 0).sum()))
        ways: dict[str, Sequence[Callable[[], object]]] = {
            "grouped": [partial(new, x_TH) for x_TH in inputs],
            "loop": [partial(old, x_TH) for x_TH in inputs],
            "read": [memory.sum],
            "dense": [partial(dense.apply, side)],
        }
        with OtherCpu() as other:
            times = in_turn(ways, options.seconds)
        num_bytes = statistics.mean(used) * expert_bytes
        case: dict[str, Any] = {**times, "other_cpu": other.share, "touched": touched[tokens], "used": used}
        for clock in ("wall_ms", "cpu_ms"):
            reading = num_bytes / memory.nbytes * times["read"][clock]
            computing = flop / (2 * 2048**3) * times["dense"][clock]
            case[f"roofline_{clock}"] = max(reading, computing)
        figures[tokens] = case
        print(line(tokens, case, memory.nbytes), flush=True)
    return {"experts": spec.num_experts, "expert_bytes": expert_bytes, "steps": figures}


def line(tokens: int, case: dict[str, Any], read_bytes: int) -> str:
    new, old = case["grouped"], case["loop"]
    shares = " ".join(f"{case[f'roofline_{clock}'] / new[clock]:.0%}" for clock in ("cpu_ms", "wall_ms"))
    return (
        f"{tokens:5d} tokens, {statistics.mean(case['used']):.0f} experts, touched {case['touched']:.3f}: cpu "
        f"{new['cpu_ms']:.2f} ms, loop {old['cpu_ms']:.2f} ms ({old['cpu_ms'] / new['cpu_ms']:.2f} times); wall "
        f"{new['wall_ms']:.2f} ms, loop {old['wall_ms']:.2f} ms; of the roofline by cpu and wall {shares}; read "
        f"{read_bytes / case['read']['cpu_ms'] / 1e6:.1f} GB/s, dense "
        f"{2 * 2048**3 / case['dense']['cpu_ms'] / 1e6:.0f} GFLOP/s, other_cpu {case['other_cpu']:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=sorted(SHAPES))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 512, 2048])
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--form", default=None, choices=("int8", "w8a8"))
    parser.add_argument("--seconds", type=float, default=2.0, help="of each way and number of tokens")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, default=RESULTS / "experts.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"{options.shape} {options.form or options.dtype}, {options.threads} threads")
    with torch.inference_mode():
        figures = measure(options)
    write_record(options.output, options, **figures)


if __name__ == "__main__":
    main()
