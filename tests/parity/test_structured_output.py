"""Structured output is the same text whatever happens on the way: n-gram drafts, preemption, swap to host memory, small
chunks, prefix hits, two ranks, and another engine that goes on, as a second group does when the first is lost. Each
finished text has its form, each text that was cut is the beginning of one that has."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import msgspec
import pytest

from tandem import LLM, SamplingParams, StructuredOutputsParams
from tandem.workers.engine.transfers.copy_costs import CopyCosts
from tandem.workers.messages.request import Abort, AdapterRef, Ended, GenerationRequest, TokenDelta
from tandem.workers.offline.llm import Completion, RequestOutput
from tandem.workers.structured.grammar_store import GrammarStore
from tandem.workers.text.grammars import grammar_of, with_grammar
from tests.support.free_drafts import free_drafts

DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo"
VOCAB = 768
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"type": "string", "maxLength": 6}, "minItems": 1, "maxItems": 3},
        "color": {"enum": ["red", "green"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["names", "color", "size"],
    "additionalProperties": False,
}
FORMS = {
    "schema": StructuredOutputsParams(json=SCHEMA),
    "object": StructuredOutputsParams(json_object=True, disable_any_whitespace=True),
    "regex": StructuredOutputsParams(regex=r"(the little dog was (red|big)\. ){2,6}"),
    "choice": StructuredOutputsParams(choice=("yes", "yesterday", "no way")),
    "grammar": StructuredOutputsParams(grammar='root ::= "(" item* ")"\nitem ::= [a-c] | root\n'),
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
COMMON: dict[str, Any] = {"max_num_seqs": 8, "dtype": "float32", "cpu_threads": 1, "enable_lora": True}
CASES: dict[str, dict[str, Any]] = {
    "drafts": {"speculative_config": NGRAM},
    "preemption": {"num_gpu_blocks_override": 24, "enable_prefix_caching": False},
    "swap and drafts": {"num_gpu_blocks_override": 16, "kv_offloading_size": 0.05, "speculative_config": NGRAM},
    "small chunks on two ranks": {"max_num_batched_tokens": 24, "tensor_parallel_size": 2},
}
STORY = "Once upon a time there was a little dog. The little dog was red. The little dog was big. "
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 20, "n": 2, "seed": 7},
    {"temperature": 0.8, "top_k": 20, "seed": 8, "min_tokens": 20},
    {"temperature": 1.0, "top_k": 20, "seed": 9, "logprobs": 2, "stop": (" dog", '",')},
    {"temperature": 1.0, "top_k": 20, "seed": 10, "max_tokens": 7, "repetition_penalty": 1.2},
]
ASKED = [
    (name, SamplingParams(**{"max_tokens": 32, **kind, "structured_outputs": form}))
    for name, form in FORMS.items()
    for kind in KINDS
]
"""Every form with every kind of sampling."""


@pytest.fixture(scope="module", autouse=True)
def _no_measured_times() -> Iterator[None]:
    """However slow the machine is: copies of KV always pay, and drafts do while they are accepted."""
    with (
        mock.patch.object(CopyCosts, "recompute_s", return_value=math.inf),
        free_drafts(),
    ):
        yield


def prompts() -> list[str]:
    return [STORY * (1 + number % 3) + f"{number % 4}" for number in range(len(ASKED))]


def adapters(llm: LLM) -> list[AdapterRef | None]:
    pirate = llm.load_adapter(DEMO / "adapters" / "pirate")
    return [pirate if number % 4 == 3 else None for number in range(len(ASKED))]


def answers(llm: LLM, asked: list[SamplingParams] | None = None) -> list[RequestOutput]:
    params = [params for _, params in ASKED] if asked is None else asked
    return llm.generate(prompts(), params, use_tqdm=False, lora_request=adapters(llm))


def seen(outputs: list[RequestOutput]) -> list[tuple[str, str | None, str | None]]:
    return [(done.text, done.finish_reason, done.error) for output in outputs for done in output.outputs]


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM("demo", **COMMON) as llm:
        yield llm


@pytest.fixture(scope="module")
def wanted(plain: LLM) -> list[RequestOutput]:
    return answers(plain)


def has_form(name: str, text: str) -> bool:
    if name in ("schema", "object"):
        jsonschema.validate(json.loads(text), SCHEMA if name == "schema" else {"type": "object"})
        return True
    if name == "grammar":
        return text.count("(") == text.count(")") and re.fullmatch(r"\([abc()]*\)", text) is not None
    form = FORMS[name]
    return text in (form.choice or ()) or re.fullmatch(form.regex or "", text) is not None


def test_every_finished_text_has_its_form_and_every_other_one_begins_so(wanted: list[RequestOutput]) -> None:
    store = GrammarStore(DEMO / "model", VOCAB, ())
    finished = 0
    for (name, params), output in zip(ASKED, wanted, strict=True):
        form = params.structured_outputs
        assert form is not None
        store.compile(name, grammar_of(form))
        for done in output.outputs:
            assert done.error is None and done.finish_reason in ("stop", "length")
            if done.finish_reason == "length" or params.stop:
                start = store.start(name)
                assert start is not None and start.deep_copy().consume_tokens(_inside(done))
            else:
                finished += 1
                assert has_form(name, done.text), (name, done.text)
    assert finished >= 6


def _inside(done: Completion) -> list[int]:
    """Its tokens without the end."""
    return [token for token in done.token_ids if token > 2]


@pytest.mark.parametrize("case", CASES)
def test_the_texts_are_those_of_an_undisturbed_engine(case: str, wanted: list[RequestOutput]) -> None:
    with LLM("demo", **{**COMMON, **CASES[case]}) as llm:
        assert seen(answers(llm)) == seen(wanted)
        if case == "drafts":  # again, with prefix hits and compiled grammars
            assert seen(answers(llm)) == seen(wanted)
        stats = llm._engine.stats()
        if "drafts" in case:
            assert stats.drafts is not None and stats.drafts.num_accepted > 0
        if "num_gpu_blocks_override" in CASES[case]:
            assert stats.preemptions > 0


def test_log_probabilities_are_the_models_own(plain: LLM, wanted: list[RequestOutput]) -> None:
    """As of every other logits processor: before anything is forbidden."""
    for number, ((_, params), output) in enumerate(zip(ASKED, wanted, strict=True)):
        if params.logprobs is not None and output.outputs[0].token_ids and number % 4 != 3:
            bare = msgspec.structs.replace(params, structured_outputs=None, stop=(), max_tokens=1)
            first = plain.generate([output.prompt_token_ids], bare, use_tqdm=False)[0].outputs[0]
            best = [
                sorted((one.rank, token) for token, one in found.logprobs[0].items() if one.rank <= params.logprobs)
                for found in (output.outputs[0], first)
            ]
            assert best[0] == best[1]
            return
    raise AssertionError("no request had log probabilities")


class Tokens:
    """A call's sink: collects the tokens of requests."""

    def __init__(self) -> None:
        self.of: dict[str, list[int]] = {}

    def deltas(self, deltas: list[TokenDelta]) -> list[Abort]:
        for delta in deltas:
            self.of.setdefault(delta.request_id, []).extend(delta.token_ids)
        return []


