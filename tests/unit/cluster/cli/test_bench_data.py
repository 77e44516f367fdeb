"""Prompts and times of `tandem bench`: those of vLLM's bench for the same seed, and traces in the forms people have."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.cli.bench.arrival_times import due_times
from tandem.cluster.cli.bench.bench_flags import TrafficFlags
from tandem.cluster.cli.bench.data_sets.choose_data import make_samples
from tandem.cluster.cli.bench.data_sets.data_flags import DataFlags
from tandem.cluster.cli.bench.data_sets.samples import Sample, SampleText, load_sample_text
from tandem.configs.errors import SettingsError


@pytest.fixture(scope="module")
def text() -> SampleText:
    return load_sample_text("demo")


def digest(samples: list[Sample]) -> str:
    fields = [[sample.prompt, sample.prompt_len, sample.output_len] for sample in samples]
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()[:16]


CONVERSATIONS = [
    {
        "conversations": [
            {"value": f"Question number {i}: what is {i} plus {i}?"},
            {"value": f"It is {2 * i}, I think." * (1 + i % 3)},
        ]
    }
    for i in range(9)
]
RANDOM = {"random_prefix_len": 5, "random_range_ratio": '{"input": 0.5, "output": 0.25}'}
RANDOM |= {"random_input_len": 20, "random_output_len": 12}
REPEATED = {"prefix_repetition_prefix_len": 9, "prefix_repetition_suffix_len": 7}
REPEATED |= {"prefix_repetition_num_prefixes": 3, "prefix_repetition_output_len": 4}


@pytest.mark.parametrize(
    ("name", "count", "flags", "of_vllm"),
    [
        ("random", 6, RANDOM, "d2317833bdf2c34a"),
        ("prefix_repetition", 6, REPEATED, "0fb956b68ea7decd"),
        ("sharegpt", 12, {}, "c2a90930d028afd8"),
    ],
)
def test_prompts_are_those_of_vllm_0_33(
    name: str, count: int, flags: dict[str, Any], of_vllm: str, text: SampleText, tmp_path: Path
) -> None:
    """The digests are of what vLLM's data sets made with the demo's tokenizer, seed 3."""
    if name == "sharegpt":
        (tmp_path / "sg.json").write_text(json.dumps(CONVERSATIONS))
        flags = {"dataset_path": str(tmp_path / "sg.json")}
    assert digest(make_samples(DataFlags(dataset_name=name, seed=3, num_prompts=count, **flags), text)) == of_vllm


@pytest.mark.parametrize(
    ("flags", "of_vllm"),
    [
        ({"request_rate": 5.0}, [0.126506637, 0.321180316, 0.375521891, 0.488553673, 0.841766905, 1.2]),
        (
            {"request_rate": 5.0, "burstiness": 0.4},
            [0.166137062, 0.199816344, 1.195318606, 1.199442742, 1.199886159, 1.2],
        ),
        (
            {"ramp_up_strategy": "exponential", "ramp_up_start_rps": 1, "ramp_up_end_rps": 8},
            [0.800282387, 1.61277456, 1.762407142, 1.967748548, 2.391094023, 2.674367338],
        ),
        (
            {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1, "ramp_up_end_rps": 8},
            [0.800282387, 1.313410656, 1.403875236, 1.541382987, 1.87993311, 2.163206425],
        ),
        ({}, [0.0] * 6),
        ({"request_rate": 2.0, "burstiness": float("inf")}, [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]),
    ],
)
def test_times_are_those_of_vllm_0_33(flags: dict[str, Any], of_vllm: list[float]) -> None:
    samples = [Sample("a", 1, 1)] * 6
    assert due_times(TrafficFlags(**flags), samples, 3) == pytest.approx(of_vllm, abs=1e-8)


def traced(path: Path, rows: str, text: SampleText, *, timed: bool = True, **flags: Any) -> list[Sample]:
    path.write_text(rows)
    data = DataFlags(dataset_name="timed_trace", dataset_path=str(path), **flags)
    return make_samples(data, text, timed=timed)


def test_a_trace_with_shared_blocks(text: SampleText, tmp_path: Path) -> None:
    """Mooncake's: milliseconds; equal ids are equal blocks; the first row begins the trace."""
    rows = [
        {"timestamp": 27000, "input_length": 20, "output_length": 7, "hash_ids": [4, 5]},
        {"timestamp": 30500, "input_length": 24, "output_length": 3, "hash_ids": [4, 9]},
    ]
    flags: dict[str, Any] = {"timed_trace_chunk_hash_size": 16, "timed_trace_sec_multiplier": 0.001}
    lines = "\n".join(map(json.dumps, rows))
    first, second = traced(tmp_path / "t.jsonl", lines, text, **flags)
    assert [(s.prompt_len, s.output_len, s.due_s) for s in (first, second)] == [(20, 7, 0.0), (24, 3, 3.5)]
    assert first.prompt[:16] == second.prompt[:16] and first.prompt[16:] != second.prompt[16:20]
    half = traced(tmp_path / "t.jsonl", lines, text, timed_trace_length_scale=0.5, **flags)
    assert [(s.prompt_len, s.output_len) for s in half] == [(10, 4), (12, 2)]
    assert half[0].prompt[:8] == half[1].prompt[:8] != half[0].prompt[8:]
    assert due_times(TrafficFlags(), [first, second], 0) == [0.0, 3.5]
    with pytest.raises(SettingsError, match="2 hash_ids of 4 tokens hold less than its 20 input tokens"):
        traced(tmp_path / "t.jsonl", lines, text, timed_trace_chunk_hash_size=4)


