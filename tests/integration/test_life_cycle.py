"""Starts of their own: pipeline stages from a hostile folder, autoscaling, a killed launcher, `serve run`."""

import asyncio
import shutil
import signal
import threading
from functools import cache
from pathlib import Path

import pytest
import yaml

from tandem import LLM
from tandem.workers.messages.request import SamplingParams
from tests.support.mixed_requests import answers, greedy
from tests.support.plain_http import plain_http
from tests.support.service import (
    BIN,
    REPOSITORY,
    START_S,
    Service,
    free_port,
    is_alive,
    run_tandem_status,
    tandem_serve,
    title_of,
    wait_for,
)
from tests.support.stream import Stream

pytestmark = pytest.mark.cluster

POISON = "raise RuntimeError('a package of the user was imported as one of ours')\n"
PROMPT = "Once upon a time"
QUESTION = [{"role": "user", "content": "Tell me a short story about a whale."}]
PIRATE = REPOSITORY / "configs" / "demo" / "adapters" / "pirate"


def shadowing_folder(folder: Path) -> Path:
    """A user's folder with packages named like ours and like one that Ray's workers import."""
    for name in ("tandem", "workers", "configs", "tests", "cluster", "parallel", "offload", "redis"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(POISON)
    return folder


def test_tp2_x_pp2_from_a_folder_that_shadows_our_packages_and_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    folder = shadowing_folder(tmp_path / "mine")
    arguments = ["demo", "-tp", "2", "-pp", "2", "--device", "cpu", "--dtype", "float32"]
    with LLM("demo", dtype="float32", device="cpu") as llm:
        wanted = greedy(llm)
    with tandem_serve(*arguments, cwd=folder) as service:
        assert asyncio.run(answers(service.url)) == wanted
        titles = sorted(title_of(p).strip().split(maxsplit=3)[3] for p in service.titled("tandem rank"))
        assert titles == ["tp0 pp0", "tp0 pp1", "tp1 pp0", "tp1 pp1"]
        status = run_tandem_status(service)
        assert "serving" in status and service.url in status
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
        done = threading.Event()
        asked = {"model": "demo", "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True}
        statuses: list[int] = []

        def keep_asking() -> None:
            while not done.is_set():
                statuses.append(service.post("/v1/completions", asked).status_code)

        threads = [threading.Thread(target=keep_asking) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            wait_for(lambda: groups(service) == 2, 60, f"a second group: {service.output}")
        finally:
            done.set()
            for thread in threads:
                thread.join()
        wait_for(lambda: groups(service) == 1, 60, "back to one group")
        assert set(statuses) == {200}, "no request failed on the way up or down"
        folder = next(service.temp.glob("td-*"))
        everyone = service.descendants()
        service.process.kill()
        service.process.wait(10)
        wait_for(lambda: not [p for p in everyone if is_alive(p)], 60, "all die")
        wait_for(lambda: not folder.exists(), 60, "the reaper removes the folder")


def groups(service: Service) -> int:
    return int(service.get("/load").json()["groups"])


def load(service: Service) -> tuple[str, int]:
    """As the gateway sees them: whether Redis is unavailable, how many groups there are."""
    answer = service.get("/load").json()
    return answer["redis"], int(answer["groups"])


def test_serve_run_with_the_shipped_file(tmp_path: Path) -> None:
    """Serve's own proxy in front, a private Redis that is none of the application's, adapters from the folder that Ray
    Serve LLM's lora_config names; Ctrl-C ends it."""
    port = free_port()
    folder = tmp_path / "adapters"
    shutil.copytree(PIRATE, folder / "pirate")
    config = yaml.safe_load((REPOSITORY / "configs" / "serve" / "demo.yaml").read_text())
    config["http_options"]["port"] = port
    (application,) = config["applications"]
    application["args"]["lora_config"] = {"dynamic_lora_loading_path": str(folder), "max_num_adapters_per_replica": 4}
    application["args"]["engine_kwargs"] |= {"max_loras": 2, "batch_invariant": True, "device": "cpu"}
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(config))
    env = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "local"}
    service = Service([str(BIN / "serve"), "run", str(file)], port, env=env)
    try:
        service.wait_ready()
        answer = service.post("/v1/completions", {"model": "demo", "prompt": PROMPT, "max_tokens": 8})
        assert answer.status_code == 200, answer.text
        asked = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "stream": True}
        with plain_http.stream("POST", service.url + "/v1/chat/completions", json=asked, timeout=60) as response:
            lines = [line for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        wait_for(
            lambda: {m["id"] for m in service.get("/v1/models").json()["data"]} == {"demo", "pirate"}, 60, "listed"
        )
        assert [says(service, model) for model in ("pirate", "demo:pirate", "demo")] == pirate_and_plain()
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
        assert [says(service, model) for model in ("pirate", "demo")] == pirate_and_plain()[1:], "its adapters too"
        service.stop(signal.SIGINT)
        wait_for(lambda: not service.titled("tandem"), 60, "everything ends")
    finally:
        service.clean()


def says(service: Service, model: str) -> str:
    asked = {"model": model, "messages": QUESTION, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    answer = service.post("/v1/chat/completions", asked)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


@cache
def pirate_and_plain() -> list[str]:
    """The offline engine's answers: the adapter's twice, the model's own."""
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    with LLM("demo", batch_invariant=True, device="cpu", enable_lora=True) as llm:
        ref = llm.load_adapter(PIRATE)
        adapted, plain = (llm.chat([QUESTION], params, use_tqdm=False, lora_request=r)[0].text for r in (ref, None))
    assert adapted != plain
    return [adapted, adapted, plain]


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
