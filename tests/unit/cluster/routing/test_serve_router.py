"""GroupRouter in Serve's hooks, with replicas and requests made of plain objects; it never raises into Serve."""

import asyncio
import base64
import inspect
import pickle
import random
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata
from ray.serve._private.constants import RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter

from tandem.cluster.app import router_config
from tandem.cluster.gateway.generation.part import RequestPart
from tandem.cluster.gateway.generation.serve_dispatch import MOST_BY_VALUE, ServeDispatch
from tandem.cluster.group.coordinator import Coordinator
from tandem.cluster.routing.policies.routing_policy import FEW
from tandem.cluster.routing.route_hint import hint_of
from tandem.cluster.routing.route_table import RouteNote
from tandem.cluster.routing.router.serve_router import GroupRouter
from tandem.cluster.routing.router_view import router_view
from tandem.cluster.routing.told_prefixes import ToldPrefixes
from tandem.workers.messages.kv_events import KvEvents, KvFacts
from tandem.workers.messages.request import AdapterRef, GenerationRequest, ReplyTo, SamplingParams
from tests.support.fake_group import FakeFleet, serving

ONE = "0123456789abcdef" * 4
LONG = GenerationRequest(
    request_id="r", prompt_token_ids=[7] * 100_000, sampling=SamplingParams(max_tokens=1), tenant="acme"
)


def replica(name: str, **stats: Any) -> Any:
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), routing_stats=stats)


def pending(
    call: str,
    max_tokens: int,
    adapter: str | None = None,
    gateway: str = "me",
    avoid: tuple[str, ...] = (),
    future: asyncio.Future[Any] | None = None,
    **options: Any,
) -> Any:
    request = GenerationRequest(
        request_id=call,
        prompt_token_ids=[1],
        sampling=SamplingParams(max_tokens=max_tokens),
        adapter=AdapterRef(name="x", digest=adapter, source="/x") if adapter is not None else None,
        reply_to=ReplyTo("tcp://127.0.0.1:1", gateway),
    )
    return SimpleNamespace(
        args=[b"not to be read"],
        kwargs={"hint": hint_of(request, avoid), **options},
        metadata=SimpleNamespace(internal_request_id=call),
        future=future if future is not None else Mock(),
        routing_context=SimpleNamespace(should_backoff=False),
    )


@pytest.fixture
def router() -> GroupRouter:
    router = GroupRouter.__new__(GroupRouter)  # Serve's constructor wants a running Serve; ours is initialize_state
    router.initialize_state()
    router._pick = lambda near: near[0]  # of equals the first, not any
    return router


def chosen(router: GroupRouter, replicas: list[Any], request: Any) -> list[str]:
    ranks = asyncio.run(router.choose_replicas(replicas, request))
    return [r.replica_id.unique_id for rank in ranks for r in rank]


def test_long_answers_keep_others_away_until_they_end(router: GroupRouter) -> None:
    a, b = replica("a"), replica("b")
    long = pending("c1", 1000)
    assert chosen(router, [a, b], long) == ["a", "b"]
    router.on_request_routed(long, a.replica_id, None)
    for i in range(3):
        short = pending(f"s{i}", 100)
        assert chosen(router, [a, b], short)[0] == "b"
        router.on_request_routed(short, b.replica_id, None)
    router.on_request_completed(a.replica_id, "c1")
    assert chosen(router, [a, b], pending("c2", 1))[0] == "a"


def test_a_group_that_reports_a_stall_is_avoided_until_it_moves(router: GroupRouter) -> None:
    def report(stalled_s: float) -> Any:
        return replica("a", outstanding_tokens={}, stalled_s=stalled_s)

    assert chosen(router, [report(3.0), replica("b")], pending("c1", 100)) == ["b", "a"]
    assert chosen(router, [report(0.0), replica("b")], pending("c2", 100)) == ["a", "b"]


