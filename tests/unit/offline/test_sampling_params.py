"""SamplingParams: values are checked where they are made, and nowhere on the wire."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from tandem import RequestOutputKind, SamplingParams, StructuredOutputsParams
from tandem.cluster.gateway.schemas.generation_body import CommonBody
from tandem.workers.messages.request import GenerationRequest
from tandem.workers.messages.sampling_check import RANGES, UNBOUNDED
from tandem.workers.messages.thinking import ThinkingBudget

PLAIN = SamplingParams(max_tokens=8)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"max_tokens": 0}, r"max_tokens=0: Expected `int` >= 1"),
        ({"prompt_logprobs": -1}, r"prompt_logprobs=-1: Expected `int` >= 0"),
        ({"max_tokens": "5"}, r"max_tokens='5': Expected `int`, got `str`"),
        ({"n": 0}, "n=0: "),
        ({"temperature": -0.1}, "temperature=-0.1: "),
        ({"temperature": 9}, r"temperature=9: Expected `float` <= 2\.0"),
        ({"temperature": math.nan}, "temperature=nan: "),
        ({"temperature": math.inf}, "temperature=inf: "),
        ({"top_p": 1.5}, "top_p=1.5: "),
        ({"top_k": -2}, "top_k=-2: "),
        ({"presence_penalty": 2.5}, r"presence_penalty=2\.5: Expected `float` <= 2\.0"),
        ({"repetition_penalty": 11}, r"repetition_penalty=11: Expected `float` <= 10\.0"),
        ({"logit_bias": {5: 101}}, r"logit_bias=.*Expected `float` <= 100\.0"),
        ({"logit_bias": {5: -101}}, r"logit_bias: -101\.0 of token id 5 must be -inf or at least -100\.0"),
        ({"min_tokens": 9}, "min_tokens=9 exceeds max_tokens=8"),
        ({"stop": ""}, "stop='': Expected `str` of length >= 1"),
        ({"stop": 5}, "stop=5: Expected a list, got `int`"),
        ({"stop": ("",)}, "stop="),
        ({"logit_bias": {"a": 1.0}}, "logit_bias={'a': 1.0}: Expected `int`, got `str`"),
        ({"logit_bias": ((1, math.nan),)}, "logit_bias="),
        ({"allowed_token_ids": ()}, r"allowed_token_ids=\(\): Expected a list of length >= 1"),
        ({"bad_words": "word"}, "bad_words='word': Expected a list"),
        ({"bad_words": ("",)}, "bad_words="),
        ({"bad_words_token_ids": ((),)}, "bad_words_token_ids="),
        ({"repetition_penalty": 0}, "repetition_penalty=0: "),
        ({"seed": 2**64}, "seed=18446744073709551616: "),
        ({"stop_token_ids": np.array(5)}, r"stop_token_ids=array\(5\): Expected a list"),
        ({"max_tokens": np.array([5])}, r"max_tokens=array\(\[5\]\): Expected `int`"),
        ({"structured_outputs": "json"}, "structured_outputs='json' is no StructuredOutputsParams"),
        ({"structured_outputs": StructuredOutputsParams(choice=())}, r"structured_outputs\.choice=\(\): "),
        ({"stop": "x", "detokenize": False}, r"stop=\('x',\) needs detokenize=True"),
        (
            {"thinking_budget": ThinkingBudget(tokens=5, start=(1,), end=())},
            r"thinking_budget=.*: at least 0 tokens, and two marks",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_values_without_meaning_are_refused_at_construction(params: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}"):
        SamplingParams(**{"max_tokens": 8, **params})
    with pytest.raises(ValueError, match=f"^{words}"):
        PLAIN.clone(**params)


def test_unknown_names_are_type_errors() -> None:
    for make in (SamplingParams, PLAIN.clone):
        with pytest.raises(TypeError, match="extra_args"):
            make(extra_args={})


def test_values_become_plain_where_they_are_given() -> None:
    given: dict[str, Any] = {"stop": "x", "logit_bias": {5: 1}, "temperature": np.float64(0.5), "bad_words": None}
    for made in (SamplingParams(**given), PLAIN.clone(**given)):
        assert made.stop == ("x",) and made.logit_bias == ((5, 1.0),) and made.bad_words == ()
        assert type(made.temperature) is float and isinstance(made, SamplingParams)
        assert made.output_kind is RequestOutputKind.CUMULATIVE
    assert SamplingParams(max_tokens=None, min_tokens=9).max_tokens == UNBOUNDED, "as in vLLM: up to the context's end"


def test_messages_are_neither_checked_nor_changed() -> None:
    odd = msgspec.structs.replace(PLAIN, temperature=9.0, max_tokens=0, min_tokens=4, logit_bias=((1, math.inf),))
    request = GenerationRequest(request_id="a", prompt_token_ids=[1], sampling=odd)
    raw = msgspec.msgpack.encode(request)
    read = msgspec.msgpack.decode(raw, type=GenerationRequest)
    assert read == request and msgspec.msgpack.encode(read) == raw
    with pytest.raises(ValueError, match=r"^temperature=9\.0: "):
        read.sampling.clone(temperature=9.0)


def test_ranges_are_those_of_bodies() -> None:
    """A body and SamplingParams refuse the same values of the parameters that both have."""
    common = set(CommonBody.__struct_fields__) & set(RANGES) - {"stop", "logit_bias"}
    assert len(common) > 15
    for name in sorted(common):
        kind = CommonBody.__annotations__[name]
        for value in (
            -(2**70),
            -101,
            -2,
            -1,
            0,
            1e-9,
            1,
            1.5,
            2.5,
            11,
            2**31,
            2**70,
            "x",
            [5],
            [-1],
            [2**31],
            ["x"],
            [""],
        ):
            told = []
            for shape in (kind, RANGES[name] | None):
                try:
                    msgspec.convert(value, shape)
                    told.append("taken")
                except msgspec.ValidationError:
                    told.append("refused")
            assert told[0] == told[1], (name, value, told)
