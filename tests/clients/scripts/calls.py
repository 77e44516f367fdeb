"""Report of a client's calls: one line of JSON each, which tests/clients/__main__.py reads. Runs in the client's own
environment, without Tandem."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

URL = os.environ["TANDEM_URL"]
"""Base of the service, without /v1."""
OPENAI = f"{URL}/v1"
USER = [{"role": "user", "content": "Tell me a short story about a whale."}]


def say(**line: object) -> None:
    print("CALL " + json.dumps(line), flush=True)


def versions(*packages: str) -> None:
    """Tells the versions of what is tried here."""
    for package in packages:
        try:
            say(package=package, version=version(package))
        except PackageNotFoundError:
            say(package=package, version="absent")


@contextmanager
def call(name: str, whose: str = "ours", why: str = "") -> Iterator[None]:
    """A call that works. whose, why: whose fault it is if it does not, "ours", "client" or "model", and the reason."""
    started_s = time.monotonic()
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:300]
        say(call=name, works=False, whose=whose, reason=f"{why}: {reason}" if why else reason)
    else:
        say(call=name, works=True, s=round(time.monotonic() - started_s, 2))


@contextmanager
def refused(name: str, *words: str) -> Iterator[None]:
    """A call that must be refused by a status below 500 with an error that has each of the words."""
    with call(f"{name}: refused by name"):
        try:
            yield
        except Exception as error:
            status, said = getattr(error, "status_code", 0), str(error)
        else:
            raise AssertionError("it was accepted")
        assert 400 <= status < 500, f"status {status}: {said}"
        missing = [word for word in words if word not in said]
        assert not missing, f"{missing} not in {said}"
