"""Tries the clients that users of other servers have, on a service of the demo model, and writes docs/clients.md.

    make clients                              # all of them; ARGS="openai anthropic": those, and no page

Each client has an environment of its own under out/clients, and talks to the loopback alone. The exit status is 1 if a
call failed by a fault of ours.
"""

import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from subprocess import SubprocessError

from tests.clients import programs
from tests.clients.installed import HERE, PLACE, install
from tests.clients.lines import Outcome, client_environment, run
from tests.clients.page import PAGE, page
from tests.support.service import REPOSITORY, tandem_serve

Client = Callable[[Outcome, str], None]
SERVE = ("demo", "--enable-lora", "--enable-auto-tool-choice")
LONG = (*SERVE, "--max-model-len", "131072", "--hf-overrides", '{"rope_scaling": {"rope_type": "yarn", "factor": 64}}')
"""For agents, whose prompts take 40,000 tokens of the demo's vocabulary."""
LEFT_OUT = {
    "vllm bench serve": "vllm takes gigabytes to install",
    "promptfoo": "no script of it yet",
}
SCRIPT_S = 300


def script(environment: str, file: str) -> Client:
    """A client that is a script of ours in an environment of its own."""

    def tried(out: Outcome, url: str) -> None:
        place = install(environment)
        if environment == "npm":
            command = ["node", place / file]
        else:
            command = [place / "bin" / "python", HERE / "scripts" / file]
        status, said, error = run(command, SCRIPT_S, client_environment(url), place)
        out.read(said)
        if status:
            out.add("the script", False, f"status {status}: {error.strip()[-250:]}")

    return tried


AGENTS: dict[str, Client] = {"claude-code": programs.claude_code, "codex": programs.codex}
CLIENTS: dict[str, Client] = {
    "litellm-proxy": programs.litellm_proxy,
    "lm-eval": programs.lm_eval,
    "openai": script("sdks", "use_openai.py"),
    "anthropic": script("sdks", "use_anthropic.py"),
    "fields": script("sdks", "use_fields.py"),
    "litellm": script("litellm", "use_litellm.py"),
    "agents": script("sdks", "use_agents.py"),
    "frameworks": script("frameworks", "use_frameworks.py"),
    "npm": script("npm", "use_npm.mjs"),
    "llm": programs.llm,
    "promtool": programs.promtool,
}


def outcomes(chosen: Iterable[str]) -> list[Outcome]:
    """Tries the chosen clients, those that share a service one after the other."""
    found = []
    for options, clients in ((SERVE, CLIENTS), (LONG, AGENTS)):
        if not (wanted := [name for name in clients if name in chosen]):
            continue
        with ExitStack() as stack:
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-clients-")))
            print(f"clients: starting tandem serve {' '.join(options)}", flush=True)
            service = stack.enter_context(tandem_serve(*options, cwd=work, env={"PYTHONPATH": str(REPOSITORY)}))
            for name in wanted:
                found.append(outcome(name, clients[name], service.url))
            service.stop()
    return found


def outcome(name: str, client: Client, url: str) -> Outcome:
    """One client's; an environment that cannot be made is a client that was not run."""
    out = Outcome(name)
    try:
        client(out, url)
    except (OSError, SubprocessError) as error:
        out.not_run = str(error)[:300]
    failed = [one for one in out.tried if not one.works]
    verdict = f"not run: {out.not_run}" if out.not_run else f"{len(out.tried) - len(failed)} of {len(out.tried)} work"
    print(f"clients: {name}: {verdict}", flush=True)
    for one in failed:
        print(f"clients:   {one.name} ({one.whose}): {' '.join(one.reason.split())}", flush=True)
    return out


def main() -> int:
    everyone = {**CLIENTS, **AGENTS}
    chosen = sys.argv[1:] or list(everyone)
    if strangers := [name for name in chosen if name not in everyone]:
        print(f"clients: no such client: {', '.join(strangers)}; there are {', '.join(everyone)}", file=sys.stderr)
        return 2
    PLACE.mkdir(parents=True, exist_ok=True)
    found = outcomes(chosen)
    if len(sys.argv) == 1:
        PAGE.write_text(page([*found, *(Outcome(name, not_run=why) for name, why in LEFT_OUT.items())]))
    return int(any(one.whose == "ours" for out in found for one in out.tried))


if __name__ == "__main__":
    sys.exit(main())
