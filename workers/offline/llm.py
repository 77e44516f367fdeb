"""LLM, the offline API, without Ray: from tandem import LLM, SamplingParams.

A single rank runs in the calling process; several are spawned. Equal seeds sample the same tokens as the service. One
thread may use an LLM at a time.
"""

import itertools
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import msgspec
from tqdm import tqdm

from tandem.configs.environment import adapter_cache_folder
from tandem.configs.errors import SettingsError
from tandem.configs.load import build_settings
from tandem.configs.options import option_named
from tandem.configs.schema import EngineSettings
from tandem.workers.build import model_facts, model_generation, offline_settings, open_executor
from tandem.workers.engine.build_engine import build_engine
from tandem.workers.engine.engine_loop import EngineLoop
from tandem.workers.messages.errors import AdapterRefused, GroupLost, RequestRefused
from tandem.workers.messages.request import (
    NO_TOKENS,
    Abort,
    AdapterRef,
    Ended,
    GenerationRequest,
    Pool,
    SamplingParams,
    TokenDelta,
    is_url,
)
from tandem.workers.messages.sampling_check import checked_sampling
from tandem.workers.offline.beams import BeamSearchOutput, PromptSearch, Step, run_searches
from tandem.workers.offline.embed import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    EmbeddingRun,
    PoolingParams,
    checked_truncation,
    pools_of,
)
from tandem.workers.offline.inbox import OfflineInbox
from tandem.workers.offline.inputs import (
    GivenPrompt,
    Prompt,
    as_conversations,
    as_prompts,
    one_for_each,
    with_bad_word_ids,
    with_grammar,
)
from tandem.workers.offline.outputs import Completion, OfflineRun, OpenChoice, RequestOutput
from tandem.workers.planning.model_source import resolve_model
from tandem.workers.planning.resolve import pooling_facts, read_spec
from tandem.workers.planning.start_notes import warn_of_model, warn_of_pool
from tandem.workers.text.beam_search import BeamSearchParams
from tandem.workers.text.chat_template import ChatTemplate, find_chat_template
from tandem.workers.text.choice_text import ChoiceText
from tandem.workers.text.detokenizer import DetokenizerFactory
from tandem.workers.text.tokenizer import check_text_ids, check_token_ids, last_tokens, load_tokenizer

__all__ = ["LLM", "Completion", "RequestOutput", "SamplingParams"]

log = logging.getLogger("tandem.offline")
FLUSH_S = 5.0
SERVICE_ONLY = frozenset(("served_model_name", "data_parallel_size", "max_num_queued_reqs", "max_num_queued_tokens"))
"""Engine flags that LLM refuses: they concern only a service."""


