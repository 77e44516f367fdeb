"""--per-request-spec-decode-metrics: what became of a request's draft tokens, in its answer, as in vLLM."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.configs.schema import GatewaySettings, SpecDecodeMetrics
from tandem.workers.speculation.acceptance import DraftAcceptance
from tests.support.fake_backend import fixed_script
from tests.support.resuming_backend import ResumingBackend
from tests.unit.gateway.rig import BOS, EOS, events, gateway

MOST = 5
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def settings(level: SpecDecodeMetrics) -> GatewaySettings:
    return GatewaySettings(per_request_spec_decode_metrics=level)


def backend(text: str = "abcdefgh", **more: Any) -> ResumingBackend:
    """Steps of three tokens, of which two were drafts, of four."""
    script = fixed_script([*text.encode(), EOS])
    return ResumingBackend(script=script, eos_token_ids=frozenset({EOS}), tokens_per_step=3, num_drafts=4, **more)


def test_the_example_of_vllms_page() -> None:
    acceptance = DraftAcceptance(3, detailed=False)
    for accepted, steps in enumerate([39, 1, 0, 3]):
        for _ in range(steps):
            acceptance.add(3, accepted)
    assert acceptance.report() == {
        "mean_acceptance_length": pytest.approx(1.2325581395348837),
        "draft_acceptance_rate": pytest.approx(0.07751937984496124),
        "acceptance_histogram": [39, 1, 0, 3],
        "acceptance_histogram_by_draft_length": {"3": [39, 1, 0, 3]},
        "num_spec_steps": 43,
        "num_accepted_draft_tokens": 10,
        "num_draft_tokens": 129,
        "num_spec_tokens": 3,
    }


@given(st.lists(st.integers(1, MOST).flatmap(lambda most: st.tuples(st.just(most), st.integers(0, most)))))
def test_the_summary_is_that_of_the_steps(steps: list[tuple[int, int]]) -> None:
    acceptance = DraftAcceptance(MOST, detailed=True)
    for num_drafts, num_accepted in steps:
        acceptance.add(num_drafts, num_accepted)
    report = acceptance.report()
    drafted, accepted = report["per_step_drafted"], report["per_step_accepted"]
    assert list(zip(drafted, accepted, strict=True)) == steps
    assert report["num_draft_tokens"] == sum(drafted) and report["num_accepted_draft_tokens"] == sum(accepted)
    assert report["acceptance_histogram"] == [accepted.count(j) for j in range(MOST + 1)]
    by_length = report["acceptance_histogram_by_draft_length"]
    assert set(by_length) == {str(length) for length in drafted}
    for length, counts in by_length.items():
        assert counts == [steps.count((int(length), j)) for j in range(int(length) + 1)]
    assert report["mean_acceptance_length"] == (1 + sum(accepted) / len(steps) if steps else 1.0)
    assert report["draft_acceptance_rate"] == (sum(accepted) / sum(drafted) if steps else 0.0)


@pytest.mark.parametrize("kind", ["chat", "complete"])
async def test_answers_and_the_last_chunk_have_the_report(kind: str) -> None:
    async with gateway(backend(), settings=settings("detailed"), text={"max_drafts": MOST}) as rig:
        whole = (await getattr(rig, kind)()).json()["metrics"]
        *chunks, bill, _ = events((await getattr(rig, kind)(**STREAMED)).text)
        assert bill["metrics"] == whole and not any("metrics" in chunk for chunk in chunks)
        report = whole["speculative_decoding"]
        assert report["acceptance_histogram"] == [0, 0, 3, 0, 0, 0]
        assert report["acceptance_histogram_by_draft_length"] == {"4": [0, 0, 3, 0, 0]}
        assert (report["per_step_drafted"], report["per_step_accepted"]) == ([4, 4, 4], [2, 2, 2])
        assert (report["mean_acceptance_length"], report["draft_acceptance_rate"]) == (3.0, 0.5)
        assert report["num_spec_tokens"] == MOST


async def test_the_summary_leaves_the_steps_out() -> None:
    async with gateway(backend(), settings=settings("summary"), text={"max_drafts": MOST}) as rig:
        report = (await rig.chat()).json()["metrics"]["speculative_decoding"]
        assert report["num_spec_steps"] == 3 and "per_step_drafted" not in report


async def test_without_the_flag_answers_are_unchanged() -> None:
    async with gateway(backend(), text={"max_drafts": MOST}) as rig:
        assert "metrics" not in (await rig.chat()).json()
        assert all("metrics" not in chunk for chunk in events((await rig.chat(**STREAMED)).text)[:-1])


@pytest.mark.parametrize(
    "body",
    [
        {"n": 2},
        {"prompt": [[BOS, 7], [BOS, 8]]},
        {"use_beam_search": True, "n": 2, "temperature": 0, "max_tokens": 2},
    ],
    ids=["n", "prompts", "beams"],
)
async def test_what_has_no_single_choice_has_null(body: dict[str, Any]) -> None:
    async with gateway(backend(), settings=settings("summary"), text={"max_drafts": MOST}) as rig:
        answer = await rig.complete(**body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["metrics"] == {"speculative_decoding": None}


async def test_steps_of_a_lost_group_count_once() -> None:
    group = backend("abcdefghijkl", manual=True)
    async with gateway(group, settings=settings("detailed"), text={"max_drafts": MOST}) as rig:
        asking = asyncio.create_task(rig.complete())
        async with asyncio.timeout(30):
            await group.submitted.wait()
            group.step(2)
            group.lose_all()
            while len(group.requests) < 2:
                await asyncio.sleep(0.01)
            assert group.requests[1].resume_token_ids == [[*b"abcdef"]]
            group.step(20)
            answer = await asking
        report = answer.json()["metrics"]["speculative_decoding"]
        assert report["per_step_accepted"] == [2, 2, 2, 2, 0]
        assert answer.json()["usage"]["completion_tokens"] == 13
