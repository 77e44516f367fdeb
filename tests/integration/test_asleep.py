"""A service without a group: it is ready, holds requests while the first one brings a group, and sleeps again; of many
requests it gets another group. Its last test kills its launcher.

`make bench-scaling` has more groups, and streams of a minute over each end of one; test_life_cycle.py, in `make chaos`,
Serve's own policy.
"""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml

from tests.support.autoscaling_page import scaled_configs
from tests.support.ends import end_by_a_killed_launcher
from tests.support.plain_http import plain_http
from tests.support.rising_load import ask_until_it_grows, groups_of
from tests.support.service import Service, tandem_serve, wait_for
from tests.support.stream import Stream
from tests.support.verbs import run_verb_of

pytestmark = pytest.mark.cluster
ASLEEP = {"status": "ok", "asleep": True}
SOON = {
    "max_replicas": 2,
    "look_back_period_s": 2,
    "metrics_interval_s": 0.5,
    "upscale_delay_s": 0.5,
    "downscale_delay_s": 0,
    "downscale_to_zero_delay_s": 1,
    "policy": {
        "policy_function": "tandem.cluster.scaling.scaling_policy:GroupScaling",
        "policy_kwargs": {"kv_high": 0.5},
    },
}
SMALL = {"device": "cpu", "max_num_seqs": 4, "max_model_len": 512, "num_gpu_blocks_override": 64}
"""Four requests of 400 tokens have more than half of the blocks."""
ASKED = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The file of docs/serving/autoscaling.md, with shorter delays."""
    (config,) = (config for config in scaled_configs() if "model" in config)
    config["autoscaling_config"] |= SOON
    file = tmp_path_factory.mktemp("scaled") / "scaled.yaml"
    file.write_text(yaml.safe_dump(config | SMALL | {"sse_keep_alive_interval": 1}))
    with tandem_serve("--config", str(file)) as running:
        yield running


def test_a_service_wakes_for_a_request_and_sleeps_again(service: Service) -> None:
    wait_for(lambda: "serving demo with 0 groups, up to 2 on" in service.output, 10, "the start's last line")
    assert "starting the gateway and no group until a request comes ..." in service.output
    assert service.get("/readyz").json() == ASLEEP
    assert [service.get(path).status_code for path in ("/", "/docs", "/v1/models")] == [200, 200, 200]
    assert service.get("/admin/groups").json()["data"] == []
    stream = Stream(service, ASKED)
    load = wait_for(lambda: held_load(service), 10, "it is held")
    lines = stream.join()
    assert "request held, and no group runs" in load["why"]
    assert lines[0] == ": keep-alive" and lines[-1] == "data: [DONE]" and "error" not in "".join(lines), lines
    assert service.get("/readyz").json() in ({"status": "ok"}, ASLEEP)
    wait_for(lambda: groups_of(service) == 0, 30, f"it sleeps: {service.get('/load').text}")
    assert service.get("/readyz").json() == ASLEEP
    shown = wait_for(lambda: said(service, "groups wanted 0: idle"), 10, "status says why")
    assert "  group " not in shown


def test_a_client_that_hangs_up_while_its_request_is_held_leaves_nothing(service: Service) -> None:
    """And nobody is waited for."""
    with pytest.raises(httpx.ReadTimeout):
        plain_http.post(service.url + "/v1/completions", json=ASKED, timeout=0.5)
    wait_for(lambda: service.metric("gateway_requests_open") == 0, 10, "the request is over")
    assert service.get("/load").json()["requests_in_this_gateway"] == 0
    assert service.get("/load").json()["requests_held"] == 0


def test_groups_follow_the_load(service: Service) -> None:
    ask_until_it_grows(service, {**ASKED, "max_tokens": 400}, to=2)
    assert "did not start" not in service.output and "Traceback" not in service.output


def test_a_killed_launcher_takes_all_with_it_and_everything_is_named(service: Service) -> None:
    end_by_a_killed_launcher(service)


def held_load(service: Service) -> dict[str, Any]:
    load: dict[str, Any] = service.get("/load").json()
    return load if load["requests_held"] == 1 else {}


def said(service: Service, words: str) -> str:
    output = run_verb_of(service.temp, "status").stdout
    return output if words in output else ""
