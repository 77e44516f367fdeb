"""What LoRA adapters cost: decode speed by the number of active ones, memory, waiting when they outnumber the room.

    python -m benchmarks.lora [--parts speed memory zipf peer] [--quick] [--threads N]

speed: decode tokens/s with 0, 1, 4, 16 and 64 different adapters active in a full batch, over base alone in the same
run (A-B-A-B); also rank 16 on all linears, over what (weights + active adapters) over measured bandwidth predicts.
memory: adapters that fit one GiB, against slots padded to the highest rank on every linear. zipf: TTFT when requests
draw from 8, 64 and 512 adapters (Zipf, Poisson arrivals at half the capacity measured with 8) and the device holds 8.
peer: `transformers` with `peft`, which switches adapters between requests. JSON and a plot go to out/benchmarks.
"""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from tqdm import tqdm

from benchmarks.adapters import ALL_LINEARS, QV, adapter_bytes, adapter_folders
from benchmarks.engine_run import TimelineSink, drain, opened_engine
from benchmarks.lora_plot import plot
from benchmarks.machine import OtherCpu, measure_machine
from benchmarks.models import SHAPES, model_folder
from benchmarks.workload import Timeline, percentiles
from configs.schema import (
    CacheSettings,
    DeviceSettings,
    EngineSettings,
    LoraSettings,
    ModelSettings,
    SchedulerSettings,
)
from workers.engine.engine import Engine
from workers.messages import AdapterRef, GenerationRequest, SamplingParams
from workers.models.registry import load_spec
from workers.models.spec import ArchSpec
from workers.peft_folder import adapter_digest

RESULTS = Path(__file__).resolve().parents[1] / "out" / "benchmarks"
PARTS = ("speed", "memory", "zipf", "peer")
PROMPT = 32
ROOM = 8
ZIPF = 1.0
GIB = 2**30


@dataclass(frozen=True)
class SpeedLine:
    """One batch: `active` adapters of `rank` on `modules`; medians of tokens/s in turn with base alone, and of the
    ratio of each turn to the base turn beside it (the machine drifts)."""

    batch: int
    active: int
    rank: int
    modules: str
    tokens_per_s: float
    base_tokens_per_s: float
    ratio: float
    predicted_ratio: float
    other_cpu: float


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--model", default="qwen3-0.6b", choices=sorted(SHAPES), help="of speed, memory and peer")
    parser.add_argument("--zipf-model", default="llama-135m", choices=sorted(SHAPES))
    parser.add_argument("--adapters", type=int, nargs="+", default=[8, 64, 512], help="of the zipf part")
    parser.add_argument("--requests", type=int, default=300, help="of each line of the zipf part")
    parser.add_argument("--tokens", type=int, default=48, help="that each row decodes in a turn of the speed part")
    parser.add_argument("--repeats", type=int, default=5, help="A-B pairs of the speed part")
    parser.add_argument("--quick", action="store_true", help="few and short turns")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.tokens, options.requests, options.adapters = 2, 8, 40, [8, 64]
    return options


def settings_of(folder: Path, options: argparse.Namespace, batch: int, lora: LoraSettings) -> EngineSettings:
    return EngineSettings(
        model=ModelSettings(model=str(folder), dtype="bfloat16", max_model_len=512),
        cache=CacheSettings(enable_prefix_caching=False),
        scheduler=SchedulerSettings(max_num_seqs=batch, max_num_queued_reqs=2**31),
        device=DeviceSettings(device="cpu", cpu_threads=options.threads),
        lora=lora,
    )


def room_for(spec: ArchSpec, count: int, rank: int, modules: Sequence[str]) -> int:
    """Device bytes for `count` adapters; a little over, because the last page of each is not full."""
    return int(count * adapter_bytes(spec, rank, modules, 2) * 1.1) + 2**20


def references(folders: Sequence[Path]) -> list[AdapterRef]:
    return [AdapterRef(name=f.name, digest=adapter_digest(f), source=str(f)) for f in folders]


def request(name: str, tokens: int, adapter: AdapterRef | None, draw: random.Random, vocab: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=[draw.randrange(2, vocab) for _ in range(PROMPT)],
        sampling=SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True),
        adapter=adapter,
    )


# ---- speed ----


def decode_tokens_per_s(
    engine: Engine, sink: TimelineSink, batch: int, adapters: Sequence[AdapterRef | None], tokens: int, tag: str
) -> float:
    """A full batch, counted from the moment when every row has its first token to the end of the first row."""
    draw = random.Random(tag)
    names = [f"{tag}-{row}" for row in range(batch)]
    for row, name in enumerate(names):
        sink.timelines[name] = Timeline(time.perf_counter())
        engine.add_request(request(name, tokens, adapters[row % len(adapters)], draw, 4096))
    drain(engine)
    times = [sink.timelines[name].token_times_s for name in names]
    begin, end = max(t[0] for t in times), min(t[-1] for t in times)
    counted = sum(1 for row in times for t in row if begin < t <= end)
    return counted / (end - begin)


