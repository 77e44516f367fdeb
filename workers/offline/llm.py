"""LLM, the offline API, without Ray: from tandem import LLM, SamplingParams.

A single rank runs in the calling process, on a thread of its own; several are spawned. Equal seeds sample the same
tokens as the service. Any thread may call an LLM: all calls join one run of its engine (local_engine.py).
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tandem.configs.environment import adapter_cache_folder
from tandem.configs.errors import SettingsError
from tandem.workers.messages.errors import AdapterRefused, RequestRefused
from tandem.workers.messages.request import AdapterRef, Ended, GenerationRequest, SamplingParams, is_url
from tandem.workers.offline.beams import BeamSearchOutput, PromptSearch, Step, run_searches
from tandem.workers.offline.chats import ChatForm, Chats
from tandem.workers.offline.embed import (
    EmbeddingRequestOutput,
    EmbeddingRun,
    PoolingParams,
    PoolingRequestOutput,
    checked_truncation,
    embedding_request,
    end_embedding,
    pooled,
    pools_of,
)
from tandem.workers.offline.engine_values import EngineValue, engine_values
from tandem.workers.offline.inputs import (
    GivenPrompt,
    Prompt,
    as_conversations,
    as_params,
    as_prompts,
    one_for_each,
    one_priority_each,
    settings_of,
)
from tandem.workers.offline.local_engine import LocalCall, LocalEngine
from tandem.workers.offline.offline_text import OfflineText
from tandem.workers.offline.outputs import Completion, OfflineRun, RequestOutput, end_output
from tandem.workers.offline.progress import Progress, UseTqdm
from tandem.workers.offline.scores import ScoringRequestOutput, judging, pairs_of, scored
from tandem.workers.planning.resolve import pooling_facts, read_spec
from tandem.workers.planning.start_notes import warn_of_model
from tandem.workers.text.beam_search import BeamSearchParams
from tandem.workers.text.model_params import with_seed

__all__ = ["LLM", "Completion", "RequestOutput", "SamplingParams"]

log = logging.getLogger("tandem.offline")
Output = TypeVar("Output", RequestOutput, EmbeddingRequestOutput)


class LLM:
    """A loaded model for offline generation, with names and semantics as in vLLM. See docs/offline.md.

    model: the folder of a Hugging Face checkpoint, the id of one on the hub, which is downloaded as by `tandem serve`
        (revision="..." chooses one), or "demo" for the bundled model. A Path is always a folder.
    chat_template: path of a Jinja chat template for chat(); None: the model's own, if it has one.
    flags: the flags of `tandem serve` that concern the engine, with underscores and their defaults there, for example
        tensor_parallel_size=2, dtype="float32", kv_offloading_size=4 (GiB), and max_logprobs. With seed=0 a script
        writes the same texts each time: seeds of requests that have none are drawn from it, in the order of calls and
        prompts; without it they are random. Those of vLLM that change
        nothing here, such as swap_space=4, are taken, and a line in the log says why.

    Raises SettingsError, which names the flag and its value, if the model cannot be loaded with these arguments, and
    GroupLost if a rank dies. Owns the ranks until close(), which ends what runs; it is a context manager too. Any
    thread may call it, and calls at the same time run in one batch. A process that was forked from it cannot use it.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        chat_template: str | None = None,
        **flags: Any,
    ) -> None:
        self.settings, max_logprobs = settings_of(model, flags)
        self._pooling = pooling_facts(self.settings)
        spec = read_spec(self.settings)
        warn_of_model(self.settings, spec, log)
        self.text = OfflineText(self.settings, spec, chat_template, max_logprobs)
        self.tokenizer = self.text.tokenizer
        self.local = local = LocalEngine(self.settings)
        self._facts, self._engine, self._executor = local.facts, local.engine, local.executor
        self.text.set_facts(local.facts)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: AdapterRef | Sequence[AdapterRef | None] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generates completions of all prompts and returns one RequestOutput for each, in order.

        prompts: a text, a list or array of token ids, vLLM's {"prompt": text} or {"prompt_token_ids": ids}, or a
            sequence of these. A mapping may have a "cache_salt" too.
        sampling_params: one for all prompts, or one for each; None: those of get_default_sampling_params(). A seed of
            None is drawn anew for each prompt, from LLM's `seed` if it has one.
        use_tqdm: shows a progress bar on standard error; a function makes another bar, with tqdm's arguments.
        lora_request: an adapter from load_adapter() for all prompts, one (or None) for each, or None: the base model.
        priority: of all prompts or of each: the smaller, the earlier it gets a row, beside other calls too.

        A prompt that cannot be served, for example one that is too long, gets finish_reason "error" and the reason; the
        others run. As in vLLM, a max_tokens beyond the context is no error: the answer ends there with "length".
        Raises, before anything runs, ValueError for a parameter outside its range (it names the parameter) and for
        sequences of another length, TypeError for a prompt, SamplingParams or adapter of another type, and
        RuntimeError after close(). A Ctrl-C, or an exception of the bar, ends the prompts of this call only.
        """
        given = self.get_default_sampling_params() if sampling_params is None else sampling_params
        return self._generate(as_prompts(prompts), given, use_tqdm, lora_request, priority)

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters that the model's generation_config.json asks for, under generation_config and
        override_generation_config; vLLM's defaults for what they leave out."""
        return self.tokenizer.defaults.sampling_params()

    def _generate(
        self,
        many: Sequence[GivenPrompt | RequestRefused],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        use_tqdm: UseTqdm,
        lora_request: AdapterRef | Sequence[AdapterRef | None] | None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Returns one output for each prompt; a RequestRefused in place of a prompt becomes its error."""
        self.local.check()
        params = [with_seed(one, self.text.draw_seed()) for one in self.text.checked(sampling_params, len(many))]
        adapters, priorities = one_for_each(lora_request, len(many)), one_priority_each(priority, len(many))
        run = OfflineRun()
        with Progress(use_tqdm, len(many), "generating") as progress, self.local.call(run) as call:
            made = [
                self.text.request(self.local.new_id(), *each, call.address)
                for each in zip(many, params, adapters, priorities, strict=True)
            ]
            run.open = {opened.output.request_id: opened for opened, _ in made}
            _run_made(call, progress, [(opened.output, request) for opened, request in made], end_output)
        return [opened.output for opened, _ in made]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: AdapterRef | Sequence[AdapterRef | None] | None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generates the assistant's answers to conversations, rendered by the chat template; returns one for each.

        messages: one conversation, a list of {"role": ..., "content": ...}, or a sequence of conversations; read as the
            service reads them: parts of text, calls, thinking, the role developer.
        sampling_params, use_tqdm, lora_request, priority: as in generate().
        chat_template: another template than the model's, as text or the path of a file.
        add_generation_prompt: the prompt ends with the assistant's header. continue_final_message: it ends inside the
            last message, which the model continues; needs add_generation_prompt=False.
        tools: in OpenAI's form, for the template to show; calls are not parsed.
        chat_template_kwargs: more variables of the template, such as enable_thinking; ValueError for one that it does
            not have, unless it switches thinking.

        A conversation without messages, or one that the template refuses, gets finish_reason "error" and the reason.
        Raises SettingsError if the model has no chat template, otherwise as generate().
        """
        form = ChatForm(chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs)
        prompts = Chats(self.text.template, self.tokenizer, form).prompts(as_conversations(messages))
        given = self.get_default_sampling_params() if sampling_params is None else sampling_params
        return self._generate(prompts, given, use_tqdm, lora_request, priority)

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
        (params,) = as_params([params], BeamSearchParams, "params")
        params.check()
        if 2 * params.beam_width > (most := self.text.max_logprobs):
            raise ValueError(f"beam_width={params.beam_width} exceeds the limit of {most // 2}, half of max_logprobs")
        given = [self.text.read(prompt) for prompt in as_prompts(prompts)]
        adapters = one_for_each(lora_request, len(given))
        searches = [PromptSearch(ids, params, self._facts.eos_token_ids, self._engine.max_len) for _, ids, _ in given]

        def ask(wanted: list[tuple[int, list[int], SamplingParams]]) -> list[Step]:
            outputs = self._generate(
                [GivenPrompt(None, ids, given[number][2]) for number, ids, _ in wanted],
                [one for *_, one in wanted],
                False,
                [adapters[number] for number, *_ in wanted],
            )
            ends = [output.outputs[0] for output in outputs]
            return [Step(end.logprobs, end.error) for end in ends]

        run_searches(searches, ask, params.max_tokens, use_tqdm)
        return [search.output(self.tokenizer.decode, self.text.token_text) for search in searches]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: UseTqdm = True,
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
        self.local.check()
        keep, many = checked_truncation(truncate_prompt_tokens), as_prompts(prompts)
        pools = pools_of(self._pooling, pooling_params, len(many))
        adapters = one_for_each(lora_request, len(many))
        run = EmbeddingRun()
        with Progress(use_tqdm, len(many), "embedding") as progress, self.local.call(run) as call:
            made = [
                embedding_request(self.text, self.local.new_id(), *each, keep, call.address)
                for each in zip(many, pools, adapters, strict=True)
            ]
            run.open = {output.request_id: output for output, _ in made}
            _run_made(call, progress, made, end_embedding)
        return [output for output, _ in made]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: str = "embed",
        use_tqdm: UseTqdm = True,
        lora_request: AdapterRef | Sequence[AdapterRef | None] | None = None,
    ) -> list[PoolingRequestOutput]:
        """Embeds all prompts as embed() does, and returns each embedding as a tensor, in vLLM's shape of encode().

        pooling_task: "embed"; ValueError for vLLM's others, which no model here is served for.
        """
        if pooling_task != "embed":
            raise ValueError(f'pooling_task={pooling_task!r:.80} is not served, only "embed" is')
        outputs = self.embed(prompts, pooling_params=pooling_params, use_tqdm=use_tqdm, lora_request=lora_request)
        return [pooled(output) for output in outputs]

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        pooling_params: PoolingParams | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: AdapterRef | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Scores pairs of prompts, as POST /v1/score does (docs/serving/scoring.md); returns one output for each pair.
        A judging model says how probable "yes" is, 0 to 1; with others it is the cosine of two embeddings, -1 to 1.

        data_1: one prompt, for all of data_2, or as many as data_2 has. chat_template: of a judging model's pairs, text
        or a file; None: that of LLM(chat_template=...), else one text follows the other. The rest is as in embed(), one
        for all. ValueError for other numbers. A pair that cannot be served has the reason as outputs.error.
        """
        firsts, seconds = as_prompts(data_1), as_prompts(data_2)
        pairs, keep = pairs_of(firsts, seconds), checked_truncation(truncate_prompt_tokens)
        if not isinstance(lora_request, AdapterRef | None):
            raise TypeError(
                f"lora_request: {lora_request!r:.80} is not what load_adapter() returned, one for all pairs"
            )
        if (judge := judging(self.text, pooling_params, chat_template, keep)) is not None:
            prompts = judge.prompts([(firsts[one], seconds[other]) for one, other in pairs])
            return list(map(judge.scored, self._generate(prompts, judge.judge.sampling, use_tqdm, lora_request)))
        found = self.embed(
            [prompt.as_mapping() for prompt in (*firsts, *seconds)],
            truncate_prompt_tokens=keep,
            pooling_params=pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
        )
        return [scored(found[one], found[len(firsts) + other]) for one, other in pairs]

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

    def get_tokenizer(self) -> Any:
        """Returns the model's tokenizer as transformers has it, as in vLLM. The LLM itself uses `tokenizer`, which
        makes the same ids and loads no transformers."""
        return self.text.transformers_tokenizer()

    def get_metrics(self) -> list[EngineValue]:
        """Returns the engine's counts of this moment, by the names of /metrics (docs/operations.md)."""
        return engine_values(self.local.ask(lambda engine: engine.stats()))

    def reset_prefix_cache(self) -> bool:
        """Forgets the KV of earlier prompts that no running prompt uses, on the device, in host memory and on disk.
        Returns whether nothing is left: False while prompts run."""
        return self.local.ask(lambda engine: engine.reset_prefix_cache())

    def close(self) -> None:
        """Ends the engine and its ranks; calls that run get a RuntimeError. Waits at most 5 s for KV that is being
        stored to host or disk. Idempotent."""
        self.local.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _run_made(
    call: LocalCall,
    progress: Progress,
    made: Iterable[tuple[Output, GenerationRequest | None]],
    end: Callable[[Output, Ended], None],
) -> None:
    """Runs the requests of outputs to their ends. None: the output says already why there is no request. end: takes
    the end of an output's request."""
    outputs, requests = {}, []
    for output, request in made:
        if request is None:
            progress.ended()
        else:
            outputs[output.request_id] = output
            requests.append(request)

    def took(ended: Ended) -> None:
        output = outputs[ended.request_id]
        end(output, ended)
        progress.ended(len(output.prompt_token_ids), ended.usage.completion_tokens)

    call.run(requests, took)
