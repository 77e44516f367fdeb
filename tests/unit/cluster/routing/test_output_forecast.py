"""How long answers are expected to be, and what a request is charged from its dispatch to its end."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.routing.output_forecast import FIRST_TOKENS, FOLLOW, MOST_PAIRS, STEP_TOKENS, OutputForecast, left
from tandem.cluster.routing.outstanding import Outstanding
from tandem.cluster.routing.route_charges import RouteCharges
from tandem.workers.messages.request import NO_TOKENS, AdapterRef, GenerationRequest, SamplingParams


def request(request_id: str = "r", prompt: int = 10, **more: Any) -> GenerationRequest:
    sampling = SamplingParams(**{"max_tokens": 1000} | more.pop("sampling", {}))
    return GenerationRequest(request_id=request_id, prompt_token_ids=[1] * prompt, sampling=sampling, **more)


def test_an_answer_is_expected_to_be_as_long_as_the_last_ones_of_its_model_and_tenant() -> None:
    forecast = OutputForecast()
    assert forecast.expect("m", "t", 1000) == FIRST_TOKENS and forecast.expect("m", "t", 50) == 50
    for tokens in (100, 200):
        forecast.ended("m", "t", tokens)
    forecast.ended("m", "u", 30)
    assert forecast.expect("m", "t", 1000) == 150 and forecast.expect("m", "u", 1000) == 30
    assert forecast.expect("m", "t", 60) == 60, "never more than it may be"
    assert forecast.expect("other", "t", 1000) == 110, "of a new one as of all"


def test_a_change_of_habit_is_followed() -> None:
    forecast = OutputForecast()
    for tokens in [100] * 100 + [500] * 60:
        forecast.ended("m", "t", tokens)
    assert 485 <= forecast.expect("m", "t", 10**6) <= 500
    before = forecast.expect("m", "t", 10**6)
    forecast.ended("m", "t", 0)
    assert forecast.expect("m", "t", 10**6) == pytest.approx(before * (1 - FOLLOW), abs=1)


def test_answers_that_their_limit_ends_do_not_shorten_the_forecast() -> None:
    forecast = OutputForecast()
    forecast.ended("m", "t", 400)
    for _ in range(50):
        forecast.ended("m", "t", 16, was_cut=True)
    assert forecast.expect("m", "t", 1000) == 400
    forecast.ended("m", "t", 800, was_cut=True)
    assert forecast.expect("m", "t", 1000) > 400


def test_no_more_pairs_than_a_bound_are_remembered() -> None:
    forecast = OutputForecast()
    for i in range(MOST_PAIRS + 10):
        forecast.ended("m", f"t{i}", 7)
    assert len(forecast._averages) == MOST_PAIRS


@given(st.integers(1, 5000), st.integers(0, 5000), st.integers(1, 5000))
def test_what_is_left_is_never_more_than_may_come_and_something_until_then(
    expected: int, produced: int, most: int
) -> None:
    expected = min(expected, most)
    rest = left(expected, produced, most)
    assert 0 <= rest <= max(0, most - produced)
    assert rest > 0 or produced >= most
    assert left(expected, produced + 1, most) <= rest


def test_a_request_is_charged_anew_at_its_first_token_and_every_256() -> None:
    told: list[int] = []
    charges = RouteCharges(lambda request_id, tokens: told.append(tokens))
    assert charges.begin(request(prompt=500, sampling={"n": 2})) == 500 + 2 * FIRST_TOKENS
    for produced in range(1, 1200):
        charges.look("r", produced)
    assert told == [511, 256, 129, 129, 129], "the prompt is computed; and one that is longer goes on for a while"
    charges.look("gone", 5)
    charges.end("r")
    charges.look("r", 3000)
    assert len(told) == 5


def test_ends_teach_by_adapter_and_tenant_and_others_do_not() -> None:
    charges = RouteCharges(lambda request_id, tokens: None)
    adapter = AdapterRef(name="a", digest="d" * 64, source="/a")
    asked = request(adapter=adapter, tenant="t")
    charges.begin(asked)
    charges.end("r", 40)
    assert charges.cost(asked) == 50 and charges.cost(request(prompt=0)) == 40
    charges.begin(asked)
    charges.end("r")  # lost, or left by its client
    charges.begin(msgspec.structs.replace(request("embedding", prompt=3), sampling=NO_TOKENS))
    charges.end("embedding", 0)
    assert charges.cost(asked) == 50


def test_what_another_group_has_delivered_is_part_of_the_prompt() -> None:
    charges = RouteCharges(lambda request_id, tokens: None)
    resumed = request(prompt=100, attempt=1, resume_token_ids=[[5] * 56])
    assert charges.cost(resumed) == 100 + 56 + (FIRST_TOKENS - 56)
    assert charges.cost(request(prompt=100, resume_token_ids=[[5] * 990])) == 100 + 990 + 10, "its limit is near"
    assert charges.cost(request(prompt=100, resume_token_ids=[[5] * 990])) == 100 + 990 + 10, "its limit is near"


def test_a_correction_changes_what_counts_here_and_not_what_the_group_reports() -> None:
    outstanding = Outstanding()
    outstanding.set_groups(["g"])
    outstanding.begin("call", "g", "t", 700, 0.0, reported=1000, request_id="r")
    outstanding.correct("r", 200)
    outstanding.correct("another", 5)
    assert outstanding.here("g") == 200 and outstanding.of_tenant("t").tolist() == [200]
    for now_s in range(0, 300, 2):
        outstanding.reconcile({"g": 1000}, float(now_s))
    assert outstanding.here("g") == 200, "the group still has it"
    for now_s in range(300, 400, 2):
        outstanding.reconcile({"g": 0}, float(now_s))
    assert outstanding.here("g") == 0 and not outstanding.holds("call")
    outstanding.correct("r", 90)
    assert outstanding.here("g") == 0


def test_a_call_whose_cost_is_less_than_its_charge_is_found_when_it_is_lost() -> None:
    """Most of its prompt was in the group's KV; another one goes on meanwhile."""
    outstanding = Outstanding()
    outstanding.begin("lost", "g", "t", 100, 0.0, reported=1000, request_id="lost")
    outstanding.begin("long", "g", "t", 50, 0.0, reported=600, request_id="long")
    for now_s in range(2, 80, 2):
        outstanding.reconcile({"g": 600}, float(now_s))
    assert outstanding.holds("long") and not outstanding.holds("lost") and outstanding.here("g") == 50