def measure_speed(options: argparse.Namespace, console: Console) -> list[dict[str, object]]:
    folder = model_folder(options.model)
    spec = load_spec(folder)
    bandwidth = measure_machine(options.threads).read_bytes_per_s
    weights = (folder / "model.safetensors").stat().st_size
    lines: list[SpeedLine] = []
    for batch, rank, modules, counts in (
        (16, 8, QV, (1, 4, 16)),
        (64, 8, QV, (64,)),
        (16, 16, ALL_LINEARS, (1, 4, 16)),
    ):
        refs = references(adapter_folders(options.model, spec, max(counts), rank, modules))
        lora = LoraSettings(
            enable_lora=True,
            max_loras=max(counts),
            max_lora_rank=rank,
            max_cpu_loras=max(counts),
            memory_bytes=room_for(spec, max(counts), rank, modules),
        )
        sink = TimelineSink()
        with opened_engine(settings_of(folder, options, batch, lora), sink) as (engine, _):
            if not lines:
                lines.append(_idle_line(options, folder, engine, sink, batch, console))
            for count in counts:
                active = adapter_bytes(spec, rank, modules, 2) * count
                predicted = weights / (weights + active)
                line = _speed_line(options, engine, sink, batch, refs[:count], rank, modules, predicted)
                lines.append(line)
                console.print(
                    f"batch {batch:2d}, {count:2d} adapters of rank {rank:2d} on {line.modules:4s}: "
                    f"{line.tokens_per_s:7.1f} tok/s, base {line.base_tokens_per_s:7.1f}: {line.ratio:.3f} of base; "
                    f"bytes predict {predicted:.3f} (reached {line.ratio / predicted:.3f} of it) "
                    f"other_cpu {line.other_cpu:.2f}"
                )
    console.print(f"weights {weights / GIB:.2f} GiB, read at {bandwidth / 1e9:.1f} GB/s")
    return [asdict(line) for line in lines]


def _idle_line(
    options: argparse.Namespace, folder: Path, engine: Engine, sink: TimelineSink, batch: int, console: Console
) -> SpeedLine:
    """No adapter active: an engine with --enable-lora over one without, turn by turn."""
    bare_sink = TimelineSink()
    ours: list[float] = []
    base: list[float] = []
    with (
        opened_engine(settings_of(folder, options, batch, LoraSettings()), bare_sink) as (bare, _),
        OtherCpu() as other,
    ):
        for repeat in range(options.repeats + 1):  # the first warms up
            turns = [(base, bare, bare_sink), (ours, engine, sink)]
            for kept, one, its_sink in turns if repeat % 2 else reversed(turns):
                kept.append(decode_tokens_per_s(one, its_sink, batch, [None], options.tokens, f"idle{repeat}"))
    ratio = statistics.median(a / b for a, b in zip(ours[1:], base[1:], strict=True))
    line = SpeedLine(
        batch, 0, 0, "none", statistics.median(ours[1:]), statistics.median(base[1:]), ratio, 1, other.share
    )
    console.print(f"batch {batch}, no adapter active: {ratio:.3f} of an engine without --enable-lora")
    return line


def _speed_line(
    options: argparse.Namespace,
    engine: Engine,
    sink: TimelineSink,
    batch: int,
    refs: Sequence[AdapterRef],
    rank: int,
    modules: Sequence[str],
    predicted: float,
) -> SpeedLine:
    def turn(tag: str, adapters: Sequence[AdapterRef | None]) -> float:
        return decode_tokens_per_s(engine, sink, batch, adapters, options.tokens, f"{tag}-{len(refs)}-{rank}")

    turn("warm", refs)
    ours: list[float] = []
    base: list[float] = []
    with OtherCpu() as other:
        for repeat in tqdm(range(options.repeats), desc=f"{len(refs)} adapters", leave=False):
            turns = [(base, "base", [None]), (ours, "lora", refs)]
            for kept, name, adapters in turns if repeat % 2 else reversed(turns):
                kept.append(turn(f"{name}{repeat}", adapters))
    kind = "all" if tuple(modules) == ALL_LINEARS else "q, v"
    middle = statistics.median
    ratio = middle(a / b for a, b in zip(ours, base, strict=True))
    return SpeedLine(batch, len(refs), rank, kind, middle(ours), middle(base), ratio, predicted, other.share)


