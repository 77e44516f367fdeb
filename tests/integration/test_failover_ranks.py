"""No request is lost when processes die: each kind of request, each kind of death and each phase at least once, with
real processes. The point of each death is exact. `make chaos` covers all pairs (test_failover_pairs.py), and kinds here
whose paths differ in the gateway alone, which tests/unit/cluster/group/test_failover.py has without processes."""

from collections.abc import Iterator

import pytest

from tests.support.failover.kinds import KINDS, STRUCTURED
from tests.support.failover.scene import TEST_S, Scene, failover_scene

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(TEST_S)]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with failover_scene(tmp_path_factory.mktemp("root"), "-tp", "2") as running:
        yield running


@pytest.mark.parametrize(
    ("kind", "death", "phase"),
    [
        (STRUCTURED.name, "rank", "decode"),
        pytest.param("stop string", "coordinator", "decode", marks=pytest.mark.chaos),
        ("LoRA", "rank", "adapter load"),
        pytest.param("split UTF-8", "rank 0", "decode", marks=pytest.mark.chaos),
        ("n = 4", "rank 0", "prefill"),
        ("seeded", "coordinator", "KV copy"),
        ("unseeded", "drain", "decode"),
        ("non-streaming", "out of memory", "decode"),
        pytest.param("include_usage", "coordinator", "prefill", marks=pytest.mark.chaos),
    ],
)
def test_no_request_is_lost(scene: Scene, kind: str, death: str, phase: str) -> None:
    print(scene.play(STRUCTURED if kind == STRUCTURED.name else KINDS[kind], death, phase))
