"""Groups that calls do not reach: Serve's endless tries are held, and the requests end with an error."""

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from ray.serve.request_router import RequestRouter

from tandem.cluster.gateway.generation.part import RequestPart
from tandem.cluster.gateway.generation.serve_dispatch import UNREACHED_S, ServeDispatch
from tandem.cluster.routing.route_hint import hint_of
from tandem.cluster.routing.router import serve_router
from tandem.cluster.routing.router.serve_router import GroupRouter
from tandem.cluster.routing.router_view import RouterView, router_view
from tandem.cluster.routing.unreached_groups import AGAIN_S, MOST_PAUSE_S, UnreachedGroups
from tandem.workers.messages.request import GenerationRequest, SamplingParams
from tests.support.fake_group import FakeFleet, serving

REQUEST = GenerationRequest(request_id="r", prompt_token_ids=[1], sampling=SamplingParams(max_tokens=1), tenant="acme")


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_series_of_failures_lasts_until_a_call_arrives_or_none_fails() -> None:
    groups = UnreachedGroups(clock := Clock())
    assert groups.failed("a") and not groups.failed("a")
    clock.now_s += AGAIN_S
    assert groups.for_s("a") == AGAIN_S and groups.for_s("b") == 0.0
    assert not groups.failed("a")
    groups.reached("a")
    assert groups.for_s("a") == 0.0
    assert groups.failed("a")
    clock.now_s += AGAIN_S + 0.1
    assert groups.for_s("a") == 0.0 and groups.failed("a"), "another series"


def test_pauses_grow_and_only_where_no_group_is_reached() -> None:
    groups = UnreachedGroups(Clock())
    assert groups.pause_s(["a", "b"]) == 0.0
    groups.failed("a")
    assert groups.pause_s(["a", "b"]) == 0.0 < groups.pause_s(["a"])
    pauses = []
    for _ in range(2000):
        groups.failed("a")
        pauses.append(groups.pause_s(["a"]))
    assert pauses == sorted(pauses) and pauses[-1] == MOST_PAUSE_S
    groups.keep_only(["b"])
    assert groups.pause_s(["a"]) == 0.0


def test_the_router_holds_a_call_that_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(duration_s: float) -> None:
        slept.append(duration_s)

    monkeypatch.setattr(router_view(), "unreached", UnreachedGroups(Clock()))
    monkeypatch.setattr(RequestRouter, "on_replica_actor_unavailable", lambda self, replica_id: None)
    monkeypatch.setattr(serve_router.asyncio, "sleep", sleep)
    router = GroupRouter.__new__(GroupRouter)
    router.initialize_state()
    replicas: list[Any] = [SimpleNamespace(replica_id=SimpleNamespace(unique_id="a"), routing_stats={})]
    call: Any = SimpleNamespace(
        kwargs={"hint": hint_of(REQUEST)},
        metadata=SimpleNamespace(internal_request_id="c"),
        routing_context=SimpleNamespace(should_backoff=False),
        future=Mock(),
    )

    def choose() -> None:
        assert asyncio.run(router.choose_replicas(replicas, call)) == [replicas]

    choose()
    assert slept == []
    for tries in (1, 2):
        router.on_replica_actor_unavailable(replicas[0].replica_id)
        choose()
        assert len(slept) == tries
    router.on_request_routed(call, replicas[0].replica_id, None)
    choose()
    assert len(slept) == 2


def test_requests_that_reach_no_living_group_end_with_an_error() -> None:
    method, view = Mock(), RouterView()
    unreached = view.unreached = UnreachedGroups(clock := Clock())

    async def run() -> None:
        handle: Any = Mock(options=lambda **_: method)
        fleet = FakeFleet(serving())
        dispatch = ServeDispatch(handle, fleet, "cd" * 32, "127.0.0.1", "tandem", view=view)
        part = RequestPart(request=REQUEST, choices=[], first_choice=0)
        dispatch.send(part, hint_of(REQUEST))
        (group,) = fleet.records
        for _ in range(int(UNREACHED_S)):
            unreached.failed(group)
            dispatch.look_after()
            assert part.ended is None and dispatch.ready()
            clock.now_s += 1.0
        unreached.failed(group)
        dispatch.look_after()
        assert part.ended is not None and part.ended.refused is not None and not dispatch.ready()
        status, code, _, message = part.ended.refused
        assert (status, code) == (503, "service_unavailable") and "can be reached from this gateway" in message
        await dispatch.close()

    asyncio.run(run())
