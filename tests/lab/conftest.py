"""Nodes of a lab, where this machine allows one. Where only that is refused tests are skipped; in CI nothing is."""

import os
from collections.abc import Iterator

import pytest

from tools.lab import Lab, refusal


@pytest.fixture(scope="package")
def lab() -> Iterator[Lab]:
    """Two nodes, a and b, for the tests of this folder, which leave them as they were."""
    why = refusal()
    if why is not None and "CI" not in os.environ:
        pytest.skip(f"no lab here: {why}")
    with Lab("a", "b") as lab:
        yield lab