@pytest.mark.parametrize(
    ("head", "rows", "times"),
    [
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens",
            ["2023-11-16 18:15:46.6805900,8,10", "2023-11-16 18:15:50.9951690,9,8"],
            [0.0, 4.314579],
        ),
        (
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
            ["5,ChatGPT,8,10,18,Conversation log", "45,ChatGPT,7,0,7,API log", "118,GPT-4,9,8,17,Conversation log"],
            [0.0, 113.0],
        ),
        ("num_prefill_tokens,num_decode_tokens", ["8,10", "9,8"], None),
    ],
    ids=["azure", "burstgpt", "vidur"],
)
def test_traces_as_tables(
    head: str, rows: list[str], times: list[float] | None, text: SampleText, tmp_path: Path, capsys: Any
) -> None:
    table = "\n".join([head, *rows, ""])
    samples = traced(tmp_path / "t.csv", table, text, timed=times is not None)
    assert [(sample.prompt_len, sample.output_len) for sample in samples] == [(8, 10), (9, 8)]
    assert [sample.due_s for sample in samples] == (pytest.approx(times, abs=1e-5) if times else [None, None])
    assert ("1 rows of" in capsys.readouterr().err) == (len(rows) == 3), "rows without tokens are named"
    if times is None:
        with pytest.raises(SettingsError, match="no field timestamp or TIMESTAMP or Timestamp; it has num_prefill"):
            traced(tmp_path / "t.csv", table, text)
    else:
        burst = DataFlags(dataset_name="burstgpt", dataset_path=str(tmp_path / "t.csv"), num_prompts=3)
        if "Model" in head:
            assert [(s.prompt_len, s.output_len) for s in make_samples(burst, text)] == [(9, 8)] * 3
        else:
            with pytest.raises(SettingsError, match="a row is not BurstGPT's"):
                make_samples(burst, text)


def test_rows_of_ones_own(text: SampleText, tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text('{"prompt": "What is 2 + 3?", "output_tokens": 5}\n\n{"prompt": "Hello"}\n')
    flags: dict[str, Any] = {"dataset_name": "custom", "dataset_path": str(file), "disable_shuffle": True}
    plain = make_samples(DataFlags(num_prompts=3, skip_chat_template=True, no_oversample=True, **flags), text)
    assert [(sample.prompt, sample.output_len) for sample in plain] == [("What is 2 + 3?", 256), ("Hello", 256)]
    as_chat = make_samples(DataFlags(num_prompts=2, custom_output_len=9, **flags), text, as_chat=True)
    assert [(sample.prompt, sample.output_len) for sample in as_chat] == [("What is 2 + 3?", 9), ("Hello", 9)]
    rendered, *_, again = make_samples(DataFlags(num_prompts=5, **flags), text)
    assert "What is 2 + 3?" in rendered.prompt and len(rendered.prompt) > len("What is 2 + 3?")
    assert again.prompt in (rendered.prompt, again.prompt)
    (own,) = make_samples(DataFlags(num_prompts=1, custom_output_len=-1, **flags), text)
    assert own.output_len == 5
    with pytest.raises(SettingsError, match="a row has no output_tokens"):
        make_samples(DataFlags(num_prompts=2, custom_output_len=-1, **flags), text)


@pytest.mark.parametrize(
    ("flags", "content", "words"),
    [
        ({"dataset_name": "sharegpt"}, None, "is read from a file"),
        ({"dataset_path": "FILE"}, "", "random is made up and reads no file"),
        ({"dataset_name": "custom", "dataset_path": "FILE/no"}, "", "no such file"),
        ({"dataset_name": "custom", "dataset_path": "FILE"}, "", "no request that --dataset-name custom takes"),
        ({"dataset_name": "custom", "dataset_path": "FILE"}, "[1]", "line 1 has no text `prompt`"),
        ({"dataset_name": "custom", "dataset_path": "FILE"}, "{", "line 1 is no JSON"),
        ({"dataset_name": "custom", "dataset_path": "FILE"}, '{"prompt": "a", "output_tokens": 0}', "output_tokens 0"),
        ({"dataset_name": "sharegpt", "dataset_path": "FILE"}, "{}", "no request that"),
        ({"dataset_name": "sharegpt", "dataset_path": "FILE"}, '{"a": 1}', "is not ShareGPT's"),
        (
            {"dataset_name": "timed_trace", "dataset_path": "FILE"},
            '{"input_length": "x"}',
            "'x' is no number of tokens",
        ),
        ({"dataset_name": "timed_trace", "dataset_path": "FILE", "output_len": 3}, "", "--output-len"),
        ({"random_range_ratio": "1"}, None, "must be at least 0 and below 1"),
        ({"random_range_ratio": "a"}, None, "neither a number nor"),
        ({"random_input_len": 0}, None, "would have no token of its own"),
        ({"custom_output_len": 3}, None, "--custom-output-len: --dataset-name random has no use for it"),
        (
            {"dataset_name": "prefix_repetition", "num_prompts": 9},
            None,
            "less than --prefix-repetition-num-prefixes 10",
        ),
    ],
)
def test_wrong_data_is_refused_by_name(
    flags: dict[str, Any], content: str | None, words: str, text: SampleText, tmp_path: Path
) -> None:
    file = tmp_path / "data.jsonl"
    if content is not None:
        file.write_text(content)
    flags = {
        name: value.replace("FILE", str(file)) if name == "dataset_path" else value for name, value in flags.items()
    }
    with pytest.raises(SettingsError) as refused:
        make_samples(DataFlags(**flags), text)
    assert words in str(refused.value)


def test_a_tokenizer_that_is_not_there_is_named() -> None:
    with pytest.raises(SettingsError, match="--tokenizer"):
        load_sample_text("./no-such-folder")
    with pytest.raises(SettingsError, match="none is named"):
        load_sample_text(None)
