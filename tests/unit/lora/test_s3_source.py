"""Adapters from S3: through s3fs to a server on loopback, as a gateway lists them and as a rank reads them.

s3fs is an extra of its own, 34 MB on disk, and not among the development tools: without it one test is left.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem import LLM, SamplingParams
from tandem.workers.lora.peft.adapter_check import AdapterChecker
from tandem.workers.lora.peft.adapter_source import local_folder, remote_digest
from tandem.workers.lora.peft.peft_folder import CONFIG_FILE, WEIGHT_FILE, adapter_digest
from tandem.workers.messages.errors import AdapterRefused, AdapterUnreadable
from tandem.workers.messages.request import AdapterRef
from tandem.workers.models.spec.config.config_reader import load_spec
from tests.support.object_store import ObjectStore, object_store

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "configs" / "demo"
PIRATE = DEMO / "adapters" / "pirate"
DIGEST = adapter_digest(PIRATE)
URL = "s3://bucket/adapters/pirate"
MOST_BYTES = 2**30


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ObjectStore]:
    """The pirate in a bucket; this process's environment names it, as that of ranks would."""
    pytest.importorskip("s3fs", reason="pip install 'tandem-serve[s3]'")
    with object_store() as opened:
        for name in (CONFIG_FILE, WEIGHT_FILE):
            opened.objects[f"bucket/adapters/pirate/{name}"] = (PIRATE / name).read_bytes()
        for name, value in opened.environment.items():
            monkeypatch.setenv(name, value)
        for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
            monkeypatch.setenv(name, str(tmp_path / "none"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield opened


def ref(digest: str = DIGEST) -> AdapterRef:
    return AdapterRef(name="pirate", digest=digest, source=URL)


def test_a_model_speaks_with_an_adapter_of_a_bucket(store: ObjectStore, tmp_path: Path) -> None:
    """Listed from the bucket, and read from there again by the rank's lane."""
    with LLM("demo", dtype="float32", device="cpu", enable_lora=True) as llm:
        pirate = llm.load_adapter(f"{URL}/")
        assert pirate == ref()
        for file in (tmp_path / "cache" / "tandem" / "adapters" / DIGEST).iterdir():
            file.unlink()
        (tmp_path / "cache" / "tandem" / "adapters" / DIGEST).rmdir()
        hello = [{"role": "user", "content": "Hello! How are you?"}]
        greedy = SamplingParams(max_tokens=16, temperature=0)
        [output] = llm.chat(hello, greedy, use_tqdm=False, lora_request=pirate)
        assert output.text.startswith("Arr!")
    fetched = [request for request in store.requests if request == f"GET bucket/adapters/pirate/{WEIGHT_FILE}"]
    assert len(fetched) == 2


def test_what_is_not_there_is_named_and_found_once_it_is(store: ObjectStore, tmp_path: Path) -> None:
    weights = store.objects.pop(f"bucket/adapters/pirate/{WEIGHT_FILE}")
    with pytest.raises(AdapterUnreadable, match=f"there is no bucket/adapters/pirate/{WEIGHT_FILE}"):
        local_folder(ref(), tmp_path)
    with pytest.raises(AdapterUnreadable, match=f"there is no bucket/adapters/pirate/{WEIGHT_FILE}"):
        remote_digest(URL, tmp_path, most_bytes=MOST_BYTES)
    store.objects[f"bucket/adapters/pirate/{WEIGHT_FILE}"] = weights
    assert local_folder(ref(), tmp_path) == tmp_path / DIGEST, "nothing remembers that it was not there"


def test_an_object_that_was_cut_is_refused(store: ObjectStore, tmp_path: Path) -> None:
    name = f"bucket/adapters/pirate/{WEIGHT_FILE}"
    store.objects[name] = store.objects[name][:-100]
    with pytest.raises(AdapterRefused, match=f"not {DIGEST[:12]}"):
        local_folder(ref(), tmp_path)
    check = AdapterChecker(load_spec(DEMO / "model"), 16, DEMO / "model", tmp_path)
    with pytest.raises(AdapterRefused, match=rf"{WEIGHT_FILE} holds \d+ bytes of tensors, its header names \d+"):
        check(URL)


def test_a_transfer_that_was_cut_is_refused(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 2)
    store.cut.add(f"bucket/adapters/pirate/{WEIGHT_FILE}")
    with pytest.raises(AdapterUnreadable, match="cannot be read"):
        local_folder(ref(), tmp_path)
    assert not (tmp_path / DIGEST).exists()


def test_a_key_that_is_not_known_is_refused(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
    with pytest.raises(AdapterUnreadable, match="cannot be read: PermissionError"):
        local_folder(ref(), tmp_path)


def test_without_the_extra_a_user_is_told_what_to_install(tmp_path: Path) -> None:
    code = f"""
import sys
sys.modules["s3fs"] = None  # what an import finds when it is not installed
from pathlib import Path
from tandem.workers.lora.peft.adapter_check import AdapterChecker
from tandem.workers.lora.peft.adapter_source import remote_digest
from tandem.workers.messages.errors import AdapterUnreadable
try:
    remote_digest({URL!r}, Path({str(tmp_path)!r}), most_bytes=1)
except AdapterUnreadable as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.stdout.strip() == (
        "it cannot be read: for S3, pip install 'tandem-serve[s3]' where gateways and ranks run"
    ), done.stderr
