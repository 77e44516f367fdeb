"""Checks the archives of a release: metadata, contents, and that they serve where they are installed.

    make release-check               # of the commit as it is; ARGS="--only python3.11": one place
    make release VERSION=0.2.0       # does the same before it makes the tag

Each place is empty: a Python of this machine, and a Debian 13 tree. There torch and the wheel are installed as
docs/install.md says, `tandem serve demo` is started, asked and ended. A place that cannot be made here is said and is
no failure. What was said is kept in out/release.
"""

import argparse
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tools.release import ROOT, NotReleasable, build
from tools.release_archives import source_faults, tracked, twine_faults, wheel_faults
from tools.release_places import DebianTree, LocalPython, NotHereError, Place, plain_environment

OUT = ROOT / "out" / "release"
INSTALL_S, START_S, STOP_S = 3600, 300, 60
Say = Callable[[str], None]


def places() -> list[Place]:
    """The places that a release is tried in."""
    pythons = [LocalPython(name, OUT / name) for name in ("python3.11", "python3.13")]
    return [*pythons, DebianTree("trixie", OUT / "trixie")]


def faults_of(archives: Sequence[Path]) -> Iterator[str]:
    """Yields a line for all that is wrong with a wheel and an sdist themselves."""
    (wheel,) = (one for one in archives if one.suffix == ".whl")
    (source,) = (one for one in archives if one.name.endswith(".tar.gz"))
    yield from wheel_faults(wheel, tracked(ROOT))
    yield from source_faults(source, wheel)
    yield from twine_faults([wheel, source], OUT / "twine")


def tried(place: Place, wheel: Path, say: Say) -> None:
    """Installs and serves there. NotHereError, or NotReleasable with what failed."""
    began_s = time.monotonic()
    version = place.make([wheel, ROOT / "constraints.txt", ROOT / "tools" / "install_torch.py"])
    say(f"{place.name}: Python {version}, an empty environment")
    run(place, say, "python", "files/install_torch.py", "", "files/constraints.txt")
    run(
        place,
        say,
        "pip",
        "--disable-pip-version-check",
        "-qq",
        "install",
        "-c",
        "files/constraints.txt",
        f"files/{wheel.name}",
    )
    run(place, say, "tandem", "--version")
    run(place, say, "pip", "--disable-pip-version-check", "check")
    serve(place, say)
    say(f"{place.name}: `tandem serve demo` answered and ended ({time.monotonic() - began_s:.0f} s)")


def run(place: Place, say: Say, *words: str) -> None:
    """Runs a command there and says what it printed. NotReleasable when it fails."""
    say(f"$ {' '.join(words)}")
    done = subprocess.run(
        place.command(*words), env=plain_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False, timeout=INSTALL_S,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if not line.startswith("WARNING: ")]
    say("".join(f"  {line}\n" for line in lines).rstrip())
    if done.returncode:
        raise NotReleasable(f"{place.name}: {' '.join(words[:3])} ended with status {done.returncode}")


def serve(place: Place, say: Say) -> None:
    """Starts the demo there, asks it, and ends it by SIGINT; once more if it ended by itself, as Ray's processes may
    not start in time on busy cores. NotReleasable when it does not answer or end."""
    try:
        served(place, say)
    except EndedError as error:
        say(f"{error}; once more")
        served(place, say)


class EndedError(NotReleasable):
    """The service ended before it was ready."""


def served(place: Place, say: Say) -> None:
    """Starts the demo there, asks it, and ends it by SIGINT. NotReleasable when it does not answer or end."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    words = ("tandem", "serve", "demo", "--port", str(port))
    say(f"$ {' '.join(words)}")
    with tempfile.TemporaryFile("w+") as lines:
        process = subprocess.Popen(
            place.command(*words), env=plain_environment(), stdin=subprocess.DEVNULL, stdout=lines, stderr=lines
        )
        try:
            answer = asked(f"http://127.0.0.1:{port}", process)
            process.send_signal(signal.SIGINT)
            status = process.wait(STOP_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            kind = NotReleasable if process.poll() is None else EndedError
            raise kind(f"{place.name}: tandem serve: {error}") from error
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(STOP_S)
            lines.seek(0)
            say("".join(f"  {line}" for line in lines).rstrip())
    say(f"  asked what 2 + 3 is: {answer!r}")
    if status or "5" not in answer:
        raise NotReleasable(f"{place.name}: tandem serve ended with status {status}, its answer was {answer!r}")


def asked(url: str, process: "subprocess.Popen[bytes]") -> str:
    """The demo's answer, once it is ready. OSError when the service ends before, or is not ready in time."""
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            urllib.request.urlopen(f"{url}/readyz", timeout=5).close()
            break
        except OSError as error:
            if process.poll() is not None:
                raise OSError(f"it ended with status {process.returncode}") from error
            if time.monotonic() > deadline_s:
                raise OSError(f"it was not ready in {START_S} s") from error
            time.sleep(0.5)
    question = {"role": "user", "content": "What is 2 + 3?"}
    body = json.dumps({"model": "demo", "messages": [question], "max_tokens": 20, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def check_archives(archives: Sequence[Path], only: str | None = None) -> None:
    """Checks archives and prints what was done. NotReleasable with all that is wrong. only: the one place to try."""
    OUT.mkdir(parents=True, exist_ok=True)
    (wheel,) = (one for one in archives if one.suffix == ".whl")
    with (OUT / "check.txt").open("w") as record:

        def say(text: str) -> None:
            if text:
                print(text, flush=True)
                record.write(f"{text}\n")
                record.flush()

        if wrong := list(faults_of(archives)):
            raise NotReleasable("\n".join(wrong))
        say(f"{', '.join(one.name for one in archives)}: metadata and contents are right")
        verdicts = {place.name: _verdict(place, wheel, say) for place in places() if only is None or only in place.name}
        for name, verdict in verdicts.items():
            say(f"release: {name}: {verdict}")
    if failed := [name for name, verdict in verdicts.items() if verdict.startswith("failed")]:
        raise NotReleasable(f"it does not serve: {', '.join(failed)}")
    if not any(verdict == "answered" for verdict in verdicts.values()):
        raise NotReleasable("it was tried nowhere")


def _verdict(place: Place, wheel: Path, say: Say) -> str:
    try:
        tried(place, wheel, say)
    except NotHereError as why:
        return f"not run: {why}"
    except (NotReleasable, subprocess.SubprocessError, OSError) as error:
        return f"failed: {error}"
    return "answered"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", help="a part of the name of the one place to try, such as python3.11")
    wanted = parser.parse_args()
    try:
        check_archives(build(ROOT, OUT / "dist"), wanted.only)
    except NotReleasable as error:
        print(f"tandem: no release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
