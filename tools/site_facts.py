"""A hook of mkdocs (mkdocs.yml): the site shows the version of pyproject.toml, and its repository if there is one."""

import tomllib
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def facts(project: Path = PROJECT) -> dict[str, str]:
    """Return settings of mkdocs: `copyright`, the line at the foot of each page, and `repo_url` where there is one."""
    metadata = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    found = {"copyright": f"Tandem {metadata['version']}, {metadata['license']}"}
    urls = {name.lower(): url for name, url in metadata.get("urls", {}).items()}
    url = urls.get("repository") or urls.get("source")
    return found if url is None else found | {"repo_url": url}


def on_config(config: Any) -> Any:
    """Called by mkdocs."""
    config.update(facts())
    return config
