"""What chat and completions answer, whole and streamed, over the fake backend."""

import math
from typing import Any

import pytest

from tandem.cluster.gateway.openai.token_formatter import TokenFormatter
from tandem.configs.schema import GatewaySettings
from tandem.workers.messages.request import Abort, TokenLogprobs
from tandem.workers.text.detokenizer import DetokenizerFactory
from tandem.workers.text.generation_config import GenerationDefaults
from tests.support.fake_backend import FakeBackend, fixed_script, logprob_of
from tests.unit.gateway.rig import BOS, CONTEXT, EOS, MODEL, TURN, USER, Rig, events, gateway, make_tokenizer


def saying(*texts: str, ends: bool = True, **options: Any) -> FakeBackend:
    """A backend whose choice i says texts[i], then EOS."""
    outputs = [[*text.encode(), EOS] if ends else list(text.encode()) for text in texts]
    return FakeBackend(script=fixed_script(*outputs), eos_token_ids=frozenset({EOS}), **options)


def joined(chunks: list[Any], index: int = 0) -> str:
    """The text of one choice of a stream, of either kind."""
    parts = [choice for chunk in chunks if chunk != "[DONE]" for choice in chunk["choices"] if choice["index"] == index]
    return "".join(part["delta"].get("content", "") if "delta" in part else part["text"] for part in parts)


async def test_a_chat_answer_has_all_its_parts() -> None:
    async with gateway(saying("Hello 😀", cached_tokens=3)) as rig:
        answer = (await rig.chat(max_tokens=20)).json()
        assert answer["id"].startswith("chatcmpl-")
        assert answer["object"] == "chat.completion"
        assert answer["model"] == MODEL
        assert answer["system_fingerprint"]
        (choice,) = answer["choices"]
        assert choice["message"] == {"role": "assistant", "content": "Hello 😀", "refusal": None}
        assert (choice["finish_reason"], choice["logprobs"], choice["stop_reason"]) == ("stop", None, None)
        prompt = rig.backend.requests[0].prompt_token_ids
        assert prompt == [TURN, *b"user:hi", TURN]
        assert answer["usage"] == {
            "prompt_tokens": len(prompt),
            "completion_tokens": 11,
            "total_tokens": len(prompt) + 11,
            "prompt_tokens_details": {"cached_tokens": 3},
        }


async def test_a_completion_answer_has_all_its_parts() -> None:
    async with gateway(saying("there", ends=False)) as rig:
        answer = (await rig.complete(max_tokens=4, model="alias/echo")).json()
        assert answer["id"].startswith("cmpl-")
        assert answer["object"] == "text_completion"
        assert answer["model"] == "alias/echo"
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("ther", "length")
        assert rig.backend.requests[0].prompt_token_ids == [BOS, *b"hello"]


