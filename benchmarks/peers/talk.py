"""What runs in a peer's process: an engine that takes commands, a JSON line each, from standard input.

Every peer has a Python of its own, so this file and those that use it import nothing of Tandem, torch or benchmarks.
Commands: {"do": "first", "jobs": [[prompt, output_len], ..]} computes until each job has a token and answers the
seconds; {"do": "steps", "count": n} computes n more and answers the times of each; {"do": "all", "jobs": .., "most": m}
computes all jobs, at most m at once; {"do": "memory"} answers bytes. What a library prints goes to standard error.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

Prompt = Sequence[int]


class Stepped(Protocol):
    """An engine that computes step by step, greedily, whatever ends of text come."""

    def add(self, job: int, prompt: Prompt, output_len: int) -> None: ...

    def step(self) -> dict[int, int]:
        """Computes a step and returns how many tokens each job got."""
        ...


class Jobs:
    """The jobs of one engine."""

    def __init__(self, engine: Stepped) -> None:
        self._engine = engine
        self._given = 0
        self._left: dict[int, int] = {}
        """Tokens that are to come, by job."""

    def first(self, jobs: Sequence[tuple[Prompt, int]]) -> dict[str, float]:
        """Returns seconds until each of the jobs has a token, by the wall and of the process's CPU time."""
        began_s, cpu_s = time.perf_counter(), time.process_time()
        waiting = {self._add(*job) for job in jobs}
        while waiting:
            waiting -= self._step().keys()
        return {"wall_s": time.perf_counter() - began_s, "cpu_s": time.process_time() - cpu_s}

    def steps(self, count: int) -> dict[str, list[float]]:
        """Returns seconds of each of `count` steps, in each of which all jobs get a token."""
        walls, cpus = [], []
        for _ in range(count):
            running = len(self._left)
            began_s, cpu_s = time.perf_counter(), time.process_time()
            got = self._step()
            while not got:
                got = self._step()
            walls.append(time.perf_counter() - began_s)
            cpus.append(time.process_time() - cpu_s)
            assert list(got.values()) == [1] * running, (got, running)
        return {"wall_s": walls, "cpu_s": cpus}

    def all(self, jobs: Sequence[tuple[Prompt, int]], most: int) -> dict[str, float]:
        """Returns seconds until all of the jobs are complete, of which at most `most` are at work."""
        began_s, cpu_s = time.perf_counter(), time.process_time()
        waiting = list(jobs)[::-1]
        while waiting or self._left:
            while waiting and len(self._left) < most:
                self._add(*waiting.pop())
            self._step()
        return {"wall_s": time.perf_counter() - began_s, "cpu_s": time.process_time() - cpu_s}

    def end(self) -> None:
        """Computes what is left of all jobs."""
        while self._left:
            self._step()

    def _add(self, prompt: Prompt, output_len: int) -> int:
        self._given += 1
        self._left[self._given] = output_len
        self._engine.add(self._given, prompt, output_len)
        return self._given

    def _step(self) -> dict[int, int]:
        got = {job: count for job, count in self._engine.step().items() if count}
        for job, count in got.items():
            self._left[job] -= count
            if self._left[job] <= 0:
                del self._left[job]
        return got


def memory() -> dict[str, int]:
    """Bytes of this process: the most that were resident, and those that are its own now."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        lines = [line.split() for line in file]
    private = sum(int(line[1]) * 1024 for line in lines if line[0].startswith("Private_"))
    return {"peak_bytes": peak, "private_bytes": private}


def serve(make: Callable[[Any], Stepped]) -> None:
    """Makes the engine of the options in argv[1], JSON, says {"ready": true}, and answers until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    jobs = Jobs(make(json.loads(sys.argv[1])))

    def answer(words: object) -> None:
        answers.write(json.dumps(words) + "\n")
        answers.flush()

    answer({"ready": True})
    for line in sys.stdin:
        command = json.loads(line)
        match command.pop("do"):
            case "memory":
                answer(memory())
            case "end":
                answer(jobs.end())
            case name:
                answer(getattr(jobs, name)(**command))
