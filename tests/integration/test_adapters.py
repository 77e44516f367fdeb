"""Two groups of two stages that serve adapters: listed at start, loaded, switched, watched, pinned and removed while
requests run; and no request is lost when a rank dies while it brings one. All requests go through Ray's object store
here, as those do that are larger than a message may be.
"""

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tandem import LLM
from tandem.cluster.adapters.entries import AdapterEntry
from tandem.cluster.state import keys
from tandem.cluster.state.redis_client import BackgroundClient
from tandem.workers.messages.request import AdapterRef, SamplingParams
from tests.support.ends import end_by_a_signal_to_all
from tests.support.failover.kinds import KINDS
from tests.support.failover.rank_faults import RankFaults
from tests.support.failover.scene import TEST_S, Scene, failover_service
from tests.support.metric_names import not_served
from tests.support.plain_http import plain_http
from tests.support.service import BIN, Service, free_port, is_alive, wait_for
from tests.support.varied_adapters import save_varied, zipf
from tests.support.verbs import run_verb_of

pytestmark = pytest.mark.cluster

ADAPTERS = Path(__file__).resolve().parents[2] / "configs" / "demo" / "adapters"
WEIGHTS = "adapter_model.safetensors"
QUESTIONS = ("Hello! How are you?", "Tell me a short story about a whale.", "What is 2 + 3?", "Who are you?")
LONG = 300


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """--lora-root and --lora-watch-dir."""
    return tmp_path_factory.mktemp("root"), tmp_path_factory.mktemp("watch")


@pytest.fixture(scope="module")
def faulty(folders: tuple[Path, Path]) -> Iterator[tuple[Service, RankFaults]]:
    """The service of tests of failover, whose answers are exact wherever they run, with more blocks."""
    root, watch = folders
    more = ("--lora-modules", f"shout={ADAPTERS / 'shout'}", "--lora-watch-dir", str(watch))
    room = ("--num-gpu-blocks-override", "512")
    with failover_service(root, "-pp", "2", *more, *room, most_by_value=0) as running:
        yield running


@pytest.fixture(scope="module")
def lora_service(faulty: tuple[Service, RankFaults]) -> Service:
    return faulty[0]


@pytest.fixture(scope="module")
def offline() -> Iterator[LLM]:
    with LLM("demo", dtype="bfloat16", batch_invariant=True, device="cpu", enable_lora=True) as llm:
        yield llm


def wanted(offline: LLM, adapter: str | None, questions: tuple[str, ...] = QUESTIONS, tokens: int = 24) -> list[str]:
    """The offline engine's answers."""
    ref: AdapterRef | None = offline.load_adapter(ADAPTERS / adapter) if adapter is not None else None
    asked = [[{"role": "user", "content": question}] for question in questions]
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return [output.text for output in offline.chat(asked, params, use_tqdm=False, lora_request=ref)]


def chat(service: Service, model: str, question: str, tokens: int = 24) -> httpx.Response:
    asked: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": question}]}
    asked |= {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return service.post("/v1/chat/completions", asked)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def names(service: Service) -> list[str]:
    return [model["id"] for model in service.get("/v1/models").json()["data"]]


def load(service: Service, name: str, folder: Path, **more: Any) -> httpx.Response:
    return service.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder), **more})


def unload(service: Service, name: str) -> httpx.Response:
    return service.post("/v1/unload_lora_adapter", {"lora_name": name})


