"""Token gaps of rows that decode while prompts arrive, at a steady rate: what chunks of prompts cost those that stream.

    python -m benchmarks.engine.mixed_load [--model llama-8b] [--rows 64] [--prompt 512] [--every-ms 100]

Random bf16 weights. --rows rows write all the while; every --every-ms a prompt of --prompt tokens that nobody has seen
arrives, and writes --tokens more. Printed are the gaps between tokens of the rows (p50, p99, the longest), beside those
without prompts, which stand first, the arrivals' times to the first token, and tokens a second. JSON goes to
out/benchmarks. --device cpu is for a try without a GPU.
"""

import argparse
import time
from collections.abc import Sequence
from itertools import pairwise

from benchmarks.engine.engine_run import TimelineSink, greedy_request, opened_engine
from benchmarks.engine.gpu_steps import prompt_of
from benchmarks.models import SHAPES, config_folder
from benchmarks.record import RESULTS, note, write_record
from benchmarks.workload import Job, Timeline, percentiles
from tandem.configs.schema import CacheSettings, DeviceSettings, EngineSettings, ModelSettings, SchedulerSettings
from tandem.workers.engine.engine import Engine
from tandem.workers.models.spec.config.config_reader import load_spec


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-8b", choices=sorted(SHAPES))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--context", type=int, default=512, help="tokens of each row's prompt")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt that arrives")
    parser.add_argument("--tokens", type=int, default=16, help="tokens that it writes")
    parser.add_argument("--every-ms", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each part, without prompts and with")
    return parser.parse_args()


class Load:
    """An engine whose rows decode, and prompts that arrive beside them."""

    def __init__(self, engine: Engine, sink: TimelineSink, options: argparse.Namespace, vocab: int, room: int) -> None:
        self._engine, self._sink, self._options, self._vocab = engine, sink, options, vocab
        self._num_prompts = 0  # of all parts: each is new to the prefix cache
        for row in range(options.rows):
            self._add(f"row-{row}", Job(prompt_of(options.context, vocab, row, 13), room - options.context))
        self._rows = list(sink.timelines.values())
        while not all(timeline.token_times_s for timeline in self._rows):
            engine.turn(0.05)

    def _add(self, name: str, job: Job) -> Timeline:
        timeline = self._sink.timelines[name] = Timeline(time.perf_counter())
        self._engine.add_request(greedy_request(name, job))
        return timeline

    def _fewest_since(self, seen: Sequence[int]) -> int:
        """The fewest tokens that a row has got since; a device that is slow for its --seconds gets longer."""
        return min(len(row.token_times_s) - count for row, count in zip(self._rows, seen, strict=True))

    def run(self, name: str, every_s: float | None) -> dict[str, object]:
        """Runs for the time; returns the figures. every_s: between arrivals, None: there are none."""
        options, arrivals = self._options, list[Timeline]()
        begin_s = time.perf_counter()
        next_s = begin_s if every_s is not None else float("inf")
        seen = [len(row.token_times_s) for row in self._rows]
        while (now_s := time.perf_counter()) < begin_s + options.seconds or self._fewest_since(seen) < 3:
            if now_s >= next_s and every_s is not None:
                self._num_prompts += 1
                prompt = prompt_of(options.prompt, self._vocab, 1000 + self._num_prompts, 17)
                arrivals.append(self._add(f"{name}-{self._num_prompts}", Job(prompt, options.tokens)))
                next_s += every_s
            self._engine.turn(0.001)
            assert "row-0" not in self._sink.ended_ids, "the rows have reached the model's context; take less --seconds"
        ends = [[at for at in row.token_times_s if at > begin_s] for row in self._rows]
        gaps_ms = [1e3 * (after - before) for times in ends for before, after in pairwise(times)]
        begun = [arrival for arrival in arrivals if arrival.token_times_s]
        tokens = sum(map(len, ends)) + sum(len(arrival.token_times_s) for arrival in arrivals)
        figures: dict[str, object] = {
            "part": name,
            "gap_ms": percentiles(gaps_ms) | {"max": max(gaps_ms)},
            "arrivals": len(arrivals),
            "first_token_ms": percentiles([arrival.ttft_ms for arrival in begun]) if begun else None,
            "tokens_per_s": tokens / (time.perf_counter() - begin_s),
        }
        words = ", ".join(f"{key} {value:.1f}" for key, value in (percentiles(gaps_ms) | {"max": max(gaps_ms)}).items())
        print(f"{name}: gaps {words} ms, {figures['tokens_per_s']:.0f} tokens/s, {len(arrivals)} arrivals", flush=True)
        note(case="mixed load", model=options.model, rows=options.rows, **figures)
        return figures


def main() -> None:
    options = parse_arguments()
    folder = config_folder(options.model)
    spec = load_spec(folder)
    room = min(spec.max_position_embeddings, options.context + int(3 * 5000 * options.seconds))
    settings = EngineSettings(
        model=ModelSettings(model=str(folder), dtype="bfloat16", load_format="dummy", max_model_len=room),
        cache=CacheSettings(kv_cache_memory_bytes=2**28 if options.device == "cpu" else None),
        scheduler=SchedulerSettings(
            max_num_seqs=2 * options.rows, max_num_batched_tokens=8192, max_num_queued_reqs=2**31
        ),
        device=DeviceSettings(device=options.device, cpu_threads=1 if options.device == "cpu" else None),
    )
    sink = TimelineSink()
    with opened_engine(settings, sink) as (engine, _):
        load = Load(engine, sink, options, spec.vocab_size, room - 1)
        load.run("warm", options.every_ms / 1000)
        parts = [load.run("no prompts", None), load.run("prompts", options.every_ms / 1000)]
    write_record(RESULTS / f"mixed-load-{options.model}.json", options, parts=parts)


if __name__ == "__main__":
    main()
