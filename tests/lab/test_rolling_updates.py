"""`serve deploy` of three kinds, three times each, under 200 streams of 20 to 90 s of a tenant with limits: an
argument, other code, another revision of the model. No stream is refused, fails or is cut, and each says what the
others of its prompt say. Counts are printed as JSON, a line for each deploy and one for each kind, and appended to the
file that TANDEM_TEST_UPDATES_LOG names."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from tests.lab.ray_nodes import HTTP_PORT, START_S, RayNodes, demo, ranks_on
from tests.lab.steady_streams import SteadyStreams
from tests.support.doors import ADMIN, bearer
from tests.support.service import REPOSITORY, wait_for
from tools.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.chaos, pytest.mark.timeout(3000)]
GROUPS, STREAMS, SECONDS = 2, int(os.environ.get("TANDEM_TEST_UPDATES_STREAMS", "200")), (20.0, 90.0)
DEPLOYS = int(os.environ.get("TANDEM_TEST_UPDATES_DEPLOYS", "3"))
PROMPTS = [f"In the year {1900 + number} a" for number in range(16)]
FIRST_RATE = 5.0
"""Tokens a second of one stream, until the first have ended."""
CODE = ("tandem", "cluster", "configs", "offload", "parallel", "workers")
MODEL = REPOSITORY / "configs" / "demo" / "model"
REPLACED_S = 900.0


class Deployed:
    """An application on the one node of a lab, and the ways to change it."""

    def __init__(self, ray_nodes: RayNodes) -> None:
        self.ray_nodes = ray_nodes
        self.config = demo({"max_num_seqs": 128}, groups=GROUPS)
        (self._application,) = self.config["applications"]
        self._application["args"]["gateway_config"] = {"admin_api_key": "env:ROOT", "api_server_count": 2}
        self.model_to(0)

    def argument_to(self, number: int) -> None:
        self._application["args"]["engine_kwargs"]["max_num_seqs"] = 128 - number

    def code_to(self, number: int) -> None:
        """Code that says its number at /livez, from a folder of its own."""
        folder = self.ray_nodes.lab.folder / f"code-{number}"
        for name in CODE:
            shutil.copytree(
                REPOSITORY / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        file = folder / "cluster" / "gateway" / "app" / "probes.py"
        said = 'json_response({"status": "ok"})'
        text = file.read_text()
        assert said in text
        file.write_text(text.replace(said, f'json_response({{"status": "ok", "code": {number}}})'))
        self._application["runtime_env"] = {"env_vars": {"PYTHONPATH": str(folder)}}

    def model_to(self, number: int) -> None:
        """A copy of the model, which is another one to the service and says the same."""
        folder = self.ray_nodes.lab.folder / f"revision-{number}"
        shutil.copytree(MODEL, folder)
        self._application["args"]["model_loading_config"]["model_source"] = str(folder)

    def groups(self) -> set[str]:
        return {group for group, _ in ranks_on(self.ray_nodes.head).values()}

    def is_replaced(self, old: set[str]) -> bool:
        """Whether none of the old groups is left, and all of the new ones are there."""
        now = self.groups()
        return len(now) == GROUPS and not now & old

    def tenant_key(self) -> str:
        """The key of a new tenant with limits that it does not reach."""
        limits = {"tokens_per_minute": 10_000_000, "concurrency": 2 * STREAMS}
        with self.ray_nodes.head.network():
            place = f"http://127.0.0.1:{HTTP_PORT}/admin/tenants"
            made = httpx.post(
                place, json={"name": "acme", **limits}, headers=bearer(ADMIN), timeout=60, trust_env=False
            )
        assert made.status_code == 201, made.text
        return str(made.json()["key"])


@pytest.fixture(scope="module")
def deployed() -> Iterator[Deployed]:
    with Lab("a") as lab:
        ray_nodes = RayNodes(lab, environment={"ROOT": ADMIN})
        deployed = Deployed(ray_nodes)
        ray_nodes.deploy(deployed.config)
        wait_for(lambda: len(deployed.groups()) == GROUPS, START_S, "all groups serve")
        yield deployed
        ray_nodes.close()


@pytest.fixture(scope="module")
def key(deployed: Deployed) -> str:
    return deployed.tenant_key()


def note(**figures: object) -> None:
    line = json.dumps(figures)
    print(line, flush=True)
    if (file := os.environ.get("TANDEM_TEST_UPDATES_LOG")) is not None:
        with Path(file).open("a") as log:
            log.write(line + "\n")


CHANGES: Mapping[str, Callable[[Deployed, int], None]] = {
    "argument": Deployed.argument_to,
    "code": Deployed.code_to,
    "revision": Deployed.model_to,
}


@pytest.mark.parametrize("kind", list(CHANGES))
def test_no_stream_notices_an_update(deployed: Deployed, key: str, kind: str) -> None:
    streams = SteadyStreams(deployed.ray_nodes.head, key, PROMPTS, STREAMS, SECONDS, FIRST_RATE)
    try:
        wait_for(lambda: streams.running == STREAMS, START_S, "all streams run", 0.5)
        for number in range(1, DEPLOYS + 1):
            wait_for(lambda: streams.running > STREAMS * 3 // 4, START_S, "most streams run", 0.5)
            old, began_s = deployed.groups(), time.monotonic()
            CHANGES[kind](deployed, number)
            deployed.ray_nodes.begin_deploy(deployed.config)
            wait_for(lambda old=old: deployed.is_replaced(old), REPLACED_S, "all groups are replaced", 0.5)
            took_s = time.monotonic() - began_s
            note(kind=kind, deploy=number, replaced_s=round(took_s, 1), **streams.counts(began_s))
    finally:
        streams.stop()
    bad = streams.bad()
    note(kind=kind, deploys=DEPLOYS, torn=sum(line.startswith("torn") for line in bad), **streams.counts())
    assert set(streams.keyless) == {401}, "keys are required all the time"
    assert not bad, f"{len(bad)} of {len(streams.streams)} streams: " + "\n".join(bad[:20])
