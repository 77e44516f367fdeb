"""Loading a checkpoint over merely reading its file: with the file outside the page cache (cold) and in it (warm).

    python -m benchmarks.engine.loading [--model qwen3-0.6b] [--turns 5] [--threads N] [--device cuda]

Random bf16 weights of a known shape in a temporary folder. In turns: the file is read into one buffer of 16 MiB by one
thread; as many bytes are written into new memory by one thread; a rank's decoder is loaded, slices read ahead; and
loaded without reading ahead, each parameter read when it is needed. Cold: before each, the file's pages are dropped
(posix_fadvise). Loading packs all weights into new memory, so reading and writing together are its roofline; CPU
seconds are printed beside the time. MALLOC_MMAP_THRESHOLD_=131072, as `make bench-load` has it, gives later turns new
memory too, as a rank that starts has.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.machine import OtherCpu
from benchmarks.models import SHAPES, model_folder
from benchmarks.record import RESULTS, note, write_record
from tandem.configs.schema import DeviceSettings, EngineSettings, ModelSettings
from tandem.offload.weights.weight_stream import WeightStream
from tandem.parallel.context import ParallelContext
from tandem.parallel.stored.read_ahead import Bounds
from tandem.parallel.stored.safetensors_source import SafetensorsSource
from tandem.workers.models.decoder import Decoder, attention_of
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.planning.stored_model import open_checkpoint
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.open_platform import open_platform

BUFFER_BYTES = 16 * 2**20
BF16 = torch.bfloat16


def read_file(file: Path) -> None:
    """Reads all bytes into one buffer, which is used again."""
    buffer = bytearray(BUFFER_BYTES)
    with file.open("rb", buffering=0) as stream:
        while stream.readinto(buffer):
            pass


def write_new(num_bytes: int) -> None:
    """Writes as many bytes into memory that has no pages yet."""
    torch.empty(num_bytes, dtype=torch.uint8).numpy().fill(1)


def drop_pages(file: Path) -> None:
    """Takes the file out of the page cache; its bytes must be on disk."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def load_once(folder: Path, bounds: Bounds, platform: Platform) -> None:
    """Loads a decoder as a rank alone does, and drops it."""
    spec = load_spec(folder)
    attention, stream = (
        attention_of(spec, platform, BF16),
        WeightStream((), platform.weight_copier(0)),
    )
    decoder = Decoder(spec, ParallelContext.single(), attention, platform, BF16, stream)
    source = SafetensorsSource(open_checkpoint(folder, spec), bounds)
    decoder.load(source, dtype=BF16, device=platform.device, progress=False)
    platform.accelerator.synchronize()
    decoder.close()


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """Returns the seconds that it took, and those of CPU."""
    began_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began_s, time.process_time() - cpu_s


def measure(
    folder: Path, file: Path, turns: int, platform: Platform
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Returns (seconds, CPU seconds) of each turn by state and kind of work; prints each turn."""
    works: dict[str, Callable[[], None]] = {
        "read": lambda: read_file(file),
        "write": lambda: write_new(file.stat().st_size),
        "load": lambda: load_once(folder, Bounds(), platform),
        "not ahead": lambda: load_once(folder, Bounds(0, 0), platform),
    }
    found: dict[str, dict[str, list[tuple[float, float]]]] = {
        state: {name: [] for name in works} for state in ("cold", "warm")
    }
    for turn in range(turns):
        for state, times in found.items():
            for name, work in works.items():
                if state == "cold":
                    drop_pages(file)
                times[name].append(timed(work))
                note(case="loading", state=state, work=name, seconds=times[name][-1][0], file_bytes=file.stat().st_size)
            words = ", ".join(f"{name} {times[name][-1][0]:.2f} s ({times[name][-1][1]:.2f} CPU)" for name in works)
            print(f"turn {turn + 1} of {turns}, {state}: {words}", flush=True)
    return found


def summary(times: dict[str, list[tuple[float, float]]]) -> dict[str, float]:
    """Returns medians, least times, and their ratios to those of reading."""
    medians = {name: statistics.median(wall for wall, _ in each) for name, each in times.items()}
    least = {name: min(wall for wall, _ in each) for name, each in times.items()}
    cpu = {name: statistics.median(spent for _, spent in each) for name, each in times.items()}
    result = {f"{name}_s": value for name, value in medians.items()}
    result |= {f"{name}_least_s": value for name, value in least.items()}
    result |= {f"{name}_cpu_s": value for name, value in cpu.items()}
    for name in ("load", "not ahead"):
        ratios = [load / read for (load, _), (read, _) in zip(times[name], times["read"], strict=True)]
        result[f"{name}_ratio"] = statistics.median(ratios)
        result[f"{name}_least_ratio"] = least[name] / least["read"]
        result[f"{name}_roofline_ratio"] = medians[name] / (medians["read"] + medians["write"])
    return result


def main() -> None:
    """Measures, prints and records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", choices=sorted(SHAPES))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made; its disk is what is measured")
    options = parser.parse_args()
    device = DeviceSettings(device=options.device)
    platform = open_platform(EngineSettings(model=ModelSettings(model=""), device=device), rank=0, ranks_on_node=1)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        print("making random weights ...", flush=True)
        folder = model_folder(options.model, BF16, Path(place))
        file = folder / "model.safetensors"
        size = file.stat().st_size
        load_once(folder, Bounds(), platform)  # compiles kernels, if there are none
        with OtherCpu() as other:
            found = measure(folder, file, options.turns, platform)
    figures = {state: summary(times) for state, times in found.items()}
    for state, of in figures.items():
        print(
            f"{state}: reading {size / 1e9:.2f} GB {of['read_s']:.2f} s, loading {of['load_s']:.2f} s, "
            f"{of['load_ratio']:.2f} times as long (least times {of['load_least_ratio']:.2f}); without reading ahead "
            f"{of['not ahead_ratio']:.2f} ({of['not ahead_least_ratio']:.2f}); writing as much new memory "
            f"{of['write_s']:.2f} s, loading {of['load_roofline_ratio']:.2f} times reading and writing"
        )
    print(f"other processes took {other.share:.0%} of the machine")
    options.folder = None
    write_record(
        RESULTS / ("loading.json" if options.device == "cpu" else "gpu-loading.json"),
        options,
        file_bytes=size,
        figures=figures,
        turns=found,
        other_cpu=other.share,
    )


if __name__ == "__main__":
    main()
