"""Tests of this folder need a CUDA device: `make gpu`. Elsewhere they are skipped."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.tiny_models import made_once


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.cuda)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a tiny model to its folder."""
    return made_once(tmp_path_factory.mktemp("tiny-models"))
