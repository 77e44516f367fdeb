"""Verbs are asked often here, in this process."""

from collections.abc import Iterator

import pytest

from tests.support.verbs import built_once


@pytest.fixture(autouse=True)
def _built_once() -> Iterator[None]:
    with built_once():
        yield
