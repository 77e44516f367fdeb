"""The shipped file under `serve run`, and a new version of its application: every replica is replaced, the service
stays what it was, and no secret is logged or shown meanwhile."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tandem import LLM
from tandem.workers.messages.channel import new_secret
from tandem.workers.messages.request import SamplingParams
from tests.support.doors import ADMIN, API, ASKED, METRICS, SENT, ask_with_keys, assert_unsaid, bearer, logged
from tests.support.plain_http import plain_http
from tests.support.proxies import DEAD_PROXIES
from tests.support.service import BIN, REPOSITORY, Service, free_port, title_of, wait_for
from tests.support.unbroken_streams import Streams

pytestmark = pytest.mark.cluster
QUESTION = [{"role": "user", "content": "Tell me a short story about a whale."}]
PIRATE = REPOSITORY / "configs" / "demo" / "adapters" / "pirate"
REPLACED_S = 120.0
SHUTDOWN_S = 1.0
"""Much less than a stream lasts: in its old group it has this time, and then moves."""
LOOK_INSIDE = """
import json, sys
import ray

def secrets_of(_):
    import gc
    ours = [thing for thing in gc.get_objects() if str(type(thing).__module__).startswith("tandem.")]
    fields = [(name, value) for thing in ours for name, value in getattr(thing, "__dict__", {}).items()]
    values = [value if name.endswith("secret") else getattr(value, "secret", None) for name, value in fields]
    passwords = [value[2] for name, value in fields if name == "_listen" and value is not None]
    return [value for value in values if isinstance(value, str)], passwords

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
names = [actor for actor in ray.util.list_named_actors(all_namespaces=True) if "tandem" in actor["name"]]
asked = [ray.get_actor(**name).__ray_call__.remote(secrets_of) for name in names]
answers = ray.get(asked, timeout=60)
found = [sorted({secret for answer in answers for secret in answer[at]}) for at in (0, 1)]
print(json.dumps([*found, ray._private.worker.global_worker.node.address_info["webui_url"]]))
"""
"""Asks the processes of a service for the secrets of its channels and the passwords of Redis servers that they have
started, over Ray, as only who may use this Ray can."""


def gcs_of(service: Service) -> str:
    """The address of its Ray."""
    words = [word for process in service.descendants() for word in title_of(process).split()]
    return next(word.partition("=")[2] for word in words if re.match(r"--gcs-address=.", word))


def look_inside(service: Service) -> tuple[list[str], list[str], str]:
    """The secrets of the channels, the passwords of Redis, and the address of Ray's REST API."""
    command = [sys.executable, "-c", LOOK_INSIDE, gcs_of(service)]
    done = subprocess.run(command, env=service.environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    secrets, passwords, dashboard = json.loads(done.stdout.splitlines()[-1])
    return secrets, passwords, f"http://{dashboard}"


class Rest:
    """Serve's REST API, asked with the token of its Ray."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        self._headers = bearer(token)

    def text(self) -> str:
        """What it says of the applications: their whole configuration, among other things."""
        answer = plain_http.get(f"{self.url}/api/serve/applications/", headers=self._headers, timeout=30)
        assert answer.status_code == 200, answer.text
        return answer.text

    def deployed(self) -> tuple[str, float]:
        """The state of the application, and when it was deployed."""
        (application,) = json.loads(self.text())["applications"].values()
        return application["status"], application["last_deployed_time_s"]


class Deployed:
    """An application under `serve run FILE`. Its keys are given by reference, its Ray asks for a token."""

    def __init__(self, folder: Path) -> None:
        (folder / "keys").write_text(f"{API}\n")
        (folder / "token").write_text(token := new_secret())
        self.token = token
        self._file = folder / "serve.yaml"
        self._config: dict[str, Any] = yaml.safe_load((REPOSITORY / "configs" / "serve" / "demo.yaml").read_text())
        self._config["http_options"]["port"] = port = free_port()
        (application,) = self._config["applications"]
        self._args = application["args"]
        shutil.copytree(PIRATE, folder / "adapters" / "pirate")
        loras = {"dynamic_lora_loading_path": str(folder / "adapters"), "max_num_adapters_per_replica": 4}
        self._args["lora_config"] = loras
        self._args["gateway_config"] = {
            "api_key": f"file:{folder / 'keys'}", "admin_api_key": "env:ROOT", "metrics_api_key": "env:SCRAPE",
            "api_server_count": 1,
        }  # fmt: skip
        self._write(
            "INFO", batch_invariant=True, device="cpu", max_num_seqs=16, max_loras=2, shutdown_timeout=SHUTDOWN_S
        )
        env = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "local", "ROOT": ADMIN, "SCRAPE": METRICS}
        env |= {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1", "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0"}  # as configs/cluster
        env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token")}
        env |= {**DEAD_PROXIES, "no_proxy": "127.0.0.1"}  # which `serve deploy` itself needs
        self.service = Service([str(BIN / "serve"), "run", str(self._file)], port, env=env)

    @cached_property
    def rest(self) -> Rest:
        """The REST API of its Ray, which stays the same."""
        return Rest(look_inside(self.service)[2], self.token)

    def redeploy(self, rest: Rest, log_level: str, **engine: Any) -> None:
        """`serve deploy` with other settings, which does not wait for the new version."""
        self._write(log_level, **engine)
        self.run("serve", "deploy", str(self._file), "--address", rest.url)

    def set_numbers(self, rest: Rest, groups: int, **user_config: Any) -> None:
        """`serve deploy` with other numbers beside the same args; without a user_config: with none in the file."""
        (application,) = self._config["applications"]
        gateways = [{"name": "tandem-gateway", "user_config": user_config}] if user_config else []
        application["deployments"] = [{"name": "tandem-coordinator", "num_replicas": groups}, *gateways]
        self.redeploy(rest, "DEBUG")

    def run(self, program: str, *words: str) -> str:
        """Runs one of the installed programs in the environment of the service; returns what it printed."""
        command, env = [str(BIN / program), *words], self.service.environment
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def status(self) -> str:
        """What `tandem status` says."""
        return self.run("tandem", "status", "--app", "tandem", "--address", gcs_of(self.service))

    def replicas(self) -> set[int]:
        """The processes of the replicas, of all versions; one that is just made has a longer title."""
        titles = {process.pid: title_of(process) for process in self.service.descendants()}
        return {pid for pid, title in titles.items() if "ServeReplica:tandem:" in title or "::tandem#tandem-" in title}

    def groups(self) -> set[str]:
        """The groups that the gateway which answers knows."""
        lines = self.service.get("/metrics", headers=bearer(METRICS)).text.splitlines()
        found = (line for line in lines if line.startswith("tandem:num_requests_running{"))
        return {line.partition('engine="')[2].partition('"')[0] for line in found}

    def _write(self, log_level: str, **engine: Any) -> None:
        self._config["logging_config"] = {"log_level": log_level, "enable_access_log": True, "encoding": "JSON"}
        self._args["engine_kwargs"] |= engine
        self._file.write_text(yaml.safe_dump(self._config))


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """Serve's own proxy in front, a private Redis that is none of the application's, adapters from the folder that Ray
    Serve LLM's lora_config names; Ctrl-C ends it."""
    deployed = Deployed(tmp_path_factory.mktemp("deployed"))
    try:
        deployed.service.wait_ready()
        yield deployed
        deployed.service.stop(signal.SIGINT)
        wait_for(lambda: not deployed.service.titled("tandem"), 60, "everything ends")
    finally:
        deployed.service.clean()


def make_tenants(client: httpx.Client) -> list[str]:
    """Two keys of a new tenant, both of which were used."""
    limits = {"tokens_per_minute": 10_000_000}
    made = client.post("/admin/tenants", json={"name": "acme", **limits}, headers=bearer(ADMIN))
    assert made.status_code == 201, made.text
    rotated = client.post("/admin/tenants/acme/rotate-key", json={"grace_s": 600}, headers=bearer(ADMIN))
    keys = [made.json()["key"], rotated.json()["key"]]
    for key in keys:
        assert client.post("/v1/completions", json=ASKED, headers=bearer(key)).status_code == 200
        assert client.get("/admin/tenants", headers=bearer(key)).status_code == 403
    return keys


def assert_nowhere(service: Service, rest: Rest, secrets: Collection[str]) -> None:
    """No line of a log, no command line and no answer of Serve's REST API has a secret."""
    assert_unsaid(service, secrets)
    commands = [" ".join(process.cmdline()) for process in service.descendants()]
    assert any(line.startswith("ray::ServeReplica:tandem:") for line in commands)
    shown = rest.text()
    assert "env:ROOT" in shown
    for secret in secrets:
        assert secret not in shown
        assert not [line for line in commands if secret in line]


def check_json_files(service: Service) -> None:
    """Files of replicas and of their ranks have the form and the access lines that Serve's logging_config asks for."""
    files = service.log_files()
    lines = {name: [json.loads(line) for line in text.splitlines()] for name, text in files.items()}
    assert {name.partition("-")[0] for name in files} == {"gateway", "requests", "group", "rank"}
    asked = [line for name, found in lines.items() if name.startswith("requests-") for line in found]
    assert {401, 200} <= {line["status"] for line in asked if line["path"] == "/v1/completions"}


def redeploy_under_streams(deployed: Deployed, rest: Rest, key: str) -> None:
    """Deploys another version while streams run, and says that none of them noticed. There are fewer of them while
    the new version's processes start: nothing changes for them until one is there."""
    (old,) = deployed.groups()
    old_replicas = deployed.replicas()
    _, before_s = rest.deployed()
    streams = Streams(deployed.service.url, key)
    try:
        wait_for(lambda: streams.ends and streams.has_just_begun, 120, "streams run", 0.02)
        began_s = time.monotonic()
        streams.relax()
        deployed.redeploy(rest, "DEBUG", max_num_seqs=8)
        wait_for(lambda: deployed.replicas() - old_replicas, REPLACED_S, "replicas of the new version", 0.5)
        streams.hurry()
        wait_for(lambda: (now := rest.deployed())[0] == "RUNNING" and now[1] > before_s, REPLACED_S, "it runs", 0.5)
        wait_for(lambda: len(now := deployed.groups()) == 1 and old not in now, 60, "the group is another", 0.5)
        wait_for(lambda: not deployed.replicas() & old_replicas, 60, "the old replicas have left", 0.5)
        ended_s = time.monotonic()
    finally:
        streams.stop()
    print(f"redeployed in {ended_s - began_s:.1f} s, {len(streams.ends)} streams")
    assert {end for _, _, end in streams.ends} == {"data: [DONE]"}
    assert len(streams.texts) == 1, "a stream that moved says what all say"
    assert any(began < began_s < end for began, end, _ in streams.ends), "one ran when the redeploy began"
    assert streams.keyless and set(streams.keyless) == {401}, "keys are required all the time"


def test_a_redeploy_keeps_tenants_keys_and_running_streams_and_tells_no_secret(deployed: Deployed) -> None:
    """At INFO, at which Serve logs the arguments of the application that it builds, and deployed anew at DEBUG."""
    service = deployed.service
    with httpx.Client(base_url=service.url, timeout=60) as client:
        ask_with_keys(client)
        keys = make_tenants(client)
        channels, passwords, dashboard = look_inside(service)
        deployed.rest = rest = Rest(dashboard, deployed.token)
        assert channels and all(len(secret) == 64 for secret in channels)
        assert len(passwords) == 1, "the private Redis's"
        secrets = {API, ADMIN, METRICS, SENT, deployed.token, *keys, *channels, *passwords}
        assert any("env:ROOT" in text for text in logged(service).values()), "the arguments are logged, as references"
        assert_nowhere(service, rest, secrets)
        redeploy_under_streams(deployed, rest, keys[1])
        ask_with_keys(client)
        for key in keys:
            answer = client.post("/v1/completions", json=ASKED, headers=bearer(key))
            assert answer.status_code == 200, "the tenant and its keys are there"
        assert any('"levelname": "DEBUG"' in text for text in logged(service).values())
        check_json_files(service)
        channels, again, _ = look_inside(service)
        assert again == passwords, "the Redis is the same"
        assert_nowhere(service, rest, {*secrets, *channels})


def test_numbers_change_without_a_restart(deployed: Deployed) -> None:
    """The number of groups, and what gateways read for each request; what needs a restart is refused by name."""
    service = deployed.service
    rest, before, (old,) = deployed.rest, deployed.replicas(), deployed.groups()

    def status_of_logprobs() -> int:
        answer = service.post("/v1/completions", {**ASKED, "logprobs": 5}, headers=bearer(API))
        return int(answer.status_code)

    assert status_of_logprobs() == 200
    deployed.set_numbers(rest, 2, max_logprobs=2)
    wait_for(lambda: status_of_logprobs() == 400, 60, "the user_config is in force", 0.5)
    wait_for(lambda: len(deployed.groups()) == 2, REPLACED_S, "another group serves", 0.5)
    assert old in deployed.groups() and before <= deployed.replicas(), "nobody was replaced"
    deployed.set_numbers(rest, 1, max_model_len=100)
    said = wait_for(lambda: "user_config" in (text := deployed.status()) and text, 60, "it is refused", 1.0)
    assert said and "max_model_len does not change without a restart" in said
    wait_for(lambda: len(deployed.groups()) == 1, 60, "one group", 0.5)
    assert status_of_logprobs() == 400, "as before"
    deployed.set_numbers(rest, 1)
    wait_for(lambda: status_of_logprobs() == 200, 60, "what is no longer in the file is as the args say", 0.5)


def load(service: Service) -> tuple[str, int]:
    """As the gateway sees them: whether Redis is unavailable, how many groups there are."""
    answer = service.get("/load", headers=bearer(API)).json()
    return answer["redis"], int(answer["groups"])


def says(service: Service, model: str) -> str:
    asked = {"model": model, "messages": QUESTION, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    answer = service.post("/v1/chat/completions", asked, headers=bearer(API))
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def adapted_and_plain() -> list[str]:
    """The offline engine's answers with the adapter and without."""
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    with LLM("demo", batch_invariant=True, device="cpu", enable_lora=True) as llm:
        ref = llm.load_adapter(PIRATE)
        adapted, plain = (llm.chat([QUESTION], params, use_tqdm=False, lora_request=r)[0].text for r in (ref, None))
    assert adapted != plain
    return [adapted, plain]


def test_adapters_are_served_and_a_lost_redis_costs_neither_them_nor_the_group(deployed: Deployed) -> None:
    service = deployed.service
    asked = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "stream": True}
    place = service.url + "/v1/chat/completions"
    with plain_http.stream("POST", place, json=asked, headers=bearer(API), timeout=60) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    several = {"model": "demo", "prompt": ["Once", "The", "A"], "n": 2, "max_tokens": 4}
    answer = service.post("/v1/completions", several, headers=bearer(API))
    assert len(answer.json()["choices"]) == 6, "calls of one request that came through the proxy"

    def listed() -> set[str]:
        return {model["id"] for model in service.get("/v1/models", headers=bearer(API)).json()["data"]}

    wait_for(lambda: listed() == {"demo", "pirate"}, 60, "listed")
    adapted, plain = adapted_and_plain()
    assert [says(service, model) for model in ("pirate", "demo:pirate", "demo")] == [adapted, adapted, plain]
    (redis,) = service.titled("tandem redis")
    service.titled("ray::ServiceIdentity")[0].kill()
    again = wait_for(lambda: [p for p in service.titled("tandem redis") if p.pid != redis.pid], 60, "a new Redis")
    assert again, "with a new URL"
    seen: list[tuple[str, int]] = []

    def is_whole_again() -> bool:
        seen.append(load(service))
        return seen[-1] == ("here", 1)

    wait_for(is_whole_again, 60, "the gateway finds it, and the group's record in it")
    assert {number for _, number in seen} == {1}, "the gateway keeps the group meanwhile"
    assert [says(service, model) for model in ("pirate", "demo")] == [adapted, plain], "its adapters too"