async def test_defaults_are_those_of_the_contract() -> None:
    defaults = GenerationDefaults(temperature=0.6, top_k=40, top_p=0.9, repetition_penalty=1.1)
    async with gateway(saying("x"), defaults=defaults, text={"random_seed": lambda: 77}) as rig:
        await rig.complete()
        await rig.chat()
        completion, chat = (request.sampling for request in rig.backend.requests)
        assert completion.max_tokens == 16
        assert chat.max_tokens == CONTEXT - len(rig.backend.requests[1].prompt_token_ids)
        assert (chat.temperature, chat.top_k, chat.top_p, chat.repetition_penalty) == (0.6, 40, 0.9, 1.1)
        assert (chat.seed, chat.n, chat.min_p) == (77, 1, 0.0)
        await rig.complete(temperature=0, top_k=-1, top_p=1, repetition_penalty=1, seed=-2, min_p=0.5)
        params = rig.backend.requests[2].sampling
        assert (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (0.0, 0, 1.0, 1.0)
        assert params.seed == -2, "as LLM takes it: the same text"
        assert params.min_p == 0.5
        await rig.complete(seed=-1)
        assert rig.backend.requests[3].sampling.seed == 77, "none, as in vLLM"


async def test_what_the_model_forbids_and_how_long_it_answers() -> None:
    """Of generation_config.json: a cap, as in vLLM, defaults of stop and min_tokens, and tokens that are never said."""
    defaults = GenerationDefaults(
        max_new_tokens=9, min_new_tokens=2, stop_strings=("END",), suppress_tokens=(7,), bad_words_ids=((8, 9),)
    )
    async with gateway(saying("x"), defaults=defaults) as rig:
        await rig.chat()
        await rig.complete(max_tokens=50, stop=["x"], min_tokens=0, logit_bias={"7": 5, "6": 1})
        await rig.complete(max_tokens=1)
        chat, given, short = (request.sampling for request in rig.backend.requests)
        assert (chat.max_tokens, chat.min_tokens, chat.stop) == (9, 2, ("END",))
        assert (given.max_tokens, given.min_tokens, given.stop) == (9, 0, ("x",))
        assert dict(given.logit_bias) == {6: 1, 7: -math.inf} and chat.bad_words_token_ids == ((8, 9),)
        assert (short.max_tokens, short.min_tokens) == (1, 1)


async def test_every_request_gets_its_own_seed_and_id() -> None:
    async with gateway(saying("x")) as rig:
        for _ in range(3):
            await rig.client.post("/v1/completions", json={"prompt": ["a", "b"]}, headers={"x-request-id": "same"})
        assert len({request.sampling.seed for request in rig.backend.requests}) == 6
        assert len({request.request_id for request in rig.backend.requests}) == 6
        assert {request.trace_ids["x-request-id"] for request in rig.backend.requests} == {"same"}


async def test_all_fields_reach_the_engine() -> None:
    async with gateway(saying("x")) as rig:
        answer = await rig.chat(
            max_completion_tokens=9,
            max_tokens=5,
            min_tokens=2,
            n=3,
            stop_token_ids=[7],
            ignore_eos=True,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={"5": 10, "6": -100},
            allowed_token_ids=[9, 5, 9],
            bad_words=["no", " a", "no"],
            priority=-2,
            cache_salt="salt",
            logprobs=True,
            top_logprobs=4,
            seed=5,
        )
        assert answer.status_code == 200
        request = rig.backend.requests[0]
        params = request.sampling
        assert (params.max_tokens, params.min_tokens, params.n, params.logprobs) == (9, 2, 3, 4)
        assert (params.stop_token_ids, params.ignore_eos, params.seed) == ((7,), True, 5)
        assert (params.presence_penalty, params.frequency_penalty) == (0.5, -0.5)
        assert params.logit_bias == ((5, 10.0), (6, -100.0))
        assert params.allowed_token_ids == (9, 5)
        space, words = 32, [b"no", b"a"]
        ids = [tuple(rig.text.tokenizer.encode(word.decode(), add_special_tokens=False)) for word in words]
        (blank,) = rig.text.tokenizer.encode(chr(space), add_special_tokens=False)
        assert params.bad_words_token_ids == (ids[0], (blank, *ids[0]), ids[1], (blank, *ids[1]))
        assert not params.bad_words, "words stay at the gateway"
        assert (request.priority, request.cache_salt, request.tenant) == (-2, "default/salt", "default")


@pytest.mark.parametrize("queue_timeout_s", [None, 7.5])
async def test_the_queue_timeout_goes_along_with_every_prompt(queue_timeout_s: float | None) -> None:
    async with gateway(saying("x"), settings=GatewaySettings(queue_timeout_s=queue_timeout_s)) as rig:
        await rig.complete(prompt=["a", "b"])
        await rig.chat()
        assert [request.deadline_s for request in rig.backend.requests] == [queue_timeout_s] * 3


async def test_eos_ids_that_the_engine_does_not_know_are_sent_along() -> None:
    async with gateway(saying("x"), engine_eos_token_ids=frozenset({300})) as rig:
        choice = (await rig.complete()).json()["choices"][0]
        assert (choice["text"], choice["stop_reason"], choice["finish_reason"]) == ("x", None, "stop")
        assert rig.backend.requests[0].sampling.stop_token_ids == (EOS,)
        await rig.complete(ignore_eos=True)
        assert rig.backend.requests[1].sampling.stop_token_ids == ()


async def test_a_chat_stream_opens_with_the_role_and_ends_with_done() -> None:
    async with gateway(saying("Hé", cached_tokens=2)) as rig:
        response = await rig.chat(stream=True, stream_options={"include_usage": True})
        assert response.headers["content-type"].startswith("text/event-stream")
        *chunks, bill, done = events(response.text)
        assert done == "[DONE]"
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert [c["choices"][0]["delta"].get("content") for c in chunks[1:-1]] == ["H", "é"]
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert all(chunk["usage"] is None and chunk["object"] == "chat.completion.chunk" for chunk in chunks)
        assert len({chunk["id"] for chunk in [*chunks, bill]}) == 1
        assert bill["choices"] == []
        assert bill["usage"]["completion_tokens"] == 4
        assert bill["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_a_stream_without_usage_has_no_word_of_it() -> None:
    async with gateway(saying("Hi")) as rig:
        for response in (await rig.chat(stream=True), await rig.complete(stream=True)):
            chunks = events(response.text)
            assert chunks[-1] == "[DONE]"
            assert all("usage" not in chunk for chunk in chunks[:-1])
            assert joined(chunks) == "Hi"


@pytest.mark.parametrize("tokens_per_step", [1, 3, 100])
@pytest.mark.parametrize("kind", ["chat", "complete"])
async def test_streamed_and_whole_answers_are_equal(kind: str, tokens_per_step: int) -> None:
    texts = ("naïve 日本 😀 one STOP two", "no stop here ß", "STOP")
    async with gateway(saying(*texts, tokens_per_step=tokens_per_step)) as rig:
        send = getattr(rig, kind)
        fields = {"n": 3, "stop": ["STOP", "tw"], "max_tokens": 100, "seed": 1}
        whole = (await send(**fields)).json()
        chunks = events((await send(stream=True, stream_options={"include_usage": True}, **fields)).text)
        for choice in whole["choices"]:
            text = choice["message"]["content"] if kind == "chat" else choice["text"]
            assert joined(chunks, choice["index"]) == text
            last = [c for chunk in chunks[:-1] for c in chunk["choices"] if c["index"] == choice["index"]][-1]
            assert last["finish_reason"] == choice["finish_reason"]
            assert last["stop_reason"] == choice["stop_reason"]
        assert chunks[-2]["usage"] == whole["usage"]


async def test_what_lm_eval_sends_to_generate_until() -> None:
    """Its local-completions model: all of a task's `until` and the tokenizer's EOS, uncut."""
    until = ["\n\n", "Question:", "</s>", "<|im_end|>", "Q:", "<eos>"]
    async with gateway(saying("It is 4. Q: And now?")) as rig:
        body = {"max_tokens": 50, "temperature": 0, "stop": until, "seed": 1234}
        answer = (await rig.complete(**body)).json()["choices"][0]
        assert (answer["text"], answer["finish_reason"], answer["stop_reason"]) == ("It is 4. ", "stop", "Q:")
        chunks = events((await rig.complete(stream=True, **body)).text)
        assert joined(chunks) == "It is 4. "


async def test_a_stop_string_across_tokens_ends_the_choice_and_aborts_at_its_token() -> None:
    async with gateway(saying("one and two and three", ends=False, manual=False)) as rig:
        answer = (await rig.complete(stop=[" and", "zzz"], max_tokens=50)).json()
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one", "stop", " and")
        assert answer["usage"]["completion_tokens"] == 7
        request_id = rig.backend.requests[0].request_id
        assert rig.backend.aborts == [Abort(request_id=request_id, attempt=0, choice=0, keep_positions=7)]
        await rig.settle()
        (row,) = rig.ledger.rows
        assert (row.terminal, row.usage.completion_tokens) == ("stop", 7)


async def test_a_stop_string_can_stay_in_the_text() -> None:
    async with gateway(saying("one and two")) as rig:
        answer = (await rig.complete(stop="an", include_stop_str_in_output=True)).json()
        assert answer["choices"][0]["text"] == "one an"


async def test_a_beginning_that_comes_to_nothing_is_shown() -> None:
    async with gateway(saying("aSTO")) as rig:
        chunks = events((await rig.complete(stop="STOP", stream=True)).text)
        assert joined(chunks) == "aSTO"
        assert not rig.backend.aborts


async def test_a_stop_string_ends_one_choice_and_the_others_go_on() -> None:
    async with gateway(saying("ab END cd", "no such word")) as rig:
        answer = (await rig.complete(stop="END", n=2, max_tokens=100)).json()
        assert [choice["text"] for choice in answer["choices"]] == ["ab ", "no such word"]
        assert answer["usage"]["completion_tokens"] == 6 + 13


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abc")])
async def test_stop_token_ids_end_with_their_id_as_reason(include: bool, text: str) -> None:
    async with gateway(saying("abcdef", ends=False)) as rig:
        answer = (await rig.complete(stop_token_ids=[ord("c")], include_stop_str_in_output=include)).json()
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", ord("c"))


async def test_special_tokens_hide_unless_asked_for() -> None:
    backend = FakeBackend(script=fixed_script([TURN, 65, EOS]), eos_token_ids=frozenset({EOS}))
    async with gateway(backend) as rig:
        assert (await rig.complete()).json()["choices"][0]["text"] == "A"
        answer = (await rig.complete(skip_special_tokens=False)).json()
        assert answer["choices"][0]["text"] == "<turn>A"


async def test_split_characters_wait_and_broken_ones_end_as_replacements() -> None:
    backend = FakeBackend(script=fixed_script([*"é😀".encode(), 0xF0, 0x9F]))
    async with gateway(backend) as rig:
        chunks = events((await rig.complete(stream=True, max_tokens=8)).text)
        texts = [chunk["choices"][0]["text"] for chunk in chunks[:-1]]
        assert texts == ["é", "😀", "\ufffd"]


async def test_chat_logprobs() -> None:
    async with gateway(saying("aé", ends=False)) as rig:
        answer = (await rig.chat(logprobs=True, top_logprobs=2, max_tokens=3)).json()
        content = answer["choices"][0]["logprobs"]["content"]
        assert [item["token"] for item in content] == ["a", "\ufffd", "\ufffd"]
        assert [item["bytes"] for item in content] == [[97], [0xC3], [0xA9]]
        assert [item["logprob"] for item in content] == [logprob_of(i) for i in range(3)]
        assert [len(item["top_logprobs"]) for item in content] == [2, 2, 2]
        chunks = events((await rig.chat(logprobs=True, stream=True, max_tokens=3)).text)
        streamed = [
            item for chunk in chunks[:-1] for item in (chunk["choices"][0].get("logprobs") or {}).get("content", [])
        ]
        assert [item["bytes"] for item in streamed] == [[97], [0xC3], [0xA9]]
        assert joined(chunks) == "aé"


async def test_completion_logprobs() -> None:
    async with gateway(saying("aéb", ends=False)) as rig:
        answer = (await rig.complete(logprobs=1, max_tokens=4)).json()
        logprobs = answer["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["a", "\ufffd", "\ufffd", "b"]
        assert logprobs["token_logprobs"] == [logprob_of(i) for i in range(4)]
        assert logprobs["text_offset"] == [0, 1, 1, 2]
        assert logprobs["top_logprobs"][0] == {"a": logprob_of(0)}


def test_of_tokens_with_one_text_the_chosen_one_is_shown_and_else_the_best() -> None:
    """Bytes that are no whole character all read U+FFFD."""
    piece, other, third, a = 0x98, 0x9F, 0xF0, 97
    top = [(piece, -0.5), (a, -1.5), (other, -2.5), (third, -3.5)]
    shown = TokenFormatter(DetokenizerFactory(make_tokenizer())).completion(
        [TokenLogprobs(a, -1.5, top), TokenLogprobs(piece, -0.5, top), TokenLogprobs(third, -3.5, top[:2])], [0, 1, 1]
    )
    assert shown["token_logprobs"] == [-1.5, -0.5, -3.5]
    assert shown["top_logprobs"] == [{"\ufffd": -0.5, "a": -1.5}] * 2 + [{"\ufffd": -3.5, "a": -1.5}]


async def test_logprobs_of_impossible_tokens_are_finite() -> None:
    async with gateway(saying("a", logprob=lambda choice, position: float("-inf"))) as rig:
        answer = (await rig.complete(logprobs=0)).json()
        assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0, -9999.0]


async def test_several_prompts_of_every_form() -> None:
    async with gateway() as rig:
        for prompt in (["ab", "cd"], [[97, 98], [99, 100]]):
            answer = (await rig.complete(prompt=prompt, n=2, max_tokens=2, add_special_tokens=False)).json()
            assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
            assert [choice["text"] for choice in answer["choices"]] == ["ab", "ba", "cd", "dc"]
            assert answer["usage"]["prompt_tokens"] == 4
            assert answer["usage"]["completion_tokens"] == 8
        chunks = events((await rig.complete(prompt=["ab", "cd"], max_tokens=2, stream=True)).text)
        assert [joined(chunks, i) for i in range(2)] == ["a", "c"]
        assert (await rig.complete(prompt=[97, 98], max_tokens=2)).json()["choices"][0]["text"] == "ab"


async def test_a_stop_string_in_one_of_several_prompts() -> None:
    async with gateway() as rig:
        fields = {"prompt": ["abX", "cd"], "stop": "X", "max_tokens": 10, "add_special_tokens": False}
        answer = (await rig.complete(**fields)).json()
        assert [choice["text"] for choice in answer["choices"]] == ["ab", "cdcdcdcdcd"]
        assert answer["usage"]["completion_tokens"] == 13


async def test_echo_puts_the_prompt_before_the_text() -> None:
    async with gateway(saying("!")) as rig:
        assert (await rig.complete(prompt="héllo", echo=True)).json()["choices"][0]["text"] == "héllo!"
        assert (await rig.complete(prompt=[BOS, 97], echo=True)).json()["choices"][0]["text"] == "a!"
        assert joined(events((await rig.complete(prompt="héllo", echo=True, stream=True)).text)) == "héllo!"


async def test_best_of_keeps_the_likeliest() -> None:
    def logprob(choice: int, position: int) -> float:
        return -1.0 if choice == 2 else -2.0 - choice

    async with gateway(saying("zero", "one", "two", logprob=logprob)) as rig:
        answer = (await rig.complete(best_of=3)).json()
        assert [choice["text"] for choice in answer["choices"]] == ["two"]
        assert answer["choices"][0]["logprobs"] is None
        assert answer["usage"]["completion_tokens"] == 5 + 4 + 4
        answer = (await rig.complete(best_of=3, n=2)).json()
        assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, "two"), (1, "zero")]


