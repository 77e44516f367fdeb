"""Policies on loads, and the count of outstanding tokens behind them."""

from collections.abc import Mapping
from types import MappingProxyType

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.routing.group_loads import GroupLoads
from tandem.cluster.routing.outstanding import Outstanding, cost_tokens, elsewhere, tokens_by_gateway
from tandem.cluster.routing.policies.adapter_affinity import AdapterAffinity
from tandem.cluster.routing.policies.routing_policy import FEW, choose
from tandem.cluster.routing.route_hint import RouteHint, hint_of
from tandem.workers.messages.request import GenerationRequest, ReplyTo, SamplingParams

REQUEST = RouteHint(request_id="r", cost_tokens=10)


def order(loads: dict[str, int], last: str = "", pick: int = 0, own: Mapping[str, int] = MappingProxyType({})) -> str:
    """The groups to try, when of equals the one at `pick` is chosen. own: tokens of the request's tenant."""
    groups = list(loads)
    given = GroupLoads(
        groups=groups,
        outstanding=np.array(list(loads.values())),
        own=np.array([own.get(name, 0) for name in groups]),
        last=[groups.index(name) for name in last],
    )
    few = choose(AdapterAffinity(), given, REQUEST, lambda near: near[pick])
    return "".join(groups[i] for i in few)


def test_the_group_with_the_fewest_tokens_to_come_is_first() -> None:
    assert order({"a": 50, "b": 110, "c": 20}) == "cab"


def test_a_tenants_requests_do_not_meet_in_one_group() -> None:
    assert order({"a": 500, "b": 520}, own={"a": 50, "b": 10}) == "ba"
    assert order({"a": 500, "b": 600}, own={"a": 50, "b": 10}) == "ab", "the load of all counts too"


def test_of_equal_groups_any_may_be_first() -> None:
    assert [order({"c": 5, "a": 5, "b": 5}, pick=pick) for pick in range(3)] == ["cab", "acb", "bca"]


def test_a_quarter_of_the_request_makes_no_difference_and_more_does() -> None:
    assert order({"a": 12, "b": 10}) == "ab"
    assert order({"a": 13, "b": 10}) == "ba"


def test_of_many_groups_only_the_best_few_are_tried_in_order() -> None:
    loads = {chr(ord("a") + i): 1000 - 100 * i for i in range(10)}
    assert order(loads) == "jihg" and len("jihg") == FEW


def test_a_group_to_choose_last_is_the_last_choice_not_none() -> None:
    assert order({"a": 0, "b": 10_000, "c": 20_000}, last="a") == "bca"
    assert order({"a": 0}, last="a") == "a"
    assert order({"a": 9, "b": 3, "c": 6}, last="abc") == "bca", "among those the fewest tokens decide"


def test_cost_counts_the_prompt_once_and_every_choice() -> None:
    request = GenerationRequest(request_id="r", prompt_token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=7, n=4))
    assert cost_tokens(request) == 3 + 28


def test_a_report_counts_for_the_gateways_that_did_not_send_it() -> None:
    reported = tokens_by_gateway([("g1", 100), ("g2", 30), ("g1", 5)])
    assert [elsewhere(reported, gateway) for gateway in ("g1", "g2", "g3")] == [30, 105, 135]
    assert elsewhere({}, "g1") == 0


def test_a_gateway_is_known_by_its_life() -> None:
    request = GenerationRequest(request_id="r", prompt_token_ids=[1], sampling=SamplingParams(max_tokens=1))
    assert hint_of(request).gateway == ""
    assert hint_of(msgspec.structs.replace(request, reply_to=ReplyTo("tcp://x", "life2"))).gateway == "life2"


def test_groups_that_are_gone_are_forgotten() -> None:
    outstanding = Outstanding()
    outstanding.begin("c1", "g", "t", 5, 0.0)
    outstanding.begin("c2", "h", "t", 7, 0.0)
    outstanding.keep_only(["h"])
    assert (outstanding.here("g"), outstanding.here("h")) == (0, 7)
    outstanding.set_groups(["g", "h"])
    assert outstanding.of_tenant("t").tolist() == [0, 7] and outstanding.of_tenant("other").tolist() == [0, 0]
    assert outstanding.here_by_group().tolist() == [0, 7]
    outstanding.end("c1", "g")
    assert outstanding.here("g") == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("abc"), st.integers(0, 50), st.booleans())))
def test_counts_return_to_nothing(calls: list[tuple[int, str, int, bool]]) -> None:
    outstanding = Outstanding()
    outstanding.set_groups("abc")
    for call, group, tokens, ends in calls:
        outstanding.end(str(call), group) if ends else outstanding.begin(str(call), group, "t", tokens, 0.0)
        assert all(outstanding.here(g) >= 0 for g in "abc")
        assert outstanding.of_tenant("t").tolist() == [outstanding.here(g) for g in "abc"]
        assert outstanding.here_by_group().tolist() == [outstanding.here(g) for g in "abc"]
    for call in range(6):
        outstanding.begin(str(call), "a", "t", 1, 0.0)
        outstanding.end(str(call), "a")
    assert [outstanding.here(g) for g in "abc"] == [0, 0, 0]


def test_the_late_end_of_a_try_that_failed_does_not_end_the_next() -> None:
    outstanding = Outstanding()
    outstanding.begin("c", "a", "t", 100, 0.0)
    outstanding.begin("c", "b", "t", 100, 0.1)
    outstanding.end("c", "a")
    assert (outstanding.here("a"), outstanding.here("b")) == (0, 100)
    outstanding.end("c", "b")
    assert outstanding.here("b") == 0 and not outstanding.holds("c")


def test_an_end_at_a_group_that_was_not_the_first_choice_counts() -> None:
    """Serve tries the ranks of an answer in order, and may tell of the end before it tells who took the call."""
    outstanding = Outstanding()
    outstanding.begin("c", "a", "t", 100, 0.0)
    outstanding.end("c", "b")
    assert outstanding.here("a") == 0 and not outstanding.holds("c")


def test_a_call_whose_end_is_lost_counts_until_the_groups_report_lacks_it() -> None:
    outstanding = Outstanding()
    outstanding.begin("lost", "g", "t", 100, 0.0)
    outstanding.begin("long", "g", "t", 40, 1.0)
    for now_s in range(2, 61, 2):
        outstanding.reconcile({"g": 40}, float(now_s))
    assert outstanding.here("g") == 140, "a report may be older than a call"
    outstanding.reconcile({"g": 40}, 62.0)
    assert outstanding.here("g") == 40 and not outstanding.holds("lost")
    for now_s in range(64, 3600, 2):
        outstanding.reconcile({"g": 40}, float(now_s))
    assert outstanding.here("g") == 40, "however long an answer takes"


def test_lost_calls_are_removed_under_steady_load_and_no_others() -> None:
    """Reports are 4 s old, calls take 20 s and come each second; some are cancelled between choice and dispatch."""
    outstanding = Outstanding()
    true: list[int] = []

    def is_lost(call: int) -> bool:
        return call < 300 and call % 10 == 0

    for second in range(600):
        outstanding.begin(str(second), "g", "t", 100, float(second))
        if second >= 20 and not is_lost(second - 20):
            outstanding.end(str(second - 20), "g")
        running = [call for call in range(max(0, second - 19), second + 1) if not is_lost(call)]
        true.append(100 * len(running))
        if second % 2 == 0 and second >= 4:
            outstanding.reconcile({"g": true[second - 4]}, float(second))
        assert outstanding.here("g") >= true[second], "what runs is counted"
    assert outstanding.here("g") == true[-1] == 2000
