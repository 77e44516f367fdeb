"""Everything worth knowing about one GPU in one run: checks, ceilings, steps, prompts, load, service, tests, in stages.

    python tools/gpu_run.py OUT [--budget 540] [--only STAGE ...] [--dry]

Each stage is a process of its own with a limit. One that fails or is over its limit is killed with all that it started,
said and passed over, and what it had found stays: its JSON lines are in OUT/run.jsonl as they come, with its name, and
what it prints in OUT/log.txt. A table of all (tools/gpu_table.py) is printed at the end, and is OUT/table.txt. The run
takes --budget seconds at most, of which the last stage, the tests, has what the others leave, and RESERVE_S at least.
A stage has the same place in each run, so that what is left out for want of time is the end.

It needs no network, and no installation beyond the packages: any Python that has them will do. --dry runs all stages on
a CPU, small, with no limits but the budget: whether the run itself works. The exit status is 1 when a stage did not end
well.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.gpu_table import table  # noqa: E402 - found once the root is on the path

RESERVE_S = 90.0
"""Of the budget, for the last stage."""
LEAST_S = 10.0
"""A stage that would have less is passed over."""
KERNELS = [
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/unit/kernels").glob("test_triton_*.py")),
    "tests/unit/kernels/test_flash_prompts.py", "tests/unit/kernels/test_kv_quant.py",
    "tests/parity/test_families_served.py",
]  # fmt: skip
"""Tests beside those of tests/gpu that compute on a GPU where there is one."""
STEPS = "benchmarks.engine.gpu_steps"
TINY = "--device cpu --model tiny"


class Stage(NamedTuple):
    """A module, its arguments on a GPU and in a dry run, and the most seconds that it may take. {out}: the folder;
    {half}: of the cores."""

    name: str
    limit_s: float
    module: str
    arguments: str
    dry: str


STAGES: tuple[Stage, ...] = (
    Stage("facts", 20, "tools.gpu_facts", "", ""),
    Stage("checks", 75, "tandem.workers.self_checks.self_check_run", "--device", "--device"),
    Stage(
        "ceilings", 70, "benchmarks.kernels.gpu_ceilings", "--parts nodes products attention",
        "--device cpu --parts nodes products attention",
    ),
    Stage("tiles", 75, "benchmarks.kernels.kernel_tiles", "", "--device cpu --model tiny"),
    Stage(
        "steps 8B", 120, STEPS,
        "--model llama-8b --rows 1 32 128 256 --lengths uniform mixed one-long --sampled --no-eager --steps 48 "
        "--pairs 1 --prompts 2048 8192 32768 --prompt-tokens 32768 --peer-rows --profile {out}/profile.txt",
        f"{TINY} --rows 1 3 --lengths uniform mixed one-long --long-context 90 --context 40 --sampled --no-eager "
        "--steps 8 --pairs 1 --prompts 64 --prompt-tokens 128 --peer-rows --profile {out}/profile.txt",
    ),
    Stage(
        "steps 0.6B", 50, STEPS,
        "--model qwen3-0.6b --rows 1 32 256 --sampled --steps 48 --pairs 1 --prompts 2048 --peer-rows --no-tune",
        f"{TINY} --rows 2 --context 20 --steps 8 --pairs 1 --prompts --peer-rows",
    ),
    Stage(
        "mixed load", 45, "benchmarks.engine.mixed_load", "--model llama-8b --rows 64 --seconds 6",
        f"{TINY} --rows 2 --context 20 --prompt 30 --tokens 3 --every-ms 100 --seconds 0.3",
    ),
    Stage(
        "quantized caches", 60, STEPS,
        "--model llama-8b --kv-cache-dtype fp8 int8 --rows 32 128 --no-eager --steps 48 --pairs 1 --prompts 8192 "
        "--peer-rows --no-tune",
        f"{TINY} --kv-cache-dtype fp8 int8 --rows 2 --context 20 --no-eager --steps 8 --pairs 1 --prompts --peer-rows",
    ),
    Stage(
        "sampling", 30, "benchmarks.engine.sampling",
        "--device cuda --batch 1 32 256 --vocab 128256 --repeats 10 --cases temperature top_p top_k all",
        "--batch 2 --vocab 1000 --repeats 2 --prompt 40 --cases temperature top_p",
    ),
    Stage("loading", 45, "benchmarks.engine.loading", "--device cuda --turns 1", "--model tiny --turns 1"),
    Stage(
        "LLM", 45, "benchmarks.service.llm_and_http", "--parts llm --model llama-8b --jobs 512",
        f"--parts llm {TINY} --jobs 4 --scale 0.05",
    ),
    Stage(
        "HTTP", 70, "benchmarks.service.llm_and_http", "--parts http --model llama-8b --jobs 256",
        f"--parts http {TINY} --jobs 4 --scale 0.05 --concurrency 2",
    ),
    Stage(
        "quantized weights", 75, STEPS,
        "--model llama-8b --quantization int4 fp8 --rows 1 32 --no-eager --steps 48 --pairs 1 --prompts 8192 "
        "--peer-rows --no-tune",
        f"{TINY} --quantization int4 fp8 --rows 2 --context 20 --no-eager --steps 8 --pairs 1 --prompts 64 "
        "--prompt-tokens 64 --peer-rows",
    ),
    Stage(
        "codes and experts", 60, "benchmarks.kernels.gpu_ceilings", "--parts codes experts",
        "--device cpu --parts codes experts",
    ),
    Stage(
        "tests", 600, "pytest",
        f"tests/gpu {' '.join(KERNELS)} -n {{half}} -v --no-header -p no:cacheprovider -m 'parity or not parity'",
        "tests/gpu tests/unit/rank/test_budgets.py -k 'not captured' -n 0 -v --no-header -p no:cacheprovider",
    ),
)  # fmt: skip


class Run:
    """A run into a folder: its lines and its log, which are there as soon as they are known."""

    def __init__(self, out: Path, budget_s: float, *, dry: bool) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._out, self._dry = out, dry
        self._end_s = time.monotonic() + budget_s
        self._found = (out / "run.jsonl").open("w", encoding="utf-8")
        self._log = (out / "log.txt").open("w", encoding="utf-8")
        self.lines: list[dict[str, Any]] = []

    def close(self) -> None:
        self._found.close()
        self._log.close()

    def run(self, stages: Sequence[Stage]) -> bool:
        """Runs the stages; returns whether all have ended well."""
        for place, stage in enumerate(stages):
            is_last = place == len(stages) - 1
            left_s = self._end_s - time.monotonic() - (0 if is_last else RESERVE_S)
            if left_s < LEAST_S:
                self._ended(stage.name, "passed over", 0.0, f"{max(0.0, left_s):.0f} s of the budget were left for it")
                continue
            self._stage(stage, left_s if self._dry else min(stage.limit_s, left_s))
        return all(line["status"] == "ok" for line in self.lines if "status" in line and "name" not in line)

    def _stage(self, stage: Stage, limit_s: float) -> None:
        print(f"{stage.name} ...", file=sys.stderr, flush=True)
        self._log.write(f"==== {stage.name}\n")
        given = shlex.split(stage.dry if self._dry else stage.arguments)
        words = [word.format(out=self._out, half=max(1, len(os.sched_getaffinity(0)) // 2)) for word in given]
        began_s = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", stage.module, *words],
            cwd=ROOT, env=environment(self._dry), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        printed: list[str] = []
        reader = threading.Thread(target=self._read, args=(stage.name, process.stdout, printed), daemon=True)
        reader.start()
        try:
            outcome = "failed" if process.wait(limit_s) else "ok"
        except subprocess.TimeoutExpired:
            outcome = "over its limit"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what it started and left behind
            process.wait()
        reader.join(5)
        found = [line for line in self.lines if line["stage"] == stage.name]
        if outcome == "ok" and any(line.get("status") == "failed" for line in found):
            outcome = "failed"
        detail = said(printed) if outcome != "ok" or stage.module == "pytest" else f"{len(found)} lines"
        detail = {"over its limit": f"{limit_s:.0f} s; {detail}"}.get(outcome, detail)
        self._ended(stage.name, outcome, time.monotonic() - began_s, detail)

    def _read(self, name: str, output: IO[str], printed: list[str]) -> None:
        with output, suppress(ValueError):  # what outlives a killed stage may print when the run has ended
            for line in output:
                self._log.write(line)
                self._log.flush()
                if (found := _object(line)) is None:
                    printed.append(line.strip())
                else:
                    self._add({"stage": name, **found})

    def _ended(self, name: str, status: str, seconds: float, detail: str) -> None:
        self._add({"stage": name, "status": status, "seconds": round(seconds, 1), "detail": detail})
        print(f"{name}: {status}, {seconds:.0f} s; {detail}", file=sys.stderr, flush=True)

    def _add(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        self._found.write(json.dumps(line) + "\n")
        self._found.flush()


def environment(dry: bool) -> dict[str, str]:
    """The environment of stages."""
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    own = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "TANDEM_TEST_JSON_LINES": "1", "OMP_WAIT_POLICY": "passive"}
    return {**os.environ, **own, **({"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if dry else {})}


def said(printed: Sequence[str]) -> str:
    """The end of what a stage has printed, in one line: what tests counted, else the last line."""
    counts = [len([line for line in printed if re.search(rf"\b{word}\b", line)]) for word in OUTCOMES]
    if any(counts) and not re.search(r" in [\d.]+s", printed[-1] if printed else ""):  # the tests did not end
        return ", ".join(f"{count} {word.lower()}" for word, count in zip(OUTCOMES, counts, strict=True) if count)
    return next((line.strip("= ") for line in reversed(printed) if line), "")[:300]


OUTCOMES = ("PASSED", "FAILED", "ERROR", "SKIPPED")


def _object(line: str) -> dict[str, Any] | None:
    """The object that a line is in JSON."""
    with suppress(ValueError):
        found = json.loads(line) if line.startswith("{") else None
        return found if isinstance(found, dict) else None
    return None


def chosen(names: Sequence[str] | None) -> Iterator[Stage]:
    """The stages of those names, in their order; all of them without names."""
    known = [stage.name for stage in STAGES]
    for name in names or ():
        if name not in known:
            raise SystemExit(f"--only {name}: the stages are {', '.join(known)}")
    return (stage for stage in STAGES if not names or stage.name in names)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for what is found; made if it is missing")
    parser.add_argument("--budget", type=float, default=540.0, metavar="SECONDS", help="of the whole run (540)")
    parser.add_argument("--only", nargs="+", metavar="STAGE", help="these stages alone")
    parser.add_argument("--dry", action="store_true", help="small, on a CPU")
    options = parser.parse_args()
    stages = list(chosen(options.only))
    run = Run(options.out.absolute(), options.budget, dry=options.dry)
    try:
        is_well = run.run(stages)
    finally:
        run.close()
        text = "\n".join(table(run.lines)) + "\n"
        (options.out / "table.txt").write_text(text, encoding="utf-8")
        print(text, end="")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