class LLM:
    """A loaded model for offline generation, with names and semantics as in vLLM. See docs/offline.md.

    model: the folder of a Hugging Face checkpoint, the id of one on the hub, which is downloaded as by `tandem serve`
        (revision="..." chooses one), or "demo" for the bundled model. A Path is always a folder.
    chat_template: path of a Jinja chat template for chat(); None: the model's own, if it has one.
    flags: the flags of `tandem serve` that concern the engine, with underscores and their defaults there, for example
        tensor_parallel_size=2, dtype="float32", kv_offloading_size=4 (GiB).

    Raises SettingsError, which names the flag and its value, if the model cannot be loaded with these arguments, and
    GroupLost if a rank dies. Owns the ranks until close(); it is a context manager too. For one thread at a time.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        chat_template: str | None = None,
        **flags: Any,
    ) -> None:
        self.settings = _engine_settings(model, flags)
        self._pooling = pooling_facts(self.settings)
        text_folder = Path(self.settings.model.tokenizer or self.settings.model.model)
        spec = read_spec(self.settings)
        warn_of_model(self.settings, spec, log)
        generation = model_generation(self.settings.model, spec)
        flag = "MODEL" if self.settings.model.tokenizer is None else "--tokenizer"
        self.tokenizer = load_tokenizer(text_folder, generation, flag)
        self._template: ChatTemplate | None = find_chat_template(text_folder, chat_template, self.tokenizer)
        self._factory = DetokenizerFactory(self.tokenizer)
        self._executor = open_executor(self.settings)
        self._closed: str | None = None
        self._run: OfflineRun | EmbeddingRun = OfflineRun(tqdm(disable=True))
        self._names = itertools.count()
        try:
            ready = self._executor.start()
            self._facts = model_facts(self.settings, ready)
            warn_of_pool(self.settings.cache, self._facts, log)
            self._engine = build_engine(self.settings, self._facts, self._executor, ready, self)
            self._max_len = self._engine.max_len
        except BaseException:
            self._executor.close()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: AdapterRef | Sequence[AdapterRef | None] | None = None,
    ) -> list[RequestOutput]:
        """Generates completions of all prompts and returns one RequestOutput for each, in order.

        prompts: a text, a list or array of token ids, vLLM's {"prompt": text} or {"prompt_token_ids": ids}, or a
            sequence of these. A mapping may have a "cache_salt" too.
        sampling_params: one for all prompts, or one for each; None: those of get_default_sampling_params(). A seed of
            None is drawn anew for each prompt.
        use_tqdm: shows a progress bar on standard error.
        lora_request: an adapter from load_adapter() for all prompts, one (or None) for each, or None: the base model.

        A prompt that cannot be served, for example one that is too long, gets finish_reason "error" and the reason; the
        others run. As in vLLM, a max_tokens beyond the context is no error: the answer ends there with "length".
        Raises, before anything runs, ValueError for a parameter outside its range (it names the parameter) and for
        sequences of another length, TypeError for a prompt, SamplingParams or adapter of another type, and
        RuntimeError after close(). A Ctrl-C takes effect after the step under way, and the LLM can be used again; a
        second one interrupts at once, which closes the LLM.
        """
        given = self.get_default_sampling_params() if sampling_params is None else sampling_params
        return self._generate(as_prompts(prompts), given, use_tqdm, lora_request)

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters that the model's generation_config.json asks for, under generation_config and
        override_generation_config; vLLM's defaults for what they leave out."""
        return self.tokenizer.defaults.sampling_params()

    def _generate(
        self,
        many: Sequence[GivenPrompt | RequestRefused],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        use_tqdm: bool,
        lora_request: AdapterRef | Sequence[AdapterRef | None] | None,
    ) -> list[RequestOutput]:
        """Returns one output for each prompt; a RequestRefused in place of a prompt becomes its error."""
        if self._closed is not None:
            raise RuntimeError(self._closed)
        params = self._checked(sampling_params, len(many))
        adapters = one_for_each(lora_request, len(many))
        with tqdm(total=len(many), disable=not use_tqdm, desc="generating", unit="prompt") as bar:
            run = self._run = OfflineRun(bar)
            names = self._run_all(zip(repeat(run), many, params, adapters), self._add)
        return [run.outputs[name] for name in names]

    def _run_all(self, many: Iterable[tuple[Any, ...]], add: Callable[..., str]) -> list[str]:
        """Runs all prompts to their ends in self._run. many: the arguments of each one's `add`. Returns the requests'
        names."""
        inbox = OfflineInbox(self._run.stops)
        try:
            with inbox:
                return self._run_added(inbox, many, add)
        finally:
            if inbox.has_cut:
                self._end("this LLM is closed: a second Ctrl-C interrupted it in the middle of a step")

    def _run_added(self, inbox: OfflineInbox, many: Iterable[tuple[Any, ...]], add: Callable[..., str]) -> list[str]:
        """Does what _run_all() does. After an error the engine has none of the requests, unless a second Ctrl-C has cut
        it short."""
        names: list[str] = []
        try:
            for each in many:
                names.append(add(*each))
            EngineLoop(self._engine, inbox).run(lambda: not self._engine.has_work())
            inbox.check()
        except BaseException:
            if not inbox.has_cut:
                with suppress(GroupLost):  # a step that failed has ended the rank
                    self._abort_all(names)
            raise
        return names

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: AdapterRef | Sequence[AdapterRef | None] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generates the assistant's answers to conversations, rendered by the chat template; returns one for each.

        messages: one conversation, a list of {"role": ..., "content": ...}, or a sequence of conversations.
        sampling_params: for all conversations. It, use_tqdm, lora_request: as in generate(). tools: in OpenAI's form,
        for the template to show; calls are not parsed. chat_template_kwargs: more variables of the template, such as
        enable_thinking; ValueError for one that it does not have.

        A conversation without messages, or one that the template refuses, gets finish_reason "error" and the reason.
        Raises SettingsError if the model has no chat template, otherwise as generate().
        """
        if self._template is None:
            raise SettingsError("the model has no chat template", "chat_template")
        for name in chat_template_kwargs or ():
            if not self._template.takes(name):
                raise ValueError(f"chat_template_kwargs: the chat template has no variable {name!r:.80}")
        render = partial(self._template.render, tools=tools, variables=chat_template_kwargs)
        texts = [self._rendered(render, conversation) for conversation in as_conversations(messages)]
        encode = self.tokenizer.encode
        prompts = [GivenPrompt(t, encode(t, add_special_tokens=False)) if isinstance(t, str) else t for t in texts]
        given = self.get_default_sampling_params() if sampling_params is None else sampling_params
        return self._generate(prompts, given, use_tqdm, lora_request)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        lora_request: AdapterRef | Sequence[AdapterRef | None] | None = None,
    ) -> list[BeamSearchOutput]:
        """Finds the most probable outputs of each prompt by beam search; returns one BeamSearchOutput for each.

        prompts, lora_request: as in generate(). use_tqdm: shows a progress bar of tokens.
        A prompt that cannot be served has no sequences, and the reason in `error`. Raises SettingsError where another
        batching_policy than continuous would keep each token waiting for the next batch, otherwise as generate().
        """
        if (policy := self.settings.scheduler.batching_policy) != "continuous":
            raise SettingsError(f"{policy}: beam search needs continuous", "batching_policy")
        if not isinstance(params, BeamSearchParams):
            raise TypeError(f"params: {params!r:.80} is no BeamSearchParams")
        params.check()
        given = [self._read(prompt) for prompt in as_prompts(prompts)]
        adapters = one_for_each(lora_request, len(given))
        searches = [PromptSearch(ids, params, self._facts.eos_token_ids, self._max_len) for _, ids, _ in given]

        def ask(wanted: list[tuple[int, list[int], SamplingParams]]) -> list[Step]:
            outputs = self._generate(
                [GivenPrompt(None, ids, given[number][2]) for number, ids, _ in wanted],
                [one for *_, one in wanted],
                False,
                [adapters[number] for number, *_ in wanted],
            )
            ends = [output.outputs[0] for output in outputs]
            return [Step(end.logprobs[0] if end.logprobs else None, end.error) for end in ends]

        run_searches(searches, ask, params.max_tokens, use_tqdm)
        return [search.output(self.tokenizer.decode) for search in searches]

    @staticmethod
    def _rendered(render: Callable[..., str], conversation: Sequence[Mapping[str, Any]]) -> str | RequestRefused:
        if not conversation:
            return RequestRefused("The conversation has no messages.", code="invalid_value", param="messages")
        try:
            return render(list(conversation), add_generation_prompt=True)
        except RequestRefused as error:
            return error

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: AdapterRef | Sequence[AdapterRef | None] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Embeds all prompts and returns one EmbeddingRequestOutput for each, in order. Any model can.

        prompts, use_tqdm, lora_request: as in generate(). truncate_prompt_tokens: keeps so many tokens of each prompt,
        the last ones; -1: as many as the context has; None: all. pooling_params: one for all prompts, or one for each.
        How hidden states become an embedding is the model's (LLM's pooler_config changes it; docs/offline.md).

        A prompt that cannot be served, for example one that is too long, gets the reason as outputs.error; the others
        run. Raises ValueError for `dimensions` that the model does not have and for a truncate_prompt_tokens without
        meaning, otherwise as generate().
        """
        if self._closed is not None:
            raise RuntimeError(self._closed)
        keep, many = checked_truncation(truncate_prompt_tokens), as_prompts(prompts)
        pools = pools_of(self._pooling, pooling_params, len(many))
        adapters = one_for_each(lora_request, len(many))
        with tqdm(total=len(many), disable=not use_tqdm, desc="embedding", unit="prompt") as bar:
            run = self._run = EmbeddingRun(bar)
            names = self._run_all(zip(repeat(run), many, repeat(keep), pools, adapters), self._add_embedding)
        return [run.outputs[name] for name in names]

    def _add_embedding(
        self, run: EmbeddingRun, prompt: GivenPrompt, keep: int | None, pool: Pool, adapter: AdapterRef | None
    ) -> str:
        text, ids, salt = self._read(prompt)
        ids = last_tokens(ids, keep, self._facts.max_model_len)
        name = f"offline-{next(self._names)}"
        output = EmbeddingRequestOutput(request_id=name, prompt=text, prompt_token_ids=ids, outputs=EmbeddingOutput())
        run.outputs[name] = output
        try:
            self._check_ids(text, ids)
            self._engine.add_request(
                GenerationRequest(
                    request_id=name,
                    prompt_token_ids=ids,
                    sampling=NO_TOKENS,
                    adapter=adapter,
                    cache_salt=salt,
                    pool=pool,
                )
            )
        except RequestRefused as error:
            output.outputs.error, output.finished = str(error), True
        return name

    def load_adapter(self, source: str | Path, name: str | None = None) -> AdapterRef:
        """Checks a LoRA adapter in PEFT's format and returns a reference to it for generate() and chat().

        source: a folder, or a URL as text ("s3://bucket/folder"). name: for errors; default: the last part of source.
        The adapter's files are read again when it is first used, and must then have the same content.

        Raises AdapterRefused with the source and the reason if it cannot be served, SettingsError without enable_lora.
        """
        lora, model = self.settings.lora, self.settings.model
        if not lora.enable_lora:
            raise SettingsError("adapters need enable_lora=True", "enable_lora")
        from tandem.workers.lora.peft.adapter_check import AdapterChecker

        place = str(source).rstrip("/")
        if not is_url(place):
            place = str(Path(source).expanduser().resolve())
        folder = None if model.load_format == "dummy" else Path(model.model)
        check = AdapterChecker(read_spec(self.settings), lora.max_lora_rank, folder, adapter_cache_folder())
        try:
            digest = check(place)
        except AdapterRefused as error:
            raise type(error)(f"{place}: {error}") from error
        return AdapterRef(name=name or place.rpartition("/")[2], digest=digest, source=place)

    def close(self) -> None:
        """Waits at most 5 s for KV that is being stored to host or disk, then ends the ranks. Idempotent."""
        if self._closed is None:
            try:
                with suppress(GroupLost):
                    self._engine.flush_transfers(FLUSH_S)
            finally:
                self._end("this LLM is closed")

    def _end(self, why: str) -> None:
        """Ends the ranks without waiting for anything; generate() raises with the reason from then on."""
        self._closed = why
        self._engine.close()
        self._executor.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def deltas(self, deltas: list[TokenDelta]) -> None:
        """OutputSink, called by the engine."""
        self._run.deltas(deltas)

    def ended(self, ended: Ended, request: GenerationRequest) -> None:
        """OutputSink, called by the engine."""
        self._run.ended(ended, request)

    def _checked(self, given: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
        """Returns checked parameters for each of `count` prompts. ValueError for another number or a bad value."""
        each = [given] if isinstance(given, SamplingParams | BeamSearchParams) else list(given)
        if wrong := [one for one in each if not isinstance(one, SamplingParams)]:
            raise TypeError(f"sampling_params: {wrong[0]!r:.80} is no SamplingParams")
        vocab_size = self._facts.vocab_size
        each = [with_bad_word_ids(checked_sampling(params, vocab_size), self.tokenizer) for params in each]
        each = [with_grammar(params) for params in each]
        if isinstance(given, SamplingParams):
            return each * count
        if len(each) != count:
            raise ValueError(f"{len(each)} sampling_params for {count} prompts")
        return each

    def _add(
        self,
        run: OfflineRun,
        prompt: GivenPrompt | RequestRefused,
        params: SamplingParams,
        adapter: AdapterRef | None,
    ) -> str:
        text, ids, salt = self._read(prompt)
        name = f"offline-{next(self._names)}"
        output = RequestOutput(
            prompt=text,
            prompt_token_ids=ids,
            outputs=[Completion(index=index) for index in range(params.n)],
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )
        run.outputs[name] = output
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=secrets.randbits(63))
        run.choices[name] = [OpenChoice(done, self._choice_text(ids, params)) for done in output.outputs]
        try:
            if isinstance(prompt, RequestRefused):
                raise prompt
            self._check_ids(text, ids)
            self._engine.add_request(
                GenerationRequest(
                    request_id=name, prompt_token_ids=ids, sampling=params, adapter=adapter, cache_salt=salt
                )
            )
        except RequestRefused as error:
            for completion in output.outputs:
                completion.finish_reason, completion.error = "error", str(error)
        return name

    def _read(self, prompt: GivenPrompt | RequestRefused) -> tuple[str | None, list[int], str]:
        """Returns a prompt's text, if there is one, its token ids and its salt."""
        if isinstance(prompt, RequestRefused):
            return None, [], ""
        ids = prompt.token_ids
        if ids is None:
            ids = self.tokenizer.encode(prompt.text or "", add_special_tokens=True)
        return prompt.text, ids, prompt.cache_salt

    def _check_ids(self, text: str | None, ids: list[int]) -> None:
        """Refuses ids outside the model's vocabulary. text: what they were made of, None if they were given."""
        if text is not None:
            check_text_ids(self.tokenizer, ids, self._facts.vocab_size, "prompts")
        check_token_ids(ids, self._facts.vocab_size, "prompts")

    def _choice_text(self, prompt: list[int], params: SamplingParams) -> ChoiceText:
        eos = frozenset(self._facts.eos_token_ids)
        tokens = self._factory.make(prompt, skip_special_tokens=params.skip_special_tokens)
        return ChoiceText(tokens, params, include_stop=params.include_stop_str_in_output, eos_token_ids=eos)

    def _abort_all(self, names: Sequence[str]) -> None:
        """Aborts requests, after which the engine is usable again."""
        for name in names:
            self._engine.abort(Abort(request_id=name, attempt=0))


def _engine_settings(model: str | Path, flags: Mapping[str, Any]) -> EngineSettings:
    """Returns checked settings for offline use, without queue limits and with the model's folder. SettingsError names
    the flag."""
    for name, value in flags.items():
        option = option_named(name)
        if (
            value is not None
            and option is not None
            and (not option.path.startswith("engine.") or name.replace("-", "_") in SERVICE_ONLY)
        ):
            raise SettingsError(f"{name} is the service's; an LLM has no use for it", name)
    name = str(model.expanduser().absolute()) if isinstance(model, Path) else model
    settings = offline_settings(build_settings(name, flags).engine)
    return msgspec.structs.replace(settings, model=resolve_model(settings.model))
