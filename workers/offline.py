"""Offline use of the engine, without Ray: from workers.offline import LLM, SamplingParams.

One rank runs in the calling process, more are spawned. Prompts in, finished texts out; what is sampled is what the
service would have sampled for the same seed. Not for concurrent callers: one thread at a time.
"""

import itertools
import logging
import secrets
import signal
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from tqdm import tqdm

from configs.environment import adapter_cache_folder
from configs.errors import SettingsError
from configs.load import build_settings
from configs.options import option_named
from configs.schema import EngineSettings
from workers.adapter_check import AdapterChecker
from workers.build import model_facts, offline_settings, open_executor
from workers.engine.engine import Engine
from workers.errors import AdapterRefused, GroupLost, RequestRefused
from workers.messages import (
    Abort,
    AdapterRef,
    Ended,
    GenerationRequest,
    SamplingParams,
    TokenDelta,
    TokenLogprobs,
    is_url,
)
from workers.offline_inputs import Prompt, as_conversations, as_prompts, one_for_each
from workers.resolve import read_spec
from workers.sampling_check import checked_sampling
from workers.start_notes import warn_of_pool
from workers.text.chat_template import ChatTemplate, find_chat_template
from workers.text.choice_text import ChoiceText
from workers.text.detokenizer import DetokenizerFactory
from workers.text.tokenizer import check_token_ids, load_tokenizer

__all__ = ["LLM", "Completion", "RequestOutput", "SamplingParams"]

log = logging.getLogger("tandem.offline")
SETTLE_S = 5.0
SERVICE_ONLY = frozenset(
    ("served_model_name", "revision", "data_parallel_size", "max_num_queued_reqs", "max_num_queued_tokens")
)
"""Flags of the engine's that one engine in a process, with a model that is a folder, has no use for."""
DEMO = Path(__file__).resolve().parents[1] / "configs" / "demo" / "model"


class Completion(msgspec.Struct, kw_only=True):
    """One choice: its text and tokens, why it ended ("stop", "length", "error"), log probabilities when asked for."""

    index: int
    text: str = ""
    token_ids: list[int] = []
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] = []
    error: str | None = None


