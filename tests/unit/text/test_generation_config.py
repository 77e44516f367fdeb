"""generation_config.json: what is honoured, what --override-generation-config changes, what is refused by name."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tandem.configs.errors import SettingsError
from tandem.configs.schema import ModelSettings
from tandem.workers.text.generation_config import GenerationDefaults, generation_config, generation_of

FILE = {
    "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1, "do_sample": True,
    "max_new_tokens": 50, "min_new_tokens": 2, "suppress_tokens": [3], "bad_words_ids": [[4, 5]], "stop_strings": "END",
    "eos_token_id": [1, 2], "bos_token_id": 0, "transformers_version": "4.40.0", "num_beams": 1, "typical_p": 1.0,
}  # fmt: skip


def test_every_key_that_is_computed_is_honoured() -> None:
    found = generation_config(FILE, {})
    assert found.eos_token_ids == (1, 2)
    params = found.defaults.sampling_params()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.6, 0.9, 20, 0.1)
    assert (params.repetition_penalty, params.max_tokens, params.min_tokens) == (1.1, 50, 2)
    assert (params.stop, params.logit_bias, params.bad_words_token_ids) == (("END",), ((3, -math.inf),), ((4, 5),))


def test_overrides_win_and_null_takes_a_key_away() -> None:
    found = generation_config(FILE, {"temperature": 0.2, "top_k": None, "do_sample": None, "eos_token_id": 9}).defaults
    assert (found.temperature, found.top_k, found.top_p) == (0.2, 0, 0.9)
    assert generation_config(FILE, {"do_sample": False}).defaults.temperature == 0.0
    assert generation_config({"penalty_alpha": 0.6}, {"penalty_alpha": None}).defaults == GenerationDefaults()


def test_how_long_an_answer_may_be() -> None:
    capped = GenerationDefaults(max_new_tokens=50)
    assert [capped.most_tokens(asked, 100) for asked in (None, 30, 80, 0)] == [50, 30, 50, 0]
    plain = generation_config({"max_length": 20}, {}).defaults
    assert [plain.most_tokens(asked, 100) for asked in (None, 90)] == [100, 90], "never shortened, as in vLLM"


@pytest.mark.parametrize(
    ("file", "overrides", "lines"),
    [
        ({"max_length": 4096}, {}, ["generation_config.json: max_length 4096 is not applied, as in vLLM: each"]),
        ({"max_length": 8192}, {}, []),
        (
            {"max_length": 20, "max_new_tokens": 50},
            {},
            ["generation_config.json: max_new_tokens 50 is the most of any"],
        ),
        ({"max_new_tokens": 8192}, {}, []),
        ({"max_new_tokens": 50}, {"max_new_tokens": None}, []),
        ({"max_length": 20}, {"max_length": None}, []),
        (
            {"max_time": 1.5, "num_return_sequences": 3},
            {},
            ["generation_config.json: max_time 1.5", "generation_config"],
        ),
        ({"num_return_sequences": 1, "temperature": 0.5, "use_cache": False}, {}, []),
    ],
)
def test_the_start_says_what_limits_answers_and_what_does_not(
    file: dict[str, Any], overrides: dict[str, Any], lines: list[str]
) -> None:
    notes = generation_config(file, overrides).notes(8192)
    assert len(notes) == len(lines) and all(note.startswith(line) for note, line in zip(notes, lines, strict=True))


@pytest.mark.parametrize(
    ("file", "overrides", "flag", "words"),
    [
        ({"num_beams": 4}, {}, "--generation-config", "generation_config.json: num_beams 4 is not computed"),
        ({}, {"no_repeat_ngram_size": 3}, "--override-generation-config", "no_repeat_ngram_size 3 is not computed"),
        ({"top_p": 1.5}, {}, "--generation-config", "generation_config.json: top_p is 1.5: expected"),
        (
            {"token_healing": True},
            {},
            "--generation-config",
            "generation_config.json: token_healing True is not computed",
        ),
        ({}, {"max_length": 9}, "--override-generation-config", "max_length is not applied.*; max_new_tokens limits"),
        ({}, {"temperature": "hot"}, "--override-generation-config", "temperature is 'hot': expected"),
        ({}, {"temperature": 3}, "--override-generation-config", r"temperature is 3: expected `float` <= 2\.0"),
        ({}, {"temprature": 1}, "--override-generation-config", "temprature is .* did you mean temperature"),
        ({"do_sample": 1}, {}, "--generation-config", "do_sample is 1, want true or false"),
    ],
)
def test_what_is_wrong_is_named_with_its_flag(
    file: dict[str, Any], overrides: dict[str, Any], flag: str, words: str
) -> None:
    with pytest.raises(SettingsError, match=words) as refused:
        generation_config(file, overrides)
    assert refused.value.flag == flag


def test_where_the_defaults_come_from(tmp_path: Path) -> None:
    (own := tmp_path / "own").mkdir()
    (other := tmp_path / "other").mkdir()
    (own / "generation_config.json").write_text(json.dumps({"temperature": 0.3, "eos_token_id": 7}))
    (other / "generation_config.json").write_text(json.dumps({"temperature": 0.4}))
    found = {
        source: generation_of(ModelSettings(model=str(own), generation_config=source))
        for source in ("auto", "vllm", str(other))
    }
    assert [one.defaults.temperature for one in found.values()] == [0.3, 1.0, 0.4]
    assert [one.eos_token_ids for one in found.values()] == [(7,), (7,), None]