# ---- memory ----


def measure_memory(options: argparse.Namespace, console: Console) -> dict[str, object]:
    """Places adapters one after another in a small slab until one pushes another out; scaled to a GiB."""
    folder = model_folder(options.model)
    spec = load_spec(folder)
    slab = 2**28
    padded = slab // adapter_bytes(spec, 64, ALL_LINEARS, 2)
    held: dict[str, float] = {}
    for rank, modules in ((8, QV), (16, ALL_LINEARS)):
        count = slab // adapter_bytes(spec, rank, modules, 2) + 2
        refs = references(adapter_folders(options.model, spec, count, rank, modules))
        lora = LoraSettings(enable_lora=True, max_loras=1, max_lora_rank=64, max_cpu_loras=count, memory_bytes=slab)
        sink = TimelineSink()
        draw = random.Random(0)
        with opened_engine(settings_of(folder, options, 1, lora), sink) as (engine, _):
            for place, ref in enumerate(refs):
                name = f"held-{place}"
                sink.timelines[name] = Timeline(time.perf_counter())
                engine.add_request(request(name, 1, ref, draw, 4096))
                drain(engine)
            on_device = sum(tier == "device" for tier in engine.adapter_residency().values())
        kind = f"rank {rank} on {'all linears' if tuple(modules) == ALL_LINEARS else 'q, v'}"
        held[kind] = on_device * GIB / slab
        console.print(f"{kind}: {held[kind]:.0f} per GiB; in slots padded to rank 64 on all: {padded * GIB / slab:.0f}")
    return {"per_gib": held, "padded_slots_per_gib": padded * GIB / slab, "padded_to": "rank 64 on all linears"}


# ---- zipf ----


def zipf_draw(count: int, seed: int) -> Callable[[], int]:
    """Adapter i is drawn with weight 1 / (i + 1)."""
    weights = [1.0 / (i + 1) ** ZIPF for i in range(count)]
    draw = random.Random(seed)
    return lambda: draw.choices(range(count), weights)[0]


def measure_zipf(options: argparse.Namespace, console: Console) -> dict[str, object]:
    folder = model_folder(options.zipf_model)
    spec = load_spec(folder)
    folders = adapter_folders(options.zipf_model, spec, max(options.adapters), 8, QV)
    refs = references(folders)
    rate = 0.5 * _capacity(options, folder, spec, refs[:ROOM])
    console.print(
        f"{options.zipf_model}: capacity with {ROOM} adapters {2 * rate:.1f} requests/s; arrivals at half of it"
    )
    lines: dict[str, object] = {"requests_per_s": rate}
    for count in options.adapters:
        sink = TimelineSink()
        with opened_engine(_zipf_settings(options, folder, spec), sink, spawn=True) as (engine, _):
            _warm(engine, sink, refs[:ROOM])
            before = engine.stats()
            with OtherCpu() as other:
                ttft = _open_loop(engine, sink, refs[:count], rate, options.requests)
            after = engine.stats()
        lines[str(count)] = {"ttft_ms": percentiles(ttft), "other_cpu": other.share}
        shown = " ".join(f"{k} {v:.0f}" for k, v in percentiles(ttft).items())
        assert before.adapters is not None and after.adapters is not None
        loads = after.adapters.loads - before.adapters.loads
        console.print(
            f"{count:4d} adapters, room for {ROOM}: TTFT ms {shown}; {loads} loads  other_cpu {other.share:.2f}"
        )
    return lines


def _zipf_settings(options: argparse.Namespace, folder: Path, spec: ArchSpec) -> EngineSettings:
    lora = LoraSettings(
        enable_lora=True,
        max_loras=ROOM,
        max_lora_rank=8,
        max_cpu_loras=max(options.adapters),
        memory_bytes=room_for(spec, ROOM, 8, QV),
    )
    return settings_of(folder, options, 16, lora)


def _zipf_request(name: str, ref: AdapterRef, draw: random.Random) -> GenerationRequest:
    return request(name, draw.randint(8, 48), ref, draw, 4096)


def _warm(engine: Engine, sink: TimelineSink, refs: Sequence[AdapterRef]) -> None:
    draw = random.Random(1)
    for place, ref in enumerate(refs):
        sink.timelines[f"warm-{place}"] = Timeline(time.perf_counter())
        engine.add_request(_zipf_request(f"warm-{place}", ref, draw))
    drain(engine)


