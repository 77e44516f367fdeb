"""What a gateway reads of a model's folder is read, and refused, before anything starts."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.gateway.app.model_text import check_text
from tandem.cluster.gateway.app.wiring import build_metrics, build_text_services
from tandem.configs.errors import SettingsError
from tandem.configs.load import build_settings
from tests.support.service import DEMO
from tests.unit.gateway.rig import CHAT, COMPLETE, EMBED, MINIMAL, gateway

CUT, UNCLOSED = b'{"version": "1.0", "mod', b"{% if messages %}{{ messages }"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The demo without its weights."""
    return Path(shutil.copytree(DEMO, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")))


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    ("file", "data", "words"),
    [
        ("chat_template.jinja", UNCLOSED, r"^--chat-template: chat template \(chat_template.jinja\): unexpected '}'"),
        ("chat_template.jinja", b"\xff{{ messages }}", r"^--chat-template: chat template .*: 'utf-8' codec can't"),
        ("tokenizer.json", CUT, r"^MODEL: .*/model/tokenizer.json cannot be read: EOF while parsing"),
        ("tokenizer.json", None, r"^MODEL: .*/model holds no tokenizer.json: copy .* into it, or pass --tokenizer"),
    ],
)
def test_launcher_and_gateway_refuse_with_the_same_words(
    folder: Path, file: str, data: bytes | None, words: str
) -> None:
    (folder / file).unlink()
    if data is not None:
        (folder / file).write_bytes(data)
    settings = build_settings(str(folder), {})
    with pytest.raises(SettingsError, match=words) as early:
        check_text(settings)
    with pytest.raises(SettingsError) as late:
        build_text_services(settings, build_metrics(settings))
    assert (str(early.value), early.value.flag) == (str(late.value), late.value.flag)


def test_the_folder_of_another_tokenizer_is_blamed_itself(folder: Path, tmp_path: Path) -> None:
    (other := tmp_path / "other").mkdir()
    with pytest.raises(
        SettingsError, match=r"^--tokenizer: .*/other holds no tokenizer.json: copy .* or give a folder"
    ):
        check_text(build_settings(str(folder), {"tokenizer": str(other)}))


TOO_MANY = (
    "the tokenizer has 768 tokens, the model's vocabulary (vocab_size) 700: texts with tokens from 700 on are refused"
)


@pytest.mark.parametrize(
    ("config", "generation", "notes"),
    [
        ({}, {}, ()),
        ({"vocab_size": 700}, {}, (TOO_MANY,)),
        ({}, {"eos_token_id": [2, -1, 768]}, ("eos_token_id 768 is outside the model's vocabulary (0 to 767): ",)),
        ({"eos_token_id": 5000}, {"eos_token_id": None}, ("eos_token_id 5000 is outside the model's vocabulary",)),
    ],
)
def test_ids_without_a_row_are_told_at_the_start(
    folder: Path, config: dict[str, Any], generation: dict[str, Any], notes: tuple[str, ...]
) -> None:
    change(folder / "config.json", **config)
    change(folder / "generation_config.json", **generation)
    told = check_text(build_settings(str(folder), {}))
    assert len(told) == len(notes) and all(line.startswith(start) for line, start in zip(told, notes, strict=True))


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        (COMPLETE, {"prompt": "a<turn>"}, "prompt"),
        (COMPLETE, {"prompt": ["a", "<turn>"]}, "prompt"),
        (CHAT, MINIMAL[CHAT], "messages"),
        (EMBED, {"input": "<turn>"}, "input"),
    ],
)
async def test_a_text_with_a_token_that_the_model_has_not(route: str, body: dict[str, Any], param: str) -> None:
    async with gateway(text={"vocab_size": 258}) as rig:
        refused = await rig.client.post(route, json={"model": "echo", **body})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert refused.json()["error"]["message"] == (
            "The text has the token '<turn>' with id 258, for which the model has no row: its tokenizer has 259 "
            "tokens, more than the model's vocabulary of 258."
        )
        counted = await rig.client.post("/tokenize", json={"prompt": "<turn>", "add_special_tokens": False})
        assert counted.json()["tokens"] == [258], "this is the tokenizer's own"
        assert (await rig.complete(prompt="a")).status_code == 200
