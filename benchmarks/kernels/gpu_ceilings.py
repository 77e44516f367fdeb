"""What a GPU can do, and how far products and attention come: bytes or operations beside the best rates.

    python -m benchmarks.kernels.gpu_ceilings [--device cuda] [--parts nodes products attention codes experts]

Rates are those of `tandem doctor`. nodes: the time of a graph's smallest kernel. products: the four of a Llama 8B layer
with 1 to 256 rows, by torch. attention: the rank's own kernel over one layer of that shape, rows of equal and of mixed
lengths, in bf16 and quantized caches, and prompts. codes: two of the products with weights as --quantization makes
them, 1 to 2,048 rows. experts: a projection of a Qwen3 30B layer's experts with 1 to 4,096 tokens. Calls are captured,
several to a graph, over memory that no cache holds. JSON goes to out/benchmarks. --device cpu, with few and small
cases, is for a try without a GPU.
"""

import argparse
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import torch

from benchmarks.record import RESULTS, note, write_record
from tandem.configs.schema import DeviceSettings, EngineSettings, ModelSettings
from tandem.parallel.context import ParallelContext
from tandem.parallel.expert_methods import ExpertParams
from tandem.parallel.linear_methods import LinearMethod
from tandem.parallel.params import Param, Scheme, Source
from tandem.parallel.quantization.weight_plan import AT_LOAD
from tandem.workers.kernels.kv_store import SCALE_DTYPE, LayerKV
from tandem.workers.models.spec.arch import AttentionParams
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.open_platform import open_platform
from tandem.workers.self_checks.device_checks import DeviceRates, device_rates
from tandem.workers.self_checks.kernel_checks import BLOCK, attention_batch
from tandem.workers.tuning.call_timer import device_seconds