def tandem(service: Service, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_verb_of(service.temp, *arguments)


def residency(service: Service, name: str) -> list[tuple[str, str]]:
    """(tier, pinned) of an adapter in each group that holds it."""
    lines = service.get("/metrics").text.splitlines()
    mine = [line for line in lines if line.startswith("tandem:adapter_residency{") and f'adapter="{name}"' in line]
    return sorted((line.split('tier="')[1].split('"')[0], line.split('pinned="')[1].split('"')[0]) for line in mine)


def test_modules_are_checked_before_anything_starts(tmp_path: Path) -> None:
    broken = shutil.copytree(ADAPTERS / "pirate", tmp_path / "broken")
    (broken / WEIGHTS).write_bytes((broken / WEIGHTS).read_bytes()[:-100])
    asked = ("serve", "demo", "--enable-lora", "--lora-modules", f"broken={broken}", "--device", "cpu")
    asked = (*asked, "--port", str(free_port()))
    done = subprocess.run([BIN / "tandem", *asked], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"--lora-modules: broken: {broken}: " in done.stderr
    assert "starting" not in done.stdout


def test_modules_are_listed_with_root_and_parent(lora_service: Service) -> None:
    models = {model["id"]: model for model in lora_service.get("/v1/models").json()["data"]}
    assert set(models) >= {"demo", "pirate", "shout"}
    assert (models["pirate"]["root"], models["pirate"]["parent"]) == (str(ADAPTERS / "pirate"), "demo")


def test_adapters_and_none_at_once_answer_as_each_does_alone(lora_service: Service, offline: LLM) -> None:
    alone = {name: wanted(offline, name) for name in ("pirate", "shout", None)}
    assert len({answers[0] for answers in alone.values()}) == 3
    work = [(name, i) for i in range(len(QUESTIONS)) for name in alone for _ in range(2)]
    with ThreadPoolExecutor(len(work)) as pool:
        answers = list(pool.map(lambda w: text_of(chat(lora_service, w[0] or "demo", QUESTIONS[w[1]])), work))
    assert answers == [alone[name][i] for name, i in work]
    version = lora_service.get("/v1/models/pirate").json()["version"]
    for model in ("demo:pirate", version, version[:15]):
        assert text_of(chat(lora_service, model, QUESTIONS[0])) == alone["pirate"][0]
    assert not_served(lora_service.get("/metrics").text, "LoRA adapters") == {}, "panels of the dashboard"


def test_what_is_refused_is_not_listed(lora_service: Service, folders: tuple[Path, Path], tmp_path: Path) -> None:
    root, _ = folders
    before = names(lora_service)
    flipped = shutil.copytree(ADAPTERS / "pirate", root / "flipped")
    data = bytearray((flipped / WEIGHTS).read_bytes())
    data[-4:] = b"\x00\x00\xc0\x7f"  # NaN
    (flipped / WEIGHTS).write_bytes(data)
    outside = shutil.copytree(ADAPTERS / "pirate", tmp_path / "outside")
    for folder, words in ((flipped, "NaN"), (outside, "--lora-root"), (root / "nothing", "--lora-root")):
        refused = load(lora_service, "odd", folder)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_path")
        assert words in refused.json()["error"]["message"]
    assert chat(lora_service, "odd", "x").status_code == 404
    assert names(lora_service) == before


def test_a_reload_under_running_streams(lora_service: Service, folders: tuple[Path, Path], offline: LLM) -> None:
    """TN-02: 50 that run end on the old version, those that come later have the new one."""
    folder = shutil.copytree(ADAPTERS / "pirate", folders[0] / "changing")
    assert load(lora_service, "changing", folder).status_code == 200
    old, new = (wanted(offline, name, QUESTIONS[:2], LONG) for name in ("pirate", "shout"))
    assert text_of(chat(lora_service, "changing", QUESTIONS[0], LONG)) == old[0], "it is on a device by now"
    begun = [0] * 50
    asked: dict[str, Any] = {"model": "changing", "max_tokens": LONG, "temperature": 0, "ignore_eos": True}

    def stream(i: int) -> str:
        body = {**asked, "stream": True, "messages": [{"role": "user", "content": QUESTIONS[i % 2]}]}
        pieces = []
        with plain_http.stream("POST", lora_service.url + "/v1/chat/completions", json=body, timeout=120) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
                    pieces.append(delta.get("content") or "")
                    begun[i] += 1
        return "".join(pieces)

    with ThreadPoolExecutor(len(begun)) as pool:
        running = [pool.submit(stream, i) for i in range(len(begun))]
        wait_for(lambda: min(begun) > 2, 60, "all streams run")
        shutil.copytree(ADAPTERS / "shout", folder, dirs_exist_ok=True)
        assert load(lora_service, "changing", folder).status_code == 400, "only when asked for"
        assert load(lora_service, "changing", folder, load_inplace=True).status_code == 200
        later = [text_of(chat(lora_service, "changing", QUESTIONS[i], LONG)) for i in range(2)]
        assert [one.result() for one in running] == old * 25
    assert later == new
    assert unload(lora_service, "changing").status_code == 200
    assert chat(lora_service, "changing", "x").status_code == 404
    assert unload(lora_service, "changing").status_code == 404


def test_sixty_adapters_by_zipf_where_the_devices_have_room_for_four(
    lora_service: Service, folders: tuple[Path, Path], offline: LLM
) -> None:
    """TN-03: two distinct ones in a step, four or so on a device; everybody gets the right one."""
    made = [save_varied(ADAPTERS / "pirate", folders[0] / f"varied-{i}", i) for i in range(60)]
    for folder in made:
        assert load(lora_service, folder.name, folder).status_code == 200
    order = [*range(60), *zipf(60, 36, seed=3)]
    random.Random(4).shuffle(order)
    conversation = [{"role": "user", "content": QUESTIONS[0]}]
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    refs = [offline.load_adapter(folder) for folder in made]
    right = [o.text for o in offline.chat([conversation] * 60, params, use_tqdm=False, lora_request=refs)]
    assert len(set(right)) == 60, "each says something else"
    swaps = lora_service.metric("adapter_swaps_total")
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda i: text_of(chat(lora_service, made[i].name, QUESTIONS[0], 16)), order))
    assert answers == [right[i] for i in order]
    wait_for(lambda: lora_service.metric("adapter_swaps_total") >= swaps + 40, 60, "there was no room for all")
    wait_for(lambda: adapters_at_rest(lora_service), 60, "nobody holds an adapter, nobody waits for one")
    for folder in made:
        assert unload(lora_service, folder.name).status_code == 200


