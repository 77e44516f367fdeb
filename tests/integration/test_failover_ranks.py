"""No request is lost when processes die: each phase at least once, with real processes, and the requests that take most
with them: a grammar, random numbers with counts; test_adapters.py has an adapter. The point of each death is exact.
test_failover_pairs.py covers all pairs; tests/unit/cluster/group/test_failover.py has, without processes, the kinds
whose paths differ in the gateway alone.

One service for all of them, with two stages a group: the rank that dies is the last stage. one_service/ and
test_frozen_group.py lose ranks of TP. All requests go through Ray's object store here, as those do that are larger than
a message may be: a resume of 128 choices and 100,000 tokens of prompt is.
"""

from collections.abc import Iterator

import pytest

from tests.support.failover.kinds import KINDS, SAMPLED, STRUCTURED, Kind
from tests.support.failover.scene import TEST_S, Scene, failover_scene

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(TEST_S)]
COUNTED = Kind(
    "seeded, with penalties and log probabilities",
    {**SAMPLED, **KINDS["penalties"].changes, **KINDS["logprobs"].changes, "seed": 11},
)
"""What the next group has to take up besides the tokens: the place in the random numbers, and the counts."""


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with failover_scene(tmp_path_factory.mktemp("root"), "-pp", "2", most_by_value=0) as running:
        yield running


@pytest.mark.parametrize(
    ("kind", "death", "phase"),
    [
        (STRUCTURED, "last stage", "decode"),
        (COUNTED, "coordinator", "KV copy"),
        (KINDS["n = 4"], "rank 0", "prefill"),
        (KINDS["unseeded"], "drain", "decode"),
        (KINDS["non-streaming"], "out of memory", "decode"),
    ],
    ids=lambda value: value.name if isinstance(value, Kind) else value,
)
def test_no_request_is_lost(scene: Scene, kind: Kind, death: str, phase: str) -> None:
    print(scene.play(kind, death, phase))
