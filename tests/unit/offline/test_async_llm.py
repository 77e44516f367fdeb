"""AsyncLLM: outputs as they grow, many tasks at once, cancellation and abort."""

import asyncio
from collections.abc import Iterator
from itertools import count, pairwise
from typing import Any

import pytest

from tandem import AsyncLLM, RequestOutputKind, SamplingParams

GREEDY = SamplingParams(max_tokens=12, temperature=0)
ENDLESS = SamplingParams(max_tokens=1500, temperature=0, ignore_eos=True)
COUNT = count()
WORDS = ["Once", "The", "A", "He"]


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    """Used by the loop of each test."""
    opened = AsyncLLM("demo", dtype="float32", max_num_seqs=8)
    yield opened
    opened.close()


async def last(llm: AsyncLLM, prompt: Any, params: SamplingParams = GREEDY, name: str | None = None) -> Any:
    outputs = [output async for output in llm.generate(prompt, params, name)]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return outputs[-1]


async def running(llm: AsyncLLM) -> int:
    return int(next(v.value for v in await llm.get_metrics() if v.name == "tandem:num_requests_running"))


async def test_many_tasks_have_the_texts_of_one_by_one(llm: AsyncLLM) -> None:
    alone = [(await last(llm, word)).text for word in WORDS]
    together = await asyncio.gather(*(last(llm, word, name=f"mine-{i}") for i, word in enumerate(WORDS * 5)))
    assert [output.text for output in together] == alone * 5
    assert [output.request_id for output in together] == [f"mine-{i}" for i in range(20)]
    assert all(alone)


async def test_a_seed_of_the_llm_makes_a_script_repeatable() -> None:
    """Seeds belong to tasks in the order in which they ask, whichever thread reads a prompt first."""
    params = SamplingParams(max_tokens=20, temperature=2.0, ignore_eos=True)
    texts = []
    for _ in range(2):
        async with AsyncLLM("demo", dtype="float32", max_num_seqs=4, seed=5) as llm:
            texts.append([one.text for one in await asyncio.gather(*(last(llm, "Once", params) for _ in range(6)))])
    assert texts[0] == texts[1] and len(set(texts[0])) == 6


async def test_an_output_has_all_so_far_or_what_is_new_or_comes_once(llm: AsyncLLM) -> None:
    params = GREEDY.clone(n=2, temperature=1.0, seed=3, logprobs=0)
    kinds = {
        kind: [one async for one in llm.generate("Once upon a time", params.clone(output_kind=kind))]
        for kind in RequestOutputKind
    }
    whole = kinds[RequestOutputKind.FINAL_ONLY]
    assert len(whole) == 1 and len(kinds[RequestOutputKind.CUMULATIVE]) > 1
    for index, choice in enumerate(whole[0].outputs):
        grown = [one.outputs[index] for one in kinds[RequestOutputKind.CUMULATIVE]]
        assert all(later.text.startswith(one.text) for one, later in pairwise(grown))
        assert grown[-1] == choice
        parts = [part for one in kinds[RequestOutputKind.DELTA] for part in one.outputs if part.index == index]
        assert "".join(part.text for part in parts) == choice.text
        assert [i for part in parts for i in part.token_ids] == choice.token_ids
        assert [p for part in parts for p in part.logprobs] == choice.logprobs
        assert parts[-1].finish_reason == choice.finish_reason


async def answers(llm: AsyncLLM, messages: Any, params: SamplingParams = GREEDY, **more: Any) -> list[Any]:
    return [output async for output in llm.chat(messages, params, f"chat-{next(COUNT)}", **more)]


