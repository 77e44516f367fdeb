"""A hub id is downloaded or found in the hub's cache, by the command line and by LLM alike."""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tandem import LLM, SamplingParams
from tandem.cluster.deploy.resolved_settings import pin_settings, resolve_settings
from tandem.configs.bundled import DEMO_MODEL
from tandem.configs.errors import SettingsError, UnsupportedModelError
from tandem.configs.load import build_settings
from tandem.configs.schema import ModelSettings
from tandem.workers.planning.model_source import find_model, model_digest, model_here, named_node, pin_model
from tests.support.hub_server import Hub, point_at, running_hub
from tests.support.service import wait_for

COMMIT = "0123456789abcdef0123456789abcdef01234567"
HERE = """
import sys
from tandem.configs.schema import ModelSettings
from tandem.workers.planning.model_source import model_here
print(model_here(ModelSettings(model="org/name", revision=sys.argv[1])).model)
"""
GREEDY = SamplingParams(max_tokens=4, temperature=0)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub's files; nothing may be looked up."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


@pytest.fixture
def cached(cache: Path) -> Path:
    """The demo model in the cache as org/name, branch main, as a download would leave it."""
    repository = cache / "models--org--name"
    snapshot = repository / "snapshots" / COMMIT
    shutil.copytree(DEMO_MODEL, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return snapshot


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the demo model as org/name, and an empty cache."""
    with running_hub(monkeypatch) as hub:
        files = {path.name: path.read_bytes() for path in DEMO_MODEL.iterdir()}
        hub.repositories["org/name@main"] = files | {"notes.md": b"not needed"}
        yield hub


def test_a_hub_id_is_found_in_the_cache(cached: Path) -> None:
    assert find_model("org/name", None, "MODEL") == cached.resolve()
    assert find_model("org/name", COMMIT, "MODEL") == cached.resolve()


def test_settings_of_a_hub_id_name_the_id_and_hold_the_folder(cached: Path) -> None:
    model = resolve_settings(build_settings("org/name", {})).engine.model
    assert model.served_model_name == ("org/name",) and Path(model.model) == cached.resolve()


def test_pinned_settings_hold_on_every_machine(cached: Path, tmp_path: Path) -> None:
    """Ids and commits, absolute folders, the demo's name; each machine puts its own folders in."""
    pinned = pin_settings(build_settings("org/name", {"tokenizer": "org/name"})).engine.model
    assert (pinned.model, pinned.revision, pinned.tokenizer, pinned.tokenizer_revision) == ("org/name", COMMIT) * 2
    assert pinned.served_model_name == ("org/name",) and pin_model(pinned) == pinned
    here = model_here(pinned)
    assert Path(here.model) == cached.resolve() and here.revision is None and here == model_here(here)
    assert model_digest(pinned) != model_digest(pin_model(replace(pinned, model=str(cached), revision=None)))
    folder = shutil.copytree(DEMO_MODEL, tmp_path / "folder")
    for name, wanted in (("demo", "demo"), (str(folder / ".." / "folder"), str(folder))):
        pinned = pin_model(ModelSettings(model=name))
        assert (pinned.model, pinned.revision, pinned.tokenizer) == (wanted, None, None)
    shutil.rmtree(folder)
    words = rf"node {re.escape(socket.gethostname())} \(10\.0\.0\.7\): MODEL: {folder}: no such folder"
    with pytest.raises(SettingsError, match=words) as caught, named_node("10.0.0.7"):
        model_here(pinned)
    assert caught.value.flag == "MODEL"
    with pytest.raises(SettingsError, match=rf"^MODEL: {folder}: no such folder"), named_node("127.0.0.1"):
        model_here(pinned)


def test_processes_of_one_machine_download_once(hub: Hub, cache: Path) -> None:
    """They begin at the same time; a later one does not even ask the hub."""
    pinned = pin_model(ModelSettings(model="org/name"))
    assert pinned.revision == COMMIT and "model.safetensors" not in hub.downloads
    hub.downloads.clear()
    with_cache = {**os.environ, "HF_HUB_CACHE": str(cache), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", HERE, COMMIT]
    asked = [subprocess.Popen(command, env=with_cache, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = {process.communicate(timeout=60)[0].strip() for process in asked}
    assert folders == {str((cache / "models--org--name" / "snapshots" / COMMIT).resolve())}
    assert hub.downloads == ["model.safetensors"]
    assert subprocess.run(command, env=with_cache | {"HF_ENDPOINT": "http://127.0.0.1:9"}, timeout=60).returncode == 0


def test_a_download_tells_how_far_it_is(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.workers.planning.hub.PROGRESS_S", 0.001)
    size, told = len(hub.repositories["org/name@main"]["model.safetensors"]), list[tuple[int, int]]()
    pinned = pin_model(ModelSettings(model="org/name"))
    hub.before_file = lambda name: wait_for(lambda: told and name == "model.safetensors", 30, "it is told")
    model_here(pinned, on_bytes=lambda done, total: told.append((done, total)))
    assert {total for _, total in told} == {size} and told[0] == (0, size)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_a_revision_is_of_the_hub_and_found_once(cached: Path) -> None:
    with pytest.raises(SettingsError, match="demo is a folder") as caught:
        resolve_settings(build_settings("demo", {"revision": "main"}))
    assert caught.value.flag == "--revision"
    found = resolve_settings(build_settings("org/name", {"revision": COMMIT}))
    assert resolve_settings(found) == found and Path(found.engine.model.model) == cached.resolve()


def test_a_seed_of_a_service_is_taken_and_said_to_make_nothing_repeatable() -> None:
    """Only of real weights; dummy ones are made of it."""
    real = resolve_settings(build_settings("demo", {"seed": 7}))
    assert [line.startswith("--seed 7 has no effect") for line in real.without_effect] == [True]
    assert resolve_settings(real) == real, "it is said once"
    for flags in ({"seed": 7, "load_format": "dummy"}, {}):
        assert not resolve_settings(build_settings("demo", flags)).without_effect


def test_the_tokenizer_may_have_a_revision_of_its_own(cached: Path) -> None:
    other = "f" * 40
    shutil.copytree(cached, cached.parent / other)
    (cached.parent.parent / "refs" / "old").write_text(other)
    for flags in ({"tokenizer_revision": "old"}, {"tokenizer_revision": other, "tokenizer": "org/name"}):
        model = resolve_settings(found := build_settings("org/name", flags)).engine.model
        assert Path(model.model) == cached.resolve() and model.tokenizer_revision is None
        assert model.tokenizer == str(cached.resolve().parent / other)
        assert resolve_settings(resolve_settings(found)) == resolve_settings(found)
    same = build_settings("org/name", {"revision": "main", "tokenizer_revision": "main"})
    assert resolve_settings(same).engine.model.tokenizer is None
    for flags in ({"tokenizer_revision": "old"}, {"tokenizer_revision": "old", "tokenizer": "demo"}):
        with pytest.raises(SettingsError, match="demo is a folder") as caught:
            resolve_settings(build_settings("demo", flags))
        assert caught.value.flag == "--tokenizer-revision"


@pytest.mark.parametrize("flags", [{}, {"revision": COMMIT}, {"tokenizer": "org/name"}])
def test_llm_takes_the_names_that_serve_takes(cached: Path, flags: dict[str, str]) -> None:
    with LLM("org/name", device="cpu", max_num_seqs=2, **flags) as llm:
        assert Path(llm.settings.model.model) == cached.resolve()
        (output,) = llm.generate("Once upon a time", GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4


def test_llm_downloads_what_it_needs_once(hub: Hub, cache: Path) -> None:
    with LLM("org/name", device="cpu", max_num_seqs=2, override_generation_config={"max_new_tokens": 4}) as llm:
        folder = Path(llm.settings.model.model)
        (output,) = llm.generate("Once upon a time", use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4
    assert cache.resolve() in folder.parents
    assert "model.safetensors" in hub.downloads and "notes.md" not in hub.downloads
    read = len(hub.downloads)
    assert find_model("org/name", None, "MODEL") == folder
    assert len(hub.downloads) == read


def serving_files(hub: Hub, model: str = "org/name", **flags: object) -> set[str]:
    """Resolves a model of the hub; returns the names of the files that were downloaded."""
    before = len(hub.downloads)
    resolve_settings(build_settings(model, flags))
    return set(hub.downloads[before:])


def test_only_what_is_needed_is_downloaded_and_shown(hub: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    files = hub.repositories["org/name@main"]
    weights = files["model.safetensors"]
    files |= {"consolidated.safetensors": weights, "pytorch_model.bin": weights, "a.gguf": weights}
    text = serving_files(hub, load_format="dummy")
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= text
    assert serving_files(hub, "demo", tokenizer="org/name") == set()
    assert serving_files(hub) == {"model.safetensors"}
    assert "Fetching 1 files: 100%" in capfd.readouterr().err


def test_the_files_of_the_index_are_downloaded(hub: Hub) -> None:
    files = hub.repositories["org/name@main"]
    files["part-1.safetensors"] = files["model.safetensors"]
    files["model.safetensors.index.json"] = b'{"weight_map": {"a": "part-1.safetensors"}}'
    assert {"part-1.safetensors", "config.json"} <= (found := serving_files(hub))
    assert "model.safetensors" not in found


def test_a_model_that_is_not_served_is_refused_before_its_weights(hub: Hub) -> None:
    files = hub.repositories["org/name@main"]
    config, files["config.json"] = files["config.json"], b'{"architectures": ["BertModel"]}'
    with pytest.raises(UnsupportedModelError, match="BertModel"):
        serving_files(hub)
    hub.repositories["org/other@main"] = files = files | {"config.json": config}
    files["pytorch_model.bin"] = files.pop("model.safetensors")
    with pytest.raises(SettingsError, match=r"org/other holds no .safetensors file, but pytorch_model.bin"):
        serving_files(hub, "org/other")
    assert not {"model.safetensors", "pytorch_model.bin"} & set(hub.downloads)


def test_a_file_in_place_of_a_folder_is_told(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
        words = refusal(str(tmp_path / name))[0]
        assert (
            words == f"{tmp_path / name} is a file; MODEL is the folder that it is in, with config.json and tokenizer"
        )


def test_llm_takes_a_path_for_a_folder(cached: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (Path("org/name"), Path("demo")):
        with pytest.raises(SettingsError, match=f"MODEL: {tmp_path / path}: no such folder"):
            LLM(path)


def test_llm_refuses_python_files_as_serve_does(tmp_path: Path) -> None:
    folder = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    (folder / "modeling.py").touch()
    with pytest.raises(SettingsError, match=r"ships Python files.* --trust-remote-code"):
        LLM(folder)
    with pytest.raises(SettingsError, match="ships Python files"):
        resolve_settings(build_settings(str(folder), {}))
    with LLM(folder, device="cpu", max_num_seqs=2, trust_remote_code=True) as llm:
        assert Path(llm.settings.model.model) == folder


def refusal(name: str, revision: str | None = None) -> tuple[str, str | None]:
    """The words and the flag with which a name is refused."""
    with pytest.raises(SettingsError) as refused:
        find_model(name, revision, "MODEL")
    return str(refused.value), refused.value.flag


def test_a_model_that_may_not_be_looked_up_names_what_forbids_it(cache: Path) -> None:
    words, flag = refusal("org/name")
    assert flag == "MODEL"
    assert f"org/name is no folder here, and not complete in the hub's cache {cache}; HF_HUB_OFFLINE forbids" in words
    assert "the folder of a model" in words and "hf download" in words


def test_a_hub_that_cannot_be_reached_is_said(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    point_at(f"http://127.0.0.1:{port}", monkeypatch)
    words, _ = refusal("org/name")
    assert "org/name is no folder here" in words and str(cache) in words
    assert "the hub cannot be reached to download it (ConnectError: " in words and "hf download" in words


def test_a_model_that_the_hub_does_not_give_out_says_why(hub: Hub) -> None:
    assert "org/none is neither a folder here nor a model on the hub; for a private one set HF_TOKEN" in str(
        refusal("org/none")[0]
    )
    words, flag = refusal("org/name", "no_such")
    assert (words, flag) == ("--revision: org/name has no revision no_such on the hub", "--revision")
    hub.gated.add("org/name")
    assert "org/name is gated: accept its conditions" in refusal("org/name")[0]


def test_a_download_that_breaks_is_said(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> str:
        raise TimeoutError

    monkeypatch.setattr("huggingface_hub.snapshot_download", broken)
    assert refusal("org/name")[0] == "MODEL: org/name cannot be downloaded: TimeoutError"


def test_what_cannot_be_a_hub_id_is_a_folder(cache: Path) -> None:
    for name in ("./org", "/org/name", "~/org", "a/b/c", "org name"):
        assert refusal(name)[0] == f"MODEL: {name}: no such folder"


# ---- which model it is ----


def digest(model: str, **more: object) -> str:
    return model_digest(resolve_settings(build_settings(model, more)).engine.model)


def test_the_same_model_with_other_settings_is_the_same_model(tmp_path: Path) -> None:
    (template := tmp_path / "other.jinja").write_text("{{ messages }}")
    others = {
        "served_model_name": ["renamed"],
        "max_model_len": 64,
        "tensor_parallel_size": 2,
        "max_num_seqs": 3,
        "kv_cache_memory_bytes": "8M",
        "chat_template": str(template),
        "enable_lora": True,
    }
    assert digest("demo") == digest(str(DEMO_MODEL)) == digest(str(DEMO_MODEL), **others)
    assert re.fullmatch("[0-9a-f]{16}", digest("demo"))


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tekken.json", "vocab.json"]
)
def test_another_config_or_tokenizer_is_another_model(tmp_path: Path, name: str) -> None:
    shutil.copytree(DEMO_MODEL, folder := tmp_path / "model")
    before = digest(str(folder))
    assert before == digest(str(folder))
    (folder / name).write_text(((folder / name).read_text() if (folder / name).exists() else "") + "\n")
    assert digest(str(folder)) != before


def test_another_folder_tokenizer_or_overrides_are_another_model(tmp_path: Path) -> None:
    shutil.copytree(DEMO_MODEL, folder := tmp_path / "model")
    overrides = {"rope_theta": 7.0}
    found = [
        digest("demo"),
        digest(str(folder)),
        digest("demo", tokenizer=str(folder), hf_overrides=overrides),
        digest("demo", hf_overrides=overrides),
        digest("demo", load_format="dummy"),
        digest("demo", load_format="dummy", seed=1),
    ]
    (folder / "tokenizer.json").unlink()
    found.append(digest("demo", tokenizer=str(folder)))
    assert len(set(found)) == len(found)


def test_two_revisions_of_the_hub_are_two_models(cached: Path) -> None:
    shutil.copytree(cached, cached.parent / ("f" * 40))
    assert digest("org/name") == digest("org/name", revision=COMMIT) != digest("org/name", revision="f" * 40)
