"""A model's generation_config.json: what it says of requests that leave fields out, and the ids that end a text.

Read by gateway, LLM and coordinator for --generation-config and --override-generation-config. Keys that would change
texts and that Tandem does not compute are refused by name. Torch-free.
"""

import difflib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from tandem.configs.errors import SettingsError
from tandem.configs.schema import ModelSettings
from tandem.workers.messages.request import SamplingParams
from tandem.workers.messages.sampling_ranges import (
    Count,
    MinP,
    RepetitionPenalty,
    Temperature,
    Text,
    TokenId,
    TopK,
    TopP,
    Whole,
)

FILE: Final = "generation_config.json"
FLAG: Final = "--generation-config"
OVERRIDE: Final = "--override-generation-config"
FROM_MODEL: Final = "auto"
WITHOUT: Final = "vllm"
"""vLLM's word for leaving the sampling defaults of the file aside."""


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults of the fields that a request omits, by their names in generation_config.json. temperature: 0 if the file
    says do_sample false.

    max_new_tokens: the most tokens of any answer, as in vLLM. suppress_tokens and bad_words_ids are forbidden in every
    answer.
    """

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    max_new_tokens: Count | None = None
    min_new_tokens: Whole = 0
    suppress_tokens: tuple[TokenId, ...] = ()
    bad_words_ids: tuple[Annotated[tuple[TokenId, ...], Meta(min_length=1)], ...] = ()
    stop_strings: tuple[Text, ...] = ()

    def most_tokens(self, asked: int | None, room: int) -> int:
        """Returns the max_tokens of a request. asked: its own, None: without; room: what the context leaves."""
        most = room if asked is None else asked
        return most if self.max_new_tokens is None else min(most, self.max_new_tokens)

    def sampling_params(self) -> SamplingParams:
        """Returns the parameters of a request that names none."""
        plain = SamplingParams()
        most = plain.max_tokens if self.max_new_tokens is None else self.max_new_tokens
        return SamplingParams(
            max_tokens=most,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(0, self.top_k),
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            min_tokens=min(self.min_new_tokens, most),
            stop=self.stop_strings,
            logit_bias=tuple((token_id, -math.inf) for token_id in self.suppress_tokens),
            bad_words_token_ids=self.bad_words_ids,
        )


REFUSED: Final[Mapping[str, tuple[Any, ...]]] = {
    "min_length": (0,),
    "no_repeat_ngram_size": (0,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "penalty_alpha": (0,),
    "diversity_penalty": (0,),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "exponential_decay_length_penalty": (),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "sequence_bias": ({}, []),
    "guidance_scale": (1,),
    "watermarking_config": (),
    "dola_layers": (),
    "token_healing": (False,),
    "force_words_ids": ([],),
    "constraints": ([],),
}
"""Keys that would change texts, which are not computed, and the values that ask for nothing."""
NOTED: Final[Mapping[str, tuple[Any, ...]]] = {"max_length": (), "max_time": (), "num_return_sequences": (1,)}
"""Keys of the file that say how much is written, which requests say here, as in vLLM; and the values that ask for
nothing."""
OWN: Final = ("do_sample", "eos_token_id")
SHAPES: Final = {field.name: field.type for field in msgspec.structs.fields(GenerationDefaults)}


class GenerationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """eos_token_ids: None if the file and the flags do not say them. unread: what the file says of NOTED."""

    defaults: GenerationDefaults = GenerationDefaults()
    eos_token_ids: tuple[int, ...] | None = None
    unread: dict[str, Any] = {}

    def notes(self, max_model_len: int) -> tuple[str, ...]:
        """Returns lines for the start: what limits every answer, and what would where max_model_len tokens fit."""
        found, most = [], self.defaults.max_new_tokens
        if most is not None and most < max_model_len:
            found.append(
                f"{FILE}: max_new_tokens {most} is the most of any answer, also where a request asks for more; "
                f"{OVERRIDE} '{{\"max_new_tokens\": null}}' lifts that"
            )
        length = self.unread.get("max_length")
        matters = most is None and not (isinstance(length, int) and length >= max_model_len)
        for key, value in self.unread.items():
            if key != "max_length" or matters:
                found.append(f"{FILE}: {key} {value!r} is not applied, as in vLLM: each request says how much it wants")
        return tuple(found)


def generation_of(model: ModelSettings) -> GenerationConfig:
    """Returns what resolved settings say. SettingsError with the flag."""
    source = model.generation_config
    folder = Path(model.model) if source in (FROM_MODEL, WITHOUT) else Path(source)
    file = read_file(folder / FILE)
    if source == WITHOUT:
        file = {"eos_token_id": file.get("eos_token_id")}
    return generation_config(file, model.override_generation_config, str(folder / FILE))


def read_file(path: Path) -> dict[str, Any]:
    """Returns the keys of a generation_config.json; {} when there is none. SettingsError when it is no JSON object."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingsError(f"{path} is not JSON: {error}", FLAG) from error
    if not isinstance(value, dict):
        raise SettingsError(f"{path} does not hold a JSON object", FLAG)
    return value


