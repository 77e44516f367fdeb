"""Loads the Lua scripts that Redis runs: files beside the modules that call them."""

from pathlib import Path


def load_lua(module_file: str, *names: str) -> str:
    """The text of the scripts beside a module (its __file__), one after the other: those that begin with functions come
    first. Lines that are comments from their first column are left out, since the text goes over the wire."""
    lines = (line for name in names for line in Path(module_file).with_name(name).read_text().splitlines(keepends=True))
    return "".join(line for line in lines if not line.startswith("--"))
