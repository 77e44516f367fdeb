"""LLM with the bundled adapters: each prompt with its own, beside prompts without; and the batch command."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem import LLM, SamplingParams
from tandem.configs.errors import SettingsError
from tandem.workers.messages.errors import AdapterRefused, AdapterUnreadable
from tests.support.verbs import run_verb_here

ADAPTERS = Path(__file__).resolve().parents[3] / "configs" / "demo" / "adapters"
GREEDY = SamplingParams(max_tokens=16, temperature=0)
HELLO = [{"role": "user", "content": "Hello! How are you?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", dtype="float32", device="cpu", enable_lora=True) as opened:
        yield opened


def test_each_prompt_has_its_own_adapter(llm: LLM) -> None:
    pirate, shout = (llm.load_adapter(ADAPTERS / name) for name in ("pirate", "shout"))
    choices = [None, pirate, shout, pirate]
    texts = [o.text for o in llm.chat([HELLO] * 4, GREEDY, use_tqdm=False, lora_request=choices)]
    assert texts[1].startswith("Arr!")
    assert texts[2] == texts[2].upper()
    assert texts[3] == texts[1]
    assert len(set(texts)) == 3
    assert [o.text for o in llm.chat([HELLO] * 2, GREEDY, use_tqdm=False, lora_request=pirate)] == [texts[1]] * 2
    assert llm.chat(HELLO, GREEDY, use_tqdm=False)[0].text == texts[0], "no KV of another version is found"


def test_names_are_the_folders_unless_given(llm: LLM) -> None:
    assert llm.load_adapter(ADAPTERS / "pirate").name == "pirate"
    assert llm.load_adapter(ADAPTERS / "pirate", "mine").name == "mine"


def test_what_is_broken_is_refused_and_content_that_changed_fails_its_prompt_only(llm: LLM, tmp_path: Path) -> None:
    folder = shutil.copytree(ADAPTERS / "pirate", tmp_path / "copy")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 3}))
    changed = llm.load_adapter(folder)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    outputs = llm.chat([HELLO] * 2, GREEDY, use_tqdm=False, lora_request=[changed, None])
    assert outputs[0].outputs[0].finish_reason == "error"
    assert outputs[0].outputs[0].error
    assert outputs[1].outputs[0].finish_reason in ("stop", "length")
    (folder / "adapter_model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(AdapterRefused, match=f"^{folder}: adapter_model.safetensors "):
        llm.load_adapter(folder)
    with pytest.raises(AdapterUnreadable, match=f"^{tmp_path}/none: it is not a folder$"):
        llm.load_adapter(tmp_path / "none")


def test_as_many_adapters_as_prompts(llm: LLM) -> None:
    with pytest.raises(ValueError, match="1 lora_requests for 2 prompts"):
        llm.generate(["a", "b"], GREEDY, use_tqdm=False, lora_request=[None])


def test_adapters_need_to_be_enabled() -> None:
    with LLM("demo", dtype="float32", device="cpu") as llm:
        with pytest.raises(SettingsError) as caught:
            llm.load_adapter(ADAPTERS / "pirate")
    assert caught.value.flag == "enable_lora"


def test_the_batch_command_serves_modules(tmp_path: Path, llm: LLM) -> None:
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": {"model": name, "messages": HELLO}}
        for name in ("demo", "pirate", "demo:pirate", "nobody")
    ]
    for line in lines:
        line["body"] |= {"max_tokens": 16, "temperature": 0}  # type: ignore[operator]
    given, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    enabled = ("--enable-lora", "--lora-modules", f"pirate={ADAPTERS / 'pirate'}", "--dtype", "float32")
    done = run_verb_here("run-batch", "demo", "-i", str(given), "-o", str(answers), *enabled, "--device", "cpu")
    assert done.returncode == 1, done.stderr
    rows = {row["custom_id"]: row["response"] for row in map(json.loads, answers.read_text().splitlines())}
    assert {name: row["status_code"] for name, row in rows.items()} == {
        "demo": 200, "pirate": 200, "demo:pirate": 200, "nobody": 404,
    }  # fmt: skip
    texts = {n: r["body"]["choices"][0]["message"]["content"] for n, r in rows.items() if r["status_code"] == 200}
    pirate = llm.chat(HELLO, GREEDY, use_tqdm=False, lora_request=llm.load_adapter(ADAPTERS / "pirate"))[0].text
    assert texts["pirate"] == texts["demo:pirate"] == pirate != texts["demo"]
