"""No request is lost when a stage of a pipeline dies: the rest of the named cases of test_failover_ranks.py.

All requests go through Ray's object store here, as those do that are larger than a message may be: a resume of 128
choices and 100,000 tokens of prompt is.
"""

from collections.abc import Iterator

import pytest

from tests.support.failover.kinds import KINDS
from tests.support.failover.scene import TEST_S, Scene, failover_scene

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(TEST_S)]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with failover_scene(tmp_path_factory.mktemp("root"), "-pp", "2", most_by_value=0) as running:
        yield running


@pytest.mark.parametrize(
    ("kind", "death", "phase"),
    [
        ("logprobs", "last stage", "decode"),
        ("penalties", "last stage", "KV copy"),
        ("chat", "rank 0", "prefill"),
    ],
)
def test_no_request_is_lost(scene: Scene, kind: str, death: str, phase: str) -> None:
    print(scene.play(KINDS[kind], death, phase))
