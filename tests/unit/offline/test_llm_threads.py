"""LLM from several threads: one run of the engine, texts as alone; each call ends for itself. Forks, and the end."""

import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tandem import LLM, BeamSearchParams, SamplingParams
from tandem.configs.bundled import DEMO_MODEL
from tandem.workers.messages.request import TokenDelta
from tandem.workers.offline.inputs import GivenPrompt

PIRATE = DEMO_MODEL.parent / "adapters" / "pirate"
TWO_BEAMS = BeamSearchParams(beam_width=2, max_tokens=3)
GREEDY = SamplingParams(max_tokens=8, temperature=0)
LONG = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
WORDS = ["Once", "The", "A", "He", "She", "One day"]
HELLO = [{"role": "user", "content": "Hello! How are you?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", dtype="float32", max_num_seqs=6, enable_lora=True) as opened:
        yield opened


def text(llm: LLM, prompt: str, params: SamplingParams = GREEDY, **more: Any) -> str:
    return llm.generate(prompt, params, use_tqdm=False, **more)[0].text


def test_ten_rounds_of_four_threads_have_the_texts_of_one_by_one(llm: LLM) -> None:
    alone = [text(llm, word) for word in WORDS]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            assert list(pool.map(lambda word: text(llm, word), WORDS)) == alone


def calls(llm: LLM) -> list[Callable[[], Any]]:
    """One of each kind of call, with answers that can be compared."""
    sampled = SamplingParams(max_tokens=6, temperature=1.0, seed=5, n=2, logprobs=1, prompt_logprobs=0)
    return [
        *(lambda word=word: text(llm, word) for word in WORDS),
        lambda: [one.token_ids for one in llm.generate(WORDS, sampled, use_tqdm=False)[3].outputs],
        lambda: text(llm, "Once upon a time", SamplingParams(max_tokens=40, temperature=0, stop=("a",))),
        lambda: [round(number, 3) for number in llm.embed("The sun", use_tqdm=False)[0].outputs.embedding],
        lambda: [one.text for one in llm.beam_search("Once", TWO_BEAMS)[0].sequences],
        lambda: llm.chat(HELLO, GREEDY, use_tqdm=False, lora_request=llm.load_adapter(PIRATE))[0].text,
        lambda: str(llm.generate([10**6], GREEDY, use_tqdm=False)[0].outputs[0].error),
        lambda: text(llm, "A", GREEDY.clone(skip_reading_prefix_cache=True), priority=-1),
    ]  # fmt: skip


def test_all_kinds_of_calls_at_once_answer_as_alone(llm: LLM) -> None:
    kinds = calls(llm)
    alone = [call() for call in kinds]
    order = [number for number in range(len(kinds)) for _ in range(4)]
    random.Random(1).shuffle(order)
    with ThreadPoolExecutor(7) as pool:
        answers = list(pool.map(lambda number: kinds[number](), order))
    assert all(answer == alone[number] for answer, number in zip(answers, order, strict=True))
    assert not llm._engine.has_work()


def test_a_bar_and_a_generator_may_call_the_llm_again(llm: LLM) -> None:
    inner: list[str] = []

    class Bar:
        format_dict = {"elapsed": 1.0}  # noqa: RUF012 - as tqdm has it
        postfix = ""

        def __init__(self, **how: Any) -> None:
            assert how["total"] == 2

        def update(self, count: int) -> None:
            inner.append(text(llm, "The"))

        def close(self) -> None:
            inner.append(self.postfix)

    alone = [text(llm, word) for word in ("Once", "The")]
    prompts = (f"{word}" for word in ("Once", "The") if text(llm, word))
    assert [one.text for one in llm.generate(prompts, GREEDY, use_tqdm=Bar)] == alone  # type: ignore[arg-type]
    assert inner[:2] == [alone[1]] * 2
    assert inner[2] == "est. speed input: 2.00 toks/s, output: 16.00 toks/s"


def test_a_call_on_the_engines_own_thread_is_refused(llm: LLM) -> None:
    with pytest.raises(RuntimeError, match="on its engine's thread"):
        llm.local.ask(lambda engine: text(llm, "A"))


def test_an_error_and_a_ctrl_c_end_the_requests_of_their_call_only(llm: LLM) -> None:
    alone = text(llm, "Once", LONG)

    class Broken:
        format_dict: dict[str, float] = {"elapsed": 0.0}  # noqa: RUF012 - as tqdm has it

        def __init__(self, error: type[BaseException], **_: Any) -> None:
            self.error = error

        def update(self, count: int) -> None:
            raise self.error("stop")

        def close(self) -> None: ...

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(text, llm, "Once", LONG)
        for error in (KeyboardInterrupt, OSError):
            with pytest.raises(error, match="stop"):
                llm.generate(["A", "He"], [GREEDY, LONG], use_tqdm=lambda error=error, **how: Broken(error, **how))
        assert other.result(60) == alone
    assert llm.local.ask(lambda engine: engine.stats().running) == 0


def test_an_exception_in_the_sink_is_its_calls(llm: LLM) -> None:
    class Sink:
        def deltas(self, deltas: list[TokenDelta]) -> list[Any]:
            raise ZeroDivisionError("in the sink")

    (params,) = llm.text.checked(GREEDY, 1)
    with llm.local.call(Sink()) as call:
        _, request = llm.text.request(llm.local.new_id(), GivenPrompt("A"), params, None, 0, call.address)
        assert request is not None
        with pytest.raises(ZeroDivisionError, match="in the sink"):
            call.run([request], lambda ended: None)
    assert text(llm, "A")


def test_close_ends_calls_that_run_with_a_clear_error() -> None:
    llm = LLM("demo", dtype="float32", max_num_seqs=2)
    with ThreadPoolExecutor(3) as pool:
        endless = SamplingParams(max_tokens=1500, temperature=0, ignore_eos=True)
        waits = [pool.submit(text, llm, word, endless) for word in ("A", "The", "He")]
        while not llm.local.ask(lambda engine: engine.stats().running):
            pass
        llm.close()
        for one in waits:
            with pytest.raises(RuntimeError, match=r"^this LLM .* closed"):
                one.result(30)
    llm.close()
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        llm.get_metrics()


def test_an_llm_that_nobody_has_any_more_ends() -> None:
    llm = LLM("demo", dtype="float32", max_num_seqs=2, max_model_len=128)
    thread = llm.local._thread
    assert thread.is_alive()
    del llm
    thread.join(30)
    assert not thread.is_alive()


def test_a_forked_process_is_told_so(llm: LLM) -> None:
    text(llm, "A")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            llm.close()  # changes nothing: the engine is its parent's
            llm.generate("A", GREEDY, use_tqdm=False)
        except RuntimeError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    assert f"belongs to process {os.getpid()}, and process {child} was forked from it" in os.read(reader, 1000).decode()
    os.close(reader)
    os.waitpid(child, 0)
    assert text(llm, "A"), "its parent's still answers"
