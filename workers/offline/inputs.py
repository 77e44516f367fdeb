"""Converts arguments of LLM (flags, prompts, conversations, parameters, adapters, bad words) to plain values, or raises
an error that names them.

Called by workers/offline/llm.py before anything runs. The engine decides whether a prompt can be served.
"""

import logging
import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from tandem.configs.errors import SettingsError
from tandem.configs.load import build_settings
from tandem.configs.options import option_named
from tandem.configs.schema import EngineSettings
from tandem.workers.build import offline_settings
from tandem.workers.messages.request import AdapterRef
from tandem.workers.planning.model_source import resolve_model

log = logging.getLogger("tandem.offline")
Params = TypeVar("Params", bound=msgspec.Struct)
_NAMES = "served_model_name", "data_parallel_size", "max_num_queued_reqs", "max_num_queued_tokens", "kv_events"
SERVICE_ONLY = frozenset(_NAMES)
"""Engine flags that LLM refuses: they concern only a service."""
ALSO_OFFLINE = frozenset(("max_logprobs",))
"""Flags of the gateway that LLM takes."""
Prompt = str | Sequence[int] | Mapping[str, Any]
NO_PROMPT = "a prompt is text or a list of token ids, not"
PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


class GivenPrompt(NamedTuple):
    """One prompt of a caller: its text, its token ids, or both, of which the ids are served. cache_salt: KV of the
    prefix cache is found only under the same salt."""

    text: str | None
    token_ids: list[int] | None = None
    cache_salt: str = ""

    def as_mapping(self) -> dict[str, Any]:
        """Returns it as a caller may give it."""
        return {"prompt": self.text, "prompt_token_ids": self.token_ids, "cache_salt": self.cache_salt or None}


def as_prompts(given: Prompt | Sequence[Prompt]) -> list[GivenPrompt]:
    """Returns the prompts as a list. Each is a text, a list of token ids, or one of vLLM's mappings ({"prompt": text}
    or {"prompt_token_ids": ids}, with "cache_salt" if wanted; other keys may be None). TypeError for other types, and
    for keys by name."""
    if isinstance(given, str | Mapping):
        return [_as_prompt(given)]
    many = _items(given)
    if many and _is_id(many[0]):
        return [_as_prompt(many)]
    return [_as_prompt(prompt) for prompt in many]


def settings_of(model: str | Path, flags: Mapping[str, Any]) -> tuple[EngineSettings, int]:
    """Returns checked settings for offline use, without queue limits and with the model's folder, and max_logprobs.
    SettingsError names the flag."""
    for name, value in flags.items():
        option, plain = option_named(name), name.replace("-", "_")
        if value is None or value is False or option is None or plain in ALSO_OFFLINE:
            continue  # a switch that is off asks for nothing
        if plain in SERVICE_ONLY or not option.path.startswith("engine."):
            raise SettingsError(f"{name} is the service's; an LLM has no use for it", name)
    name = str(model.expanduser().absolute()) if isinstance(model, Path) else model
    built = build_settings(name, flags)
    for line in built.without_effect:
        log.warning(line)
    settings = offline_settings(built.engine)
    resolved = msgspec.structs.replace(settings, model=resolve_model(settings.model))
    return resolved, built.gateway.max_logprobs


def as_params(given: Any, kind: type[Params], name: str) -> list[Params]:
    """Returns parameters as a list, of one or of several. TypeError names the argument, what is no `kind`, and a key of
    a dict that is no parameter."""
    is_one = isinstance(given, kind | msgspec.Struct | Mapping | str) or not isinstance(given, Iterable)
    many = [given] if is_one else list(given)
    for one in many:
        if isinstance(one, kind):
            continue
        words = f"{name}: {one!r:.80} is no {kind.__name__}"
        if isinstance(one, Mapping):
            unknown = [key for key in one if key not in kind.__struct_fields__]
            words += f", which has no {unknown[0]!r:.80}" if unknown else f"; write {kind.__name__}(**it)"
        raise TypeError(words)
    return many


