"""Prompts as token ids that fit the model: work for the threads of text_workers.py."""

from collections.abc import Sequence
from typing import NamedTuple

from tandem.cluster.gateway.schemas.generation_body import CommonBody
from tandem.cluster.gateway.schemas.reading import invalid
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.workers.messages.errors import ContextLengthExceeded, RequestRefused
from tandem.workers.text.tokenizer import check_text_ids, check_token_ids


class Prompt(NamedTuple):
    """One prompt, ready. `text` is what the client sent as text, None for ids."""

    token_ids: list[int]
    text: str | None


def tokenized(
    services: TextServices,
    items: Sequence[str | list[int]],
    param: str,
    *,
    add_special_tokens: bool,
    truncates: bool,
) -> list[Prompt]:
    """Tokenizes texts and checks token ids, in order. param: the field's name; truncates: too long a text is cut."""
    texts = [item for item in items if isinstance(item, str)]
    if not truncates:
        for text in texts:
            services.tokenizer.check_bytes(text, services.max_model_len, param)
    check_text_bytes(services, sum(len(text.encode()) for text in texts), param)
    prompts: list[Prompt] = []
    for item in items:
        if isinstance(item, str):
            token_ids = services.tokenizer.encode(item, add_special_tokens=add_special_tokens)
            check_text_ids(services.tokenizer, token_ids, services.vocab_size, param)
            prompts.append(Prompt(token_ids, item))
        else:
            check_token_ids(item, services.vocab_size, param)
            prompts.append(Prompt(item, None))
    return prompts


def check_text_bytes(services: TextServices, size: int, param: str) -> None:
    """Refuses more text than one request may have tokenized, with 413."""
    limit = services.settings.text_budget(services.max_model_len)
    if size > limit:
        raise RequestRefused(
            f"The request has {size} bytes of text to tokenize, above the limit of {limit} (--max-text-bytes).",
            code="content_too_large", status=413, param=param,
        )  # fmt: skip


def check_token_count(services: TextServices, count: int, param: str) -> None:
    """Refuses more token ids than the text of one request may have, with 413."""
    limit = services.settings.text_budget(services.max_model_len) // 4
    if count > limit:
        raise RequestRefused(
            f"The request has {count} token ids, above the limit of {limit} (a quarter of --max-text-bytes).",
            code="content_too_large", status=413, param=param,
        )  # fmt: skip


def prompt_items(prompt: str | list[str | int | list[int]]) -> Sequence[str | list[int]]:
    """A prompt field as a list of texts or lists of ids."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [[item for item in prompt if isinstance(item, int)]]
    return [item for item in prompt if not isinstance(item, int)]


class LimitNames(NamedTuple):
    """The names of the two fields that must fit the context together, in this body."""

    prompt: str
    max_tokens: str


def fit(
    services: TextServices, prompt: Prompt, body: CommonBody, wanted: int | None, names: LimitNames
) -> tuple[Prompt, int]:
    """The prompt, cut as asked, and its max_tokens: `wanted`, or all that fits, within generation_config.json's limits.

    ContextLengthExceeded when both do not fit; it names the prompt where that does not fit by itself.
    """
    limit = services.max_model_len
    needed = 1 if wanted is None else wanted
    keep = body.truncate_prompt_tokens
    if keep is not None:
        most = limit - needed if keep == -1 else keep
        if len(prompt.token_ids) > most > 0:
            prompt = prompt._replace(token_ids=prompt.token_ids[-most:])
    length = len(prompt.token_ids)
    if length == 0:
        raise invalid(names.prompt, "The prompt is empty: it must hold at least one token.")
    room = limit - length
    if room < needed:
        wish = f"{wanted} for the completion ({names.max_tokens})" if wanted is not None else "1 for the completion"
        beside = wanted if wanted is not None and wanted < limit else 1
        advice = f"or ask for at most {room} tokens" if room > 0 else f"to at most {limit - beside} tokens"
        raise ContextLengthExceeded(
            f"This model's context is {limit} tokens; the request needs {length} for the prompt and {wish}. "
            f"Shorten the prompt {advice}.",
            names.max_tokens if room > 0 else names.prompt,
        )
    return prompt, services.tokenizer.defaults.most_tokens(wanted, room)
