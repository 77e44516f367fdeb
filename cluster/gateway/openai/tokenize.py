"""POST /tokenize and /detokenize."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.cluster.gateway.conversation.chat_prompt import chat_prompt
from tandem.cluster.gateway.conversation.request_template import with_own_template
from tandem.cluster.gateway.generation.gateway_context import GatewayContext
from tandem.cluster.gateway.http.auth import Principal
from tandem.cluster.gateway.schemas.chat_body import TokenizeBody, check_parts
from tandem.cluster.gateway.schemas.ignored_fields import IgnoredFields
from tandem.cluster.gateway.schemas.openai_hints import TEXT_HINTS, TOKENIZE_HINTS, take_hints
from tandem.cluster.gateway.schemas.reading import ShortText, invalid, read
from tandem.cluster.gateway.services.model_lookup import served_model
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.cluster.gateway.serving.answer import json_response
from tandem.cluster.gateway.serving.prompts import Prompt, check_text_bytes, check_token_count
from tandem.cluster.gateway.serving.received import ignored_fields, received
from tandem.workers.messages.sampling_ranges import TokenId
from tandem.workers.text.tokenizer import check_token_ids


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    model: ShortText | None = None
    tokens: list[TokenId]


async def tokenize(text: TextServices, context: GatewayContext, request: Request, principal: Principal) -> Response:
    """Token ids of a text or of a rendered conversation."""
    body, size = await received(text, request, principal, _tokenize_body)
    served_model(text.model_names, context.adapters, body.model, principal)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "Send either prompt or messages.")
    return await text.workers.run(principal.tenant, size, _tokenized, text, body, ignored_fields(request))


async def detokenize(text: TextServices, context: GatewayContext, request: Request, principal: Principal) -> Response:
    """The text of token ids, special tokens included."""
    body, size = await received(text, request, principal, _detokenize_body)
    served_model(text.model_names, context.adapters, body.model, principal)
    return await text.workers.run(principal.tenant, size, _detokenized, text, body)


def _tokenize_body(fields: dict[str, Any], ignored: IgnoredFields) -> TokenizeBody:
    take_hints(fields, TOKENIZE_HINTS, ignored)
    check_parts(fields.get("messages"))
    return read(fields, TokenizeBody)


def _detokenize_body(fields: dict[str, Any], ignored: IgnoredFields) -> DetokenizeBody:
    take_hints(fields, TEXT_HINTS, ignored)
    return read(fields, DetokenizeBody)


async def tokenizer_info(text: TextServices, _: Request, __: Principal) -> Response:
    """The tokenizer's special tokens, its settings and the chat template, as vLLM and lm-eval have them."""
    tokenizer, template = text.tokenizer, text.chat_template
    shown = {name: value for name, value in tokenizer.config.items() if _is_plain(value) and name != "chat_template"}
    kind = shown.get("tokenizer_class", "PreTrainedTokenizerFast")
    absent = dict.fromkeys(("bos_token", "eos_token", "pad_token"))
    source = None if template is None else template.source
    fixed = {"tokenizer_class": kind, "chat_template": source, "model_max_length": text.max_model_len}
    return json_response({**shown, **absent, **tokenizer.special_tokens, **fixed})


def _is_plain(value: Any) -> bool:
    """True for a setting of one value, or for texts."""
    values = value if isinstance(value, list) else [value]
    return all(isinstance(one, str | int | float | bool | None) for one in values)


def _tokenized(text: TextServices, body: TokenizeBody, ignored: IgnoredFields) -> Response:
    ids = text_prompt(text, body, ignored).token_ids
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": text.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [text.tokenizer.piece(i) for i in ids]
    return json_response(answer)


def _detokenized(text: TextServices, body: DetokenizeBody) -> Response:
    check_token_count(text, len(body.tokens), "tokens")
    check_token_ids(body.tokens, text.vocab_size, "tokens")
    return json_response({"prompt": text.tokenizer.decode(body.tokens, skip_special_tokens=False)})


def text_prompt(services: TextServices, body: TokenizeBody, ignored: IgnoredFields) -> Prompt:
    """Tokenizes what /tokenize was sent: a text or a conversation."""
    if body.messages is not None:
        return chat_prompt(with_own_template(services, body), body, ignored)
    text = body.prompt or ""
    check_text_bytes(services, len(text.encode()), "prompt")
    return Prompt(services.tokenizer.encode(text, add_special_tokens=body.add_special_tokens is not False), text)
