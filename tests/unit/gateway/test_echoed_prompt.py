"""text_offset of an echoed prompt: where each token begins in the text, special ones and parts of characters too."""

from itertools import pairwise
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tandem.cluster.gateway.http.gateway_metrics import GatewayMetrics
from tandem.cluster.gateway.openai.echoed_prompt import added_tokens, echoed_prompt
from tandem.cluster.gateway.schemas.generation_body import CompletionBody
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.cluster.gateway.serving.prompts import Prompt
from tandem.configs.bundled import DEMO_MODEL
from tandem.configs.schema import GatewaySettings
from tandem.workers.text.tokenizer import ModelTokenizer, load_tokenizer
from tests.unit.gateway.rig import BOS, TURN, gateway, make_text, make_tokenizer
from tests.unit.gateway.test_tool_calls import saying
from tests.unit.text.data import needs_data, tokenizer_folder

RENDERED = "<|im_start|>user\nhi<|im_end|>"
SPECIALS = {
    "gpt2": "<|endoftext|>",
    "llama2": "<s>",
    "minimind": "<|im_start|>",
    "qwen2.5": "<|im_end|>",
}
TEXTS = (
    "{}user\nHow  are you?{}\n{}assistant\n",
    "{}{} [INST] Grüße, 🐳!{} x",
    "{}Once upon{}a time",
    " leading and trailing ",
    "日本語{}🐳🐳",
)


def services_of(tokenizer: ModelTokenizer) -> TextServices:
    metrics = GatewayMetrics(CollectorRegistry(), "tandem", "m")
    return make_text(GatewaySettings(), metrics, tokenizer, vocab_size=tokenizer.vocab_size)


def echoed(services: TextServices, text: str, **fields: Any) -> tuple[list[int], list[int]]:
    """Token ids and offsets of a text that is echoed."""
    body = CompletionBody(prompt=text, echo=True, logprobs=0, **fields)
    ids = services.tokenizer.encode(text, add_special_tokens=body.add_special_tokens is not False)
    echo = echoed_prompt(services, Prompt(ids, text), body)
    assert echo.text == text
    return ids, list(echo.offsets)


@pytest.mark.parametrize("skip", [True, False])
def test_a_rendered_prompt_keeps_its_special_tokens(skip: bool) -> None:
    services = services_of(load_tokenizer(DEMO_MODEL))
    assert echoed(services, RENDERED, skip_special_tokens=skip)[1] == [0, 12, 16, 17, 18, 19]


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("text", ["<turn>hé<turn>", "<bos><turn>x", "hé"])
def test_what_the_tokenizer_adds_takes_no_place(text: str, adds: bool) -> None:
    services = services_of(make_tokenizer())
    ids, offsets = echoed(services, text, add_special_tokens=adds)
    assert added_tokens(services.tokenizer, text) == [True] + [False] * (len(ids) - adds)
    own = ids[1:] if adds else ids
    wide = {BOS: 5, TURN: 6, 0xC3: 0}
    at, expected = 0, [0] if adds else []
    for token_id in own:
        expected.append(at)
        at += wide.get(token_id, 1)
    assert (offsets, at) == (expected, len(text))


@needs_data
@pytest.mark.parametrize("name", SPECIALS)
def test_places_are_those_of_the_tokenizer(name: str) -> None:
    """The library's own offsets leave spaces out, and give each part of a character the whole of it."""
    services = services_of(load_tokenizer(tokenizer_folder(name)))
    for form in TEXTS:
        text = form.replace("{}", SPECIALS[name])
        ids, offsets = echoed(services, text)
        encoding = services.tokenizer.backend.encode(text, add_special_tokens=True)
        assert encoding.ids == ids
        is_added, spans = added_tokens(services.tokenizer, text), encoding.offsets
        own = [i for i in range(len(ids)) if not is_added[i]]
        assert offsets[own[0]] == 0
        for before, one in pairwise(own):
            place, end = offsets[one], min(spans[before][1], spans[one][0])
            assert not text[min(place, end) : max(place, end)].strip(" "), (text, one)
            assert offsets[before] <= place


async def test_offsets_of_the_answer_follow_those_of_the_echo() -> None:
    """Ids and texts that are cut are echoed as decoded, by skip_special_tokens."""
    ids = [TURN, *b"hi", TURN, *"é".encode()]
    for skip, before in ((True, [0, 0, 1, 2, 2, 2]), (False, [0, 6, 7, 8, 14, 14])):
        async with gateway(saying("ok")) as rig:
            asked = {"echo": True, "logprobs": 0, "max_tokens": 2, "skip_special_tokens": skip}
            for more in ({"prompt": ids}, {"prompt": "x<turn>hi<turn>é", "truncate_prompt_tokens": 6}):
                (choice,) = (await rig.complete(**asked, **more)).json()["choices"]
                offsets = choice["logprobs"]["text_offset"]
                assert offsets[:6] == before
                assert choice["text"][offsets[6] :] == "".join(choice["logprobs"]["tokens"][6:])
