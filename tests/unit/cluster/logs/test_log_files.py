"""Log files: one for each process, bounded, the last runs kept; how processes of others have ended."""

import asyncio
import gc
import io
import json
import logging
import logging.config
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from unittest.mock import Mock

import pytest
from ray._common.formatters import JSONFormatter

from tandem.cluster.cli.verbs.serve import open_log_of_run
from tandem.cluster.logs import log_files
from tandem.cluster.logs.log_files import (
    FILE_BYTES,
    KEPT_RUNS,
    LOGGERS,
    OLD_FILES,
    REQUESTS,
    LogPlace,
    is_written,
    open_log,
    open_requests_log,
)
from tandem.cluster.process import exit_watch
from tandem.cluster.process.exit_watch import ExitWatch, ended_words, oom_kills
from tandem.cluster.wire.service_facts import ServiceFacts, open_log_of
from tandem.configs.errors import SettingsError
from tandem.configs.schema import LogSettings

log = logging.getLogger("tandem.test")


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Takes away what a test adds to the loggers."""
    factory = logging.getLogRecordFactory()
    names = (*LOGGERS, REQUESTS)
    before = {name: (list(logging.getLogger(name).handlers), logging.getLogger(name).level) for name in names}
    yield
    logging.setLogRecordFactory(factory)
    logging.getLogger(REQUESTS).propagate = True
    for name, (kept, level) in before.items():
        logger = logging.getLogger(name)
        for handler in set(logger.handlers) - set(kept):
            logger.removeHandler(handler)
            handler.close()
        logger.setLevel(level)


def test_a_process_writes_a_private_file_of_its_own_from_a_level_on(tmp_path: Path) -> None:
    open_log(tmp_path / "run", "group-a", "info")
    log.debug("hidden")
    log.info("shown")
    logging.getLogger("ray.serve.tandem").warning("shown too")
    logging.getLogger("ray.serve").error("not ours")
    lines = (tmp_path / "run" / "group-a.log").read_text().splitlines()
    assert [line.partition(": ")[2] for line in lines] == ["shown", "shown too"]
    assert f"INFO {os.getpid()} tandem.test" in lines[0]
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700


def test_lines_as_json_are_an_object_each(tmp_path: Path) -> None:
    """Their names are those of Ray's own JSON; what is given as `extra` is fields, a traceback one of them."""
    open_log(tmp_path / "run", "group-a", "debug", "json")
    began_s = time.time()
    log.info("two\nlines of %s", '"words"')
    log.warning("with fields", extra={"request_id": "r1", "tokens": 3, "path": Path("/x")})
    try:
        raise KeyError("missing")
    except KeyError:
        log.exception("it failed")
    first, second, third = map(json.loads, (tmp_path / "run" / "group-a.log").read_text().splitlines())
    assert first.keys() == {
        *("asctime", "levelname", "message", "name", "filename", "lineno", "process", "timestamp_ns")
    }
    said = JSONFormatter().format(logging.makeLogRecord({"msg": "x"}))
    assert {*json.loads(said)} - {"timestamp_ns"} <= first.keys(), "Ray has no other words"
    assert first["message"] == 'two\nlines of "words"' and first["levelname"] == "INFO"
    assert (first["name"], first["filename"], first["process"]) == ("tandem.test", "test_log_files.py", os.getpid())
    assert began_s <= first["timestamp_ns"] / 1e9 <= time.time()
    assert datetime.fromisoformat(first["asctime"]).timestamp() == pytest.approx(began_s, abs=5)
    assert (second["request_id"], second["tokens"], second["path"]) == ("r1", 3, "/x")
    assert third["exc_text"].startswith("Traceback") and third["exc_text"].endswith("KeyError: 'missing'")


def test_messages_of_exceptions_are_hidden_in_json_too(tmp_path: Path) -> None:
    place = LogPlace(base=str(tmp_path), form="json")
    open_log_of(ServiceFacts(single_node=True, device="cpu", logs=place), "gateway-a")
    try:
        json.loads("my secret plan")
    except ValueError:
        log.exception("request %s failed", "r1")
    (file,) = tmp_path.rglob("gateway-a.log")
    (line,) = file.read_text().splitlines()
    assert "secret" not in line and "JSONDecodeError" in json.loads(line)["exc_text"]


def test_lines_about_requests_are_in_a_file_of_their_own(tmp_path: Path) -> None:
    """So that many of them push none of the others out; --log-level is for the others."""
    open_log(tmp_path / "run", "gateway-a", "warning")
    open_requests_log(tmp_path / "run", "requests-a")
    logging.getLogger(REQUESTS).info("an answer")
    log.info("hidden")
    assert (tmp_path / "run" / "requests-a.log").read_text().endswith("tandem.requests: an answer\n")
    assert (tmp_path / "run" / "gateway-a.log").read_text() == ""
    assert is_written(tmp_path / "run" / "requests-a.log")