def _capacity(options: argparse.Namespace, folder: Path, spec: ArchSpec, refs: Sequence[AdapterRef]) -> float:
    """Requests per second of a closed queue that is always full."""
    sink = TimelineSink()
    draw, pick = random.Random(2), zipf_draw(len(refs), 2)
    with opened_engine(_zipf_settings(options, folder, spec), sink, spawn=True) as (engine, _):
        _warm(engine, sink, refs)
        count = max(40, options.requests // 2)
        start = time.perf_counter()
        for place in range(count):
            sink.timelines[f"full-{place}"] = Timeline(start)
            engine.add_request(_zipf_request(f"full-{place}", refs[pick()], draw))
        drain(engine)
        return count / (time.perf_counter() - start)


def _open_loop(engine: Engine, sink: TimelineSink, refs: Sequence[AdapterRef], rate: float, count: int) -> list[float]:
    """TTFT of each request in ms, from when it was due. The same arrivals and lengths for every number of adapters."""
    arrivals, draw, pick = random.Random(3), random.Random(4), zipf_draw(len(refs), 5)
    due, now = [], time.perf_counter() + 0.1
    for _ in range(count):
        now += arrivals.expovariate(rate)
        due.append(now)
    names = [f"zipf-{place}" for place in range(count)]
    sink.timelines.update({name: Timeline(at) for name, at in zip(names, due, strict=True)})
    place = 0
    while place < count or engine.has_work():
        while place < count and due[place] <= time.perf_counter():
            engine.add_request(_zipf_request(names[place], refs[pick()], draw))
            place += 1
        if engine.has_work():
            engine.step()
        elif place < count:
            time.sleep(max(0.0, due[place] - time.perf_counter()))
    return [1e3 * (sink.timelines[name].token_times_s[0] - at) for name, at in zip(names, due, strict=True)]


# ---- peer ----


def measure_peer(options: argparse.Namespace, console: Console) -> dict[str, object]:
    """16 requests of 16 adapters: one batch of ours, and transformers with peft, one request after another."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = model_folder(options.model)
    spec = load_spec(folder)
    folders = adapter_folders(options.model, spec, 16, 8, QV)
    refs = references(folders)
    tokens = options.tokens
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    model = PeftModel.from_pretrained(base, folders[0], adapter_name="a0")
    for place, one in enumerate(folders[1:], 1):
        model.load_adapter(str(one), adapter_name=f"a{place}")
    draw = random.Random(0)
    prompts = [[draw.randrange(2, 4096) for _ in range(PROMPT)] for _ in folders]
    lora = LoraSettings(
        enable_lora=True, max_loras=16, max_lora_rank=8, max_cpu_loras=16, memory_bytes=room_for(spec, 16, 8, QV)
    )
    sink, ours, theirs = TimelineSink(), [], []
    with opened_engine(settings_of(folder, options, 16, lora), sink) as (engine, _):
        for repeat in range(2):
            start = time.perf_counter()
            for place, ref in enumerate(refs):
                name = f"peer{repeat}-{place}"
                sink.timelines[name] = Timeline(start)
                asked = request(name, tokens, ref, draw, 4096)
                engine.add_request(msgspec.structs.replace(asked, prompt_token_ids=prompts[place]))
            drain(engine)
            ours.append(len(refs) * tokens / (time.perf_counter() - start))
            theirs.append(_peft_tokens_per_s(model, prompts, tokens))
    ratio = statistics.median(ours) / statistics.median(theirs)
    console.print(
        f"16 requests, 16 adapters: {statistics.median(ours):.1f} tok/s; transformers + peft, switching per request: "
        f"{statistics.median(theirs):.1f} tok/s: {ratio:.1f}x"
    )
    return {"ours_tokens_per_s": ours, "peft_tokens_per_s": theirs, "ratio": ratio}


def _peft_tokens_per_s(model: "torch.nn.Module", prompts: Sequence[list[int]], tokens: int) -> float:
    start = time.perf_counter()
    with torch.inference_mode():
        for place, prompt in enumerate(prompts):
            model.set_adapter(f"a{place}")
            ids = torch.tensor([prompt])
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                pad_token_id=0,
            )
    return len(prompts) * tokens / (time.perf_counter() - start)


def main() -> None:
    options = parse_arguments()
    console = Console(width=160)
    torch.set_num_threads(options.threads)
    parts = {"speed": measure_speed, "memory": measure_memory, "zipf": measure_zipf, "peer": measure_peer}
    RESULTS.mkdir(parents=True, exist_ok=True)
    measured: dict[str, object] = {}
    for part in options.parts:
        measured[part] = parts[part](options, console)
        record = {"options": vars(options), "torch": torch.__version__, part: measured[part]}
        (RESULTS / f"lora-{part}.json").write_text(json.dumps(record, indent=1))
    plot(measured, RESULTS / "lora.png")


if __name__ == "__main__":
    main()