def adapters_at_rest(service: Service) -> bool:
    lines = [x for x in service.get("/metrics").text.splitlines() if x.startswith("tandem:lora_requests_info{")]
    used = [x for x in lines if 'running_lora_adapters=""' not in x or 'waiting_lora_adapters=""' not in x]
    return len(lines) == 2 and not used and service.metric("adapter_sequences_waiting") == 0


def test_files_that_are_swapped_before_a_group_has_read_them_are_refused_until_they_are_mended(
    lora_service: Service, folders: tuple[Path, Path], offline: LLM
) -> None:
    """FT-12: its digest was known when it was listed, and no group had loaded it by then."""
    right, others = (wanted(offline, name, QUESTIONS[:1])[0] for name in ("pirate", "shout"))
    varied = save_varied(ADAPTERS / "pirate", folders[0] / "varied", 99)
    kept = shutil.copytree(varied, folders[0] / "kept")
    assert load(lora_service, "swapped", varied).status_code == 200
    shutil.copytree(ADAPTERS / "shout", varied, dirs_exist_ok=True)
    refusals = lora_service.metric("adapters_refused_total")
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda i: chat(lora_service, "swapped", QUESTIONS[i]), range(4)))
        beside = [text_of(x) for x in pool.map(lambda _: chat(lora_service, "pirate", QUESTIONS[0]), range(4))]
    for answer in answers:
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "service_unavailable"), "no fault of the request's"
        assert "not those that were listed" in error["message"]
        assert str(varied) not in answer.text
    assert beside == [right] * 4
    wait_for(lambda: lora_service.metric("adapters_refused_total") > refusals, 60, "it shows in the metrics")
    wait_for(lambda: adapters_at_rest(lora_service), 60, "it is held by nobody")
    assert residency(lora_service, "swapped") == []
    assert load(lora_service, "swapped", varied, load_inplace=True).status_code == 200
    assert text_of(chat(lora_service, "swapped", QUESTIONS[0])) == others, "the new content, once it was asked for"
    assert load(lora_service, "swapped", kept, load_inplace=True).status_code == 200
    ref = offline.load_adapter(kept)
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    asked = [{"role": "user", "content": QUESTIONS[0]}]
    (mended,) = offline.chat(asked, params, use_tqdm=False, lora_request=ref)
    assert text_of(chat(lora_service, "swapped", QUESTIONS[0])) == mended.text != others
    assert unload(lora_service, "swapped").status_code == 200


