"""What the comparison with other engines computes: turns and ratios of recorded answers, a peer's process, and tokens
that engines count otherwise. No peer is installed: their packages are stand-ins.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.engine.quantization_peers import Comparison, described, figures, peers_of, ratios
from benchmarks.machine import OtherCpu
from benchmarks.peers import model_files
from benchmarks.peers.processes import ROOT, Peer, PeerProcess
from benchmarks.peers.talk import Jobs, Prompt, memory
from tandem.parallel.stored.gguf_header import read_gguf
from tests.support.tiny_models import BY_NAME, save_tiny_model

RECORDED = ROOT / "benchmarks" / "results" / "latest" / "quantization-peers.json"


class Scripted:
    """An engine that gives the tokens of a script, step by step, and then one to each job that it has."""

    def __init__(self, *script: Mapping[int, int]) -> None:
        self._script = list(script)
        self.left: dict[int, int] = {}
        self.most = 0

    def add(self, job: int, prompt: Prompt, output_len: int) -> None:
        self.left[job] = output_len
        self.most = max(self.most, len(self.left))

    def step(self) -> dict[int, int]:
        got = dict(self._script.pop(0)) if self._script else dict.fromkeys(self.left, 1)
        for job, count in got.items():
            self.left[job] -= count
        self.left = {job: count for job, count in self.left.items() if count > 0}
        return got


def test_first_waits_for_a_token_of_each_job_and_steps_for_one_of_all() -> None:
    """A chunk of a prompt may give nothing, and prompts may end in different steps."""
    engine = Scripted({}, {1: 1}, {2: 1, 1: 1}, {}, {1: 1, 2: 1})
    jobs = Jobs(engine)
    assert set(jobs.first([([5, 6], 4), ([7], 4)])) == {"wall_s", "cpu_s"}
    assert engine.left == {1: 2, 2: 3}
    assert [len(times) for times in jobs.steps(1).values()] == [1, 1]
    assert engine.left == {1: 1, 2: 2}
    jobs.end()
    assert engine.left == {}


def test_a_step_that_leaves_a_job_out_is_no_decode_step() -> None:
    jobs = Jobs(Scripted({1: 1, 2: 1}, {1: 1}))
    jobs.first([([5], 3), ([6], 3)])
    with pytest.raises(AssertionError):
        jobs.steps(1)


def test_all_has_at_most_so_many_jobs_at_work() -> None:
    engine = Scripted()
    Jobs(engine).all([([1], length) for length in (1, 3, 2, 1, 2)], most=2)
    assert (engine.most, engine.left) == (2, {})


def test_memory_of_this_process() -> None:
    found = memory()
    assert 2**20 < found["private_bytes"] <= found["peak_bytes"]


# ---- a peer's process ----

ECHO = """
import json, os, sys
options = json.loads(sys.argv[-1])
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    command = json.loads(line)
    if command["do"] == "die":
        sys.exit("out of luck")
    print(json.dumps({**command, **options, "module": sys.argv[-2], "omp": os.environ["OMP_NUM_THREADS"]}), flush=True)
"""


def interpreter(folder: Path) -> str:
    """Stands in for a peer's Python: whatever module it is asked for, it answers as ECHO does."""
    (folder / "echo.py").write_text(ECHO)
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {folder}/echo.py "$@"\n')
    script.chmod(0o755)
    return str(script)


def test_a_process_is_asked_and_its_last_words_are_told(tmp_path: Path) -> None:
    peer = Peer("other", interpreter(tmp_path), "json", "other_peer", {"model": "m"})
    process = PeerProcess(peer, 3, tmp_path / "logs" / "other.log")
    answer = {
        "do": "steps",
        "count": 2,
        "model": "m",
        "threads": 3,
        "module": "benchmarks.peers.other_peer",
        "omp": "3",
    }
    assert process.ask("steps", count=2) == answer
    with pytest.raises(RuntimeError, match="other has ended with status 1: out of luck"):
        process.ask("die")
    process.close()


def test_what_keeps_a_peer_from_running() -> None:
    given = {"module": "x", "options": {}}
    assert Peer("a", sys.executable, "json", **given).obstacle is None
    assert Peer("a", "/no/python", "json", **given).obstacle == "/no/python is not there"
    words = Peer("a", sys.executable, "no_such_package", **given).obstacle
    assert words is not None and "cannot import no_such_package" in words and "ModuleNotFoundError" in words