def test_a_lost_call_is_found_although_others_are_corrected() -> None:
    outstanding = Outstanding()
    outstanding.begin("lost", "g", "t", 300, 0.0, request_id="lost")
    outstanding.begin("long", "g", "t", 3000, 0.0, request_id="long")
    outstanding.correct("long", STEP_TOKENS)
    for now_s in range(2, 80, 2):
        outstanding.reconcile({"g": 3000}, float(now_s))
    assert outstanding.here("g") == STEP_TOKENS and not outstanding.holds("lost")


@given(st.lists(st.tuples(st.sampled_from("bce"), st.integers(0, 4), st.sampled_from("gh"), st.integers(0, 900))))
def test_counts_return_to_nothing_whatever_is_corrected(events: list[tuple[str, int, str, int]]) -> None:
    outstanding = Outstanding()
    outstanding.set_groups("gh")
    for kind, call, group, tokens in events:
        if kind == "b":
            outstanding.begin(f"c{call}", group, "t", tokens, 0.0, reported=900, request_id=f"r{call}")
        elif kind == "c":
            outstanding.correct(f"r{call}", tokens)
        else:
            outstanding.end(f"c{call}", group)
        assert outstanding.here("g") >= 0 and outstanding.here("h") >= 0
        assert outstanding.of_tenant("t").tolist() == [outstanding.here("g"), outstanding.here("h")]
    outstanding.keep_only([])
    assert outstanding.tenants_with("t") == 1 and not outstanding._call_of and not outstanding._reported
