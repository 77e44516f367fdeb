"""Do the tests notice? `make mutate ARGS="MODULE ..."`: small defects, one at a time, and the tests of their module.

mutmut's operators make them (mutants.py). Its runner needs a package of its own copying and naming; here each mutant is
written into a copy of the tree (links kept), and a forked child, which has all libraries loaded already, runs the
module's tests there, those that reach the changed line first, up to the first failure: the checkout is never touched,
processes that tests start see the mutant too, and it costs little more than these tests. mutants.toml names each
module's file and tests, and the mutants that no test can notice, with the reason; they are not run (--doubt runs them).

Results lie under out/mutate and are taken up again as long as module and tests are the same. Status 1: fewer than
95 % of the mutants were caught. 2: the tests fail without any.
"""

import argparse
import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NoReturn

import pytest

from tools.mutants import Identity, Key, Mutant, mutants_of
from tools.reached_lines import Observer, ReachingFirst

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_name("mutants.toml")
RESULTS = ROOT / "out" / "mutate"
ENOUGH = 0.95
PATIENCE, LEAST_PATIENCE_S = 4.0, 20.0
"""A test fails, or a child is ended, that takes so many times what the slowest test, or all tests, take without a
mutant."""
CAUGHT, ENDED, SURVIVED = "caught", "ended", "SURVIVED"
"""A test failed; the tests took far too long, or crashed; nothing happened."""


@dataclass
class Module:
    """One row of the table, its mutants, and what became of them."""

    name: str
    path: Path
    text: str
    tests: list[str]
    without: str
    mutants: list[Mutant] = field(default_factory=list)
    equivalent: dict[Identity, str] = field(default_factory=dict)
    known: dict[Key, str] = field(default_factory=dict)
    seconds: float = 0.0
    slowest_s: float = 0.0
    lines: dict[str, list[int]] = field(default_factory=dict)
    """By test, the lines that it runs."""

    @cached_property
    def stamp(self) -> str:
        """Module, its tests and what lies beside them: a result holds for these."""
        digest = hashlib.sha256(self.text.encode() + " ".join([*self.tests, self.without]).encode())
        files = [ROOT / test for test in self.tests]
        for path in sorted(
            {*files, *(path for file in files for path in file.parent.glob("*.py") if "test_" not in path.name)}
        ):
            digest.update(path.read_bytes())
        return digest.hexdigest()

    def count(self, *ends: str | None) -> int:
        return sum(self.known.get(m.key) in ends for m in self.mutants if m.identity not in self.equivalent)


# ---- running them ----