def test_a_watched_folder_is_followed(lora_service: Service, folders: tuple[Path, Path], offline: LLM) -> None:
    folder = shutil.copytree(ADAPTERS / "shout", folders[1] / "watched")
    wait_for(lambda: "watched" in names(lora_service), 60, "it is listed")
    assert text_of(chat(lora_service, "watched", QUESTIONS[0])) == wanted(offline, "shout", QUESTIONS[:1])[0]
    shutil.rmtree(folder)
    wait_for(lambda: "watched" not in names(lora_service), 60, "it is unlisted")


def test_the_command_line_changes_a_running_service(lora_service: Service, tmp_path: Path) -> None:
    copy = shutil.copytree(ADAPTERS / "shout", tmp_path / "copy")
    done = tandem(lora_service, "adapters", "add", "typed", str(copy), "--pin")
    assert (done.returncode, done.stdout) == (0, "typed listed\n"), done.stderr
    wait_for(lambda: "typed" in names(lora_service), 60, "the gateway has read it")
    wait_for(lambda: residency(lora_service, "typed") == [("device", "true")] * 2, 60, "both groups hold it")
    (line,) = [x for x in tandem(lora_service, "adapters", "ls").stdout.splitlines() if x.startswith("typed@")]
    assert line.endswith(f"  public  pinned  device 2  {copy}")
    done = tandem(lora_service, "adapters", "add", "typed", str(ADAPTERS / "pirate"))
    assert done.returncode == 2 and "taken by other content" in done.stderr
    done = tandem(lora_service, "adapters", "add", "odd", str(tmp_path))
    assert done.returncode == 2 and "adapter_config.json" in done.stderr
    assert tandem(lora_service, "adapters", "unpin", "typed").returncode == 0
    wait_for(lambda: {p for _, p in residency(lora_service, "typed")} == {"false"}, 60, "the gateway has read it")
    assert tandem(lora_service, "adapters", "rm", "typed").returncode == 0
    wait_for(lambda: "typed" not in names(lora_service), 60, "the gateway has read it")
    done = tandem(lora_service, "adapters", "rm", "typed")
    assert done.returncode == 2 and "no adapter typed" in done.stderr


def test_an_emptied_redis_and_none_at_all_cost_no_adapter(lora_service: Service, offline: LLM) -> None:
    def is_here() -> bool:
        return bool(lora_service.get("/load").json()["redis"] == "here")

    answer = wanted(offline, "pirate", QUESTIONS[:1])[0]
    before = names(lora_service)
    (redis,) = lora_service.titled("tandem redis")
    socket = Path(redis.cmdline()[1]).parent / "redis.sock"
    done = tandem(lora_service, "adapters", "ls", "--redis-url", f"unix://{socket}", "--model", "demo")
    assert done.returncode == 0 and "pirate@" in done.stdout, done.stderr
    redis.suspend()
    try:
        wait_for(lambda: not is_here(), 60, "the gateway notices")
        assert text_of(chat(lora_service, "pirate", QUESTIONS[0])) == answer
        refused = unload(lora_service, "pirate")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "service_unavailable")
    finally:
        redis.resume()
    wait_for(is_here, 60, "the gateway is back")
    flush(socket)
    wait_for(lambda: listed(socket) >= {"pirate", "shout"}, 60, "the list is written again")
    assert names(lora_service) == before
    assert text_of(chat(lora_service, "pirate", QUESTIONS[0])) == answer


