"""One choice: the same text, tokens and end however the tokens are cut into deltas."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.gateway.rig import EOS, make_tokenizer
from workers.messages import SamplingParams, TokenDelta, TokenLogprobs
from workers.text.choice_text import ChoiceText
from workers.text.detokenizer import DetokenizerFactory

FACTORY = DetokenizerFactory(make_tokenizer())


def deltas(tokens: list[int], cuts: list[int], reason: str, with_logprobs: bool) -> list[TokenDelta]:
    bounds = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    spans = list(pairwise(bounds)) or [(0, 0)]
    return [
        TokenDelta(
            request_id="r",
            epoch=0,
            choice=0,
            first_position=low,
            token_ids=tokens[low:high],
            logprobs=[TokenLogprobs(t, -1.0) for t in tokens[low:high]] if with_logprobs else None,
            finish_reason=reason if high == len(tokens) else None,  # type: ignore[arg-type]
        )
        for low, high in spans
    ]


def outcome(params: SamplingParams, stream: list[TokenDelta], include: bool) -> tuple[object, ...]:
    choice = ChoiceText(FACTORY.make([1]), params, include_stop=include, eos_token_ids=frozenset({EOS}))
    text, ids, logprobs, reason, keep = "", [], 0, None, None
    for delta in stream:
        addition = choice.take(delta)
        if addition is not None:
            text += addition.text
            ids += addition.token_ids
            logprobs += len(addition.logprobs or ())
            reason = addition.stop_reason if addition.finish_reason else None
            keep = addition.abort_at if addition.abort_at is not None else keep
    assert choice.tokens == len(ids)
    assert not logprobs or logprobs == len(ids)
    assert keep is None or keep == len(ids)
    return text, ids, choice.finished, reason


@given(
    st.binary(max_size=30) | st.text("ab é", max_size=20).map(lambda t: t.encode()),
    st.lists(st.integers(1, 30), max_size=10),
    st.lists(st.text("ab é", min_size=1, max_size=3), max_size=3),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["stop", "length"]),
)
def test_the_cuts_do_not_matter(
    raw: bytes, cuts: list[int], stops: list[str], include: bool, with_logprobs: bool, reason: str
) -> None:
    tokens = [*raw, EOS] if reason == "stop" else [*raw]
    params = SamplingParams(max_tokens=100, stop=tuple(stops))
    whole = outcome(params, deltas(tokens, [], reason, with_logprobs), include)
    assert outcome(params, deltas(tokens, cuts, reason, with_logprobs), include) == whole
    if not stops:
        assert whole[:3] == (raw.decode("utf-8", "replace"), tokens, reason)


def test_tokens_sent_twice_count_once() -> None:
    choice = ChoiceText(FACTORY.make([1]), SamplingParams(max_tokens=9), include_stop=False, eos_token_ids=frozenset())
    first = TokenDelta(request_id="r", epoch=0, choice=0, first_position=0, token_ids=[97, 98])
    again = TokenDelta(request_id="r", epoch=1, choice=0, first_position=1, token_ids=[98, 99])
    texts = [addition.text for delta in (first, again) if (addition := choice.take(delta)) is not None]
    assert (texts, choice.tokens) == (["ab", "c"], 3)