def generation_config(file: Mapping[str, Any], overrides: Mapping[str, Any], path: str = FILE) -> GenerationConfig:
    """Returns the config of a file's keys under the user's, of which null takes one away. Other keys of the file mean
    nothing here; of the user's they are refused, as are keys that are not computed. SettingsError."""
    known = (*SHAPES, *OWN, *REFUSED)
    for key in overrides:
        if key in NOTED:
            if overrides[key] is not None:
                raise SettingsError(f"{key} is not applied, as in vLLM; max_new_tokens limits every answer", OVERRIDE)
            continue
        if key not in known and key not in file:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join((*SHAPES, *OWN))}"
            raise SettingsError(f"{key} is not a key of {FILE} that is read; {hint}", OVERRIDE)
    given = {key: value for key, value in {**file, **overrides}.items() if value is not None}

    def wrong(key: str, words: str) -> SettingsError:
        is_users = key in overrides
        return SettingsError(f"{'' if is_users else f'{path}: '}{key} {words}", OVERRIDE if is_users else FLAG)

    for key, neutral in REFUSED.items():
        if key in given and given[key] not in neutral:
            raise wrong(key, f"{given[key]!r} is not computed; {OVERRIDE} '{json.dumps({key: None})}' leaves it out")
    values = {}
    for key in (key for key in SHAPES if key in given):
        try:
            values[key] = msgspec.convert(_listed(key, given[key]), SHAPES[key])
        except msgspec.ValidationError as error:
            raise wrong(key, f"is {given[key]!r}: {str(error)[0].lower()}{str(error)[1:]}") from error
        if isinstance(values[key], float) and not math.isfinite(values[key]):
            raise wrong(key, f"is {given[key]!r}, want a finite number")
    if not isinstance(given.get("do_sample", True), bool):
        raise wrong("do_sample", f"is {given['do_sample']!r}, want true or false")
    if not given.get("do_sample", True):
        values["temperature"] = 0.0
    ids = given.get("eos_token_id")
    if ids is not None and not all(type(one) is int and one >= -1 for one in _listed("eos_token_id", ids)):
        raise wrong("eos_token_id", f"is {ids!r}, want a token id or a list of them")
    listed = None if ids is None else tuple(_listed("eos_token_id", ids))
    unread = {key: given[key] for key, neutral in NOTED.items() if key in given and given[key] not in neutral}
    return GenerationConfig(defaults=GenerationDefaults(**values), eos_token_ids=listed, unread=unread)


def _listed(key: str, value: Any) -> Any:
    """Returns the value of a key whose list may be written as its only item."""
    one = (key == "stop_strings" and isinstance(value, str)) or (key == "eos_token_id" and not isinstance(value, list))
    return [value] if one else value