def test_a_group_that_is_replaced_serves_an_adapter_on_first_request(lora_service: Service, offline: LLM) -> None:
    ranks = lora_service.titled("tandem rank")
    assert len(ranks) == 4
    old = {rank.pid for rank in ranks}
    for rank in ranks:
        os.kill(rank.pid, signal.SIGKILL)

    def are_new() -> bool:
        now = {p.pid for p in lora_service.titled("tandem rank") if is_alive(p)}
        return len(now) == 4 and not now & old and lora_service.get("/readyz").status_code == 200

    wait_for(are_new, 180, "both groups are replaced")
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda i: text_of(chat(lora_service, "pirate", QUESTIONS[i])), range(4)))
    assert answers == wanted(offline, "pirate")


@pytest.mark.timeout(TEST_S)
def test_no_request_is_lost_when_a_rank_dies_that_brings_its_adapter(
    faulty: tuple[Service, RankFaults], folders: tuple[Path, Path]
) -> None:
    """The last stage, at that very point; the others go on, and a new group takes its place. test_failover_ranks.py and
    test_failover_pairs.py have other deaths."""
    service, _ = faulty
    print(Scene(*faulty, folders[0]).play(KINDS["LoRA"], "last stage", "adapter load"))
    (fresh,) = [name for name in names(service) if name.startswith("fresh-")]
    assert unload(service, fresh).status_code == 200


def test_a_tenants_adapter_is_there_for_that_tenant_only(lora_service: Service, offline: LLM) -> None:
    """TN-01; the last test of this service: from here on it asks for keys."""

    def key_of(tenant: str) -> dict[str, str]:
        done = tandem(lora_service, "tenants", "add", tenant)
        (key,) = [word for word in done.stdout.split() if word.startswith("sk-tandem-")]
        return {"authorization": f"Bearer {key}"}

    keys_of = {tenant: key_of(tenant) for tenant in ("acme", "beta")}
    done = tandem(lora_service, "adapters", "add", "mine", str(ADAPTERS / "shout"), "--tenant", "acme")
    assert done.returncode == 0, done.stderr

    def seen(tenant: str) -> set[str] | None:
        answer = lora_service.get("/v1/models", headers=keys_of[tenant])
        return {model["id"] for model in answer.json()["data"]} if answer.status_code == 200 else None

    wait_for(lambda: seen("acme") == {"demo", "pirate", "shout", "mine"}, 60, "the gateway knows tenant and adapter")
    wait_for(lambda: seen("beta") == {"demo", "pirate", "shout"}, 60, "the gateway knows the other tenant")
    body = {"model": "mine", "messages": [{"role": "user", "content": QUESTIONS[0]}]}
    body |= {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
    own = lora_service.post("/v1/chat/completions", body, headers=keys_of["acme"])
    assert text_of(own) == wanted(offline, "shout", QUESTIONS[:1])[0]
    others = lora_service.post("/v1/chat/completions", body, headers=keys_of["beta"])
    unknown = lora_service.post("/v1/chat/completions", {**body, "model": "none"}, headers=keys_of["beta"])
    assert (others.status_code, unknown.status_code) == (404, 404)
    assert others.text.replace("mine", "none") == unknown.text
    for headers, status in (({}, 401), (keys_of["acme"], 403)):
        for route in ("load", "unload"):
            asked = {"lora_name": "mine", "lora_path": "/x"}
            assert lora_service.post(f"/v1/{route}_lora_adapter", asked, headers=headers).status_code == status


def test_a_signal_to_every_process_of_a_running_service_ends_it_soon(lora_service: Service) -> None:
    end_by_a_signal_to_all(lora_service)


def flush(socket: Path) -> None:
    _command(socket, "FLUSHALL")


def listed(socket: Path) -> set[str]:
    """Names in Redis now."""
    found = _command(socket, "HGETALL", keys.adapters("demo"))
    return {msgspec.msgpack.decode(raw, type=AdapterEntry).name for name, raw in found.items() if name[:1] != b"@"}


def _command(socket: Path, *parts: str) -> Any:
    async def send() -> Any:
        client = BackgroundClient(f"unix://{socket}")
        try:
            return await client.command(*parts)
        finally:
            await client.close()

    return asyncio.run(send())