def test_a_traceback_is_whole_where_print_is_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray Serve's `print` in replicas writes the tuple of its arguments to files, and logging prints tracebacks."""
    real = print
    monkeypatch.setattr("builtins.print", lambda *objects, **options: real(objects, **options))
    open_log(tmp_path / "run", "group-a", "info")
    try:
        raise KeyError("missing")
    except KeyError:
        log.exception("it failed")
    text = (tmp_path / "run" / "group-a.log").read_text()
    assert "it failed\nTraceback (most recent call last):\n  File " in text and text.endswith("KeyError: 'missing'\n")


def test_no_message_of_an_exception_is_shown_by_a_process_that_serves(tmp_path: Path) -> None:
    """A handler that fails in a way that nobody foresaw may quote the prompt, and so may what asyncio says of it."""
    prompt = "my secret plan"
    console = io.StringIO()
    handler = logging.StreamHandler(console)
    logging.getLogger().addHandler(handler)
    try:
        open_log_of(ServiceFacts(single_node=True, device="cpu", logs=LogPlace(base=str(tmp_path))), "gateway-a")
        open_log_of(ServiceFacts(single_node=True, device="cpu", logs=None), "gateway-a")  # is hidden once

        def read(body: str) -> None:
            try:
                json.loads(body)
            except ValueError as error:
                error.add_note(body)
                both = ExceptionGroup(body, [KeyError(body), OwnError(body)])
                raise both from error

        try:
            read(prompt)
        except ExceptionGroup:
            log.exception("request %s failed", "r1")

        async def lost() -> None:
            asyncio.get_running_loop().call_soon(read, prompt)
            task = asyncio.create_task(asyncio.to_thread(read, prompt), name="reader")
            await asyncio.wait([task])
            del task
            gc.collect()

        asyncio.run(lost())
    finally:
        logging.getLogger().removeHandler(handler)
    (file,) = tmp_path.rglob("gateway-a.log")
    for text in (file.read_text(), console.getvalue()):
        assert prompt not in text
        assert "request r1 failed\nTraceback (most recent call last, without messages):\n  File " in text
        assert f'File "{__file__}", line ' in text and ", in read\n" in text
        for kind in ("json.decoder.JSONDecodeError\nwhich led to:", "ExceptionGroup", "KeyError", "OwnError"):
            assert kind in text, text
    assert "Task exception was never retrieved" in console.getvalue()
    assert "Exception in callback" in console.getvalue()


class OwnError(Exception):
    """An exception of a module of its own."""


def test_a_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "FILE_BYTES", 4096)
    open_log(tmp_path / "run", "gateway-a", "info")
    for _ in range(400):
        log.info("x" * 100)
    files = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert files == ["gateway-a.log", *(f"gateway-a.log.{n}" for n in range(1, OLD_FILES + 1))]
    assert all(path.stat().st_size <= 4096 for path in (tmp_path / "run").iterdir()) and FILE_BYTES >= 2**20


def test_lines_are_written_behind_a_configuration_that_closes_all_handlers(tmp_path: Path) -> None:
    """As uvicorn's, and Serve's."""
    handler = open_log(tmp_path / "run", "gateway-a", "info")
    log.info("before")
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})
    log.info("after")
    (file,) = (tmp_path / "run").iterdir()
    assert [line.rpartition(" ")[2] for line in file.read_text().splitlines()] == ["before", "after"]
    handler.close()


def test_the_last_runs_are_kept_and_none_that_a_process_writes(tmp_path: Path) -> None:
    for number in range(KEPT_RUNS + 5):
        run = tmp_path / f"run-20260101-00000{number % 10}-{number}"
        run.mkdir()
        (run / "launcher.log").write_text("old")
        os.utime(run, (number, number))
    other = tmp_path / "not a run"
    other.mkdir()
    oldest = tmp_path / "run-20260101-000000-0"
    script = "import sys; from pathlib import Path; from tandem.cluster.logs.log_files import LogFile; "
    script += "handler = LogFile(Path(sys.argv[1])); print('open', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", script, str(oldest / "launcher.log")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == b"open\n"
        os.utime(oldest, (0, 0))
        open_log(tmp_path / "run-20260102-000000-1", "launcher", "info")
        left = {path.name for path in tmp_path.iterdir()}
        assert len(left) == KEPT_RUNS + 2 and {oldest.name, other.name, "run-20260102-000000-1"} <= left
        assert "run-20260101-000001-1" not in left and "run-20260101-000004-14" in left
        writer.communicate()
    assert not is_written(oldest / "launcher.log")


def test_files_of_groups_that_have_ended_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "MOST_FILES", 3)
    open_log(tmp_path / "serve-00", "group-mine", "info")
    os.utime(tmp_path / "serve-00" / "group-mine.log", (0, 0))
    for number in range(1, 6):
        file = tmp_path / "serve-00" / f"group-{number}.log"
        file.write_text("of one that has ended")
        os.utime(file, (number, number))
    log_files.remove_old(tmp_path / "serve-00")
    assert {path.name for path in (tmp_path / "serve-00").iterdir()} == {
        "group-mine.log", "group-3.log", "group-4.log", "group-5.log"
    }  # fmt: skip


