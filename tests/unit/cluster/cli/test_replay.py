"""`tandem replay`: a mixed load on the demo model, its plans again in another process, its token ids by ranks."""

import os
import random
import re
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from tandem.configs.schema import (
    CacheSettings,
    DeviceSettings,
    EngineSettings,
    LoraSettings,
    ModelSettings,
    SchedulerSettings,
    SpeculativeSettings,
)
from tandem.workers.build import model_facts, open_executor
from tandem.workers.engine.base.stats import EngineStats
from tandem.workers.engine.recording.call_records import RecordingHeader
from tandem.workers.engine.recording.recorded_engine import recorded_engine
from tandem.workers.engine.recording.recording_file import KEPT, RecordingError, read_recording, write_recording
from tandem.workers.engine.recording.redaction import redacted
from tandem.workers.engine.recording.tape import Tape, TapeCopy
from tandem.workers.lora.peft.peft_folder import adapter_digest
from tandem.workers.messages.request import Abort, AdapterRef, Ended, GenerationRequest, SamplingParams, TokenDelta
from tests.support.service import DEMO, REPOSITORY
from tests.support.verbs import run_verb_here

ADAPTERS = sorted(path.parent for path in (DEMO.parent / "adapters").glob("*/adapter_config.json"))
SETTINGS = EngineSettings(
    model=ModelSettings(model=str(DEMO), dtype="float32"),
    device=DeviceSettings(device="cpu", cpu_threads=1),
    cache=CacheSettings(num_blocks=24, kv_offloading_gib=0.01),
    scheduler=SchedulerSettings(max_num_seqs=6, max_num_batched_tokens=31),  # no chunk measures the speed of prefill
    lora=LoraSettings(enable_lora=True, max_loras=1, max_cpu_loras=4),
    speculative=SpeculativeSettings(method="ngram", num_speculative_tokens=3),
)


class CountedEnds:
    """Counts how requests have ended."""

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()

    def deltas(self, deltas: list[TokenDelta]) -> None:
        assert deltas

    def ended(self, ended: Ended, request: GenerationRequest) -> None:
        assert ended.refused is None
        self.reasons.update(ended.finish_reasons)


class Files(NamedTuple):
    """The same load, with ids and without."""

    full: Path
    hidden: Path
    num_steps: int


def asked(i: int, rng: random.Random) -> GenerationRequest:
    """A request of one of two tenants, of an adapter or none, of one or two choices; some are for "yes" or "no"."""
    folder = rng.choice([None, *ADAPTERS[:2]])
    ref = None if folder is None else AdapterRef(name=folder.name, digest=adapter_digest(folder), source=str(folder))
    text = [5 + (j * 7) % 300 for j in range(40)]
    params = SamplingParams(
        max_tokens=rng.randint(20, 60),
        n=rng.choice([1, 2]),
        temperature=rng.choice([0.0, 0.9]),
        seed=i,
        grammar='start: "yes" | "no"' if i % 5 == 4 else None,
        ignore_eos=i % 3 == 0,
    )
    return GenerationRequest(
        request_id=f"r{i}",
        prompt_token_ids=[*text[: rng.choice([0, 40])], *(rng.randrange(5, 300) for _ in range(rng.randint(5, 40)))],
        sampling=params,
        adapter=ref,
        tenant="ab"[i % 2],
        priority=rng.choice([0, 0, 1]),
    )


def write(path: Path, mode: str, copy: TapeCopy, num_blocks: int) -> Path:
    header = RecordingHeader(
        product="test",
        mode=mode,
        group="g1",
        written_s=1.0,
        settings=msgspec.msgpack.encode(SETTINGS),
        num_blocks=num_blocks,
        is_whole=copy.is_whole,
        num_calls=len(copy.calls),
    )
    assert write_recording(path, header, copy.state, copy.calls) == path.stat().st_size
    return path


