"""Starts of their own: pipeline stages from a hostile folder, autoscaling, a killed launcher, `serve run`."""

import asyncio
import os
import shutil
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from tests.support.mixed_requests import answers, greedy
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
from workers.messages import SamplingParams
from workers.offline import LLM

pytestmark = pytest.mark.cluster

POISON = "raise RuntimeError('a package of the user was imported as one of ours')\n"
PROMPT = "Once upon a time"
QUESTION = [{"role": "user", "content": "Tell me a short story about a whale."}]
PIRATE = REPOSITORY / "configs" / "demo" / "adapters" / "pirate"


def shadowing_folder(folder: Path) -> Path:
    """A user's folder with packages named like ours."""
    for name in ("workers", "configs", "tests", "cluster", "parallel", "offload"):
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


class Stream:
    """A streaming request on a thread of its own; it has begun when the constructor returns."""

    def __init__(self, service: Service, asked: dict[str, object]) -> None:
        self._lines: list[str] = []
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(service.url, {**asked, "stream": True}))
        self._thread.start()
        assert self._begun.wait(30)

    def join(self) -> list[str]:
        self._thread.join(30)
        return self._lines

    def _read(self, url: str, asked: dict[str, object]) -> None:
        try:
            with httpx.stream("POST", url + "/v1/completions", json=asked, timeout=60) as response:
                for line in response.iter_lines():
                    if line:
                        self._lines.append(line)
                        self._begun.set()
        except httpx.HTTPError as error:
            self._lines.append(f"broken: {error}")


def run_tandem_status(service: Service) -> str:
    env = {**os.environ, "TMPDIR": str(service.temp), "XDG_RUNTIME_DIR": ""}
    return subprocess.run([BIN / "tandem", "status"], env=env, capture_output=True, text=True, timeout=30).stdout


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

        threads = [threading.Thread(target=keep_asking) for _ in range(8)]
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
        wait_for(lambda: not [p for p in everyone if is_alive(p)], 20, "all die")
        wait_for(lambda: not folder.exists(), 10, "the reaper removes the folder")


def groups(service: Service) -> int:
    return int(service.get("/load").json()["groups"])


def load(service: Service) -> tuple[str, int]:
    """As the gateway sees them: whether Redis is away, how many groups there are."""
    answer = service.get("/load").json()
    return answer["redis"], int(answer["groups"])


