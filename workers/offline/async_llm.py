"""AsyncLLM: LLM for programs with an event loop. Outputs are yielded as they grow; the engine is the same.

engine's thread: TextDelta -> StreamRun -> loop: RequestOutput of all so far, or of what is new
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tandem.workers.messages.errors import RequestRefused
from tandem.workers.messages.request import (
    Abort,
    AdapterRef,
    Ended,
    GenerationRequest,
    SamplingParams,
    TokenDelta,
)
from tandem.workers.messages.sampling_ranges import RequestOutputKind
from tandem.workers.offline.chats import ChatForm, Chats
from tandem.workers.offline.embed import EmbeddingRequestOutput, PoolingParams
from tandem.workers.offline.engine_values import EngineValue
from tandem.workers.offline.inputs import (
    GivenPrompt,
    Prompt,
    as_conversations,
    as_prompts,
    one_for_each,
    one_priority_each,
)
from tandem.workers.offline.llm import LLM
from tandem.workers.offline.local_engine import LocalCall, raise_if_lost
from tandem.workers.offline.outputs import (
    Completion,
    Logprobs,
    OpenOutput,
    RequestOutput,
    abort_after,
    empty,
    end_all,
    end_output,
    grow,
)
from tandem.workers.text.choice_text import TextDelta
from tandem.workers.text.model_params import with_seed

T = TypeVar("T")
Grown = tuple[int, TextDelta, list[Logprobs], str | None]
Read = Callable[[], GivenPrompt | RequestRefused]
"""Makes the prompt of a request, or says why there is none. Work for a thread."""
How = tuple[SamplingParams | None, AdapterRef | None, int]
"""Parameters, adapter and priority of a request, as they were given."""


class StreamRun:
    """CallSink of one request: hands its text from the engine's thread to the loop. opened: set before it runs."""

    opened: OpenOutput

    def __init__(self) -> None:
        self.is_aborted = False
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._is_told = False
        self._grown: deque[Grown | Ended | BaseException] = deque()

    # ---- the engine's thread ----

    def deltas(self, deltas: list[TokenDelta]) -> list[Abort]:
        aborts: list[Abort] = []
        for delta in deltas:
            if (added := self.opened.read(delta)) is not None:
                self._grown.append((delta.choice, added, self.opened.shown(added), delta.error))
                aborts += abort_after(delta, added)
        self._tell()
        return aborts

    def say(self, end: Ended | BaseException) -> None:
        """Passes on the end of the request, or an error of the call."""
        self._grown.append(end)
        self._tell()

    def _tell(self) -> None:
        if not self._is_told:
            self._is_told = True
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(self._event.set)

    # ---- the loop ----

    async def next(self) -> list[Grown | Ended | BaseException]:
        """Waits for more; returns all that has come."""
        await self._event.wait()
        self._event.clear()
        self._is_told = False
        come: list[Grown | Ended | BaseException] = []
        with suppress(IndexError):
            while True:
                come.append(self._grown.popleft())
        return come


