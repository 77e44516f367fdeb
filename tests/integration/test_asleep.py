"""A service without a group: it is ready, holds requests while the first one brings a group, and sleeps again.

`make bench-scaling` has more groups, and streams of a minute over each end of one.
"""

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.autoscaling_page import scaled_configs
from tests.support.plain_http import plain_http
from tests.support.service import Service, tandem_serve, wait_for
from tests.support.stream import Stream
from tests.support.verbs import run_verb_of

pytestmark = pytest.mark.cluster
ASLEEP = {"status": "ok", "asleep": True}
SOON = {
    "look_back_period_s": 2,
    "metrics_interval_s": 0.5,
    "downscale_delay_s": 0,
    "downscale_to_zero_delay_s": 1,
}
ASKED = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 8, "ignore_eos": True}


def test_a_service_wakes_for_a_request_and_sleeps_again(tmp_path: Path) -> None:
    """The file of docs/serving/autoscaling.md, with shorter delays."""
    (config,) = (config for config in scaled_configs() if "model" in config)
    config["autoscaling_config"] |= SOON
    file = tmp_path / "scaled.yaml"
    file.write_text(yaml.safe_dump(config | {"device": "cpu", "max_num_seqs": 4, "sse_keep_alive_interval": 1}))
    with tandem_serve("--config", str(file)) as service:
        wait_for(lambda: "serving demo with 0 groups, up to 3 on" in service.output, 10, "the start's last line")
        assert "starting the gateway and no group until a request comes ..." in service.output
        assert service.get("/readyz").json() == ASLEEP
        assert [service.get(path).status_code for path in ("/", "/docs", "/v1/models")] == [200, 200, 200]
        assert service.get("/admin/groups").json()["data"] == []
        lines = Stream(service, ASKED).join()
        assert lines[0] == ": keep-alive" and lines[-1] == "data: [DONE]" and "error" not in "".join(lines), lines
        assert service.get("/readyz").json() in ({"status": "ok"}, ASLEEP)
        sleeps_again(service)
        shown = wait_for(lambda: said(service, "groups wanted 0: idle"), 10, "status says why")
        assert "  group " not in shown
        answers: list[int] = []
        held = threading.Thread(target=lambda: answers.append(service.post("/v1/completions", ASKED).status_code))
        held.start()
        load = wait_for(lambda: held_load(service), 10, "it is held")
        held.join(60)
        assert "request held, and no group runs" in load["why"] and answers == [200]
        sleeps_again(service)
        asked_and_left(service)
        assert "did not start" not in service.output and "Traceback" not in service.output


def sleeps_again(service: Service) -> None:
    wait_for(lambda: groups(service) == 0, 30, f"it sleeps: {service.get('/load').text}")
    assert service.get("/readyz").json() == ASLEEP


def held_load(service: Service) -> dict[str, Any]:
    load: dict[str, Any] = service.get("/load").json()
    return load if load["requests_held"] == 1 else {}


def groups(service: Service) -> int:
    return int(service.get("/load").json()["groups"])


def said(service: Service, words: str) -> str:
    output = run_verb_of(service.temp, "status").stdout
    return output if words in output else ""


def asked_and_left(service: Service) -> None:
    """A client that hangs up while its request is held: nothing of it is left, and nobody is waited for."""
    with pytest.raises(httpx.ReadTimeout):
        plain_http.post(service.url + "/v1/completions", json=ASKED, timeout=0.5)
    wait_for(lambda: service.metric("gateway_requests_open") == 0, 10, "the request is over")
    assert service.get("/load").json()["requests_in_this_gateway"] == 0
    assert service.get("/load").json()["requests_held"] == 0
