"""The bodies of /v1/score and /v1/rerank, as vLLM has them, and the pairs of texts that they ask about."""

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from tandem.cluster.gateway.schemas import openai_hints
from tandem.cluster.gateway.schemas.ignored_fields import Ignorables, IgnoredFields, ignorable
from tandem.cluster.gateway.schemas.reading import ShortText, check_limit, invalid, read
from tandem.configs.schema import GatewaySettings


class TextDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A document as an object."""

    text: str


Text = str | TextDocument
Texts = str | TextDocument | list[Text]


class ScoringBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields that both bodies share. truncate_prompt_tokens keeps the last tokens, the others the first ones.
    use_activation: false: a judging model's score before the logistic function."""

    model: ShortText | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    max_tokens_per_query: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    max_tokens_per_doc: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    use_activation: bool | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    user: ShortText | None = None


class ScoreBody(ScoringBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/score: two texts, one and several, or as many as there are of the other, under one pair of names."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None


class RerankBody(ScoringBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/rerank. top_n: how many documents to answer with, the best ones; 0: all."""

    query: Text
    documents: Texts
    top_n: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    return_documents: bool | None = None


PAIRS_OF_NAMES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
HINTS: Ignorables = {"": {**openai_hints.HINTS, **ignorable("max_chunks_per_doc")}}


class TextPairs(NamedTuple):
    """The texts to compare: one and several, or as many as there are of the other. names: of their fields."""

    firsts: list[str]
    seconds: list[str]
    names: tuple[str, str]

    def first_of(self, index: int) -> int:
        """The place of the text that the second one of this index is compared with."""
        return 0 if len(self.firsts) == 1 else index


def read_score(
    fields: dict[str, Any], settings: GatewaySettings, ignored: IgnoredFields
) -> tuple[ScoreBody, TextPairs]:
    """A body of /v1/score and its pairs. RequestRefused naming the field at fault."""
    ignored.take_from(fields, HINTS)
    body = read(fields, ScoreBody, {})
    given = {name for pair in PAIRS_OF_NAMES for name in pair if getattr(body, name) is not None}
    names = next((pair for pair in PAIRS_OF_NAMES if given == set(pair)), None)
    if names is None:
        words = ", ".join(" and ".join(pair) for pair in PAIRS_OF_NAMES)
        raise invalid(next(iter(sorted(given)), "text_1"), f"Send one pair of fields: {words}.")
    return body, _pairs(getattr(body, names[0]), getattr(body, names[1]), names, body, settings)


def read_rerank(
    fields: dict[str, Any], settings: GatewaySettings, ignored: IgnoredFields
) -> tuple[RerankBody, TextPairs]:
    """A body of /v1/rerank and its pairs. RequestRefused naming the field at fault."""
    ignored.take_from(fields, HINTS)
    body = read(fields, RerankBody, {})
    return body, _pairs(body.query, body.documents, ("query", "documents"), body, settings)


def _pairs(
    first: Texts, second: Texts, names: tuple[str, str], body: ScoringBody, settings: GatewaySettings
) -> TextPairs:
    pairs = TextPairs(_texts(first), _texts(second), names)
    for name, texts in zip(names, (pairs.firsts, pairs.seconds), strict=True):
        if not texts:
            raise invalid(name, f"{name} is empty: it must hold at least one text.")
        check_limit(name, len(texts), settings.max_messages)
    if len(pairs.firsts) not in (1, len(pairs.seconds)):
        raise invalid(
            names[1], f"{names[1]} has {len(pairs.seconds)} texts and {names[0]} {len(pairs.firsts)}: send one of "
            f"{names[0]}, or as many of both."
        )  # fmt: skip
    if body.truncate_prompt_tokens == 0:
        raise invalid("truncate_prompt_tokens", "truncate_prompt_tokens: 0 must be -1 or at least 1.")
    return pairs


def _texts(given: Texts) -> list[str]:
    many: Sequence[Text] = given if isinstance(given, list) else [given]
    return [one if isinstance(one, str) else one.text for one in many]