def lacks(stats: EngineStats, reasons: Counter[str]) -> list[str]:
    """What is to be in a recording and is not."""
    assert stats.adapters is not None and stats.drafts is not None and stats.offload is not None
    counts = {
        "preemptions": stats.preemptions,
        "evictions of adapters": stats.adapters.evictions,
        "accepted drafts": stats.drafts.num_accepted,
        "stores": stats.offload.blocks["store"],
        "loads": stats.offload.loaded_tokens,
        **{reason: reasons[reason] for reason in ("abort", "stop", "length")},
    }
    return [name for name, count in counts.items() if not count]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Adapters in turns, n-gram drafts, aborts, several choices, preemption with KV in host memory, two tenants,
    priorities and grammars, on the demo model."""
    executor, ends, tape, rng = open_executor(SETTINGS), CountedEnds(), Tape(2**24), random.Random(2)
    try:
        ready = executor.start()
        facts = model_facts(SETTINGS, ready)
        engine = recorded_engine(
            SETTINGS, facts, executor, ready, ends, time.monotonic, lambda request, cached: None, tape
        )
        for rounds in range(8):  # in most runs the first has all of it
            for i in range(14 * rounds, 14 * (rounds + 1)):
                engine.add_request(asked(i, rng))
                engine.turn(0.05)
                if i % 6 == 5:
                    engine.abort(Abort(request_id=f"r{i - 1}", attempt=0))
            while engine.has_work() or engine.is_copying:
                engine.turn(0.05)
            lacking = lacks(stats := engine.stats(), ends.reasons)
            if not lacking:
                break
    finally:
        executor.close()
    assert not lacking, f"the load has no {lacking}"
    copy, folder = tape.take(), tmp_path_factory.mktemp("recordings")
    assert copy is not None
    full = write(folder / "full.recording", "full", copy, ready.num_blocks)
    hidden = write(folder / "redacted.recording", "redacted", redacted(copy, b"secret"), ready.num_blocks)
    return Files(full, hidden, stats.steps)


IN_ANOTHER_PROCESS = """
import sys
from tandem.cluster.cli.main import run_verb
try:
    run_verb()
finally:
    print("loaded:", *sorted({"torch", "ray", "transformers"} & sys.modules.keys()))