def test_where_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert LogPlace(run="run-1").folder("ab") == tmp_path / "tandem" / "logs" / "run-1"
    assert LogPlace(base="/logs").folder("ab") == Path("/logs/serve-ab")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert LogPlace().folder("ab") == Path.home() / ".local" / "state" / "tandem" / "logs" / "serve-ab"
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError))  # as in a container whose user has no entry
    assert LogPlace().folder("ab").parent == Path(tempfile.gettempdir()) / f"tandem-state-{os.getuid()}" / "logs"


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("no folder")
    bad = str(tmp_path / "file")
    with pytest.raises(SettingsError, match=r"^--log-dir: .*file cannot be written: Not a directory"):
        open_log_of_run(LogSettings(dir=bad))
    monkeypatch.setenv("XDG_STATE_HOME", bad)
    assert open_log_of_run(LogSettings()) is None
    assert "there are no log files" in capsys.readouterr().err
    facts = ServiceFacts(single_node=True, device="cpu", service_id="ab", logs=LogPlace(base=bad))
    open_log_of(facts, "group-a")  # goes on without
    open_log_of(ServiceFacts(single_node=True, device="cpu", logs=None), "group-a")


def test_a_crash_of_the_interpreter_is_in_the_file(tmp_path: Path) -> None:
    script = f"""
import ctypes, logging
from pathlib import Path
from tandem.cluster.logs.log_files import open_log
open_log(Path({str(tmp_path)!r}) / "run", "rank-g-0", "info")
ctypes.string_at(0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in (tmp_path / "run" / "rank-g-0.log").read_text()


def test_a_crash_behind_rotations_is_in_the_newest_file(tmp_path: Path) -> None:
    """Its descriptor would else be that of a file which was renamed, or removed."""
    script = f"""
import ctypes, logging
from pathlib import Path
from tandem.cluster.logs import log_files
log_files.FILE_BYTES = 300
log_files.open_log(Path({str(tmp_path)!r}) / "run", "rank-g-0", "info")
for i in range(40):
    logging.getLogger("tandem.test").info("line %d", i)
ctypes.string_at(0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGSEGV, done.stderr
    files = {path.name: path.read_text() for path in (tmp_path / "run").iterdir()}
    assert sorted(files) == ["rank-g-0.log", "rank-g-0.log.1", "rank-g-0.log.2"]
    assert [name for name, text in files.items() if "Segmentation fault" in text] == ["rank-g-0.log"]
    newest = files["rank-g-0.log"]
    assert newest.index("line 39") < newest.index("Segmentation fault"), "behind the last line"


def test_a_forked_process_writes_behind_what_was_rotated_meanwhile(tmp_path: Path) -> None:
    """As the reaper does, whose launcher rotates; and renames nothing that is newer than its own file."""
    script = f"""
import logging, os
from pathlib import Path
from tandem.cluster.logs import log_files
log_files.FILE_BYTES = 300
log_files.open_log(Path({str(tmp_path)!r}) / "run", "launcher", "info")
log = logging.getLogger("tandem.launcher")
reads, writes = os.pipe()
if not (child := os.fork()):
    os.read(reads, 1)
    log.info("last words")
    os._exit(0)
for i in range(14):
    log.info("line %02d", i)
os.write(writes, b"x")
os.waitpid(child, 0)
log.info("the launcher's own")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    run = tmp_path / "run"
    written = [run / f"launcher.log{end}" for end in (".2", ".1", "")]
    lines = [line.partition("launcher: ")[2] for path in written for line in path.read_text().splitlines()]
    assert lines[-3:] == ["line 13", "last words", "the launcher's own"]
    numbers = [line for line in lines if line.startswith("line ")]
    assert numbers == sorted(numbers) and len(numbers) > 6


def test_a_file_that_was_removed_is_made_anew(tmp_path: Path) -> None:
    open_log(tmp_path / "run", "group-a", "info")
    (tmp_path / "run" / "group-a.log").unlink()
    log.info("seen")
    assert "seen" in (tmp_path / "run" / "group-a.log").read_text()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV, 7])
def test_how_a_process_has_ended_is_known_where_the_kernel_tells(
    how: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = ExitWatch()
    script = (
        f"import os; input(); os._exit({how})" if how == 7 else f"import os; input(); os.kill(os.getpid(), {how:d})"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE)
    watch.watch(process.pid)
    assert watch.how_it_ended(process.pid) is None, "it runs"
    process.communicate(b"\n")
    wanted = "exited with status 7" if how == 7 else f"was killed by {signal.Signals(how).name}"
    assert watch.how_it_ended(process.pid) in (wanted, None)  # None: a kernel before 6.15
    (vmstat := tmp_path / "vmstat").write_text(f"nr_free 1\noom_kill {oom_kills() + 2}\n")
    monkeypatch.setattr(exit_watch, "VMSTAT", vmstat)
    of_memory = f"{wanted} (while it ran, the kernel has killed 2 for lack of memory)"
    assert watch.how_it_ended(process.pid) in (of_memory if how == signal.SIGKILL else wanted, None)
    assert ended_words(process.returncode) == wanted
    watch.watch(process.pid)  # has ended; nothing is known of one that was not watched
    watch.close()
    assert watch.how_it_ended(process.pid) is None
