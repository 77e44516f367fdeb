"""Environments of the clients, under out/clients: Python's by uv, of requirements with upper bounds; npm's by a lock.

Nothing of them enters Tandem's own environment.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.service import REPOSITORY

HERE = Path(__file__).parent
PLACE = REPOSITORY / "out" / "clients"
INSTALL_S = 900
REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "sdks": (
        "openai>=3.3,<4", "anthropic>=2.14,<3", "openai-agents>=0.24,<0.30", "pydantic-ai-slim[openai]>=2.38,<3",
        "instructor>=1.17,<2", "langchain-openai>=1.7,<2",
    ),
    "litellm": ("litellm[proxy]>=1.108,<2",),
    "lm-eval": ("lm-eval[api]>=0.4.13,<0.5", "transformers>=5.24,<6"),
    "frameworks": (
        "llama-index-llms-openai-like>=0.8,<0.9", "llama-index-embeddings-openai-like>=0.4,<0.5", "haystack-ai>=3.4,<4",
        "smolagents[openai]>=1.26,<2", "llm>=0.32,<0.40",
    ),
}  # fmt: skip


def install(name: str) -> Path:
    """The folder of an environment, made if need be: "npm", or a name of REQUIREMENTS. OSError or
    subprocess.SubprocessError where it cannot be made."""
    place = PLACE / name
    wanted = "\n".join(REQUIREMENTS[name]) if name in REQUIREMENTS else (HERE / "npm" / "package-lock.json").read_text()
    stamp = place / ".installed"
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(place, ignore_errors=True)
        if name in REQUIREMENTS:
            _run(_uv(), "venv", "-q", "--python", sys.executable, place)
            _run(_uv(), "pip", "install", "-q", "--python", place / "bin" / "python", *REQUIREMENTS[name])
        else:
            shutil.copytree(HERE / "npm", place)
            _run("npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", cwd=place)
        stamp.write_text(wanted)
    return place


def _uv() -> Path:
    """uv, in an environment of its own."""
    place = PLACE / "uv"
    if not (place / "bin" / "uv").exists():
        _run(sys.executable, "-m", "venv", place)
        _run(place / "bin" / "pip", "install", "-q", "uv>=0.9,<1")
    return place / "bin" / "uv"


def _run(*command: str | Path, cwd: Path | None = None) -> None:
    """An error has what the command said last."""
    environment = {**os.environ, "UV_CACHE_DIR": str(PLACE / "uv-cache"), "UV_NO_CONFIG": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=INSTALL_S)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing said"]
        raise OSError(f"{Path(command[0]).name} ended with {done.returncode}: {said[-1][:200]}")
