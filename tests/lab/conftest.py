"""Nodes of a lab, where this machine allows one. Where it refuses, every test here is skipped; a program that a lab
lacks is a reason for that too, but in CI, where it is a failure."""

import os
from collections.abc import Iterator

import pytest

from tools.lab import Lab, lack, refusal


@pytest.fixture(scope="session", autouse=True)
def allowed() -> None:
    """Before any test here, and what it is given."""
    if (why := lack()) is not None:
        (pytest.fail if "CI" in os.environ else pytest.skip)(f"no lab here: {why}")
    if (why := refusal()) is not None:
        pytest.skip(f"no lab here: {why}")


@pytest.fixture(scope="package")
def lab(allowed: None) -> Iterator[Lab]:
    """Two nodes, a and b, for the tests of this folder, which leave them as they were."""
    with Lab("a", "b") as lab:
        yield lab