async def test_a_chat_is_read_as_llm_reads_it(llm: AsyncLLM) -> None:
    question = [{"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "2 + 3?"}]}]
    begun = [*question, {"role": "assistant", "content": "2 + 3 ="}]
    go_on: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    forms: list[tuple[Any, dict[str, Any]]] = [
        (question, {}),
        (begun, go_on),
        (question, {"chat_template": "{{ messages[0]['content'] }}{{ tools[0].name }}", "tools": [{"name": "t"}]}),
        (question, {"chat_template_kwargs": {"enable_thinking": False}}),
    ]
    together = await asyncio.gather(*(answers(llm, messages, **more) for messages, more in forms))
    for (messages, more), outputs in zip(forms, together, strict=True):
        (wanted,) = await asyncio.to_thread(llm._llm.chat, messages, GREEDY, use_tqdm=False, **more)
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert (outputs[-1].prompt, outputs[-1].text) == (wanted.prompt, wanted.text)
        assert outputs[-1].request_id.startswith("chat-")
    assert "5" in together[0][-1].text and len(together[0]) > 1


async def test_a_conversation_that_cannot_be_read_says_why(llm: AsyncLLM) -> None:
    hello = {"role": "user", "content": "hi"}
    for messages, words in (([], "has no messages"), ([{"role": "foo", "content": "hi"}], "foo")):
        (output,) = await answers(llm, messages)
        assert output.finished and output.outputs[0].finish_reason == "error" and words in str(output.outputs[0].error)
    wrong: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        ("hi", {}, TypeError, "a conversation is a list of messages, not 'hi'"),
        (hello, {}, TypeError, "a conversation is a list of messages, not {"),
        ([[hello], [hello]], {}, ValueError, r"AsyncLLM.chat\(\) takes one conversation, not 2"),
        ([hello], {"chat_template_kwargs": {"tools": []}}, ValueError, "has no variable 'tools'"),
        ([hello], {"params": GREEDY.clone(logprobs=21)}, ValueError, "logprobs=21"),
        ([hello], {"params": {"max_tokns": 5}}, TypeError, "which has no 'max_tokns'"),
    ]
    for messages, more, kind, words in wrong:
        with pytest.raises(kind, match=words):
            await answers(llm, messages, **more)
    stream = llm.chat([hello], ENDLESS)
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    assert await running(llm) == 0


async def test_a_cancelled_task_and_a_closed_iterator_abort_their_request(llm: AsyncLLM) -> None:
    begun = asyncio.Event()

    async def reads() -> None:
        async for _ in llm.generate("Once", ENDLESS, "cut"):
            begun.set()

    task = asyncio.create_task(reads())
    await begun.wait()
    with pytest.raises(ValueError, match="request_id 'cut' is already running"):
        await last(llm, "A", name="cut")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    stream = llm.generate("The", ENDLESS)
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    assert await running(llm) == 0
    assert (await last(llm, "A", name="cut")).text


async def test_abort_ends_a_request_with_that_reason(llm: AsyncLLM) -> None:
    texts = []
    async for output in llm.generate("Once", ENDLESS, "one"):
        texts.append(output.text)
        await llm.abort(["one", "unknown"])
    assert output.finished and output.outputs[0].finish_reason == "abort" and output.text.startswith(texts[0])
    assert await running(llm) == 0


async def test_errors_are_of_their_prompt_or_of_the_call(llm: AsyncLLM) -> None:
    refused = await last(llm, [10**6])
    assert refused.outputs[0].finish_reason == "error" and "1000000" in str(refused.outputs[0].error)
    for prompt, params, error in (
        ("A", SamplingParams(logprobs=21), "logprobs=21 exceeds the limit of 20"),
        (["A", "B"], GREEDY, "takes one prompt, not 2"),
    ):
        with pytest.raises(ValueError, match=error):
            await last(llm, prompt, params)


async def test_what_else_it_has(llm: AsyncLLM) -> None:
    (output,) = await llm.embed("The sun")
    assert output.outputs.hidden_size > 64
    assert await llm.reset_prefix_cache()
    await llm.check_health()


async def test_close_ends_what_runs() -> None:
    llm = AsyncLLM("demo", dtype="float32", max_num_seqs=2)
    stream = llm.generate("Once", ENDLESS)
    await anext(stream)
    await asyncio.to_thread(llm.shutdown)
    with pytest.raises(RuntimeError, match="closed while the call was running"):
        async for _ in stream:
            pass
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        await llm.check_health()
