"""benchmarks/multiturn.py runs, and the requests it makes have the trace's shape. Speeds are not looked at."""

import json
from pathlib import Path

from rich.console import Console

from benchmarks.multiturn import parse_arguments, run
from benchmarks.prefix_bins import slower_bins, ttft_bins
from benchmarks.turns import BLOCK, TRACE_BLOCK, Row, Turn, block_tokens, choose, generate_trace, read_trace
from benchmarks.workload import Job


def test_turns_share_exactly_the_prefixes_of_the_trace() -> None:
    rows = [
        Row(0.0, 2 * TRACE_BLOCK + 100, 320, (0, 1, 2)),
        Row(5.0, 700, 10, (0, 9)),  # a conversation of one turn: left out
        Row(10.0, 3 * TRACE_BLOCK + 512, 64, (0, 1, 2, 3)),
        Row(20.0, 9 * TRACE_BLOCK, 64, (0, 4, *range(10, 17))),  # too long
        Row(30.0, 2 * TRACE_BLOCK, 64, (0, 4)),
    ]
    talk = choose(rows, "test", 1000, 10, 8, 0)
    assert (talk.num_conversations, talk.num_blocks, talk.longest_blocks) == (1, 4, 4)
    first, second = talk.turns
    assert (first.arrival, second.arrival) == (0.0, 1.0)
    assert len(first.job.prompt) == 2 * BLOCK + 3 and len(second.job.prompt) == 4 * BLOCK
    assert (first.job.output_len, second.job.output_len) == (10, 2)
    assert second.job.prompt[: 2 * BLOCK + 3] == first.job.prompt
    assert second.job.prompt[:BLOCK] == block_tokens(0, 1000) != block_tokens(1, 1000)
    assert (first.seen_tokens, second.seen_tokens) == (0, 2 * BLOCK), "the first turn's third block was not full"


def test_a_trace_file_reads_as_rows(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps({"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [0, 5]}) + "\n")
    assert read_trace(file) == [Row(1.5, 600, 7, (0, 5))]


def test_a_generated_trace_returns_to_its_prefixes() -> None:
    talk = choose(generate_trace(20), "generated", 700, 30, 40, 0)
    assert len(talk.turns) >= 30 and 0 < talk.seen_tokens < talk.prompt_tokens


def test_times_are_told_apart_by_known_tokens() -> None:
    turns = [Turn(0.0, Job([2], 2), known) for known in (0, 0, 0, 16, 112, 128, 900)]
    times = {"recompute": [1.0, 2.0, 9.0, 5.0, 7.0, 8.0, 9.0], "host+prefetch": [1.0, 3.0, 4.0, 5.0, 6.0, 8.5, 1.0]}
    bins = ttft_bins(turns, times)
    assert [(one.known, one.turns) for one in bins] == [("0", 3), ("1 to 127", 2), ("128 to 255", 1), ("512+", 1)]
    assert [one.p50_ms["recompute"] for one in bins] == [2.0, 6.0, 8.0, 9.0]
    assert slower_bins(bins, "host+prefetch", "recompute") == ["0", "128 to 255"]
    assert slower_bins(bins, "host", "recompute") == []


def test_a_small_run_has_every_figure(tmp_path: Path) -> None:
    flags = [
        "--quick",
        "--turns",
        "16",
        "--longest",
        "12",
        "--repeats",
        "1",
        "--load",
        "4",
        "--threads",
        "1",
        "--patience",
        "0",
    ]
    flags += ["--trace", str(tmp_path / "none"), "--out", str(tmp_path), "--parts", "trace", "crossover"]
    record = run(parse_arguments(flags), Console(quiet=True))
    trace, crossover = record["trace"], record["crossover"]
    assert isinstance(trace, dict) and isinstance(crossover, dict)
    recompute, host, prefetch, disk = trace["results"]
    assert [arm["prefetch"] for arm in trace["arms"]] == [True, False, True, True]
    assert recompute["hits"]["host"] == 0 and disk["copied_bytes"]["spill"] > 0
    assert host["copied_bytes"]["store"] > 0 and prefetch["copied_bytes"]["store"] > 0
    assert sum(one["turns"] for one in trace["ttft_by_known_tokens"]) == trace["turns"]
    for result in trace["results"]:
        assert sum(result["hits"].values()) + result["computed"] == trace["prompt_tokens"]
        assert result["failed_blocks"] == 0
    assert len(crossover["points"]) == 7 and not list(tmp_path.glob("multiturn-kv-*"))