def test_of_equal_groups_gateways_choose_by_chance_and_many_are_tried_at_last(router: GroupRouter) -> None:
    router._pick = random.Random(1).choice
    replicas = [replica(f"g{i}") for i in range(16)]
    firsts = set()
    for i in range(100):
        order = chosen(router, replicas, pending(f"c{i}", 1))
        firsts.add(order[0])
        assert len(set(order[:FEW])) == FEW and order[FEW:] == [r.replica_id.unique_id for r in replicas]
        router.on_request_completed(replica(order[0]).replica_id, f"c{i}")
    assert len(firsts) == 16


def test_reports_are_read_when_serve_brings_them(router: GroupRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    def bring(tokens: int) -> list[Any]:
        """As RequestRouter.update_replicas does."""
        router._replicas_list = [replica("a", outstanding_tokens={"you": tokens}), replica("b")]
        router.update_replicas(router._replicas_list)
        return router._replicas_list

    monkeypatch.setattr(router_view(), "running", None)
    monkeypatch.setattr(RequestRouter, "update_replicas", lambda self, replicas: None)
    assert chosen(router, bring(0), pending("c1", 1)) == ["a", "b"]
    router.on_request_completed(replica("a").replica_id, "c1")
    assert chosen(router, bring(9), pending("c2", 1)) == ["b", "a"]
    router.on_request_completed(replica("b").replica_id, "c2")
    router._replicas_list = [replica("a", strange=1)]
    router.update_replicas(router._replicas_list)  # it never raises into Serve
    assert len(chosen(router, router._replicas_list, pending("c3", 1))) == 1


def test_what_a_group_was_sent_is_expected_there(router: GroupRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes, request = ToldPrefixes(), msgspec.structs.replace(LONG, request_id="c1")
    monkeypatch.setattr(router_view(), "prefixes", prefixes)
    for group in ("a", "b"):
        prefixes.take(group, 1, KvFacts("", "revision", "float32", 16, 8), 0.0)
        prefixes.take(group, 1, KvEvents("", 1, is_snapshot=True), 0.0)
    prefixes.note("c1", prefixes.overlaps(request))
    assert chosen(router, [replica("a"), replica("b")], pending("c1", 100))[0] == "a"
    prefixes.expect_sent()
    assert prefixes.overlaps(request).overlaps == {"a": (128, 0)}


def test_a_group_to_avoid_is_the_last_choice(router: GroupRouter) -> None:
    a, b = replica("a"), replica("b")
    assert chosen(router, [a, b], pending("c1", 100, avoid=("a",))) == ["b", "a"]
    assert chosen(router, [a, b], pending("c2", 100)) == ["a", "b"]


def test_requests_at_the_same_time_are_spread_before_serve_says_that_any_was_routed(router: GroupRouter) -> None:
    replicas = [replica("a"), replica("b")]
    assert [chosen(router, replicas, pending(f"c{i}", 100))[0] for i in range(4)] == ["a", "b", "a", "b"]


def test_a_request_that_another_group_took_counts_there(router: GroupRouter) -> None:
    a, b = replica("a"), replica("b")
    request = pending("c1", 100)
    assert chosen(router, [a, b], request)[0] == "a"
    router.on_request_routed(request, b.replica_id, None)
    assert chosen(router, [a, b], pending("c2", 1))[0] == "a"


def test_what_is_left_of_an_answer_counts_to_its_end(router: GroupRouter) -> None:
    """Serve says late that a request was routed: when its answer is there, or when others have been routed since. The
    gateway, maybe on another thread than the router, says what is left."""
    a, b = replica("a"), replica("b")
    long = pending("c1", 1000)
    assert chosen(router, [a, b], long)[0] == "a"
    assert chosen(router, [a, b], pending("c2", 100))[0] == "b"
    correct = router_view().correct
    teller = threading.Thread(target=lambda: correct("c1", 5))
    teller.start()
    teller.join()
    assert router._outstanding.here("a") == 1001, "only the router's thread changes what it reads"
    assert chosen(router, [a, b], pending("c3", 1))[0] == "a"
    router.on_request_routed(long, a.replica_id, None)
    assert chosen(router, [a, b], pending("c4", 1))[0] == "a"
    assert router._outstanding.here("a") == 5 + 2 + 2


def test_a_request_has_one_turn_of_round_robin(router: GroupRouter) -> None:
    router.initialize_state(policy="round-robin")
    router._pick = lambda near: near[0]
    a, b = replica("a"), replica("b")
    first = pending("c1", 1)
    assert [chosen(router, [a, b], first)[0], chosen(router, [a, b], pending("c2", 1))[0]] == ["a", "b"]
    router.on_request_routed(first, a.replica_id, None)
    router.on_request_completed(a.replica_id, "c1")
    assert chosen(router, [a, b], pending("c3", 1))[0] == "a"


async def test_the_gateway_learns_where_serve_sends_a_request(
    router: GroupRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before anybody answers, and again when the group does not take it."""
    sent_to: dict[str, str | None] = {"r": None}
    monkeypatch.setattr(router_view(), "sent_to", sent_to)
    replicas = {name: replica(name) for name in "abc"}
    request = pending("r", 100)
    for name in ("b", "c"):
        request.future = asyncio.Future()  # as Serve does for each try
        for _ in range(3):  # it asks again while nobody has room
            await router.choose_replicas(list(replicas.values()), request)
        request.future.set_result(replicas[name])
        await asyncio.sleep(0)
        assert sent_to == {"r": name}
    given_up = pending("r", 100, future=asyncio.Future())
    await router.choose_replicas(list(replicas.values()), given_up)
    given_up.future.cancel()
    over = pending("over", 100, future=asyncio.Future())
    await router.choose_replicas(list(replicas.values()), over)
    over.future.set_result(replicas["a"])
    await asyncio.sleep(0)
    assert sent_to == {"r": "c"}, "nobody waits for the other one any more"


async def test_serve_tells_where_it_sends_a_request_as_it_does_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve's own router; nobody is called."""
    sent_to: dict[str, str | None] = {"r": None}
    monkeypatch.setattr(router_view(), "sent_to", sent_to)
    monkeypatch.setattr(router_view(), "running", None)
    deployment = DeploymentID("coordinators", "tandem")
    router = GroupRouter(deployment, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
    router.initialize_state()
    group: Any = Mock(replica_id=ReplicaID("g", deployment), routing_stats={}, max_ongoing_requests=9)
    router.update_replicas([group])
    router.on_new_queue_len_info(group.replica_id, 0)
    request = PendingRequest(
        args=[], kwargs=pending("r", 5).kwargs, metadata=RequestMetadata(request_id="q", internal_request_id="i")
    )
    async with asyncio.timeout(10):
        assert await router._choose_replica_for_request(request) is group
    await asyncio.sleep(0)
    assert sent_to == {"r": "g"}


def test_what_other_gateways_sent_counts(router: GroupRouter) -> None:
    a = replica("a", outstanding_tokens={"you": 300, "them": 200})
    b = replica("b", outstanding_tokens={"you": 20})
    assert chosen(router, [a, b], pending("c", 5)) == ["b", "a"]


def test_of_other_gateways_what_is_left_counts_and_of_this_one_what_was_charged(
    router: GroupRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = replica("a", outstanding_tokens={"you": 900, "me": 1001}, left_tokens={"you": 10, "me": 5})
    b = replica("b", outstanding_tokens={"you": 20}, left_tokens={"you": 20})
    assert chosen(router, [a, b], pending("c", 1000))[0] == "a"
    for later_s in (1, 70, 140):
        monkeypatch.setattr(time, "monotonic", lambda at_s=time.monotonic() + later_s: at_s)
        chosen(router, [a, replica("b")], pending(f"d{later_s}", 1, avoid=("a",)))
        assert router._outstanding.holds("c"), "the group says that it has it"


def test_a_report_that_is_first_seen_after_its_requests_ended_keeps_nobody_away(router: GroupRouter) -> None:
    """Serve's controller brings reports seconds late, and this gateway looks at them when it has a request to route."""
    replicas = [replica("a"), replica("b")]
    assert [chosen(router, replicas, pending(f"c{i}", 100))[0] for i in range(2)] == ["a", "b"]
    for name, call in (("a", "c0"), ("b", "c1")):
        router.on_request_completed(replica(name).replica_id, call)
    late = [replica("a", outstanding_tokens={"me": 101}), replica("b", outstanding_tokens={})]
    assert [chosen(router, late, pending(f"d{i}", 10))[0] for i in range(4)] == ["a", "b", "a", "b"]


def test_a_report_that_lacks_an_old_call_removes_it(router: GroupRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    def owes(tokens: int) -> list[Any]:
        return [replica("a", outstanding_tokens={"me": tokens}), replica("b")]

    assert chosen(router, owes(0), pending("lost", 1000))[0] == "a"
    now_s = time.monotonic()
    for later_s, tokens, group in ((3600, 1001, "b"), (3602, 0, "b"), (3700, 0, "a")):
        monkeypatch.setattr(time, "monotonic", lambda at_s=now_s + later_s: at_s)
        assert chosen(router, owes(tokens), pending(f"c{later_s}", 1))[0] == group, later_s


def test_a_request_goes_where_its_adapter_is_reported(router: GroupRouter) -> None:
    def report(name: str, tokens: int = 0, **adapters: list[str]) -> Any:
        return replica(name, outstanding_tokens={"you": tokens}, **adapters)

    key = ONE[:16]
    none, host = report("a"), report("b", on_device=[], on_host=[key])
    device = report("c", tokens=50, on_device=[key], on_host=[])
    assert chosen(router, [none, host, device], pending("c1", 100, adapter=ONE)) == ["c", "b", "a"]
    assert chosen(router, [none, host, device], pending("c2", 100)) == ["a", "b", "c"], "without one, by tokens"


def test_a_burst_for_a_cold_adapter_keeps_together_and_two_adapters_need_not(router: GroupRouter) -> None:
    replicas = [replica(name) for name in "abcd"]
    first = [chosen(router, replicas, pending(f"c{i}", 100, adapter=ONE))[0] for i in range(4)]
    assert len(set(first)) == 1
    many = {chosen(router, replicas, pending(f"d{i}", 1, adapter=f"{i:02}" * 32))[0] for i in range(32)}
    assert many >= set("abcd") - {first[0]}
    flood = {chosen(router, replicas, pending(f"e{i}", 1000, adapter=ONE))[0] for i in range(60)}
    assert flood == set("abcd"), "what one group cannot serve alone, others get too"


def test_a_request_that_cannot_be_read_goes_anywhere(router: GroupRouter) -> None:
    request = pending("c", 5, hint=None)
    assert chosen(router, [replica("b"), replica("a")], request) == ["b", "a"]
    assert request.routing_context.should_backoff
    router.on_request_routed(request, replica("a").replica_id, None)
    router.on_request_completed(replica("a").replica_id, "c")


def test_statistics_of_another_form_do_not_hang_the_caller(router: GroupRouter) -> None:
    assert len(chosen(router, [replica("a", strange=1), replica("b")], pending("c", 5))) == 2


def test_no_request_means_no_preference(router: GroupRouter) -> None:
    assert len(chosen(router, [replica("a"), replica("b")], None)) == 2


def send(handle: Any, *requests: GenerationRequest) -> None:
    """Sends them as a gateway does."""

    async def sent() -> None:
        dispatch = ServeDispatch(handle, FakeFleet(serving()), "cd" * 32, "127.0.0.1", "tandem")
        for request in requests:
            dispatch.send(RequestPart(request=request, choices=[], first_choice=0), hint_of(request))
        await dispatch.close()

    asyncio.run(sent())


def test_the_hint_reaches_the_router_under_the_coordinators_own_argument() -> None:
    """Serve passes a call's arguments to the router and to the coordinator alike."""
    method = Mock()
    send(Mock(options=lambda **_: method), LONG)
    (call,) = method.remote.call_args_list
    inspect.signature(Coordinator.generate).bind(None, *call.args, **call.kwargs)
    (hint,) = call.kwargs.values()
    assert list(call.kwargs) == ["hint"] and hint.gateway
    assert msgspec.structs.replace(hint, gateway=hint_of(LONG).gateway) == hint_of(LONG)


def test_a_request_above_what_a_replica_takes_in_a_message_goes_through_the_object_store() -> None:
    """128 choices of 8,000 tokens to resume, and a prompt of 100,000: gRPC's limit is 4 MiB."""
    methods = {False: Mock(), True: Mock()}
    request = GenerationRequest(
        request_id="large",
        attempt=1,
        prompt_token_ids=list(range(100_000)),
        sampling=SamplingParams(max_tokens=10_000, n=128),
        resume_token_ids=[[70_000] * 8_000] * 128,
    )
    payload = msgspec.msgpack.encode(request)
    assert len(payload) > RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH
    send(Mock(options=lambda method_name, _by_reference: methods[_by_reference]), request, LONG)
    (large,), (small,) = (methods[large].remote.call_args_list for large in (True, False))
    assert len(large.args[0]) > len(payload) and len(small.args[0]) <= MOST_BY_VALUE
    assert 2 * MOST_BY_VALUE < RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH


def test_choosing_a_group_takes_no_longer_for_a_long_prompt(router: GroupRouter) -> None:
    """The router gets no prompt: what it is given is no encoded request at all."""
    assert chosen(router, [replica("a"), replica("b")], pending("c", 5)) == ["a", "b"]
    assert len(pickle.dumps(hint_of(LONG))) < 400


def test_groups_that_serve_no_longer_lists_are_known(router: GroupRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_view(), "running", None)
    monkeypatch.setattr(RequestRouter, "update_replicas", lambda self, replicas: None)
    router.update_replicas([replica("a"), replica("b")])
    assert router_view().running == {"a", "b"}
    router.update_replicas([replica("b")])
    assert router_view().running == {"b"}


def test_a_policy_is_named_by_the_routers_arguments() -> None:
    router = GroupRouter.__new__(GroupRouter)
    with pytest.raises(ValueError, match="'fastest' is not a routing policy; there are joint, "):
        router.initialize_state(policy="fastest")
    with pytest.raises(ValueError, match="request_router_kwargs has weight; it takes `policy` only"):
        router.initialize_state(policy="joint", weight=3)
    router.initialize_state(policy="round-robin")
    replicas = [replica(name) for name in "abc"]
    assert sorted(chosen(router, replicas, pending(f"c{i}", 1))[0] for i in range(3)) == ["a", "b", "c"]
    config = router_config("session")
    assert config.request_router_kwargs == {"policy": "session"}


def overlapping(call: str, session: str = "", **overlaps: tuple[int, int]) -> Any:
    asked = pending(call, 100)
    asked.kwargs["hint"] = msgspec.structs.replace(
        asked.kwargs["hint"], cost_tokens=1000, overlaps=overlaps, session=session
    )
    return asked


def test_a_request_goes_where_its_prompt_is_and_costs_less_there(router: GroupRouter) -> None:
    replicas = [replica("a"), replica("b")]
    assert chosen(router, replicas, overlapping("c1", b=(900, 0)))[0] == "b"
    assert router._outstanding.here("b") == 100
    assert chosen(router, replicas, overlapping("c2", b=(50, 0)))[0] == "a", "b has 100 tokens to come"
    assert router._outstanding.here("a") == 1000


def test_groups_report_how_dear_their_copies_are(router: GroupRouter) -> None:
    def reports(a: float, b: float) -> list[Any]:
        return [replica(n, outstanding_tokens={}, copy_share=s) for n, s in (("a", a), ("b", b))]

    both = {"a": (0, 800), "b": (0, 800)}
    assert chosen(router, reports(0.9, 0.1), overlapping("c1", **both))[0] == "b"
    router.on_request_completed(replica("b").replica_id, "c1")
    assert chosen(router, reports(0.1, 0.9), overlapping("c2", **both))[0] == "a"


def test_a_session_keeps_its_home_until_that_has_more_to_do(router: GroupRouter) -> None:
    router._pick = random.Random(3).choice
    replicas = [replica(f"g{i}") for i in range(8)]
    homes = set()
    for i in range(20):
        homes.add(chosen(router, replicas, overlapping(f"c{i}", session="s"))[0])
        router.on_request_completed(replica(next(iter(homes))).replica_id, f"c{i}")
    (home,) = homes
    chosen(router, replicas, overlapping("busy", session="s"))
    assert chosen(router, replicas, overlapping("next", session="s"))[0] != home, "a request is worth more than a home"


async def test_the_router_says_why_to_who_asks(router: GroupRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    note = RouteNote()
    monkeypatch.setattr(router_view(), "sent_to", {"c1": None, "c2": None})
    monkeypatch.setattr(router_view(), "notes", {"c1": note})
    replicas = [replica("a"), replica("b", outstanding_tokens={"you": 70})]
    for call in ("c1", "c2"):
        request = overlapping(call, b=(200, 30))
        request.future = asyncio.Future()
        await router.choose_replicas(replicas, request)
        assert note.line is None or call == "c2"
        request.future.set_result(replicas[1])
        await asyncio.sleep(0)
    assert note.line == "b overlap=200+30 outstanding=70 adapter=- second=a"


def test_what_is_said_of_a_choice_by_chance_is_of_that_choice(
    router: GroupRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that draws two groups draws others the next time."""
    router.initialize_state(policy="p2c")
    note = RouteNote()
    monkeypatch.setattr(router_view(), "notes", {f"c{i}": note for i in range(8)})
    replicas = [replica(f"g{i}", outstanding_tokens={"you": 1000 * i}) for i in range(16)]
    for i in range(8):
        first = chosen(router, replicas, pending(f"c{i}", 1))[0]
        assert note.table is not None and note.table.groups[0].group == first


def test_costs_are_shown_without_a_request(router: GroupRouter) -> None:
    explain = router_view().explain
    assert explain is not None
    router._replicas_list = []
    assert explain(overlapping("c").kwargs["hint"]) is None, "no group"
    router._replicas_list = [replica("a", stalled_s=9.0, outstanding_tokens={}), replica("b")]
    table = explain(overlapping("c", a=(900, 0)).kwargs["hint"])
    assert table is not None and table.policy == "joint"
    assert [(one.group, one.cost, one.is_last) for one in table.groups] == [("b", 1000, False), ("a", 100, True)]
    assert router._outstanding.here("a") == router._outstanding.here("b") == 0


def test_what_travels_to_a_group_is_short_and_what_it_was_before() -> None:
    hint = overlapping("c", session="s", **{f"g{i}": (1, 2) for i in range(256)}).kwargs["hint"]
    sent = pickle.dumps(hint)
    assert len(sent) < 400
    assert pickle.loads(sent) == msgspec.structs.replace(hint, overlaps={}, session="")


SENT = """
import base64, sys
from unittest.mock import patch
from ray import cloudpickle
from ray.serve.request_router import RequestRouter
from tandem.cluster.routing.router_view import router_view
from tandem.cluster.routing.router import serve_router

sent = cloudpickle.loads(base64.b64decode(sys.stdin.read()))
assert sent is not serve_router.GroupRouter
router = sent.__new__(sent)
router.initialize_state()
with patch.object(RequestRouter, "update_replicas"):
    router.update_replicas([])
assert router_view().running == frozenset(), router_view().running
"""


def test_what_the_router_of_a_gateway_sees_is_seen_by_the_gateway() -> None:
    """Serve sends its class by value; a copy's own attributes would be nobody else's."""
    sent = base64.b64encode(router_config("joint").get_serialized_request_router_cls() or b"").decode()
    done = subprocess.run([sys.executable, "-c", SENT], input=sent, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