# ---- turns and ratios ----


class Recorded:
    """Answers of a peer's process, by command."""

    def __init__(self, name: str, answers: Mapping[str, Sequence[Any]]) -> None:
        self.peer = Peer(name, "", "", "", {})
        self._answers = {do: list(given) for do, given in answers.items()}
        self.asked: list[str] = []

    def ask(self, do: str, **more: Any) -> Any:
        self.asked.append(do)
        return self._answers[do].pop(0) if do in self._answers else None


def seconds(*wall: float, factor: float = 2.0) -> dict[str, list[float]]:
    return {"wall_s": list(wall), "cpu_s": [each * factor for each in wall]}


def options_of(**given: int) -> argparse.Namespace:
    return argparse.Namespace(
        **{"steps": 3, "turns": 2, "prompt": 8, "prompt_turns": 2, "context": 4, "mixed": 2, **given}
    )


def test_a_turns_first_step_counts_for_nothing() -> None:
    steps = [seconds(9.0, 0.2, 0.4), seconds(9.0, 0.1, 0.3)]
    process = Recorded("a", {"steps": steps})
    found = Comparison([process], options_of()).decode(rows=1)  # type: ignore[list-item]
    assert found == {"a": pytest.approx({"median_ms": 250, "best_ms": 100, "cpu_ms": 500, "best_cpu_ms": 200})}
    assert process.asked == ["first", "steps", "steps", "end"]


def test_the_first_prompt_counts_for_nothing_and_mixed_work_is_one_time() -> None:
    firsts = [{"wall_s": wall, "cpu_s": wall} for wall in (9.0, 0.5, 0.25)]
    process = Recorded("a", {"first": firsts, "all": [{"wall_s": 3.0, "cpu_s": 2.0}]})
    compared = Comparison([process], options_of())  # type: ignore[list-item]
    assert compared.prompt()["a"] == figures([0.5, 0.25], [0.5, 0.25])
    assert compared.mixed()["a"]["cpu_ms"] == 2000


def test_ratios_are_of_the_best_peer() -> None:
    def case(**cpu_ms: float) -> dict[str, Any]:
        return {"engines": {name.replace("_", " "): {"cpu_ms": ms} for name, ms in cpu_ms.items()}}

    cases = {
        "decode of 1": case(tandem_int4=10.0, tandem_bf16=40.0, llama=20.0, openvino=30.0),
        "alone": case(tandem=1.0),
    }
    assert ratios(cases) == [("decode of 1, int4", 2.0), ("decode of 1, bf16", 0.5)]
    other = OtherCpu()
    other.share = 0.25
    found = {"a": figures([0.5], [1.0])}
    assert described("prompt", found, other) == "prompt, ms: a 500.0 (cpu 1000.0); 0.25 other_cpu"


def test_the_record_has_what_its_own_figures_make() -> None:
    record = json.loads(RECORDED.read_text())
    forms = [name for name in record["options"]["peers"] if name.startswith("tandem")]
    found = dict(ratios(record["cases"]))
    assert len(found) == len(forms) * len(record["cases"])
    case = record["cases"]["decode of 1"]["engines"]
    best = min(own["cpu_ms"] for name, own in case.items() if name not in forms)
    assert found["decode of 1, int4"] == best / case["tandem int4"]["cpu_ms"]


def test_a_peer_without_its_package_is_named_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    options = options_of(rows=1)
    options.ours, options.peers, options.model = (), ["vllm=/no/python"], "x"
    assert peers_of(options) == [] and "vllm: left out, /no/python is not there" in capsys.readouterr().out
    options.peers = ["sglang=python"]
    with pytest.raises(
        SystemExit, match=r"sglang=python: a peer is NAME=PYTHON, NAME one of llama\.cpp, openvino, vllm"
    ):
        peers_of(options)


# ---- tokens as engines count them ----


def with_packages(monkeypatch: pytest.MonkeyPatch, module: str, **packages: Any) -> Any:
    """Returns a peer's module, which imports stand-ins for packages."""
    for name, members in packages.items():
        made = ModuleType(name)
        vars(made).update(members)
        monkeypatch.setitem(sys.modules, name, made)
    monkeypatch.delitem(sys.modules, f"benchmarks.peers.{module}", raising=False)
    return importlib.import_module(f"benchmarks.peers.{module}")


