"""Results of clients: calls and versions, and the environment in which clients run."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.clients.installed import PLACE

CLOSED = "http://127.0.0.1:9"
"""Proxy that nobody serves: what a client wants elsewhere fails at once."""
QUIET = {
    "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1", "LANGSMITH_TRACING": "false", "LANGCHAIN_TRACING_V2": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
    "LITELLM_TELEMETRY": "False", "OPENAI_AGENTS_DISABLE_TRACING": "1", "HAYSTACK_TELEMETRY_ENABLED": "False",
    "AI_SDK_LOG_WARNINGS": "false", "DISABLE_TELEMETRY": "1", "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_AUTOUPDATER": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}  # fmt: skip


@dataclass(frozen=True)
class Tried:
    """One call of a client. whose: fault if it does not work: "ours", "client" or "model"."""

    name: str
    works: bool
    whose: str = ""
    reason: str = ""


@dataclass
class Outcome:
    """All calls of one client. not_run: why there are none."""

    client: str
    versions: dict[str, str] = field(default_factory=dict)
    tried: list[Tried] = field(default_factory=list)
    not_run: str = ""

    def add(self, name: str, works: bool, reason: str, whose: str = "ours") -> None:
        self.tried.append(Tried(name, works, "" if works else whose, "" if works else reason[:300]))

    def read(self, output: str) -> None:
        """Takes the lines of scripts/calls.py."""
        for line in output.splitlines():
            if line.startswith("CALL "):
                said = json.loads(line[5:])
                if "package" in said:
                    self.versions[said["package"]] = said["version"]
                else:
                    self.add(said["call"], said["works"], said.get("reason", ""), said.get("whose", "ours"))


def client_environment(url: str, **more: str) -> dict[str, str]:
    """Nothing of the user's: a home of its own, no keys; proxies for all but the loopback lead nowhere."""
    home = PLACE / "home"
    home.mkdir(parents=True, exist_ok=True)
    proxies = {name: CLOSED for way in ("http_proxy", "https_proxy", "all_proxy") for name in (way, way.upper())}
    here = dict.fromkeys(("no_proxy", "NO_PROXY"), "127.0.0.1,localhost")
    plain = {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", "TANDEM_URL": url}
    return {**plain, **proxies, **here, **QUIET, **more}


def run(command: Sequence[str | Path], timeout_s: float, env: Mapping[str, str], cwd: Path) -> tuple[int, str, str]:
    """Exit status (124: it ran out of time), output and errors of a client."""
    cwd.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=timeout_s)  # fmt: skip
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        return 124, said if isinstance(said, str) else said.decode(errors="replace"), f"ended after {timeout_s:.0f} s"
    return done.returncode, done.stdout, done.stderr