def as_conversations(given: Any) -> list[Sequence[Mapping[str, Any]]]:
    """Returns the conversations as a list, each a list of messages. TypeError for any other type."""
    many = [given] if isinstance(given, Sequence) and given and isinstance(given[0], Mapping) else given
    if isinstance(many, str | Mapping) or not isinstance(many, Iterable):
        raise TypeError(f"a conversation is a list of messages, not {given!r:.80}")
    conversations = list(many)
    for conversation in conversations:
        if not isinstance(conversation, Sequence) or not all(isinstance(m, Mapping) for m in conversation):
            raise TypeError(f"a conversation is a list of messages, not {conversation!r:.80}")
    return conversations


def one_for_each(given: AdapterRef | Sequence[AdapterRef | None] | None, count: int) -> list[AdapterRef | None]:
    """Returns an adapter or None for each of `count` prompts. TypeError or ValueError for another type or number."""
    if given is None or isinstance(given, AdapterRef):
        return [given] * count
    adapters = list(given)
    if wrong := [one for one in adapters if one is not None and not isinstance(one, AdapterRef)]:
        raise TypeError(f"lora_request: {wrong[0]!r:.80} is not what load_adapter() returned")
    if len(adapters) != count:
        raise ValueError(f"{len(adapters)} lora_requests for {count} prompts")
    return adapters


def one_priority_each(given: int | Sequence[int] | None, count: int) -> list[int]:
    """Returns a priority for each of `count` prompts, the smaller the earlier. TypeError or ValueError for others."""
    each = [given or 0] * count if given is None or isinstance(given, int) else list(given)
    if wrong := [one for one in each if isinstance(one, bool) or not isinstance(one, int)]:
        raise TypeError(f"priority: {wrong[0]!r:.80} is no whole number")
    if len(each) != count:
        raise ValueError(f"{len(each)} priorities for {count} prompts")
    return each


def _as_prompt(prompt: Any) -> GivenPrompt:
    if isinstance(prompt, str):
        return GivenPrompt(prompt)
    if not isinstance(prompt, Mapping):
        return GivenPrompt(None, _as_ids(prompt))
    if unknown := [key for key, value in prompt.items() if key not in PROMPT_KEYS and value is not None]:
        raise TypeError(f"a prompt has no key {unknown[0]!r:.80}; it may have {', '.join(PROMPT_KEYS)}")
    text, ids, salt = (prompt.get(key) for key in PROMPT_KEYS)
    if text is None and ids is None:
        raise TypeError(f"a prompt needs the key prompt or prompt_token_ids: {prompt!r:.80}")
    for key, value in (("prompt", text), ("cache_salt", salt)):
        if not isinstance(value, str | None):
            raise TypeError(f"the key {key} of a prompt is text, not {value!r:.80}")
    return GivenPrompt(text, None if ids is None else _as_ids(ids), salt or "")


def _as_ids(prompt: Any) -> list[int]:
    """Converts token ids of any library to a list of ints. TypeError for anything else."""
    items = _items(prompt)
    if not all(map(_is_id, items)):
        raise TypeError(f"{NO_PROMPT} {prompt!r:.80}")
    return list(map(operator.index, items))


def _items(given: Any) -> list[Any]:
    """Returns the items of a list, an array or an iterator. TypeError for other types, mappings, sets and bytes."""
    try:
        if not isinstance(given, bytes | bytearray | Mapping | Set):
            return list(given)
    except TypeError:  # a number, an array without dimensions
        pass
    raise TypeError(f"{NO_PROMPT} {given!r:.80}")


def _is_id(value: object) -> bool:
    """Returns whether a value is a whole number of any library; arrays of one item and booleans are not."""
    if isinstance(value, bool) or bool(getattr(value, "ndim", None)) or "bool" in str(getattr(value, "dtype", "")):
        return False
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True
