"""LLM with structured_outputs: what is refused before anything runs; hostile forms, after which it answers still."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from tandem import LLM, SamplingParams, StructuredOutputsParams

DEEP: dict[str, Any] = {"type": "integer"}
for _ in range(60):
    DEEP = {"type": "object", "properties": {"a": DEEP}, "required": ["a"], "additionalProperties": False}
HOSTILE: list[dict[str, Any]] = [
    {"regex": "(((a*)*)*)*b"},
    {"regex": "(.{1,400}){1,400}x"},
    {"regex": "(a|b|ab)*c{1,9999}"},
    {"regex": ".*a.{300}"},
    {"choice": tuple(f"{'x' * 50}{number}" for number in range(3000))},
    {"json": DEEP},
    {"json": {"enum": [f"value {number}" for number in range(5000)]}},
    {"json": {"$ref": "#"}},
    {"json": {"allOf": [{"anyOf": [{"type": "string"}, {"type": "integer"}]}] * 12}},
    {
        "json": {
            "type": "object",
            "properties": {f"p{n}": {"type": "string", "pattern": "^(a|b){1,60}$"} for n in range(300)},
        }
    },
    {"grammar": 'start: a\na: a a | "x" |\n'},
    {"grammar": "start: start"},
    {"grammar": "\u0000"},
]
BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "one of json, regex"),
    ({"json": {}, "regex": "a"}, "json and regex exclude each other"),
    ({"regex": "("}, "(?s)structured_outputs.regex: .*unclosed group"),
    ({"regex": "(?=a)"}, "look-around"),
    ({"choice": ()}, "structured_outputs.choice"),
    ({"json": "{"}, "it is not JSON"),
    ({"json": 5}, "must be a JSON object"),
    ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ({"json": {"not": {}}}, "not"),
    ({"json": {"x-guidance": {"lenient": True}}}, "x-guidance"),
    ({"grammar": "start: nothing"}, "nothing"),
    ({"structural_tag": {"type": "structural_tag", "format": {}}}, "format"),
    (
        {"structural_tag": {"type": "structural_tag", "structures": [{"begin": "a"}], "triggers": ["b"]}},
        "none of the trig",
    ),
    ({"regex": "a", "disable_any_whitespace": True}, "does not go with regex"),
    ({"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}, "exclude each other"),
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", dtype="float32", device="cpu", cpu_threads=1) as opened:
        yield opened


def params(**form: Any) -> SamplingParams:
    return SamplingParams(max_tokens=24, temperature=0, structured_outputs=StructuredOutputsParams(**form))


@pytest.mark.parametrize(("form", "words"), BAD, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_a_value_error_that_names_it(llm: LLM, form: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        llm.generate("x", params(**form), use_tqdm=False)


def test_a_grammar_is_no_parameter_of_callers(llm: LLM) -> None:
    with pytest.raises(ValueError, match="structured_outputs"):
        llm.generate("x", SamplingParams(grammar='start: "a"'), use_tqdm=False)
    with pytest.raises(ValueError, match="StructuredOutputsParams"):
        llm.generate("x", SamplingParams(structured_outputs={"regex": "a"}), use_tqdm=False)  # type: ignore[arg-type]


def test_hostile_forms_end_alone(llm: LLM) -> None:
    """A text, an error of the prompt or a ValueError; the prompts beside them are answered in any case."""
    plain = SamplingParams(max_tokens=12, temperature=0)
    wanted = llm.generate("Once", plain, use_tqdm=False)[0].text
    taken: list[SamplingParams] = []
    for form in HOSTILE:
        with suppress(ValueError):  # refused before anything runs
            llm.generate([], params(**form), use_tqdm=False)
            taken.append(params(**form))
    assert len(taken) > len(HOSTILE) / 2
    *hostile, beside = llm.generate(["Once"] * (len(taken) + 1), [*taken, plain], use_tqdm=False)
    assert beside.text == wanted
    assert all(output.outputs[0].finish_reason in ("stop", "length", "error") for output in hostile)
    assert llm.generate("Once", plain, use_tqdm=False)[0].text == wanted


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ({"choice": ("green",)}, "green"),
        ({"regex": "^a{3}$"}, "aaa"),
        ({"json": '{"const": {"a": [1, true, null]}}', "disable_any_whitespace": True}, '{"a":[1,true,null]}'),
        ({"json": {"const": [1, 2]}, "whitespace_pattern": "-"}, "[1,-2]"),
        ({"grammar": 'root ::= "b" [c] "d"'}, "bcd"),
        ({"grammar": 'start: "b" /c/ "d"'}, "bcd"),
    ],
)
def test_forms_that_leave_one_text(llm: LLM, form: dict[str, Any], text: str) -> None:
    (output,) = llm.generate("x", params(**form), use_tqdm=False)
    assert output.outputs[0].text.replace("-", "") == text.replace("-", "")
    assert output.outputs[0].finish_reason in ("stop", "length")
