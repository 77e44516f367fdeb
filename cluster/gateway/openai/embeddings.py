"""POST /v1/embeddings: one or several inputs, each an engine request of its own that ends with an embedding."""

import base64
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from tandem.cluster.gateway.generation.delivery import Delivery
from tandem.cluster.gateway.generation.gateway_context import GatewayContext
from tandem.cluster.gateway.generation.generation import Generation
from tandem.cluster.gateway.generation.part import RequestPart
from tandem.cluster.gateway.generation.response_format import ChoiceAnswer
from tandem.cluster.gateway.http.auth import Principal
from tandem.cluster.gateway.openai.answer_usage import usage_object
from tandem.cluster.gateway.schemas.generation_body import check_prompt
from tandem.cluster.gateway.schemas.ignored_fields import IgnoredFields
from tandem.cluster.gateway.schemas.openai_hints import TEXT_HINTS, take_hints
from tandem.cluster.gateway.schemas.reading import ShortText, invalid, read
from tandem.cluster.gateway.services.model_lookup import ServedModel, held_model
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.cluster.gateway.serving.parts import PromptWork, request_parts
from tandem.cluster.gateway.serving.prompts import prompt_items, tokenized
from tandem.cluster.gateway.serving.received import Posted, received
from tandem.configs.schema import GatewaySettings
from tandem.workers.messages.errors import ContextLengthExceeded, RequestRefused
from tandem.workers.messages.request import NO_TOKENS, FinishReason, Pool, TokenDelta, Usage
from tandem.workers.messages.sampling_ranges import Count, TokenId
from tandem.workers.text.tokenizer import check_token_ids, last_tokens

AT_ONCE = 64
"""Inputs of one body that are in a group at once: a long list must not fill the queue for other requests."""
FLOAT_BYTES, BASE64_BYTES = 56, 8
"""A component of an answer in Python's memory: a float and its digits in JSON, or its part of a base64 text."""
VECTOR_BYTES = 32
"""A component's weight in the choice of a thread to write a large answer."""
OTHER_IDS = (
    "Are these another tokenizer's ids? Send texts; LangChain's OpenAIEmbeddings does with "
    "check_embedding_ctx_length=False."
)
Format = Literal["float", "base64"]


class EmbeddingBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/embeddings. `input`: text, texts, token ids, or lists of token ids."""

    input: str | list[str | int | list[TokenId]]
    model: ShortText | None = None
    encoding_format: Format | None = None
    dimensions: Count | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    user: ShortText | None = None


def read_embedding(fields: dict[str, Any], ignored: IgnoredFields, settings: GatewaySettings) -> EmbeddingBody:
    """An embeddings body. RequestRefused naming the field at fault."""
    take_hints(fields, TEXT_HINTS, ignored)
    body = read(fields, EmbeddingBody)
    check_prompt(body.input, settings, "input")
    if body.truncate_prompt_tokens == 0:
        raise invalid("truncate_prompt_tokens", "truncate_prompt_tokens: 0 must be -1 or at least 1.")
    return body


async def embeddings(text: TextServices, context: GatewayContext, request: Request, principal: Principal) -> Response:
    """One or several inputs, an embedding each."""
    began_s = context.clock()
    body, size = await received(text, request, principal, partial(read_embedding, settings=text.settings))
    with ExitStack() as held:
        model = held_model(text, context, body.model, principal, held)
        posted, name = Posted(request, principal, body, size, began_s), f"embd-{text.random_ids()}"
        pool = _pool_of(text, body)
        parts = await text.workers.run(principal.tenant, size, _parts, text, context, posted, model, name, pool)
        head: dict[str, Any] = {"id": name, "created": int(context.wall_clock())}
        style = EmbeddingFormat(head, model.name, parts, body.encoding_format or "float")
        generation = Generation(
            context,
            parts,
            trace=posted.note_generation(),
            tenant=principal.tenant,
            model=model.name,
            began_s=began_s,
            held=held.pop_all(),
            prompt_field="input",
            at_once=AT_ONCE,
        )
        components = len(parts) * (pool.dimensions or text.pooling.size)
        return Delivery(context, generation, style, other_bytes=components * VECTOR_BYTES)


def _pool_of(text: TextServices, body: EmbeddingBody) -> Pool:
    try:
        return text.pooling.pool(dimensions=body.dimensions, normalize=body.normalize)
    except ValueError as error:
        raise invalid("dimensions", f"dimensions {error}.") from error


def _parts(
    text: TextServices,
    context: GatewayContext,
    posted: Posted[EmbeddingBody],
    model: ServedModel,
    name: str,
    pool: Pool,
) -> list[RequestPart]:
    """A part for every input."""
    inputs, encoding = _inputs(text, posted.body), posted.body.encoding_format
    _check_answer(len(inputs), pool.dimensions or text.pooling.size, encoding, context.max_answer_bytes)
    work = [PromptWork(token_ids, NO_TOKENS, [EmbeddingChoice()]) for token_ids in inputs]
    return request_parts(text, context, posted, model, name, work, pool=pool)


def _inputs(text: TextServices, body: EmbeddingBody) -> list[list[int]]:
    """The token ids of each input, cut as asked."""
    limit, keep = text.max_model_len, body.truncate_prompt_tokens
    items = prompt_items(body.input)
    _check_ids(items, text.vocab_size)
    prompts = tokenized(
        text,
        items,
        "input",
        add_special_tokens=body.add_special_tokens is not False,
        truncates=keep is not None,
    )
    found = []
    for prompt in prompts:
        token_ids = last_tokens(prompt.token_ids, keep, limit)
        if not token_ids:
            raise invalid("input", "An input is empty: it must hold at least one token.")
        if len(token_ids) > limit:
            raise ContextLengthExceeded(
                f"This model's context is {limit} tokens; an input has {len(token_ids)}. Shorten it, or send "
                "truncate_prompt_tokens -1.",
                "input",
            )
        found.append(token_ids)
    return found


def _check_ids(items: Sequence[str | list[int]], vocab_size: int) -> None:
    """Refuses ids that are not of this model, which LangChain makes with OpenAI's tokenizer for every server."""
    try:
        for item in items:
            if not isinstance(item, str):
                check_token_ids(item, vocab_size, "input")
    except RequestRefused as refusal:
        raise invalid("input", f"{refusal} {OTHER_IDS}") from None


