"""`tandem simulate`: from a trace and times of steps to figures, and each error by its flag and value."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.cli.simulate.simulate_flags import FleetFlags
from tandem.cluster.simulator.setup import Setup
from tandem.configs.errors import SettingsError
from tests.support.verbs import run_verb_here

TIMES = {"alone": {"step_s": 0.02, "decode_s": 0.0005, "prefill_token_s": 0.0001}}
SMALL = ("--num-gpu-blocks-override", "256", "--device", "cpu", "--disable-tqdm")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of two conversations and one request that shares nothing, and times of steps."""
    folder = tmp_path_factory.mktemp("simulated")
    rows = [
        {"timestamp": 1000 * at, "input_length": 32 * len(ids), "output_length": 9, "hash_ids": ids}
        for at, ids in enumerate(([0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [5]))
    ]
    (folder / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "times.json").write_text(json.dumps(TIMES))
    (folder / "scaled.yaml").write_text("model: demo\nautoscaling_config: {min_replicas: 1, max_replicas: 3}\n")
    return folder


def asked(files: Path, *more: str, file: str = "demo", times: str = "times.json") -> tuple[str, ...]:
    trace = ("--trace", str(files / "trace.jsonl"), "--timed-trace-chunk-hash-size", "32")
    return ("simulate", file, *trace, "--timed-trace-sec-multiplier", "0.001", *SMALL, "--step-times",
            str(files / times), *more)  # fmt: skip


def test_a_tiny_trace_prints_its_figures(files: Path) -> None:
    said = run_verb_here(*asked(files, "--groups", "1:4", "--json"))
    assert said.returncode == 0, said.stderr
    assert said.stdout == run_verb_here(*asked(files, "--groups", "1:4", "--json")).stdout, "byte for byte"
    found = json.loads(said.stdout)
    assert [run["groups"] for run in found["runs"]] == [1, 2, 4]
    (one, *_) = found["runs"]
    assert one["ends"] == {"stop": 5}
    # of 12 blocks of 32 tokens the second and third turns find what earlier ones have: 1 and 2 blocks of theirs each,
    # and the second conversation the system prompt
    assert one["figures"]["hit_rate"] == pytest.approx((32 + 64 + 64) / (32 * 11))
    assert one["figures"]["ttft_p50_s"] == pytest.approx(0.02 + 0.0001 * 32 + 0.003, abs=0.004)
    assert found["step_times"]["alone"]["decode_s"] == 0.0005
    table = run_verb_here(*asked(files, "--groups", "2")).stdout
    assert "goodput/s" in table and " 5/5" in table


def test_a_file_with_autoscaling_chooses_the_number_of_groups(files: Path) -> None:
    said = run_verb_here(*asked(files, file=str(files / "scaled.yaml")))
    assert said.returncode == 0, said.stderr
    assert "* at the start" in said.stdout


def test_groups_and_gateways_are_the_services_unless_flags_say_others(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, made = files / "own.yaml", list[tuple[int, int]]()
    own.write_text("model: demo\ndata_parallel_size: 3\napi_server_count: 2\n")

    def setup(**given: Any) -> Setup:
        made.append((given["groups"], given["gateways"]))
        return Setup(**given)

    monkeypatch.setattr("tandem.cluster.cli.simulate.simulate.Setup", setup)
    for more in ((), ("--groups", "1", "--gateways", "1")):
        said = run_verb_here(*asked(files, *more, file=str(own)))
        assert said.returncode == 0, said.stderr
    assert made == [(3, 2), (1, 1)]


def test_a_plot_is_drawn(files: Path, tmp_path: Path) -> None:
    file = tmp_path / "groups.svg"
    said = run_verb_here(*asked(files, "--groups", "1,2", "--plot", str(file)))
    assert said.returncode == 0, said.stderr
    assert "goodput" in file.read_text() or file.stat().st_size > 5000


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--groups", "x"), "--groups: x: not a number"),
        (("--groups", "0"), "--groups: 0: groups are from 1"),
        (("--policy", "magic"), "--policy: magic: not one of"),
        (("--load", "heavy"), "--load: heavy: not one of"),
        (("--load", "adapters"), "--load: adapters: the service has none"),
        (("-pp", "2"), "--pipeline-parallel-size: 2: stages beside each other are not simulated"),
        (("--goodput", "e2el:9"), "--goodput: e2el: goals are of"),
        (("--plot", "groups.txt"), "--plot: groups.txt: must end with"),
        (("--step-log", "x.jsonl"), "--step-log says them already"),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_flag(files: Path, more: tuple[str, ...], words: str) -> None:
    said = run_verb_here(*asked(files, *more))
    assert said.returncode == 2 and words in said.stderr, said.stderr


def test_files_that_are_not_there_are_named(files: Path) -> None:
    assert "nowhere.json cannot be read" in run_verb_here(*asked(files, times="nowhere.json")).stderr
    there = run_verb_here(
        "simulate", "demo", "--trace", "nowhere.jsonl", *SMALL, "--step-times", str(files / "times.json")
    )
    assert "--trace: nowhere.jsonl: no such file" in there.stderr
    assert "--step-log: how long do steps take?" in run_verb_here("simulate", "demo", *SMALL).stderr


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "--trace: FILE, row 1 is no JSON"),
        ("[]", "--trace: FILE, row 1 is no JSON object"),
        ('{"timestamp": 0, "input_length": "a", "output_length": 4}', "--trace: FILE, row 1: 'a' is no number"),
        ('{"timestamp": 0, "input_length": 1e999, "output_length": 4}', "--trace: FILE, row 1: inf is no number"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 4, "hash_ids": 5}', "--trace: FILE, row 1: hash_ids 5"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 4, "hash_ids": [[1]]}', "row 1: hash_ids [[1]]"),
        ('{"timestamp": {}, "input_length": 9, "output_length": 4}', "--timed-trace-label-timestamp: FILE, row 1"),
        ('{"timestamp": NaN, "input_length": 9, "output_length": 4}', "row 1: nan is no time"),
        ('{"timestamp": Infinity, "input_length": 9, "output_length": 4}', "row 1: inf is no time"),
        ('{"timestamp": 0, "input_length": 9}', "--timed-trace-label-output-length: FILE, row 1 has no field"),
    ],
)
def test_a_row_that_says_nothing_is_refused_by_flag_file_and_value(
    files: Path, tmp_path: Path, row: str, words: str
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(row + "\n")
    said = run_verb_here("simulate", "demo", "--trace", str(trace), *SMALL, "--step-times", str(files / "times.json"))
    assert said.returncode == 2 and words.replace("FILE", str(trace)) in said.stderr, said.stderr


def test_fields_of_other_traces_are_named_by_flags(files: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"at": 3, "asked": 20, "said": 4, "blocks": [1, 2]}\n')
    labels = {"timestamp": "at", "input-length": "asked", "output-length": "said", "hash-ids": "blocks"}
    named = [part for name, field in labels.items() for part in (f"--timed-trace-label-{name}", field)]
    times = ("--step-times", str(files / "times.json"))
    said = run_verb_here("simulate", "demo", "--trace", str(trace), *SMALL, *times, *named)
    assert said.returncode == 0 and " 1/1" in said.stdout, said.stderr
    alone = run_verb_here("simulate", "demo", *SMALL, *times, "--timed-trace-label-hash-ids", "blocks")
    assert "--timed-trace-label-hash-ids: blocks: is of a file, and --trace names none" in alone.stderr


def test_groups_are_doubled_up_to_the_last() -> None:
    assert FleetFlags(groups="1:12").numbers() == [1, 2, 4, 8, 12]
    assert FleetFlags(groups="3").numbers() == [3]
    assert FleetFlags(groups="8,2").numbers() == [8, 2]
    with pytest.raises(SettingsError, match="--groups"):
        FleetFlags(groups="8:2").numbers()