class Copy:
    """The tree without what git ignores, in a temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
        ).stdout
        for name in filter(None, listed.decode().split("\0")):
            if (ROOT / name).is_symlink() or (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)

    def hold(self, module: Module, text: str) -> None:
        (self.folder / module.path).write_text(text)
        for compiled in (self.folder / module.path.parent / "__pycache__").glob(f"{module.path.stem}.*"):
            compiled.unlink()


@dataclass
class Child:
    """A run of one module's tests in one copy, in a process group of its own."""

    copy: Copy
    module: Module
    mutant: Mutant | None
    began_s: float = field(default_factory=time.monotonic)
    pid: int = 0
    log: Path = Path()

    @property
    def notes(self) -> Path:
        """What a run without a mutant has found out."""
        return self.copy.folder.with_suffix(".json")

    def start(self) -> "Child":
        self.copy.hold(self.module, self.module.text if self.mutant is None else self.mutant.text)
        self.log = self.copy.folder.with_suffix(".log")
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            self._run()
        return self

    def _run(self) -> NoReturn:
        status = 3
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.chdir(self.copy.folder)
            descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            for standard in (1, 2):
                os.dup2(descriptor, standard)
            sys.path[0] = os.environ["PYTHONPATH"] = str(self.copy.folder)
            sys.dont_write_bytecode = self.mutant is not None
            status = _pytest(self.module, self.mutant, self.notes)
        finally:
            sys.stdout.flush()
            os._exit(status)

    def ended(self, patience_s: float) -> int | None:
        """pytest's status, or -1 when it took too long or crashed; None while it runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid and time.monotonic() - self.began_s > patience_s:
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            return -1
        if not pid:
            return None
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # what tests that failed have left
        return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else -1


def _pytest(module: Module, mutant: Mutant | None, notes: Path) -> int:
    from hypothesis import HealthCheck, Phase, settings

    # the usual examples; a failing one is enough, the smallest is not needed
    quick = settings(
        settings.get_profile("default"), deadline=None, derandomize=True, database=None, print_blob=False,
        suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate],
    )  # fmt: skip
    settings.register_profile("mutate", quick)
    arguments = ["-x", "-q", "--no-header", "--durations=0", "--hypothesis-profile=mutate", "-W", "ignore"]
    arguments.append(f"--timeout={max(LEAST_PATIENCE_S, PATIENCE * module.slowest_s) if mutant else 600}")
    if module.without:
        arguments += ["-k", f"not ({module.without})"]
    plugin = Observer(module.path, notes) if mutant is None else ReachingFirst(module.lines, mutant.number)
    status = int(pytest.main([*arguments, *module.tests], [plugin]))
    wanted = os.path.realpath(module.path)
    loaded = {os.path.realpath(file) for m in list(sys.modules.values()) if (file := getattr(m, "__file__", None))}
    if status == 0 and wanted not in loaded:
        print(f"these tests never load {module.path}")
        return 3
    return status


class Run:
    """All of the chosen modules' mutants, `jobs` at a time."""

    def __init__(self, modules: list[Module], jobs: int, folder: Path) -> None:
        self.modules = {module.name: module for module in modules}
        self.jobs = jobs
        self.copies = [Copy(folder / f"tree{i}") for i in range(jobs)]
        self.running: list[Child] = []

    def check_tests(self) -> None:
        """Without a mutant all tests pass; that also says how long they take, and what Observer notes."""
        for module in self.modules.values():
            for copy in self.copies:  # in each, so that all is compiled in each
                child = Child(copy, module, None).start()
                while (status := child.ended(3600.0)) is None:
                    time.sleep(0.01)
                module.seconds = time.monotonic() - child.began_s
                if status:
                    print(child.log.read_text())
                    print(f"mutate: {module.name}: its tests fail without any mutant")
                    raise SystemExit(2)
            notes = json.loads(child.notes.read_text())
            module.lines, module.slowest_s = notes["lines"], notes["slowest_s"]
            for name in notes["libraries"]:  # once here instead of in each child
                with suppress(Exception):  # one that loads only after others
                    importlib.import_module(name)
            print(
                f"mutate: {module.name}: {len(module.mutants)} mutants, tests take {module.seconds:.1f} s", flush=True
            )

    def run(self, mutants: list[Mutant]) -> None:
        began_s, left = time.monotonic(), list(mutants)
        while left or self.running:
            while left and len(self.running) < self.jobs:
                free = next(copy for copy in self.copies if all(child.copy is not copy for child in self.running))
                mutant = left.pop(0)
                self.running.append(Child(free, self.modules[mutant.module], mutant).start())
            for child in list(self.running):
                module = child.module
                status = child.ended(PATIENCE * max(LEAST_PATIENCE_S, module.seconds))
                if status is None:
                    continue
                self.running.remove(child)
                child.copy.hold(module, module.text)
                self._note(child, status, len(mutants) - len(left) - len(self.running), len(mutants), began_s)
            time.sleep(0.005)

    def _note(self, child: Child, status: int, done: int, total: int, began_s: float) -> None:
        mutant = child.mutant
        assert mutant is not None
        if status not in (-1, 0, 1, 2):
            print(child.log.read_text())
            raise SystemExit(f"mutate: pytest ended with {status}")
        child.module.known[mutant.key] = end = {0: SURVIVED, -1: ENDED}.get(status, CAUGHT)
        write_results(child.module)
        left_s = (time.monotonic() - began_s) / done * (total - done)
        took_s = time.monotonic() - child.began_s
        line = str(mutant) if end == SURVIVED else str(mutant).partition("\n")[0]
        print(f"[{done}/{total}, {left_s / 60:.1f} min left] {end} in {took_s:.1f} s: {line}", flush=True)

    def close(self) -> None:
        for child in self.running:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


# ---- the table and what is known ----