"""


@pytest.mark.parametrize("kind", ["full", "hidden"])
def test_all_plans_are_equal_in_another_process(files: Files, kind: str) -> None:
    """Its hashes of strings and addresses of objects are others; it has neither torch nor Ray."""
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, "replay", str(getattr(files, kind))]
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == f"{files.num_steps} steps, all plans equal\nloaded:\n", done
    assert done.returncode == 0 and "group g1" in done.stderr


def test_ranks_compute_the_same_ids(files: Files) -> None:
    done = run_verb_here("replay", str(files.full), "--model", str(DEMO))
    found = re.fullmatch(rf"{files.num_steps} steps, all plans equal, (\d+) token ids equal\n", done.stdout)
    assert found is not None and int(found[1]) > 300 and done.returncode == 0, done


def test_an_id_that_ranks_do_not_compute_is_named(files: Files, tmp_path: Path) -> None:
    """One sampled id in the middle is another one: the plans are equal, as they do not show it, the ids are not."""
    header, state, calls = read_recording(files.full)
    encoded = [msgspec.msgpack.encode(call) for call in calls]
    place = next(
        i for i in range(len(calls) // 2, len(calls)) if any(getattr(m, "rows", None) for m in calls[i].polled)
    )
    builtins = msgspec.msgpack.decode(encoded[place])
    answer = next(one for one in builtins[2] if one is not None and one[0] == "result")
    row = next(row for row in answer[2] if row[1])
    row[1][0] = (row[1][0] + 1) % 300
    encoded[place] = msgspec.msgpack.encode(builtins)
    changed = tmp_path / "changed.recording"
    write_recording(changed, header, state, encoded)
    done = run_verb_here("replay", str(changed), "--model", str(DEMO))
    assert done.returncode == 1 and re.search(r"step \d+, token ids of row \d", done.stdout), done


def test_what_cannot_be_computed_is_refused(files: Files, tmp_path: Path) -> None:
    done = run_verb_here("replay", str(files.hidden), "--model", str(DEMO))
    assert done.returncode == 2 and "--record full" in done.stderr
    header, state, calls = read_recording(files.full)
    later = tmp_path / "later.recording"
    write_recording(
        later, msgspec.structs.replace(header, is_whole=False), state, [msgspec.msgpack.encode(call) for call in calls]
    )
    done = run_verb_here("replay", str(later), "--model", str(DEMO))
    assert done.returncode == 2 and "a larger --record-mib" in done.stderr


def test_a_file_that_is_no_recording_is_refused(files: Files, tmp_path: Path) -> None:
    data = files.full.read_bytes()
    short = [(data[:size], "is damaged: its last record is cut short") for size in (-5, 60, 18)]
    for content, words in ((b"", "is no recording"), (data[:16], "it ends before its first call"), *short):
        (tmp_path / "x").write_bytes(content)
        done = run_verb_here("replay", str(tmp_path / "x"))
        assert done.returncode == 2 and words in done.stderr, done
    done = run_verb_here("replay", str(tmp_path / "none"))
    assert done.returncode == 2 and "No such file" in done.stderr


def test_a_recording_of_another_version_says_so(files: Files, tmp_path: Path) -> None:
    """Of another format it is named, whatever its header has; of this format it is replayed, and that is said."""
    header, state, calls = read_recording(files.full)
    later, older = tmp_path / "later.recording", tmp_path / "older.recording"
    fields = msgspec.msgpack.encode({"format": 2, "product": "9.1", "colour": "red"})
    later.write_bytes(files.full.read_bytes()[:16] + struct.pack("<I", len(fields)) + fields)
    done = run_verb_here("replay", str(later))
    assert done.returncode == 2 and "has format 2, of Tandem 9.1; this one, " in done.stderr, done
    for product, is_said in (("0.0.1", True), (version("tandem-serve"), False)):
        header = msgspec.structs.replace(header, product=product)
        write_recording(older, header, state, [msgspec.msgpack.encode(call) for call in calls])
        done = run_verb_here("replay", str(older))
        assert done.returncode == 0, done
        assert (f"written by Tandem {product}, replayed by " in done.stderr) == is_said, done


def test_few_files_are_kept_and_a_full_disk_leaves_none(files: Files, tmp_path: Path) -> None:
    header, state, _ = read_recording(files.full)
    header = msgspec.structs.replace(header, num_calls=0)
    for number in range(KEPT + 3):
        path = tmp_path / f"group-{number}.recording"
        write_recording(path, header, state, [])
        os.utime(path, (number, number))
    there = sorted(int(path.stem.split("-")[1]) for path in tmp_path.glob("*.recording"))
    assert there == list(range(3, KEPT + 3))
    assert (tmp_path / "group-5.recording").stat().st_mode & 0o777 == 0o600
    with pytest.raises(RecordingError, match="No space left"):
        write_recording(tmp_path / "full.recording", header, state, full_disk())
    assert not list(tmp_path.glob("*.tmp")) and not (tmp_path / "full.recording").exists()


def test_a_file_that_another_group_removes_costs_no_recording(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All groups of a node may be lost at once, and write and remove files in one folder."""
    header, state, _ = read_recording(files.full)
    gone = [tmp_path / "gone.recording", tmp_path / "gone.recording.tmp"]
    listed = Path.glob
    monkeypatch.setattr(Path, "glob", lambda folder, what: [*listed(folder, what), *gone])
    assert write_recording(tmp_path / "new.recording", header, state, []) > 0


def test_a_recording_that_shows_nothing_is_not_said_to_be_equal(files: Files, tmp_path: Path) -> None:
    header, state, calls = read_recording(files.full)
    empty, short = tmp_path / "empty.recording", tmp_path / "short.recording"
    write_recording(empty, msgspec.structs.replace(header, num_calls=0), state, [])
    done = run_verb_here("replay", str(empty))
    assert done.returncode == 2 and "no step" in done.stderr and "equal" not in done.stdout, done
    write_recording(short, header, state, [msgspec.msgpack.encode(call) for call in calls[:-1]])
    done = run_verb_here("replay", str(short))
    assert done.returncode == 2 and f"{len(calls) - 1} of {len(calls)} calls" in done.stderr, done


def full_disk() -> Iterator[bytes]:
    """Calls of which the first finds no room."""
    yield b"call"
    raise OSError(28, "No space left on device")