class RequestOutput(msgspec.Struct, kw_only=True):
    """One prompt and its `n` completions, in order; `text` is the first one's."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    cached_tokens: int = 0

    @property
    def text(self) -> str:
        return self.outputs[0].text


class _Choice:
    """One choice on its way: ChoiceText fills the Completion."""

    def __init__(self, completion: Completion, text: ChoiceText) -> None:
        self.completion = completion
        self._text = text

    def take(self, delta: TokenDelta) -> int | None:
        """Adds a delta; the number of tokens to keep when a stop string was completed, else None."""
        added = self._text.take(delta)
        if added is None:
            return None
        done = self.completion
        done.text += added.text
        done.token_ids += added.token_ids
        done.logprobs += added.logprobs or []
        done.finish_reason, done.error = added.finish_reason, delta.error
        return added.abort_at


class _Interrupts:
    """Holds a Ctrl-C back until the step is over, so that the engine stays usable; a second one ends it at once."""

    def __init__(self) -> None:
        self._noted = False
        self._before: Any = None

    def __enter__(self) -> "_Interrupts":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def check(self) -> None:
        if self._noted:
            raise KeyboardInterrupt

    def _note(self, *_: object) -> None:
        if self._noted:
            raise KeyboardInterrupt
        self._noted = True


class _Run:
    """OutputSink of one call of generate(): collects all requests' tokens; stop strings are noted for the caller."""

    def __init__(self, bar: "tqdm[Any]") -> None:
        self.choices: dict[str, list[_Choice]] = {}
        self.outputs: dict[str, RequestOutput] = {}
        self.stops: list[Abort] = []
        self.ended_ids: list[str] = []
        self._bar = bar

    def deltas(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            keep = self.choices[delta.request_id][delta.choice].take(delta)
            if keep is not None:
                self.stops.append(
                    Abort(request_id=delta.request_id, epoch=delta.epoch, choice=delta.choice, keep_positions=keep)
                )

    def ended(self, ended: Ended, request: GenerationRequest) -> None:
        output = self.outputs[ended.request_id]
        output.cached_tokens = ended.usage.cached_tokens
        if ended.refused is not None:
            for completion in output.outputs:
                completion.finish_reason, completion.error = "error", ended.refused[3]
        self.ended_ids.append(ended.request_id)
        self._bar.update()


class LLM:
    """A model ready to generate. `model`: a folder, or "demo". Other keyword arguments are the flags of `tandem serve`
    that concern the engine, with underscores: tensor_parallel_size=2, dtype="float32", kv_offloading_size=4.

    Raises SettingsError, whose text names the flag and its value, when the model cannot be loaded as asked. Use as a
    context manager, or call close().
    """

    def __init__(
        self,
        model: str | Path,
        *,
        chat_template: str | None = None,
        **flags: Any,
    ) -> None:
        self.settings = _engine_settings(str(_model_folder(model)), flags)
        folder = Path(self.settings.model.model)
        text_folder = Path(self.settings.model.tokenizer or folder).expanduser()
        self.tokenizer = load_tokenizer(text_folder)
        self._template: ChatTemplate | None = find_chat_template(text_folder, chat_template, self.tokenizer)
        self._factory = DetokenizerFactory(self.tokenizer)
        self._executor = open_executor(self.settings)
        self._closed = False
        self._run = _Run(tqdm(disable=True))
        self._names = itertools.count()
        try:
            ready = self._executor.start()
            self._facts = model_facts(self.settings, ready)
            warn_of_pool(self.settings.cache, self._facts.max_model_len, log)
            self._engine = Engine(self.settings, self._facts, self._executor, ready, self)
        except BaseException:
            self._executor.close()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        *,
        use_tqdm: bool = True,
        lora_request: AdapterRef | Sequence[AdapterRef | None] | None = None,
    ) -> list[RequestOutput]:
        """Completions of every prompt (text, or token ids: a list or an array), in the prompts' order. lora_request:
        what load_adapter() returned, for all prompts or one (or None) for each.

        A prompt that cannot be served (too long, say) has finish_reason "error" and the reason; the others go on. As in
        vLLM a max_tokens beyond the context is no error: the answer ends where the context does, with "length".
        ValueError, before anything runs, for sampling parameters without meaning; it names the parameter. TypeError for
        what is no prompt, no SamplingParams or no adapter. RuntimeError after close().
        """
        return self._generate(as_prompts(prompts), sampling_params, use_tqdm, lora_request)

    def _generate(
        self,
        many: Sequence[Prompt | RequestRefused],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        use_tqdm: bool,
        lora_request: AdapterRef | Sequence[AdapterRef | None] | None,
    ) -> list[RequestOutput]:
        """One output for each prompt, or for why there is none."""
        if self._closed:
            raise RuntimeError("this LLM is closed")
        params = self._checked(sampling_params, len(many))
        adapters = one_for_each(lora_request, len(many))
        with tqdm(total=len(many), disable=not use_tqdm, desc="generating", unit="prompt") as bar:
            self._run = _Run(bar)
            names = [self._add(*each) for each in zip(many, params, adapters, strict=True)]
            try:
                with _Interrupts() as interrupts:
                    while self._engine.has_work():
                        self._engine.step()
                        self._apply_stops()
                        interrupts.check()
            except BaseException:
                self._abort_all(names)
                raise
        return [self._run.outputs[name] for name in names]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams,
        *,
        use_tqdm: bool = True,
        lora_request: AdapterRef | Sequence[AdapterRef | None] | None = None,
    ) -> list[RequestOutput]:
        """The assistant's answers to one conversation or several, rendered by the model's chat template. One without
        messages, or that the template refuses, has finish_reason "error", as in generate()."""
        if self._template is None:
            raise SettingsError("the model has no chat template", "chat_template")
        texts = [self._rendered(self._template, conversation) for conversation in as_conversations(messages)]
        ids = [self.tokenizer.encode(t, add_special_tokens=False) if isinstance(t, str) else t for t in texts]
        outputs = self._generate(ids, sampling_params, use_tqdm, lora_request)
        for output, text in zip(outputs, texts, strict=True):
            output.prompt = text if isinstance(text, str) else None
        return outputs

    @staticmethod
    def _rendered(template: ChatTemplate, conversation: Sequence[Mapping[str, Any]]) -> str | RequestRefused:
        if not conversation:
            return RequestRefused("The conversation has no messages.", code="invalid_value", param="messages")
        try:
            return template.render(list(conversation), add_generation_prompt=True)
        except RequestRefused as error:
            return error

    def load_adapter(self, source: str | Path, name: str | None = None) -> AdapterRef:
        """A LoRA adapter in PEFT's format, checked whole: a folder, or a URL as text ("s3://bucket/folder").
        AdapterRefused with the place and the reason. It is read again when it is first used. Needs enable_lora=True."""
        lora, model = self.settings.lora, self.settings.model
        if not lora.enable_lora:
            raise SettingsError("adapters need enable_lora=True", "enable_lora")
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
        """Lets KV that is on its way to host or disk arrive, then ends the ranks. Idempotent."""
        if not self._closed:
            self._closed = True
            with suppress(GroupLost):
                self._engine.settle(SETTLE_S)
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
        """One for each of `count` prompts. ValueError when they are others in number, or one makes no sense."""
        each = [given] if isinstance(given, SamplingParams) else list(given)
        if wrong := [one for one in each if not isinstance(one, SamplingParams)]:
            raise TypeError(f"sampling_params: {wrong[0]!r:.80} is no SamplingParams")
        each = [checked_sampling(params, self._facts.vocab_size) for params in each]
        if isinstance(given, SamplingParams):
            return each * count
        if len(each) != count:
            raise ValueError(f"{len(each)} sampling_params for {count} prompts")
        return each

    def _add(self, prompt: Prompt | RequestRefused, params: SamplingParams, adapter: AdapterRef | None) -> str:
        text = prompt if isinstance(prompt, str) else None
        ids = self._token_ids(prompt)
        name = f"offline-{next(self._names)}"
        output = RequestOutput(
            prompt=text, prompt_token_ids=ids, outputs=[Completion(index=index) for index in range(params.n)]
        )
        self._run.outputs[name] = output
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=secrets.randbits(63))
        self._run.choices[name] = [_Choice(done, self._choice_text(ids, params)) for done in output.outputs]
        try:
            if isinstance(prompt, RequestRefused):
                raise prompt
            check_token_ids(ids, self._facts.vocab_size, "prompts")
            self._engine.add_request(
                GenerationRequest(request_id=name, prompt_token_ids=ids, sampling=params, adapter=adapter)
            )
        except RequestRefused as error:
            for completion in output.outputs:
                completion.finish_reason, completion.error = "error", str(error)
        return name

    def _token_ids(self, prompt: Prompt | RequestRefused) -> list[int]:
        if isinstance(prompt, RequestRefused):
            return []
        return self.tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else list(prompt)

    def _choice_text(self, prompt: list[int], params: SamplingParams) -> ChoiceText:
        eos = frozenset(self._facts.eos_token_ids)
        return ChoiceText(self._factory.make(prompt), params, include_stop=False, eos_token_ids=eos)

    def _apply_stops(self) -> None:
        stops, self._run.stops = self._run.stops, []
        for stop in stops:
            self._engine.abort(stop)

    def _abort_all(self, names: Sequence[str]) -> None:
        """The engine is usable again afterwards."""
        for name in names:
            self._engine.abort(Abort(request_id=name, epoch=0))


def _model_folder(model: str | Path) -> Path:
    """The folder, absolute. SettingsError when there is none."""
    if str(model) == "demo":
        return DEMO
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise SettingsError(
            f'{model}: no such folder; give a model\'s folder or "demo" (a hub id is not downloaded here)', "model"
        )
    return folder.resolve()


def _engine_settings(model: str, flags: Mapping[str, Any]) -> EngineSettings:
    """Checked settings for offline use: nothing is ever refused for a full queue. SettingsError names the value."""
    for name, value in flags.items():
        option = option_named(name)
        if (
            value is not None
            and option is not None
            and (not option.path.startswith("engine.") or name.replace("-", "_") in SERVICE_ONLY)
        ):
            raise SettingsError(f"{name} is the service's; an LLM has no use for it", name)
    return offline_settings(build_settings(model, flags).engine)
