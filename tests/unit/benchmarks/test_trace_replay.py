"""benchmarks/service/trace_replay: its traces have the stated shape, and small runs have every figure."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.service.trace_replay import lora_adapters
from benchmarks.service.trace_replay.__main__ import parse_arguments, run
from benchmarks.service.trace_replay.replay import slower_bins, ttft_bins
from benchmarks.service.trace_replay.trace import (
    BLOCK,
    TRACE_BLOCK,
    Row,
    adapter_arrivals,
    block_tokens,
    choose,
    generate_trace,
    read_trace,
)
from tandem.workers.messages.request import AdapterRef


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
    assert (first.place, second.place) == (0.0, 1.0)
    assert [arrival.due_s for arrival in talk.arrivals(8.0)] == [0.0, 8.0]
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


def test_adapters_are_drawn_at_the_same_times_whatever_their_number() -> None:
    refs = [AdapterRef(name=f"a{place}", digest=f"a{place}", source="") for place in range(64)]
    few, many = (adapter_arrivals(refs[:count], 100.0, 500, 700) for count in (8, 64))
    assert [arrival.due_s for arrival in few] == sorted(arrival.due_s for arrival in many)
    assert [arrival.request.prompt_token_ids for arrival in few] == [a.request.prompt_token_ids for a in many]
    counts = [sum(arrival.request.adapter == ref for arrival in few) for ref in refs]
    assert counts[0] == max(counts) and sum(counts[:8]) == 500 and few[-1].due_s == pytest.approx(5.0, rel=0.2)


def test_times_are_told_apart_by_known_tokens() -> None:
    known = [0, 0, 0, 16, 112, 128, 900]
    times = {"recompute": [1.0, 2.0, 9.0, 5.0, 7.0, 8.0, 9.0], "host+prefetch": [1.0, 3.0, 4.0, 5.0, 6.0, 8.5, 1.0]}
    bins = ttft_bins(known, times)
    assert [(one.known, one.turns) for one in bins] == [("0", 3), ("1 to 127", 2), ("128 to 255", 1), ("512+", 1)]
    assert [one.p50_ms["recompute"] for one in bins] == [2.0, 6.0, 8.0, 9.0]
    assert slower_bins(bins, "host+prefetch", "recompute") == ["0", "128 to 255"]
    assert slower_bins(bins, "host+prefetch+disk", "recompute") == []


@pytest.mark.parametrize("flags", ["--prefix 16", "--trace /no/such/trace.jsonl"])
def test_wrong_options_are_refused(flags: str) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["kv", *flags.split()])


def test_a_small_run_of_kv_tiers_has_every_figure(tmp_path: Path) -> None:
    flags = "kv --quick --turns 16 --longest 12 --repeats 1 --load 4 --threads 1 --patience 0 --parts trace crossover"
    record = run(parse_arguments([*flags.split(), "--out", str(tmp_path)]), Console(quiet=True))
    trace, crossover = record["trace"], record["crossover"]
    assert isinstance(trace, dict) and isinstance(crossover, dict)
    recompute, prefetch, disk = trace["results"]
    assert trace["source"] == "generated"
    assert recompute["hits"]["host"] == 0 and disk["copies"]["num_bytes"]["spill"] > 0
    assert prefetch["copies"]["num_bytes"]["store"] > 0
    assert sum(one["turns"] for one in trace["ttft_by_known_tokens"]) == trace["turns"]
    for result in trace["results"]:
        assert sum(result["hits"].values()) + result["computed"] == trace["prompt_tokens"]
        assert result["copies"]["failed_blocks"] == 0
    assert len(crossover["points"]) == 6 and not list(tmp_path.glob("trace-replay-kv-*"))
    assert json.loads((tmp_path / "kv-trace.json").read_text())["options"]["model"] == "demo"


def test_a_small_run_of_lora_has_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_adapters, "OUT", tmp_path / "adapters")
    flags = "lora --quick --requests 8 --adapters 8 12 --threads 1 --parts zipf"
    record = run(parse_arguments([*flags.split(), "--out", str(tmp_path)]), Console(quiet=True))
    zipf = record["zipf"]
    assert isinstance(zipf, dict) and zipf["8"]["loads"] == 0 and set(zipf["12"]["ttft_ms"]) == {"p50", "p90", "p99"}
    assert (tmp_path / "lora.png").is_file()