async def test_token_ids_come_back_when_asked_for() -> None:
    async with gateway(saying("ab")) as rig:
        answer = (await rig.chat(return_token_ids=True)).json()
        assert answer["choices"][0]["token_ids"] == [97, 98, EOS]
        assert answer["prompt_token_ids"] == rig.backend.requests[0].prompt_token_ids
        answer = (await rig.complete(return_token_ids=True)).json()
        assert answer["choices"][0]["token_ids"] == [97, 98, EOS]
        assert answer["choices"][0]["prompt_token_ids"] == [BOS, *b"hello"]
        for kind in (rig.chat, rig.complete):
            chunks = events((await kind(return_token_ids=True, stream=True)).text)[:-1]
            ids = [i for chunk in chunks for choice in chunk["choices"] for i in choice.get("token_ids", [])]
            assert ids == [97, 98, EOS]


async def test_prompts_are_truncated_from_the_left() -> None:
    async with gateway() as rig:
        await rig.complete(prompt="x" * 2000 + "abc", truncate_prompt_tokens=3)
        assert rig.backend.requests[0].prompt_token_ids == [*b"abc"]
        await rig.complete(prompt="x" * 2000 + "abc", truncate_prompt_tokens=-1, max_tokens=12)
        assert len(rig.backend.requests[1].prompt_token_ids) == CONTEXT - 12


