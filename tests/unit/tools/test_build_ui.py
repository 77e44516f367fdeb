"""`make check-ui` finds every file that is not what the sources give, and Node of this machine or a wheel's."""

from pathlib import Path

import pytest

from tools import build_ui


def test_every_difference_is_named(tmp_path: Path) -> None:
    built, committed = tmp_path / "built", tmp_path / "committed"
    for folder, files in ((built, {"a": "1", "b": "1", "c": "1"}), (committed, {"a": "1", "b": "2", "d": "1"})):
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
    assert build_ui.differences(built, committed) == ["b: differs", "c: is missing", "d: is left over"]
    assert build_ui.differences(built, built) == []


def test_an_old_node_or_none_is_replaced_by_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(build_ui, "OUT", tmp_path / "out")
    monkeypatch.setattr(build_ui, "run", lambda command: commands.append(list(command)))
    monkeypatch.setenv("PATH", str(tmp_path))
    for version, is_taken in (("v22.3.0", True), ("v18.20.4", False), (None, False)):
        for name in ("node", "npm"):
            program = tmp_path / name
            program.unlink(missing_ok=True)
            if version is not None:
                program.write_text(f"#!/bin/sh\necho {version}\n")
                program.chmod(0o755)
        commands.clear()
        node, npm = build_ui.find_node()
        assert (node == str(tmp_path / "node") and npm == [str(tmp_path / "npm")]) is is_taken
        assert [command[-1] for command in commands] == (
            [] if is_taken else [str(tmp_path / "out/node"), build_ui.NODE_WHEEL]
        )
        assert is_taken or npm == [node, str(Path(node).parents[1] / "lib/node_modules/npm/bin/npm-cli.js")]


def test_packages_are_installed_once_for_each_lock_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(build_ui, "SOURCE", tmp_path)
    monkeypatch.setattr(build_ui, "run", lambda command: commands.append(list(command)))
    (tmp_path / "node_modules").mkdir()
    for text, count in (("one", 1), ("one", 1), ("two", 2)):
        (tmp_path / "package-lock.json").write_text(text)
        build_ui.install(["npm"])
        assert len(commands) == count and all("--ignore-scripts" in command for command in commands)


def test_no_package_names_a_server() -> None:
    """The registry is the one that npm is set up with."""
    assert "resolved" not in (build_ui.SOURCE / "package-lock.json").read_text()


def test_a_check_without_packages_says_that_it_was_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(npm: list[str]) -> None:
        raise SystemExit("npm ci failed with status 1")

    monkeypatch.setattr(build_ui, "find_node", lambda: ("node", ["npm"]))
    monkeypatch.setattr(build_ui, "install", unreachable)
    monkeypatch.setattr("sys.argv", ["build_ui", "--check"])
    assert build_ui.main() == 0
    assert "WERE NOT CHECKED, for want of what builds them: npm ci failed" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["build_ui"])
    with pytest.raises(SystemExit, match="npm ci failed"):
        build_ui.main()