def _check_answer(count: int, size: int, encoding: Format | None, most: int) -> None:
    """RequestRefused when so many embeddings would take too much memory, before any is computed."""
    needed = count * size * (BASE64_BYTES if encoding == "base64" else FLOAT_BYTES)
    if needed > most:
        message = (
            f"{count} embeddings of {size} components take about {needed} bytes of memory, above the limit of {most}. "
            "Send fewer inputs, or encoding_format base64."
        )
        raise RequestRefused(message, code="content_too_large", status=413, param="input")


class EmbeddingChoice:
    """The embedding of one input, as float32 in little-endian order, once it has come."""

    tokens = 0

    def __init__(self) -> None:
        self.finished: FinishReason | None = None
        self.embedding = b""

    def take(self, delta: TokenDelta) -> None:
        """Adds a delta, of which only the last one says anything."""
        if self.finished is None and delta.finish_reason is not None:
            self.finished = delta.finish_reason
            self.embedding = delta.embedding or b""


class EmbeddingFormat:
    """The list of embeddings, in the order of the inputs. head: the first fields of the answer."""

    def __init__(self, head: dict[str, Any], model: str, parts: Sequence[RequestPart], encoding: Format) -> None:
        self._head = head
        self._model = model
        self._parts = parts
        self._shown = _as_base64 if encoding == "base64" else _as_floats

    def whole(self, choices: Sequence[ChoiceAnswer], usage: Usage) -> bytes:
        """Implements ResponseFormat. RequestRefused for an input that ended without an embedding."""
        del choices
        vectors = [vector_of(part) for part in self._parts]
        data = [{"object": "embedding", "index": i, "embedding": self._shown(v)} for i, v in enumerate(vectors)]
        answer = {**self._head, "object": "list", "data": data, "model": self._model, "usage": usage_object(usage)}
        return msgspec.json.encode(answer)


def vector_of(part: RequestPart) -> bytes:
    """Raises RequestRefused for an input that ended without an embedding."""
    (choice,) = part.choices
    if not isinstance(choice, EmbeddingChoice) or not choice.embedding:
        raise RequestRefused("The request ended without an embedding.", code="internal_error", status=500)
    return choice.embedding


def _as_base64(vector: bytes) -> str:
    return base64.b64encode(vector).decode("ascii")


def _as_floats(vector: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(vector) // 4}f", vector)