async def test_the_context_is_filled_to_the_last_token_and_not_beyond() -> None:
    async with gateway() as rig:
        answer = await rig.complete(prompt=[97] * (CONTEXT - 4), max_tokens=4)
        assert answer.json()["usage"]["completion_tokens"] == 4
        too_much = {"prompt": [97] * (CONTEXT - 4), "max_tokens": 5}
        for fields, param in ((too_much, "max_tokens"), ({"prompt": [97] * CONTEXT}, "prompt")):
            refused = await rig.complete(**fields)
            assert refused.status_code == 400
            assert refused.json()["error"]["code"] == "context_length_exceeded"
            assert refused.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}],
        [{"role": "system", "content": "s"}, *USER],
        [
            *USER,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "1"},
        ],
        [{"role": "user", "content": "x", "name": "ann"}],
    ],
)
async def test_messages_of_every_kind_are_rendered(messages: list[dict[str, Any]]) -> None:
    async with gateway(saying("ok")) as rig:
        assert (await rig.chat(messages=messages)).status_code == 200
        text = bytes(i for i in rig.backend.requests[0].prompt_token_ids if i < 256).decode()
        first = messages[0]["content"]
        assert text.startswith(messages[0]["role"] + ":" + (first if isinstance(first, str) else "one\ntwo"))


