"""Clients that are programs: coding agents, LiteLLM's proxy, lm-eval, llm and promtool."""

import json
import secrets
import shutil
import subprocess
import time
from pathlib import Path

import httpx

from tests.clients.installed import PLACE, REPOSITORY, install
from tests.clients.lines import Outcome, client_environment, run
from tests.support.plain_http import plain_http
from tests.support.service import free_port

STORY = "Tell me a short story about a whale."
WORK = PLACE / "work"
CODEX = """model = "demo"
model_provider = "tandem"
model_context_window = 100000
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.tandem]
name = "Tandem"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "TANDEM_KEY"
request_max_retries = 0
stream_max_retries = 0
"""
PROXIED = [{"model_name": f"{kind}-demo", "litellm_params": {"model": f"{kind}/demo", "api_key": "none"}}
           for kind in ("hosted_vllm", "openai")]  # fmt: skip
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
DOCS = [{"q": "Once upon a", "c": [" time", " whale"], "a": 0}, {"q": "The sea is", "c": [" wide", " a"], "a": 1}]
TASK = {"task": "own", "dataset_path": "json", "test_split": "test", "doc_to_text": "{{q}}", "metadata": {"version": 1}}
TASKS = {
    "own_choice": {"output_type": "multiple_choice", "doc_to_choice": "{{c}}", "doc_to_target": "{{a}}",
                   "metric_list": [{"metric": "acc"}]},
    "own_rolling": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{q}}",
                    "metric_list": [{"metric": "word_perplexity"}]},
    "own_text": {"output_type": "generate_until", "doc_to_target": "{{q}}",
                 "generation_kwargs": {"until": ["."], "max_gen_toks": 8}, "metric_list": [{"metric": "exact_match"}]},
}  # fmt: skip


def claude_code(out: Outcome, url: str) -> None:
    place = install("npm") / "node_modules"
    (program,) = place.glob("@anthropic-ai/claude-code-*/claude")
    more = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "none", "ANTHROPIC_MODEL": "demo",
            "ANTHROPIC_SMALL_FAST_MODEL": "demo", "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "64"}  # fmt: skip
    env = client_environment(url, **more)
    out.versions["@anthropic-ai/claude-code"] = _version(place, "@anthropic-ai/claude-code")
    asked = [program, "-p", STORY, "--output-format", "json"]
    for name, options in {"one tool": ["--tools", "Read"], "its own prompt and tools": []}.items():
        status, said, error = run([*asked, *options], 500, env, WORK)
        works = status == 0 and not json.loads(said)["is_error"]
        out.add(f"print mode, {name}", works, f"status {status}: {said[:200]} {error[-100:]}")


def codex(out: Outcome, url: str) -> None:
    place = install("npm") / "node_modules"
    out.versions["@openai/codex"] = _version(place, "@openai/codex")
    home = PLACE / "home" / "codex"
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.toml").write_text(CODEX.format(url=url))
    env = client_environment(url, CODEX_HOME=str(home), TANDEM_KEY="none")
    command = [place / ".bin" / "codex", "exec", "--skip-git-repo-check", "--sandbox", "read-only", STORY]
    status, said, error = run(command, 500, env, WORK)
    out.add("exec mode, wire_api responses", status == 0 and bool(said.strip()), f"status {status}: {error[-250:]}")


def litellm_proxy(out: Outcome, url: str) -> None:
    place, port, key = install("litellm"), free_port(), f"sk-{secrets.token_hex(32)}"
    config = PLACE / "litellm.yaml"
    for entry in PROXIED:
        entry["litellm_params"]["api_base"] = f"{url}/v1"
    config.write_text(json.dumps({"model_list": PROXIED}))  # JSON is YAML
    out.versions["litellm[proxy]"] = _python_version(place, "litellm")
    command = [place / "bin" / "litellm", "--config", config, "--host", "127.0.0.1", "--port", str(port)]
    with (PLACE / "litellm.log").open("w") as log:
        proxy = subprocess.Popen(command, env=client_environment(url, LITELLM_MASTER_KEY=key), stdout=log, stderr=log)
    try:
        _proxied(out, f"http://127.0.0.1:{port}", proxy, key)
    finally:
        proxy.terminate()
        proxy.wait(30)