def test_serve_run_with_the_shipped_file(tmp_path: Path) -> None:
    """Serve's own proxy in front, a private Redis as a deployment, adapters from the folder that Ray Serve LLM's
    lora_config names; Ctrl-C ends it."""
    port = free_port()
    folder = tmp_path / "adapters"
    shutil.copytree(PIRATE, folder / "pirate")
    config = yaml.safe_load((REPOSITORY / "configs" / "serve" / "demo.yaml").read_text())
    config["http_options"]["port"] = port
    (application,) = config["applications"]
    application["args"]["lora_config"] = {"dynamic_lora_loading_path": str(folder), "max_num_adapters_per_replica": 4}
    application["args"]["engine_kwargs"] |= {"max_loras": 2, "dtype": "float32", "device": "cpu"}
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(config))
    env = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "local"}
    service = Service([str(BIN / "serve"), "run", str(file)], port, env=env)
    try:
        service.wait_ready()
        answer = service.post("/v1/completions", {"model": "demo", "prompt": PROMPT, "max_tokens": 8})
        assert answer.status_code == 200, answer.text
        asked = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "stream": True}
        with httpx.stream("POST", service.url + "/v1/chat/completions", json=asked, timeout=60) as response:
            lines = [line for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        wait_for(
            lambda: {m["id"] for m in service.get("/v1/models").json()["data"]} == {"demo", "pirate"}, 15, "listed"
        )
        assert [says(service, model) for model in ("pirate", "demo:pirate", "demo")] == pirate_and_plain()
        (redis,) = service.titled("tandem redis")
        service.titled("ray::ServeReplica:tandem:tandem-redis")[0].kill()
        wait_for(lambda: load(service) == ("away", 1), 30, "the gateway notices, and keeps the group")
        again = wait_for(lambda: [p for p in service.titled("tandem redis") if p.pid != redis.pid], 60, "a new Redis")
        assert again, "with a new URL"
        wait_for(lambda: load(service) == ("here", 1), 60, "the gateway finds it, and the group's record in it")
        service.stop(signal.SIGINT)
        wait_for(lambda: not service.titled("tandem"), 10, "everything ends")
    finally:
        service.clean()


def says(service: Service, model: str) -> str:
    asked = {"model": model, "messages": QUESTION, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    answer = service.post("/v1/chat/completions", asked)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def pirate_and_plain() -> list[str]:
    """The offline engine's answers: the adapter's twice, the model's own."""
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    with LLM("demo", dtype="float32", device="cpu", enable_lora=True) as llm:
        ref = llm.load_adapter(PIRATE)
        adapted, plain = (llm.chat([QUESTION], params, use_tqdm=False, lora_request=r)[0].text for r in (ref, None))
    assert adapted != plain
    return [adapted, adapted, plain]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_start_leaves_nothing(number: int) -> None:
    port = free_port()
    service = Service([str(BIN / "tandem"), "serve", "demo", "--port", str(port)], port)
    try:
        wait_for(lambda: [p for p in service.descendants() if "raylet" in title_of(p)], 60, "Ray is starting")
        assert service.stop(number) == 128 + number
        service.check_gone()
    finally:
        service.clean()


MOMENTS_S = {
    signal.SIGINT: (0.3, 0.8, 1.2, 1.6, 2.2, 3.0),
    signal.SIGTERM: (0.6, 1.0, 1.4, 1.8, 2.4, 2.8),
}


@pytest.mark.parametrize("number", MOMENTS_S)
def test_a_signal_to_every_process_ends_the_start_soon_whenever_it_comes(number: signal.Signals) -> None:
    """As service managers send it: Ray's own processes get it, and the launcher may be waiting for one."""
    for moment_s in MOMENTS_S[number]:
        port = free_port()
        service = Service([str(BIN / "tandem"), "serve", "demo", "--port", str(port)], port)
        began_s = time.monotonic()
        try:
            while time.monotonic() < began_s + moment_s:
                service.descendants()
                time.sleep(0.02)
            interrupt_everyone(service, number)
            signalled_s = time.monotonic()
            wait_for(lambda s=service: s.descendants() is None or s.process.poll() is not None, 10, f"ends: {moment_s}")
            took_s = time.monotonic() - signalled_s
            print(f"{number.name} after {moment_s:.1f} s: {service.process.returncode} after {took_s:.2f} s")
            ends = {128 + number, -number}  # the latter before the launcher listens
            assert service.process.returncode in ends, service.output
            assert "Traceback" not in service.output or "starting" not in service.output
            service.check_gone()
            wait_for(lambda s=service: not inhabitants(s.temp), 5, f"nobody runs in its folder: {moment_s}")
        finally:
            service.clean()


def interrupt_everyone(service: Service, number: signal.Signals) -> None:
    service.process.send_signal(number)
    for process in service.descendants():
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def test_a_signal_to_every_process_of_a_running_service_ends_it_soon() -> None:
    """Nothing can be drained then. A signal to the launcher's process group alone is not that: see the other tests."""
    with tandem_serve("demo", "--device", "cpu") as service:
        interrupt_everyone(service, signal.SIGTERM)
        began_s = time.monotonic()
        assert service.process.wait(30) in (0, 128 + signal.SIGTERM), service.output
        print(f"ended after {time.monotonic() - began_s:.2f} s")
        assert "Traceback" not in service.output
        service.check_gone()


def test_a_service_whose_ray_has_died_ends_with_one_line() -> None:
    with tandem_serve("demo", "--device", "cpu") as service:
        (raylet,) = [p for p in service.descendants() if Path(title_of(p).partition(" ")[0]).name == "raylet"]
        raylet.kill()
        assert service.process.wait(30) == 2, service.output
        last = service.output.splitlines()[-1]
        assert last == "tandem: error: Ray's own processes have died; the service cannot go on"
        assert "Traceback" not in service.output
        service.check_gone()


def inhabitants(folder: Path) -> list[psutil.Process]:
    """Processes that run in a folder below, removed or not."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cwd().startswith(f"{folder}/td-"):
                found.append(process)
    return found


def test_make_serve_serves_and_ctrl_c_ends_it() -> None:
    """The first of the README's two commands, on an installed virtual environment."""
    port = free_port()
    venv = BIN.parent
    assert (venv / ".runtime-installed").exists(), "make dev has made this environment"
    command = ["make", "serve", f"VENV={venv}", f"ARGS=--port {port} --device cpu"]
    service = Service(command, port, cwd=REPOSITORY)
    try:
        service.wait_ready()
        asked = {"model": "demo", "messages": [{"role": "user", "content": "What is 2 + 3?"}], "temperature": 0}
        assert "5" in service.post("/v1/chat/completions", asked).json()["choices"][0]["message"]["content"]
        service.stop(signal.SIGINT)
        service.check_gone()
    finally:
        service.clean()


def test_a_second_signal_does_not_wait_for_requests() -> None:
    """A hundred and twenty rows make steps so slow that none of the requests is over by then."""
    with tandem_serve("demo", "--device", "cpu", "--shutdown-timeout", "60", "--max-num-seqs", "256") as service:
        asked = {"model": "demo", "prompt": PROMPT, "max_tokens": 2000, "n": 10, "ignore_eos": True}
        streams = [Stream(service, asked) for _ in range(12)]
        service.interrupt()
        wait_for(lambda: "stopping" in service.output, 10, "the first signal is heard")
        service.interrupt()
        assert service.process.wait(30) == 0
        for stream in streams:
            *_, error, done = stream.join()
            assert done == "data: [DONE]" and "shutting down" in error
        assert "tandem: 12 requests were cut off by the second signal\n" in service.output
        service.check_gone()


def test_a_drain_ends_short_streams_well_cuts_long_ones_cleanly_and_refuses_late_requests() -> None:
    """A hundred choices over three rows last far longer than the timeout, at any speed; a few tokens far less."""
    asked = {"model": "demo", "prompt": PROMPT, "ignore_eos": True}
    arguments = ["demo", "--device", "cpu", "--shutdown-timeout", "12", "--max-num-seqs", "3"]
    with tandem_serve(*arguments) as service, ThreadPoolExecutor(1) as pool:
        many = {**asked, "max_tokens": 1000, "n": 100}
        long = [Stream(service, many)]
        whole = [pool.submit(service.post, "/v1/completions", many)]
        wait_for(lambda: service.get("/load").json()["requests_in_this_gateway"] == 2, 20, "both are in")
        short = [Stream(service, {**asked, "max_tokens": 50, "priority": -1}) for _ in range(2)]
        service.interrupt(signal.SIGTERM)  # to the process group; Ray's processes are not in it
        wait_for(lambda: service.get("/readyz").status_code == 503, 5, "the gateway drains")
        late = service.post("/v1/completions", {**asked, "max_tokens": 4})
        assert (late.status_code, late.json()["error"]["code"]) == (503, "service_unavailable")
        assert late.headers["retry-after"] and late.headers["x-request-id"] and late.headers["connection"] == "close"
        assert service.get("/livez").status_code == 200
        head, group = run_tandem_status(service).splitlines()[:2]
        assert service.url in head and head.endswith(", stopping") and "running" in group
        for stream in short:
            assert stream.join()[-1] == "data: [DONE]" and not any('"error"' in line for line in stream.join())
        for stream in long:
            *_, error, done = stream.join()
            assert done == "data: [DONE]" and "shutting down" in error
        for answer in whole:
            assert (answer.result().status_code, "shutting down" in answer.result().text) == (503, True)
        assert service.process.wait(30) == 0
        service.check_gone()
        stopping, cut_off, stopped = service.output.partition(f"{service.port}/v1\n")[2].splitlines()
        assert "requests in hand have up to 12 s to finish (--shutdown-timeout)" in stopping
        assert cut_off == "tandem: 2 requests were cut off after 12 s (--shutdown-timeout)"
        assert stopped.startswith("tandem: stopped: nothing is left running")


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