async def test_a_final_message_can_be_continued() -> None:
    async with gateway(saying("ok")) as rig:
        messages = [*USER, {"role": "assistant", "content": "Once "}]
        await rig.chat(messages=messages, continue_final_message=True)
        assert bytes(rig.backend.requests[0].prompt_token_ids[-5:]) == b"Once "


async def test_tokenize_and_detokenize() -> None:
    async with gateway() as rig:

        async def post(path: str, **body: Any) -> dict[str, Any]:
            answer: dict[str, Any] = (await rig.client.post(path, json=body)).json()
            return answer

        answer = await post("/tokenize", prompt="ab", return_token_strs=True, model=MODEL)
        assert answer == {
            "count": 3,
            "max_model_len": CONTEXT,
            "tokens": [BOS, 97, 98],
            "token_strs": ["<bos>", "a", "b"],
        }
        assert (await post("/tokenize", prompt="ab", add_special_tokens=False))["tokens"] == [97, 98]
        assert (await post("/tokenize", messages=USER))["tokens"] == [TURN, *b"user:hi", TURN]
        assert (await post("/detokenize", tokens=[BOS, 97, 98])) == {"prompt": "<bos>ab"}
        large = "héllo " * 20_000
        tokens = (await post("/tokenize", prompt=large, add_special_tokens=False))["tokens"]
        assert (await post("/detokenize", tokens=tokens)) == {"prompt": large}


