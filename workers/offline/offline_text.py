"""OfflineText: what turns prompts and parameters of LLM and AsyncLLM into requests, and tokens into text.

Immutable after loading, but for the generator of seeds: calls of several threads share it.
"""

import random
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.configs.schema import EngineSettings
from tandem.workers.build import model_generation, pair_judge
from tandem.workers.engine.admission import ModelFacts
from tandem.workers.messages.errors import RequestRefused
from tandem.workers.messages.request import AdapterRef, GenerationRequest, ReplyTo, SamplingParams
from tandem.workers.messages.sampling_check import checked_sampling
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.offline.inputs import GivenPrompt, as_params
from tandem.workers.offline.outputs import Completion, OpenOutput, RequestOutput, end_all
from tandem.workers.text.chat_template import ChatTemplate, find_chat_template
from tandem.workers.text.choice_text import ChoiceText
from tandem.workers.text.detokenizer import Detokenizer, DetokenizerFactory, NoText
from tandem.workers.text.grammars import with_grammar
from tandem.workers.text.model_params import with_bad_word_ids
from tandem.workers.text.tokenizer import check_text_ids, check_token_ids, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class OfflineText:
    """Tokenizer, chat template and facts of a model. template: None if the model has none; judge: None if it is served
    as no classifier of pairs; max_logprobs: the most log probabilities that a token may have."""

    def __init__(self, settings: EngineSettings, spec: ArchSpec, chat_template: str | None, max_logprobs: int) -> None:
        self._folder = Path(settings.model.tokenizer or settings.model.model)
        flag = "MODEL" if settings.model.tokenizer is None else "--tokenizer"
        self.tokenizer = load_tokenizer(self._folder, model_generation(settings.model, spec), flag)
        self.template: ChatTemplate | None = find_chat_template(self._folder, chat_template, self.tokenizer)
        self.judge = pair_judge(settings.model, self.tokenizer, self.template if chat_template else None)
        self._factory = DetokenizerFactory(self.tokenizer)
        self.token_text = self._factory.token_text
        self._theirs: PreTrainedTokenizerBase | None = None
        seed = settings.model.seed
        self._random = secrets.SystemRandom() if seed is None else random.Random(seed)
        self.max_logprobs = spec.vocab_size if max_logprobs == -1 else max_logprobs

    def set_facts(self, facts: ModelFacts) -> None:
        """Notes the facts of the model, which are known when its ranks are ready."""
        self.facts = facts
        self._eos = frozenset(facts.eos_token_ids)

    def transformers_tokenizer(self) -> "PreTrainedTokenizerBase":
        """Returns the same tokenizer as transformers has it, with the chat template in use. Loaded once."""
        if self._theirs is None:
            from transformers import AutoTokenizer

            found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(self._folder, local_files_only=True)
            if self.template is not None:
                found.chat_template = self.template.source
            self._theirs = found
        return self._theirs

    # ---- prompts ----

    def read(self, prompt: GivenPrompt) -> tuple[str | None, list[int], str]:
        """Returns a prompt's text, if there is one, its token ids and its salt."""
        ids = prompt.token_ids
        if ids is None:
            ids = self.tokenizer.encode(prompt.text or "", add_special_tokens=True)
        return prompt.text, ids, prompt.cache_salt

    def check_ids(self, text: str | None, ids: Sequence[int]) -> None:
        """Refuses ids outside the model's vocabulary. text: what they were made of, None if they were given."""
        if text is not None:
            check_text_ids(self.tokenizer, ids, self.facts.vocab_size, "prompts")
        check_token_ids(ids, self.facts.vocab_size, "prompts")

    # ---- parameters ----

    def checked(self, given: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
        """Returns checked parameters for each of `count` prompts. ValueError for another number or a bad value,
        TypeError for what is no SamplingParams."""
        each = as_params(given, SamplingParams, "sampling_params")
        limits = (self.facts.vocab_size, self.max_logprobs)
        each = [with_bad_word_ids(checked_sampling(params, *limits), self.tokenizer) for params in each]
        each = [with_grammar(params) for params in each]
        if isinstance(given, SamplingParams):
            return each * count
        if len(each) != count:
            raise ValueError(f"{len(each)} sampling_params for {count} prompts")
        return each

    def draw_seed(self) -> int:
        """Draws the seed of a request that has none; with LLM's `seed` the same ones in the same order."""
        return self._random.getrandbits(63)

    # ---- requests ----

    def request(
        self,
        name: str,
        prompt: GivenPrompt | RequestRefused,
        params: SamplingParams,
        adapter: AdapterRef | None,
        priority: int,
        reply_to: ReplyTo,
    ) -> tuple[OpenOutput, GenerationRequest | None]:
        """Returns the output of a prompt with checked parameters, a seed among them, and its request; None for what is
        refused, whose output says why."""
        refusal = prompt if isinstance(prompt, RequestRefused) else None
        text, ids, salt = self.read(GivenPrompt(None, []) if isinstance(prompt, RequestRefused) else prompt)
        asked = params.logprobs is not None or params.logprob_token_ids is not None
        output = RequestOutput(
            request_id=name,
            prompt=text,
            prompt_token_ids=ids,
            outputs=[Completion(index=index, logprobs=[] if asked else None) for index in range(params.n)],
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )
        token_text = self.token_text if params.detokenize else None
        texts = [self._choice_text(ids, params) for _ in output.outputs]
        opened = OpenOutput(output, texts, token_text, is_ranked=params.logprob_token_ids is None)
        try:
            if refusal is not None:
                raise refusal
            self.check_ids(text, ids)
        except RequestRefused as error:
            end_all(output, "error", str(error))
            return opened, None
        request = GenerationRequest(
            request_id=name,
            prompt_token_ids=ids,
            sampling=params,
            adapter=adapter,
            cache_salt=salt,
            priority=priority,
            reply_to=reply_to,
        )
        return opened, request

    def _choice_text(self, prompt: Sequence[int], params: SamplingParams) -> ChoiceText:
        tokens: Detokenizer = NoText()
        if params.detokenize:
            tokens = self._factory.make(prompt, skip_special_tokens=params.skip_special_tokens)
        return ChoiceText(tokens, params, include_stop=params.include_stop_str_in_output, eos_token_ids=self._eos)