BF16 = torch.bfloat16
CALLS = 10
PARTS = ("nodes", "products", "attention", "codes", "experts")
PRODUCTS = {"qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096)}
ROWS = (1, 8, 32, 64, 128, 256)
CODED = ("o", "gate_up")
CODE_ROWS = (1, 16, 32, 64, 256, 2048)
SCHEMES = ("int4", "int8", "fp8", "nf4", "w8a8")
EXPERTS, TOP_K, EXPERT_INPUTS, EXPERT_OUTPUTS = 128, 8, 2048, 1536
EXPERT_TOKENS = (1, 8, 64, 512, 4096)
HEADS, KV_HEADS, DIM = 32, 8, 128
DECODES: dict[str, list[int]] = {
    "1 x 536": [536],
    "1 x 8192": [8192],
    "32 x 536": [536] * 32,
    "128 x 536": [536] * 128,
    "256 x 536": [536] * 256,
    "32 x 4096": [4096] * 32,
    "8 x 32768": [32768] * 8,
    "32 x 100 and 32 x 4000": [100, 4000] * 32,
    "1 x 100000 and 63 x 500": [100_000] + [500] * 63,
}
CHUNKS: dict[str, tuple[list[int], int]] = {
    "4 prompts of 2048": ([2048] * 4, 2048),
    "1 prompt of 8192": ([8192], 8192),
    "512 behind 16384": ([16896], 512),
}
CACHES = {"bf16": BF16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


class Timer:
    """The time of calls on a device: captured where there are graphs."""

    def __init__(self, platform: Platform, options: argparse.Namespace) -> None:
        self._accelerator, self._captures = platform.accelerator, options.device == "cuda"

    def seconds(self, works: Sequence[Callable[[], object]], calls: int = CALLS) -> float:
        """Seconds of one of `works`, which take turns."""
        turns = [work for _, work in zip(range(calls), cycle(works), strict=False)]

        def run() -> None:
            for work in turns:
                work()

        if not self._captures:
            return device_seconds(self._accelerator, run, 3) / calls
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return device_seconds(self._accelerator, graph.replay) / calls


def told(part: str, name: str, taken_s: float, least_s: float, **more: object) -> dict[str, Any]:
    """Prints and returns a figure beside its ceiling."""
    figure = {"part": part, "name": name, "us": 1e6 * taken_s, "share": least_s / taken_s, **more}
    print(f"{part:9} {name:34} {1e6 * taken_s:9.1f} us, {least_s / taken_s:4.0%} of the best rate", flush=True)
    note(case="ceilings", **figure)
    return figure


def nodes(timer: Timer, platform: Platform) -> list[dict[str, Any]]:
    one = torch.zeros(1, device=platform.device)
    taken_s = timer.seconds([lambda: one.add_(1)], 200)
    return [told("nodes", "a kernel of one element", taken_s, 0.0)]


def products(timer: Timer, platform: Platform, rates: DeviceRates, is_small: bool) -> list[dict[str, Any]]:
    found = []
    for name, (inputs, outputs) in list(PRODUCTS.items())[:1] if is_small else PRODUCTS.items():
        inputs, outputs = (inputs // 16, outputs // 16) if is_small else (inputs, outputs)
        copies = 1 if is_small else 1 + 2**28 // (2 * inputs * outputs)
        weights = [torch.randn(outputs, inputs, device=platform.device).to(BF16) for _ in range(copies)]
        for rows in ROWS[:2] if is_small else ROWS:
            x = torch.randn(rows, inputs, device=platform.device).to(BF16)
            taken_s = timer.seconds([lambda x=x, w=w: torch.nn.functional.linear(x, w) for w in weights])
            moved_s = 2 * (inputs * outputs + rows * (inputs + outputs)) / rates.memory_bytes_per_s
            least_s = max(moved_s, 2 * rows * inputs * outputs / rates.bf16_flop_per_s)
            found.append(told("products", f"{name}, {rows} rows", taken_s, least_s))
    return found


def attention(timer: Timer, platform: Platform, rates: DeviceRates, is_small: bool) -> list[dict[str, Any]]:
    """Of one layer; contexts are read once, and prompts' products counted for the keys that a token sees."""
    found, params = [], AttentionParams(DIM**-0.5)
    decodes: dict[str, tuple[list[int], int]] = {name: (lens, 1) for name, lens in DECODES.items()}
    cases = {"3 x 40": ([40, 7, 33], 1), "1 prompt of 20": ([20], 20)} if is_small else decodes | CHUNKS
    for cache, dtype in CACHES.items():
        for name, (lens, queries) in cases.items():
            batch = attention_batch(lens, queries, platform.device)
            blocks, tokens = int(batch.block_table_RN.max()) + 1, batch.num_tokens
            memory = (blocks, BLOCK, KV_HEADS)
            planes = [torch.randn(*memory, DIM, device=platform.device).to(dtype) for _ in range(2)]
            scales = [torch.ones(memory, dtype=SCALE_DTYPE, device=platform.device) for _ in range(2 * (dtype != BF16))]
            kv = LayerKV.of(planes, scales)
            q, k, v = (
                torch.randn(tokens, heads, DIM, device=platform.device).to(BF16)
                for heads in (HEADS, KV_HEADS, KV_HEADS)
            )
            step = platform.attention(BF16, DIM, dtype).prepare(batch)
            taken_s = timer.seconds([lambda step=step, q=q, k=k, v=v, kv=kv: step.attend(q, k, v, kv, params)])
            read = sum(lens) * KV_HEADS * 2 * (DIM * dtype.itemsize + 4 * (dtype != BF16))
            seen = sum(length * queries - queries * (queries - 1) // 2 for length in lens)
            flop = 4 * seen * HEADS * DIM
            least_s = max(read / rates.memory_bytes_per_s, flop / rates.bf16_flop_per_s)
            found.append(told("attention", f"{name}, {cache}", taken_s, least_s, read_bytes=read, flop=flop))
    return found


def codes(timer: Timer, platform: Platform, rates: DeviceRates, is_small: bool) -> list[dict[str, Any]]:
    """The least time reads what a method holds, or multiplies as bf16 does."""
    found = []
    for name in CODED[:1] if is_small else CODED:
        inputs, outputs = (size // 16 if is_small else size for size in PRODUCTS[name])
        dense_OI = torch.randn(outputs, inputs, device=platform.device).to(BF16) * 0.02
        for scheme in SCHEMES:
            methods = [_coded(platform, dense_OI, scheme)]
            copies = 1 if is_small else 1 + 2**28 // methods[0].nbytes
            methods += [_coded(platform, dense_OI, scheme) for _ in range(copies - 1)]
            for rows in CODE_ROWS[:2] if is_small else CODE_ROWS:
                x = torch.randn(rows, inputs, device=platform.device).to(BF16)
                taken_s = timer.seconds([lambda x=x, method=method: method.apply(x) for method in methods])
                moved_s = (methods[0].nbytes + 2 * rows * (inputs + outputs)) / rates.memory_bytes_per_s
                least_s = max(moved_s, 2 * rows * inputs * outputs / rates.bf16_flop_per_s)
                found.append(told("codes", f"{name} in {scheme}, {rows} rows", taken_s, least_s))
    return found


def _coded(platform: Platform, dense_OI: torch.Tensor, scheme: str) -> LinearMethod:
    """A weight rounded as --quantization says."""
    param = _param(dense_OI.shape, AT_LOAD[scheme].of("x"))
    method = platform.linear((param,), ParallelContext.single(), dtype=BF16)
    method.take(dense_OI, None)
    return method


def _param(shape: Sequence[int], scheme: Scheme | None = None) -> Param:
    source = Source(("x.weight",))
    return Param(name="x.weight", shape=tuple(shape), role="x", source=source, merge="x", scheme=scheme)


def experts(timer: Timer, platform: Platform, rates: DeviceRates, is_small: bool) -> list[dict[str, Any]]:
    """Tokens choose experts at random; the least time reads the weights of those that were chosen."""
    count, inputs, outputs = (8, 64, 96) if is_small else (EXPERTS, EXPERT_INPUTS, EXPERT_OUTPUTS)
    ops, found = platform.experts(BF16), []
    method = ops.method([ExpertParams((_param((outputs, inputs)),), ())] * count, ParallelContext.single())
    for slot in method.slots():
        slot.accept(torch.randn(outputs, inputs, device=platform.device).to(BF16) * 0.02)
    for tokens in EXPERT_TOKENS[:2] if is_small else EXPERT_TOKENS:
        scores = torch.rand(tokens, count, device=platform.device)
        ids_TK = scores.topk(min(TOP_K, count), dim=1).indices
        groups = ops.group(ids_TK, range(count), ops.loads(count))
        x = torch.randn(tokens, inputs, device=platform.device).to(BF16)
        taken_s = timer.seconds([lambda x=x, groups=groups: method.apply(x, groups, gathers=True)])
        pairs, used = ids_TK.numel(), len(ids_TK.unique())
        moved_s = 2 * (used * inputs * outputs + pairs * outputs + tokens * inputs) / rates.memory_bytes_per_s
        least_s = max(moved_s, 2 * pairs * inputs * outputs / rates.bf16_flop_per_s)
        found.append(told("experts", f"{tokens} tokens, {used} of {count} experts", taken_s, least_s))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    options = parser.parse_args()
    is_small = options.device == "cpu"
    settings = EngineSettings(model=ModelSettings(model=""), device=DeviceSettings(device=options.device))
    platform = open_platform(settings, rank=0, ranks_on_node=1)
    rates = device_rates(platform, **({"most_bytes": 2**24, "square": 256} if is_small else {}))
    print(", ".join(f"{name} {rate:.3g}" for name, rate in rates._asdict().items()), flush=True)
    note(case="rates", **rates._asdict())
    timer, found = Timer(platform, options), list[dict[str, Any]]()
    with torch.inference_mode():
        if "nodes" in options.parts:
            found += nodes(timer, platform)
        if "products" in options.parts:
            found += products(timer, platform, rates, is_small)
        if "attention" in options.parts:
            found += attention(timer, platform, rates, is_small)
        if "codes" in options.parts:
            found += codes(timer, platform, rates, is_small)
        if "experts" in options.parts:
            found += experts(timer, platform, rates, is_small)
    write_record(RESULTS / "gpu-ceilings.json", options, rates=rates._asdict(), figures=found)


if __name__ == "__main__":
    main()