async def test_probes() -> None:
    async with gateway() as rig:
        for path in ("/livez", "/readyz", "/health", "/ping", "/version", "/load", "/metrics", "/openapi.json"):
            assert (await rig.client.get(path)).status_code == 200, path
        models = (await rig.client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in models] == [MODEL, "alias/echo"]
        assert (await rig.client.get("/v1/models/alias/echo")).json()["max_model_len"] == CONTEXT
        assert (await rig.client.get("/readyz")).json() == {"status": "ok"}
        rig.backend.sleeps = True
        assert (await rig.client.get("/readyz")).json() == {"status": "ok", "asleep": True}
        rig.backend.is_ready = rig.backend.sleeps = False
        answer = await rig.client.get("/readyz")
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert (await rig.client.get("/livez")).status_code == 200


async def test_metrics_count_requests_and_hold_no_word_of_clients() -> None:
    async with gateway(saying("x")) as rig:
        await rig.complete()
        await rig.client.get("/secret-path")
        await rig.complete(model="secret-model")
        await rig.settle()
        text = (await rig.client.get("/metrics")).text
        assert "tandem:num_requests_running" in text
        assert 'tandem:http_requests_total{route="/v1/completions",status="200"} 1.0' in text
        assert f'tandem:gateway_requests_total{{model_name="{MODEL}",outcome="stop"}} 1.0' in text
        assert f'tandem:gateway_time_to_first_token_seconds_count{{model_name="{MODEL}"}} 1.0' in text
        assert f'tandem:gateway_requests_open{{model_name="{MODEL}"}} 0.0' in text
        assert "secret" not in text
        assert "_created" not in text, "vLLM has none"
        accepts = "application/openmetrics-text;version=1.0.0;q=0.9,text/plain;version=0.0.4;q=0.5"  # as Prometheus
        answer = await rig.client.get("/metrics", headers={"accept": accepts})
        assert answer.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
        assert "tandem:num_requests_running" in answer.text and answer.text.endswith("# EOF\n")


async def test_the_metrics_prefix_is_on_every_name_of_the_gateway() -> None:
    async with gateway(settings=GatewaySettings(metrics_prefix="vllm")) as rig:
        await rig.complete()
        lines = (await rig.client.get("/metrics")).text.splitlines()
        assert any(line.startswith("vllm:http_requests_total{") for line in lines)
        ours = [line for line in lines if line.startswith("tandem:") and "num_requests_running" not in line]
        assert ours == [], "num_requests_running is the backend's"


async def rows_after(rig: Rig) -> list[str]:
    await rig.settle()
    return [row.terminal for row in rig.ledger.rows]


async def test_the_ledger_has_one_row_per_request_with_the_usage_returned() -> None:
    async with gateway(saying("stop by eos")) as rig:
        answer = (await rig.complete(max_tokens=50)).json()
        await rig.complete(max_tokens=2)
        assert await rows_after(rig) == ["stop", "length"]
        row = rig.ledger.rows[0]
        assert row.id == answer["id"]
        assert row.usage.completion_tokens == answer["usage"]["completion_tokens"]
        assert row.time_s >= rig.ledger.opened[0].time_s