def read_table(names: list[str]) -> list[Module]:
    table = tomllib.loads(TABLE.read_text())
    unknown = set(names) - set(table["modules"])
    if unknown:
        raise SystemExit(f"mutate: no module {', '.join(sorted(unknown))}; there are {', '.join(table['modules'])}")
    modules = []
    for name, row in table["modules"].items():
        if names and name not in names:
            continue
        path = Path(row["path"])
        text = (ROOT / path).read_text()
        module = Module(name, path, text, row["tests"], row.get("without", ""))
        module.mutants = mutants_of(name, text)
        there = {mutant.identity for mutant in module.mutants}
        for entry in table.get("equivalent", []):
            if entry["module"] != name:
                continue
            identity = (entry["function"], entry["line"], entry["mutant"])
            module.equivalent[identity] = entry["reason"]
            if identity not in there:
                print(f"mutate: {name} has no such mutant any more: {entry['function']}: {entry['mutant']}")
        modules.append(module)
    return modules


def read_results(module: Module, keep_caught: bool) -> None:
    """What was found before: all of it for the same module and tests; keep_caught: else what was caught."""
    with suppress(FileNotFoundError, ValueError):
        saved = json.loads((RESULTS / f"{module.name}.json").read_text())
        same = saved["stamp"] == module.stamp
        module.known = {
            tuple(key): end for *key, end in saved["known"] if same or (keep_caught and end in (CAUGHT, ENDED))
        }


def write_results(module: Module) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    saved = {"stamp": module.stamp, "known": [[*key, end] for key, end in module.known.items()]}
    path = RESULTS / f"{module.name}.json"
    path.with_suffix(".new").write_text(json.dumps(saved, indent=0))
    path.with_suffix(".new").replace(path)


def report(modules: list[Module]) -> int:
    columns = ("mutants", CAUGHT, ENDED, "survived", "equivalent", "not run")
    print(f"\n{'module':16}" + "".join(f"{column:>12}" for column in columns))
    caught = ran = 0
    for module in modules:
        counts = [module.count(CAUGHT), module.count(ENDED), module.count(SURVIVED)]
        unknown = module.count(None)
        numbers = [len(module.mutants), *counts, len(module.mutants) - sum(counts) - unknown, unknown]
        print(f"{module.name:16}" + "".join(f"{number:12}" for number in numbers))
        caught, ran = caught + counts[0] + counts[1], ran + sum(counts)
    for module in modules:
        for mutant in module.mutants:
            end, is_equivalent = module.known.get(mutant.key), mutant.identity in module.equivalent
            if is_equivalent and end in (CAUGHT, ENDED):
                print(f"mutate: named equivalent, but {end}: {mutant}")
            elif not is_equivalent and end == SURVIVED:
                print(f"survived: {mutant}")
    share = caught / ran if ran else 1.0
    print(f"mutate: {caught} of {ran} caught, {share:.1%} (at least {ENOUGH:.0%} are wanted)")
    return int(share < ENOUGH)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="names in tools/mutants.toml (all)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (2)")
    parser.add_argument("--sample", type=int, help="only so many, drawn at random; says how long all take")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--again", action="store_true", help="tests are new: what was caught before counts as caught")
    parser.add_argument("--doubt", action="store_true", help="run those that are named equivalent too")
    parser.add_argument("--list", action="store_true", help="only say which there are")
    options = parser.parse_args()
    modules = read_table(options.modules)
    for module in modules:
        read_results(module, options.again)
    wanted = [
        mutant
        for module in modules
        for mutant in module.mutants
        if (options.doubt or mutant.identity not in module.equivalent) and mutant.key not in module.known
    ]
    total = len(wanted)
    if options.sample is not None:
        wanted = random.Random(options.seed).sample(wanted, min(options.sample, len(wanted)))
    if options.list:
        for mutant in wanted:
            print(mutant)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("mutate: ended; what was found is kept"))
    names = {mutant.module for mutant in wanted}
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive")
    with tempfile.TemporaryDirectory(prefix="tandem-mutate-") as folder:
        run = Run([module for module in modules if module.name in names], options.jobs if names else 0, Path(folder))
        try:
            run.check_tests()
            began_s = time.monotonic()
            run.run(wanted)
            if len(wanted) < total:
                hours = (time.monotonic() - began_s) / max(1, len(wanted)) * total / 3600
                print(
                    f"mutate: {total} like these {len(wanted)} take about {hours:.1f} h with {options.jobs} at a time"
                )
        finally:
            run.close()
    return report(modules)


if __name__ == "__main__":
    raise SystemExit(main())
