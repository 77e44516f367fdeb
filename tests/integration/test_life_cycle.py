"""Starts of their own: autoscaling, a killed launcher, a rank that cannot load; `make chaos`: both kinds of shards."""

import asyncio
import shutil
import signal
from pathlib import Path

import pytest
import yaml

from tandem import LLM
from tests.support.mixed_requests import answers, greedy
from tests.support.rising_load import ask_until_it_grows, groups_of
from tests.support.service import (
    BIN,
    REPOSITORY,
    START_S,
    Service,
    free_port,
    is_alive,
    tandem_serve,
    title_of,
    wait_for,
)
from tests.support.stream import Stream
from tests.support.verbs import run_verb_of

pytestmark = pytest.mark.cluster

PROMPT = "Once upon a time"


@pytest.mark.chaos
def test_tp2_x_pp2_and_ctrl_c_leaves_nothing() -> None:
    """one_service/ has TP, test_failover_ranks.py stages; tests/distributed has both at once, without a service."""
    arguments = ["demo", "-tp", "2", "-pp", "2", "--device", "cpu", "--dtype", "float32"]
    with LLM("demo", dtype="float32", device="cpu") as llm:
        wanted = greedy(llm)
    with tandem_serve(*arguments) as service:
        assert asyncio.run(answers(service.url)) == wanted
        titles = sorted(title_of(p).strip().split(maxsplit=3)[3] for p in service.titled("tandem rank"))
        assert titles == ["tp0 pp0", "tp0 pp1", "tp1 pp0", "tp1 pp1"]
        status = run_verb_of(service.temp, "status").stdout
        assert "serving" in status and f"{service.url} (pid {service.process.pid})" in status, "whom to signal"
        asked = {"model": "demo", "prompt": PROMPT, "max_tokens": 300, "temperature": 0, "ignore_eos": True}
        stream = Stream(service, asked)
        assert service.stop(signal.SIGINT) == 0
        assert stream.join()[-1] == "data: [DONE]", "a request in flight may finish"
        service.check_gone()
        assert "Traceback" not in service.output


AUTOSCALING = {
    "model": "demo",
    "device": "cpu",
    "max_num_seqs": 4,
    "autoscaling_config": {
        "min_replicas": 1,
        "max_replicas": 2,
        "target_ongoing_requests": 2,
        "look_back_period_s": 2,
        "metrics_interval_s": 0.5,
        "upscale_delay_s": 0.5,
        "downscale_delay_s": 1,
    },
}


def test_groups_follow_the_load_and_a_killed_launcher_takes_all_with_it(tmp_path: Path) -> None:
    file = tmp_path / "auto.yaml"
    file.write_text(yaml.safe_dump(AUTOSCALING))
    with tandem_serve("--config", str(file)) as service:
        ask_until_it_grows(service, {"model": "demo", "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True}, to=2)
        wait_for(lambda: groups_of(service) == 1, 60, "back to one group")
        folder = next(service.temp.glob("td-*"))
        everyone = service.descendants()
        service.process.kill()
        service.process.wait(10)
        wait_for(lambda: not [p for p in everyone if is_alive(p)], 60, "all die")
        wait_for(lambda: not folder.exists(), 60, "the reaper removes the folder")


def test_a_rank_that_cannot_load_ends_the_start_with_one_line(tmp_path: Path) -> None:
    """Found only when the weights are read: the launcher says it and leaves nothing."""
    folder = tmp_path / "broken"
    shutil.copytree(REPOSITORY / "configs" / "demo" / "model", folder)
    (folder / "model.safetensors").write_bytes(b"\0" * 64)
    port = free_port()
    service = Service([str(BIN / "tandem"), "serve", str(folder), "--port", str(port)], port)
    try:
        assert service.process.wait(START_S) == 2, service.output
        assert "tandem: error: " in service.output and "Traceback" not in service.output
        service.check_gone()
    finally:
        service.clean()