def check_end(ended: Ended) -> None:
    assert ended.refused is None and "error" not in ended.finish_reasons


def test_an_engine_that_resumes_a_text_writes_its_rest(wanted: list[RequestOutput]) -> None:
    """The tokens delivered are the beginning; the grammar goes on behind them."""
    chosen = [
        (with_grammar(params), output)
        for (_, params), output, number in zip(ASKED, wanted, range(len(ASKED)), strict=True)
        if params.n == 1 and not params.stop and number % 4 != 3 and len(output.outputs[0].token_ids) > 3
    ]
    assert len(chosen) > 5
    with LLM("demo", speculative_config=NGRAM, **COMMON) as llm:
        tokens, requests = Tokens(), []
        with llm.local.call(tokens) as call:
            for number, (params, output) in enumerate(chosen):
                whole = output.outputs[0].token_ids
                requests.append(
                    GenerationRequest(
                        request_id=str(number),
                        attempt=1,
                        prompt_token_ids=output.prompt_token_ids,
                        sampling=params,
                        resume_token_ids=[whole[: 1 + number % (len(whole) - 1)]],
                        begun=True,
                        reply_to=call.address,
                    )
                )
            call.run(requests, check_end)
    for number, (_, output) in enumerate(chosen):
        whole = output.outputs[0].token_ids
        cut = 1 + number % (len(whole) - 1)
        assert tokens.of[str(number)] == whole[cut:]