def test_vllm_tells_all_tokens_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    module = with_packages(monkeypatch, "vllm_peer", vllm={"SamplingParams": lambda **given: given})

    def said(**ids: int) -> list[Any]:
        return [
            SimpleNamespace(request_id=job[1:], outputs=[SimpleNamespace(token_ids=[0] * n)]) for job, n in ids.items()
        ]

    steps = [said(j1=1), said(j1=2, j2=1), said(j2=4)]
    engine: Any = module.Vllm.__new__(module.Vllm)
    engine._had = {}
    engine._engine = SimpleNamespace(add_request=lambda *_: None, step=lambda: steps.pop(0))
    engine.add(1, [5], 2)
    engine.add(2, [6], 4)
    assert [engine.step() for _ in range(3)] == [{1: 1}, {1: 1, 2: 1}, {2: 3}]


class Handle:
    """OpenVINO's view of a request, by the tokens that are new at each step."""

    def __init__(self, *counts: int) -> None:
        self._counts = iter(counts)
        self._new = 0

    def can_read(self) -> bool:
        self._new = next(self._counts)
        return self._new > 0

    def read(self) -> dict[int, Any]:
        return {0: SimpleNamespace(generated_ids=[0] * self._new)}


def test_openvino_tells_what_is_new_where_there_is_something(monkeypatch: pytest.MonkeyPatch) -> None:
    module = with_packages(monkeypatch, "openvino_peer", openvino={}, openvino_genai={})

    engine: Any = module.OpenVino.__new__(module.OpenVino)
    engine._pipeline = SimpleNamespace(step=lambda: None)
    engine._handles, engine._left = {1: Handle(1, 2), 2: Handle(0, 2)}, {1: 3, 2: 2}
    assert [engine.step() for _ in range(2)] == [{1: 1}, {1: 2, 2: 2}]
    assert engine._handles == {}


def test_llama_cpp_decodes_new_prompts_apart_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    module = with_packages(monkeypatch, "llama_cpp_peer", llama_cpp={"_ggml": None})
    engine: Any = module.LlamaCpp.__new__(module.LlamaCpp)
    engine._free, engine._new, engine._seat, engine._last, engine._place, engine._left = [0, 1], {}, {}, {}, {}, {}
    decoded: list[dict[int, Sequence[int]]] = []

    def decode(given: dict[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        decoded.append(dict(given))
        return {job: torch.tensor([0.0, 3.0, 1.0]) for job in given}

    engine._decode, engine._end = decode, lambda job: engine._left.pop(job)
    engine.add(1, [5, 6], 2)
    assert engine.step() == {1: 1}
    engine.add(2, [7], 1)
    assert [engine.step(), engine.step()] == [{2: 1}, {1: 1}]
    assert decoded == [{1: [5, 6]}, {2: [7]}, {1: [1]}] and engine._left == {}


# ---- the files that peers read ----


def test_files_of_a_shape_stand_for_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each made once; int8 codes with scales by output, and GGUF's sizes."""
    folder = save_tiny_model(BY_NAME["llama-gqa"], tmp_path)
    given = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**given, "rope_theta": given["rope_parameters"]["rope_theta"]}))
    monkeypatch.setattr(model_files, "OUT", tmp_path)
    monkeypatch.setattr(model_files, "model_folder", lambda shape: folder)
    made = model_files.w8a8_folder("tiny")
    dense, codes = load_file(folder / "model.safetensors"), load_file(made / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    weight, scale = codes[f"{name}.weight"].float(), codes[f"{name}.weight_scale"].float()
    assert codes[f"{name}.weight"].dtype is torch.int8 and float(weight.abs().max()) == model_files.LEVELS
    assert float((weight * scale - dense[f"{name}.weight"]).abs().max()) <= float(scale.max()) * 0.75
    assert torch.equal(codes["lm_head.weight"], dense["lm_head.weight"])
    header = read_gguf(model_files.gguf_file("tiny"))
    kinds = {tensor.dtype for tensor in header.tensors.values()}
    assert kinds == {"F32", "Q4_0", "Q8_0"} and header.metadata["llama.vocab_size"] == given["vocab_size"]
    save_file({}, folder / "model.safetensors")
    assert model_files.w8a8_folder("tiny") == made and model_files.gguf_file("tiny").exists()
