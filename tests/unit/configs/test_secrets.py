"""Keys and the URL of Redis by reference: variables of the environment and files."""

from pathlib import Path

import pytest

from tandem.configs.errors import SettingsError
from tandem.configs.load import build_settings
from tandem.configs.secrets import check_redis_url, read_secret, with_secrets


def test_references_are_replaced_by_what_they_stand_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, url = tmp_path / "keys", tmp_path / "redis"
    keys.write_text("sk-one\n\n  sk-two  \n")
    url.write_text("redis://:word@h:1/0\n")
    monkeypatch.setenv("ROOT_KEY", " root\n")
    given = {
        "api_key": [f"file:{keys}", "sk-plain"],
        "admin_api_key": ["env:ROOT_KEY"],
        "metrics_api_key": ["plain"],
        "redis_url": f"file:{url}",
    }
    settings = build_settings("m", given)
    assert "sk-one" not in repr(settings) and "word" not in repr(settings), "references until the service starts"
    found = with_secrets(settings)
    assert found.gateway.api_keys == ("sk-one", "sk-two", "sk-plain")
    assert (found.gateway.admin_keys, found.gateway.metrics_keys) == (("root",), ("plain",))
    assert found.redis.url == "redis://:word@h:1/0"
    assert with_secrets(build_settings("m", {})) == build_settings("m", {})


def test_what_cannot_be_read_is_named_with_its_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blank, binary = tmp_path / "blank", tmp_path / "binary"
    blank.write_text(" \n")
    binary.write_bytes(b"\xff")
    monkeypatch.setenv("BLANK", "")
    monkeypatch.delenv("NOBODYS", raising=False)
    for given, words in (
        ("env:NOBODYS", "no such variable"),
        ("env:BLANK", "is empty"),
        (f"file:{blank}", "is empty"),
        (f"file:{tmp_path / 'none'}", "cannot be read: No such file"),
        (f"file:{tmp_path}", "cannot be read: Is a directory"),
        (f"file:{binary}", "is not UTF-8"),
    ):
        for name, value in (("api_key", [given]), ("redis_url", given)):
            with pytest.raises(SettingsError, match=words) as caught:
                with_secrets(build_settings("m", {name: value}))
            assert caught.value.flag == f"--{name.replace('_', '-')}" and given in str(caught.value)


def test_a_key_from_a_file_is_checked_and_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("hush\x00\n")
    with pytest.raises(SettingsError, match="printable") as caught:
        with_secrets(build_settings("m", {"admin_api_key": [f"file:{file}"]}))
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://h",
        "rediss://:pw@h:6380/1",
        "unix://:pw@/run/redis.sock",
        "redis://[::1]:1",
        "redis+sentinel://:pw@a,[::1]:2/m",
    ],
)
def test_urls_of_redis(url: str) -> None:
    check_redis_url(url)
    assert read_secret(url, "--redis-url") == url


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://:hush@a:1",
        "redis+sentinel://a,hush:x/m",
        "http://:hush@h",
        "redis://:hu/sh@h:x",
        ":hush@h:6379",
        "redis://h:99999",
        "redis://h:hush",
    ],
)
def test_what_is_no_url_of_redis_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(SettingsError) as caught:
        check_redis_url(url)
    assert caught.value.flag == "--redis-url" and "hush" not in str(caught.value)