def _proxied(out: Outcome, base: str, proxy: "subprocess.Popen[bytes]", key: str) -> None:
    deadline_s = time.monotonic() + 120
    while not _answers(f"{base}/health/liveliness"):
        if proxy.poll() is not None or time.monotonic() > deadline_s:
            raise OSError("the proxy does not start: out/clients/litellm.log")
        time.sleep(0.2)
    user = [{"role": "user", "content": STORY}]
    headers = {"authorization": f"Bearer {key}"}
    bodies = {
        "chat": ("chat/completions", {"messages": user, "max_tokens": 8}),
        "tools, streamed": ("chat/completions", {"messages": user, "max_tokens": 32, "tools": [TOOL], "stream": True,
                                                 "tool_choice": "required"}),
        "messages": ("messages", {"messages": user, "max_tokens": 8}),
        "messages, streamed": ("messages", {"messages": user, "max_tokens": 8, "stream": True}),
        "responses": ("responses", {"input": STORY, "max_output_tokens": 8}),
        "embeddings": ("embeddings", {"input": ["a"]}),
    }  # fmt: skip
    for kind in ("hosted_vllm", "openai"):
        for name, (route, body) in bodies.items():
            answer = plain_http.post(
                f"{base}/v1/{route}", json={"model": f"{kind}-demo", **body}, headers=headers, timeout=60
            )
            works = answer.status_code == 200 and '"error":{' not in answer.text.replace(" ", "")
            out.add(f"{kind}: {name}", works, f"{answer.status_code}: {answer.text}")


def _answers(url: str) -> bool:
    try:
        return plain_http.get(url, timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def lm_eval(out: Outcome, url: str) -> None:
    place, tasks = install("lm-eval"), PLACE / "lm-eval-tasks"
    tasks.mkdir(exist_ok=True)
    (tasks / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    data = {"dataset_kwargs": {"data_files": {"test": str(tasks / "docs.jsonl")}}}
    for name, own in TASKS.items():
        (tasks / f"{name}.yaml").write_text(json.dumps({**TASK, **data, **own, "task": name}))
    out.versions["lm-eval"] = _python_version(place, "lm-eval")
    model = REPOSITORY / "configs" / "demo" / "model"
    whole = f"model=demo,base_url={url}/v1/completions,num_concurrent=1,max_retries=1"
    runs = {
        "local-chat-completions": (f"model=demo,base_url={url}/v1/chat/completions,max_retries=1", "own_text"),
        "local-completions, huggingface": (f"{whole},tokenizer_backend=huggingface,tokenizer={model}", ",".join(TASKS)),
        "local-completions, remote": (f"{whole},tokenizer_backend=remote", ",".join(TASKS)),
    }
    env = client_environment(url, OPENAI_API_KEY="none")
    for name, (options, chosen) in runs.items():
        command = [place / "bin" / "lm_eval", "--model", name.partition(",")[0], "--model_args", options,
                   "--tasks", chosen, "--include_path", tasks]  # fmt: skip
        chat = ["--apply_chat_template"] if "chat" in name else []
        status, _, error = run([*command, *chat], 240, env, WORK)
        out.add(name, status == 0, f"status {status}: {error[-250:]}")


def llm(out: Outcome, url: str) -> None:
    place, home = install("frameworks"), PLACE / "home" / "llm"
    home.mkdir(parents=True, exist_ok=True)
    served = {"model_id": "demo", "model_name": "demo", "api_base": f"{url}/v1", "supports_schema": True,
              "supports_tools": True}  # fmt: skip
    (home / "extra-openai-models.yaml").write_text(json.dumps([served]))
    out.versions["llm"] = _python_version(place, "llm")
    env = client_environment(url, LLM_USER_PATH=str(home), OPENAI_API_KEY="none")
    for name, options in {"prompt": [], "no stream": ["--no-stream"], "schema": ["--schema", "name str"]}.items():
        command = [place / "bin" / "llm", "-m", "demo", STORY, "-o", "max_tokens", "64", *options]
        status, said, error = run(command, 60, env, WORK)
        out.add(name, status == 0 and bool(said.strip()), f"status {status}: {error[-250:]}")


def promtool(out: Outcome, url: str) -> None:
    if (program := shutil.which("promtool")) is None:
        raise OSError("promtool is absent (Debian's package prometheus has it)")
    out.versions["promtool"] = subprocess.run([program, "--version"], capture_output=True, text=True).stdout.split()[2]
    page = plain_http.get(f"{url}/metrics", timeout=30).text
    done = subprocess.run([program, "check", "metrics"], input=page, capture_output=True, text=True)
    # 3: only lint, such as colons in names, which are vLLM's too
    out.add("check metrics", done.returncode in (0, 3), f"status {done.returncode}: {done.stderr}")


def _version(modules: Path, package: str) -> str:
    return str(json.loads((modules / package / "package.json").read_text())["version"])


def _python_version(place: Path, package: str) -> str:
    program = f"from importlib.metadata import version; print(version('{package}'))"
    return subprocess.run([place / "bin" / "python", "-c", program], capture_output=True, text=True).stdout.strip()
