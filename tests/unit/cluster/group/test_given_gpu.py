"""A rank's actor hands the rank the GPU that Ray has given to it, and it computes there."""

import signal
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import ray

from tandem.cluster.group import ray_ranks
from tandem.configs.bundled import DEMO_MODEL
from tandem.configs.schema import EngineSettings, ModelSettings
from tandem.workers.messages.handshake import RankSetup
from tandem.workers.rank import rank_server
from tandem.workers.rank.rank_server import RankServer


@pytest.mark.parametrize(("given", "gpu"), [({"GPU": ["3"], "TPU": []}, "3"), ({"GPU": []}, None), ({}, None)])
def test_the_actor_says_which_gpu(
    given: Mapping[str, Sequence[str]], gpu: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    for name in ("check_node", "open_log_of", "use_rays_titles"):
        monkeypatch.setattr(ray_ranks, name, lambda *_: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_accelerator_ids=lambda: given))
    monkeypatch.setattr(rank_server, "run_rank", lambda *_, **more: asked.append(more) or 0)
    facts: Any = SimpleNamespace(single_node=True)
    assert ray_ranks.RankActor().run(1, "tcp://somewhere", "secret", "g", facts) is False
    assert asked == [{"group": "g", "host": "127.0.0.1", "gpu": gpu}]


def test_the_rank_opens_that_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Opened(Exception):
        """Ends the set-up."""

    def opened(settings: EngineSettings, *asked: object) -> None:
        raise Opened(*asked)

    monkeypatch.setattr(rank_server, "open_platform", opened)
    settings = msgspec.msgpack.encode(EngineSettings(model=ModelSettings(model=str(DEMO_MODEL))))
    setup = RankSetup(settings=settings, world_size=1, master_address="127.0.0.1", master_port=None, ranks_on_node=4)
    with pytest.raises(Opened) as found:
        list(RankServer(2, lambda _: None, lambda _: None, gpu="3").take(setup))
    assert found.value.args == (2, 4, "3", None), "a rank that is no process counts no others"