class AsyncLLM:
    """A loaded model for programs with an event loop, with names and semantics as in vLLM. See docs/offline.md.

    model, chat_template, flags: as of LLM; the constructor blocks while the model is loaded. Requests of any number of
    tasks run in one batch. An async context manager; close() ends what runs.
    """

    def __init__(self, model: str | Path, *, chat_template: str | None = None, **flags: Any) -> None:
        self._llm = LLM(model, chat_template=chat_template, **flags)
        self._runs: dict[str, tuple[str, StreamRun]] = {}

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: AdapterRef | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Generates completions of one prompt and yields its RequestOutput as it grows; the last one is `finished`.

        sampling_params: its output_kind says whether an output has all text so far, what is new, or only the end is
        yielded. request_id: for abort(), and in the outputs; None: a number. The rest is as in LLM.generate().

        A prompt that cannot be served yields one output with finish_reason "error" and the reason. When the task is
        cancelled, or the iterator closed, the request is aborted. ValueError for a request_id that is running.
        """
        how = (sampling_params, lora_request, priority)
        return self._stream(lambda: only(as_prompts(prompt), "generate() takes one prompt"), request_id, how)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: AdapterRef | None = None,
        priority: int = 0,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Generates the assistant's answer to one conversation, and yields its RequestOutput as it grows.

        messages and the template's arguments: as in LLM.chat(), which raises the same. The rest is as in generate(). A
        conversation that the template refuses yields one output with finish_reason "error" and the reason.
        """
        form = ChatForm(chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs)
        text = self._llm.text

        def read() -> GivenPrompt | RequestRefused:
            conversation = only(as_conversations(messages) or [[]], "chat() takes one conversation")
            return Chats(text.template, text.tokenizer, form).prompts([conversation])[0]

        return self._stream(read, request_id, (sampling_params, lora_request, priority))

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        truncate_prompt_tokens: int | None = None,
        lora_request: AdapterRef | Sequence[AdapterRef | None] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Embeds all prompts, as LLM.embed() does."""
        return await asyncio.to_thread(
            self._llm.embed,
            prompts,
            pooling_params=pooling_params,
            truncate_prompt_tokens=truncate_prompt_tokens,
            lora_request=lora_request,
            use_tqdm=False,
        )

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests, whose last output then has finish_reason "abort"; unknown ids change nothing."""
        names = [request_id] if isinstance(request_id, str) else list(request_id)
        found = [self._runs[name] for name in names if name in self._runs]
        for _, run in found:
            run.is_aborted = True
        self._llm.local.abort([engine_id for engine_id, _ in found])

    def load_adapter(self, source: str | Path, name: str | None = None) -> AdapterRef:
        """Checks a LoRA adapter, as LLM.load_adapter() does; it blocks while the files are read."""
        return self._llm.load_adapter(source, name)

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns what the model's generation_config.json asks for, as LLM does."""
        return self._llm.get_default_sampling_params()

    async def get_tokenizer(self) -> Any:
        """Returns the model's tokenizer as transformers has it."""
        return await asyncio.to_thread(self._llm.get_tokenizer)

    async def get_metrics(self) -> list[EngineValue]:
        """Returns the engine's counts of this moment, as LLM does."""
        return await asyncio.to_thread(self._llm.get_metrics)

    async def reset_prefix_cache(self) -> bool:
        """Forgets the KV of earlier prompts, as LLM does."""
        return await asyncio.to_thread(self._llm.reset_prefix_cache)

    async def check_health(self) -> None:
        """Raises RuntimeError, with the reason, if the engine runs no more."""
        self._llm.local.check()

    def close(self) -> None:
        """Ends the engine; requests that run raise RuntimeError. Blocks as LLM.close() does."""
        self._llm.close()

    def shutdown(self) -> None:
        """Closes it, by vLLM's name."""
        self.close()

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    async def _stream(self, read: Read, request_id: str | None, how: How) -> AsyncIterator[RequestOutput]:
        """Runs one request, and yields its outputs."""
        local, run = self._llm.local, StreamRun()
        engine_id, seed = local.new_id(), self._llm.text.draw_seed()
        name = engine_id if request_id is None else request_id
        if name in self._runs:
            raise ValueError(f"request_id {name!r:.80} is already running")
        self._runs[name], is_over = (engine_id, run), False
        try:
            with local.call(run, run.say) as call:
                opened, request = await asyncio.to_thread(self._opened, call, (engine_id, name), read, how, seed)
                if request is None or run.is_aborted:
                    is_over = True
                    yield opened.output if request is None else end_all(opened.output, "abort")
                    return
                run.opened = opened
                local.submit([request], run.say)
                async for output in outputs_of(run, request.sampling.output_kind):
                    is_over = output.finished
                    yield output
        finally:
            del self._runs[name]
            if not is_over:
                local.abort([engine_id])

    def _opened(
        self, call: LocalCall, names: tuple[str, str], read: Read, how: How, seed: int
    ) -> tuple[OpenOutput, GenerationRequest | None]:
        """Returns the output and the request of a prompt, as OfflineText does. Work for a thread."""
        sampling_params, lora_request, priority = how
        prompt = read()
        given = self.get_default_sampling_params() if sampling_params is None else sampling_params
        (params,), (adapter,) = self._llm.text.checked(given, 1), one_for_each(lora_request, 1)
        (place,) = one_priority_each(priority, 1)
        engine_id, name = names
        seeded = with_seed(params, seed)
        opened, request = self._llm.text.request(engine_id, prompt, seeded, adapter, place, call.address)
        opened.output.request_id = name
        return opened, request


def only(many: Sequence[T], what: str) -> T:
    """Returns the one of a list. ValueError for another number. what: what a call takes one of."""
    if len(many) != 1:
        raise ValueError(f"AsyncLLM.{what}, not {len(many)}")
    return many[0]


async def outputs_of(run: StreamRun, kind: RequestOutputKind) -> AsyncIterator[RequestOutput]:
    """Yields the outputs of a request until its end. Raises GroupLost or RuntimeError when the engine ends."""
    output = run.opened.output
    while not output.finished:
        new: dict[int, Completion] = {}
        for one in await run.next():
            if isinstance(one, BaseException):
                raise one
            if isinstance(one, Ended):
                raise_if_lost(one)
                end_output(output, one)
                continue
            choice, added, logprobs, error = one
            whole = output.outputs[choice]
            for each in (whole, new.setdefault(choice, empty(whole))):
                grow(each, added, logprobs, error)
        if output.finished or kind is not RequestOutputKind.FINAL_ONLY:
            yield delta_of(output, new) if kind is RequestOutputKind.DELTA else copy_of(output)


def copy_of(output: RequestOutput) -> RequestOutput:
    """Returns an output that does not grow any more."""
    return msgspec.structs.replace(output, outputs=[copied(one) for one in output.outputs])


def copied(one: Completion) -> Completion:
    """Returns a completion that does not grow any more."""
    logprobs = None if one.logprobs is None else list(one.logprobs)
    return msgspec.structs.replace(one, token_ids=list(one.token_ids), logprobs=logprobs)


def delta_of(output: RequestOutput, new: dict[int, Completion]) -> RequestOutput:
    """Returns an output of what is new; at its end all choices have their finish_reason."""
    if output.finished:
        for one in output.outputs:
            last = new.setdefault(one.index, empty(one))
            last.finish_reason, last.error, last.stop_reason = one.finish_reason, one.error, one.stop_reason
    return msgspec.structs.replace(output, outputs=[new[index] for index in sorted(new)])
