"""Which paths count: absolute ones below a root once links are resolved, the same words for all others."""

from pathlib import Path

import pytest

from tandem.cluster.adapters.sources import FILES, Module, allowed_source, modules_of, resolved, roots_of
from tandem.configs.errors import SettingsError
from tandem.configs.load import build_settings, settings_from_serve_args
from tandem.configs.schema import AdapterSettings
from tandem.workers.messages.errors import RequestRefused


def adapter(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_text("{}")
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    adapter(tmp_path / "root" / "mine")
    adapter(tmp_path / "elsewhere")
    return tmp_path / "root"


def refused(path: str, *roots: str) -> str:
    with pytest.raises(RequestRefused) as caught:
        allowed_source(path, roots)
    assert (caught.value.status, caught.value.param) == (400, "lora_path")
    return str(caught.value)


def test_a_folder_below_a_root(root: Path) -> None:
    assert allowed_source(str(root / "mine"), ["/other", str(root)]) == str(root / "mine")
    (root / "link").symlink_to(root / "mine")
    assert allowed_source(str(root / "link"), [str(root)]) == str(root / "mine"), "what it is now, not later"
    assert allowed_source(f"{root}/x/../mine", [str(root)]) == str(root / "mine")


def test_a_root_may_be_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(root)
    assert allowed_source(str(tmp_path / "alias" / "mine"), [str(tmp_path / "alias")]) == str(root / "mine")


def test_what_lies_elsewhere_and_what_lies_nowhere_are_refused_in_the_same_words(root: Path, tmp_path: Path) -> None:
    (root / "out").symlink_to(tmp_path / "elsewhere")
    inner = adapter(root / "inner")
    (inner / FILES[1]).unlink()
    (inner / FILES[1]).symlink_to(tmp_path / "elsewhere" / FILES[1])
    (root / "round").symlink_to(root / "round")
    paths = [
        str(tmp_path / "elsewhere"),
        f"{root}/../elsewhere",
        str(root / "out"),
        str(root / "inner"),
        str(root / "nothing"),
        str(root / "round"),
        str(root / "mine" / FILES[0]),
        "mine",
        "",
        "~/mine",
        "/etc",
        str(root / "a\0b"),
        str(root / ("x" * 5000)),
        f"file://{root}/mine",
        f"{root}x/mine",
    ]
    assert len({refused(path, str(root)) for path in paths}) == 1
    refused(str(root / "mine"))


def test_urls_need_a_root_that_is_one() -> None:
    roots = ["s3://bucket/adapters", "/here"]
    assert allowed_source("s3://bucket/adapters/one/", roots) == "s3://bucket/adapters/one"
    for path in (
        "s3://bucket/adapters",
        "s3://bucket/adapters-too/one",
        "s3://bucket/other/one",
        "s3://bucket/adapters/../other",
        "s3://bucket/adapters/./one",
        "http://bucket/adapters/one",
        "s3://bucket/adapters/%2e%2e/other",
        "s3://bucket/adapters/one?versionId=1",
        "s3://bucket/adapters/one#part",
        "s3://bucket/adapters/one::file:///etc",
        "s3://bucket/adapters/..\\other",
        "s3://bucket/adapters/one\n",
        "s3://bucket/adapters/o\0ne",
    ):
        refused(path, *roots)


def test_roots_are_the_parents_of_the_modules_unless_given() -> None:
    modules = ("a=/x/y/a", "b=/x/y/b", "c=s3://bucket/c", "d=/d")
    assert roots_of(AdapterSettings(modules=modules)) == ("/x/y", "s3://bucket", "/")
    assert roots_of(AdapterSettings(modules=modules, roots=("/z",))) == ("/z",)
    assert roots_of(AdapterSettings()) == ()


def test_paths_become_absolute(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    monkeypatch.chdir(root)
    settings = resolved(AdapterSettings(modules=("a=mine", "b=s3://b/c"), roots=("mine", "s3://b"), watch_dir="."))
    assert settings.modules == (f"a={root}/mine", "b=s3://b/c")
    assert settings.roots == (f"{root}/mine", "s3://b")
    assert settings.watch_dir == str(root)
    for wrong, flag, words in (
        ({"roots": ("no",)}, "--lora-root", "no such folder"),
        ({"watch_dir": "no"}, "--lora-watch-dir", "no such folder"),
        ({"watch_dir": "s3://b"}, "--lora-watch-dir", "folder of this machine"),
    ):
        with pytest.raises(SettingsError, match=words) as caught:
            resolved(AdapterSettings(**wrong))  # type: ignore[arg-type]
        assert caught.value.flag == flag


def test_modules_need_names_that_adapters_can_have() -> None:
    assert modules_of(AdapterSettings(modules=("a=/x=y",)), ["demo"]) == [Module("a", "/x=y")]
    for wrong in ("a b=/x", "demo=/x", "a:b=/x"):
        with pytest.raises(SettingsError) as caught:
            modules_of(AdapterSettings(modules=(wrong,)), ["demo"])
        assert caught.value.flag == "--lora-modules"


def test_ray_serve_llms_lora_config() -> None:
    model = {"model_loading_config": {"model_id": "m"}}
    config = {"dynamic_lora_loading_path": "/adapters", "max_num_adapters_per_replica": 5}
    settings = settings_from_serve_args({**model, "lora_config": config, "engine_kwargs": {"max_loras": 3}})
    assert settings.adapters.watch_dir == "/adapters"
    lora = settings.engine.lora
    assert (lora.enable_lora, lora.max_cpu_loras, lora.max_loras) == (True, 5, 3)
    assert settings_from_serve_args({**model, "lora_config": {}}).engine.lora.enable_lora
    with pytest.raises(SettingsError, match="download_timeout_s") as caught:
        settings_from_serve_args({**model, "lora_config": {"download_timeout_s": 30}})
    assert caught.value.flag == "download_timeout_s"


def test_adapters_need_the_flag_that_enables_them() -> None:
    with pytest.raises(SettingsError) as caught:
        build_settings("m", {"lora_modules": ["a=/x"]})
    assert caught.value.flag == "--enable-lora"
    assert build_settings("m", {"lora_modules": ["a=/x"], "enable_lora": True}).adapters.modules == ("a=/x",)


def test_without_a_root_the_refusal_says_what_to_give() -> None:
    with pytest.raises(RequestRefused, match="started without --lora-root"):
        allowed_source("/somewhere", ())
