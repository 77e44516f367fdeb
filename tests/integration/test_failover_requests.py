"""What one request, one client or one gateway does to others: nothing. Two groups and two gateways, real processes."""

import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import openai
import psutil
import pytest

from tandem.cluster.fleet.engine_metrics import decode_stats
from tandem.cluster.tenants.billing_record import CLIENT_LOST, BillingRecord
from tests.support.failover import laws
from tests.support.failover.calls import Call
from tests.support.failover.leaving import PROMPT_TOKENS, Points, connected
from tests.support.failover.rank_faults import Fault
from tests.support.failover.scene import HEAL_S, TEST_S, Scene, failover_scene
from tests.support.mixed_requests import PROMPTS
from tests.support.plain_http import plain_http
from tests.support.records import group_records, group_reports
from tests.support.service import BIN, REPOSITORY, is_alive, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(TEST_S)]
TOKEN = 241
"""A token that nobody else sends or is told."""
GREEDY = {"model": "demo", "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
GATEWAY = "ray::ServeReplica:tandem:tandem-gateway"


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with failover_scene(tmp_path_factory.mktemp("root"), "--api-server-count", "2") as running:
        yield running


def streams(scene: Scene, count: int, max_tokens: int = 200) -> list[Call]:
    """So many streams of mixed prompts."""
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(count)]
    bodies = [{**GREEDY, "prompt": prompt, "max_tokens": max_tokens} for prompt in prompts]
    return [Call(scene.service, "/v1/completions", body) for body in bodies]


def server_errors(scene: Scene) -> int:
    return errors_shown(scene)[1]


def errors_shown(scene: Scene) -> tuple[int, int]:
    """The pid of the gateway that answers, and the server errors of all gateways that it knows of."""
    with plain_http.stream("GET", scene.service.url + "/metrics", timeout=30) as answer:
        gateway = gateway_at(scene, answer.extensions["network_stream"].get_extra_info("client_addr")[1])
        lines = answer.read().decode().splitlines()
    return gateway.pid, sum(
        round(float(line.rpartition(" ")[2]))
        for line in lines
        if line.startswith("tandem:http_requests_total{") and 'status="5' in line and "readyz" not in line
    )


def wait_until_all_show(scene: Scene, errors: int) -> None:
    """Until each gateway shows so many server errors: what one counts, the other shows a moment later."""
    shown: dict[int, int] = {}

    def by_all() -> bool:
        shown.update([errors_shown(scene)])
        return len(shown) == 2 and set(shown.values()) == {errors}

    wait_for(by_all, HEAL_S, f"each gateway shows {errors} errors: {shown}")


def gateway_at(scene: Scene, port: int) -> psutil.Process:
    """The gateway to which a connection from this port leads."""
    for gateway in scene.service.titled(GATEWAY):
        with suppress(psutil.NoSuchProcess):
            if any(c.raddr and c.raddr.port == port for c in gateway.net_connections("tcp")):
                return gateway
    raise AssertionError("no gateway has this connection")


# ---- one row ----


@pytest.mark.parametrize("fault", ["nan", "out of memory"])
def test_a_fault_of_one_row_is_that_rows_alone(scene: Scene, fault: Fault) -> None:
    """FT-10: the group stays, and what runs beside it says what it says alone."""
    scene.wait_until_two_serve()
    undisturbed = [call.result() for call in streams(scene, 4)]
    before = {pid for record in scene.serving() for pid in (record.pid, *scene.ranks(record))}
    known = server_errors(scene)
    beside = streams(scene, 4)
    for call in beside:
        call.wait_for_tokens(1)
    with scene.faults.on_token(TOKEN, fault):
        bad = Call(scene.service, "/v1/completions", {**GREEDY, "prompt": [TOKEN] * 40, "max_tokens": 10}).result()
    assert (bad.status, bad.error["code"]) == (500, "internal_error"), bad.error
    wait_until_all_show(scene, known + 1)
    for call, wanted in zip(beside, undisturbed, strict=True):
        laws.check_tokens(call.result(), wanted, is_exact=True)
    assert {pid for record in scene.serving() for pid in (record.pid, *scene.ranks(record))} == before
    laws.check_ledger(scene.service, [*undisturbed, *beside], frozenset({"length"}))
    laws.check_kv(scene.service)
    laws.check_alive(scene.service, [], scene.known)


# ---- a group that is drained ----


def drained_by_the_page(scene: Scene, group: str, *more: str) -> str:
    """What the command of docs/operations.md says of a group."""
    page = (REPOSITORY / "docs" / "operations.md").read_text()
    (command,) = re.findall(r"^    .venv/bin/(tandem drain GROUP) +#", page, re.M)
    words = [*command.replace("GROUP", group).split()[1:], "--url", scene.service.url, *more]
    done = subprocess.run([BIN / "tandem", *words], capture_output=True, text=True, timeout=HEAL_S)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_a_group_is_drained_by_the_pages_command_and_no_stream_notices(scene: Scene) -> None:
    scene.wait_until_two_serve()
    undisturbed = [call.result() for call in streams(scene, 4)]
    lost, running = scene.service.output.count(" is lost: "), streams(scene, 4)
    for call in running:
        call.wait_for_tokens(1)
    group = scene.serving()[0].group
    assert f"group {group} is drained; groups that serve: " in drained_by_the_page(scene, group)
    assert group not in {record.group for record in scene.serving()}
    for call, wanted in zip(running, undisturbed, strict=True):
        laws.check_tokens(call.result(), wanted, is_exact=True)
    assert scene.service.output.count(" is lost: ") == lost, "it left as planned"
    laws.check_ledger(scene.service, [*undisturbed, *running], frozenset({"length"}))


@pytest.mark.chaos
def test_groups_are_drained_one_right_after_the_other_and_what_runs_waits_for_the_next(scene: Scene) -> None:
    scene.wait_until_two_serve()
    undisturbed = [call.result() for call in streams(scene, 4)]
    running, groups = streams(scene, 4), [record.group for record in scene.serving()]
    for call in running:
        call.wait_for_tokens(1)
    drained_by_the_page(scene, groups[0], "--no-wait")
    wait_for(lambda: len(scene.serving()) == 1, HEAL_S, "the first one is seen to drain")
    assert "no other group serves: requests are held" in drained_by_the_page(scene, groups[1], "--timeout", "100")
    late = streams(scene, 1)[0]
    for call, wanted in zip([*running, late], [*undisturbed, undisturbed[0]], strict=True):
        laws.check_tokens(call.result(), wanted, is_exact=True)
    scene.wait_until_two_serve()
    laws.check_ledger(scene.service, [*undisturbed, *running, late], frozenset({"length"}))
    laws.check_kv(scene.service)


# ---- a query of death ----


def poison(phase: str, salt: int) -> dict[str, Any]:
    """A prompt that has the token, or one to which the model answers it. salt: what was convicted stays refused."""
    if phase == "prefill":
        return {"prompt": [428, 422, TOKEN, salt], "max_tokens": 10}
    return {"prompt": [428, 422, 260, salt], "max_tokens": 10, "logit_bias": {str(TOKEN): 100}}


def play_poison(scene: Scene, phase: str, num_others: int, max_tokens: int) -> None:
    """FT-09: a client that asks again and again, among others that must not notice."""
    scene.wait_until_two_serve()
    undisturbed = [call.result() for call in streams(scene, num_others, max_tokens)]
    assert not any(TOKEN in said.token_ids for call in undisturbed for said in call.choices.values())
    said, known = len(scene.service.output), server_errors(scene)
    others = streams(scene, num_others, max_tokens)
    for call in others:
        call.wait_for_tokens(1)
    asked = {"model": "demo", "temperature": 0, **poison(phase, 300 + num_others)}
    with (
        scene.faults.on_token(TOKEN, "kill"),
        openai.OpenAI(base_url=scene.service.url + "/v1", api_key="none", max_retries=5, timeout=HEAL_S) as client,
    ):
        for _ in range(2):
            with pytest.raises(openai.InternalServerError) as refused:
                client.completions.create(**asked)
            assert (refused.value.status_code, refused.value.code) == (500, "request_poisoned")
            assert refused.value.response.headers["x-should-retry"] == "false"
    wait_until_all_show(scene, known + 2)  # nobody has asked again by itself
    for call, wanted in zip(others, undisturbed, strict=True):
        laws.check_tokens(call.result(), wanted, is_exact=True)
    scene.wait_until_two_serve()
    lost = [line for line in scene.service.output[said:].splitlines() if " is lost: " in line]
    assert 1 <= len(lost) <= 2, lost
    laws.check_ledger(scene.service, others, frozenset({"length"}))
    laws.check_kv(scene.service)
    laws.check_alive(scene.service, [], scene.known)


@pytest.mark.chaos
def test_a_query_of_death_ends_two_groups_and_no_other_request(scene: Scene) -> None:
    play_poison(scene, "decode", 7, 300)


@pytest.mark.chaos
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_query_of_death_among_63_others(scene: Scene, phase: str) -> None:
    play_poison(scene, phase, 63, 200)


# ---- clients that leave ----


@pytest.mark.parametrize(
    ("point", "changes"),
    [
        ("queued", {"stream": True}),
        ("tokenizing", {"stream": True}),
        ("adapter_load", {"stream": False}),
        ("prompt", {"stream": True, "n": 4}),
        pytest.param("prompt", {"stream": False}, marks=pytest.mark.chaos),
        ("decoding", {"stream": True}),
        ("decoding", {"stream": False, "n": 4}),
        ("swapped", {"stream": True}),
        ("migrating", {"stream": True}),
        pytest.param("migrating", {"stream": False, "n": 4}, marks=pytest.mark.chaos),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(f"{k}={v}" for k, v in value.items()),
)
def test_a_client_that_leaves_leaves_nothing(scene: Scene, point: str, changes: dict[str, Any]) -> None:
    """CN-01: its blocks, adapters and places in queues are free, its row is in the ledger, and it was no error."""
    scene.wait_until_two_serve()
    body = {**GREEDY, "max_tokens": 800, "prompt": [7 + i % 200 for i in range(PROMPT_TOKENS)], **changes}
    if point == "tokenizing":
        body["prompt"] = "Once upon a time " * 400
    if point == "adapter_load":
        body["model"] = scene.fresh_adapter()
    if point == "swapped":  # more than there is room for, once they have grown
        body |= {"prompt": [[11 + (i * (7 + j) + j) % 200 for i in range(700)] for j in range(8)], "max_tokens": 100}
    points, errors, began_s = Points(scene), server_errors(scene), time.time()

    def new_rows() -> list[BillingRecord]:
        """Those of requests that ended since; a row may come late."""
        ids = {call.id for call in points.fillers}
        return [row for row in laws.bills(scene.service) if row.time_s > began_s and row.id not in ids]

    wait = getattr(points, point)()
    with connected(scene.service, "/v1/completions", body):
        wait()
    if point == "queued":
        wait_for(
            lambda: sum(r.waiting for r in group_records(scene.service)) <= points.num_waiting,
            HEAL_S,
            "it waits no more",
        )
    scene.faults.release()
    for call in points.fillers:
        assert call.result().is_ok
    print(f"{point}: all is free {laws.check_kv(scene.service):.2f} s after what was held was let go")
    if point == "tokenizing":
        assert new_rows() == [], "it was never accepted"
    else:
        wait_for(new_rows, HEAL_S, "its row")
        assert [row.terminal for row in new_rows()] == ["abort"], new_rows()
    assert server_errors(scene) == errors
    scene.wait_until_two_serve()
    laws.check_alive(scene.service, [], scene.known)


@pytest.mark.chaos
def test_how_soon_all_is_free_when_clients_leave(scene: Scene) -> None:
    """CN-01: printed, for a busy machine says more of itself than of the service."""
    scene.wait_until_two_serve()
    laws.check_kv(scene.service)
    waits_s = []
    for number in range(100):
        body = {**GREEDY, "max_tokens": 1000, "prompt": PROMPTS[0], "n": 4, "stream": number % 2 == 0}
        with connected(scene.service, "/v1/completions", body):
            wait_for(lambda: any(r.kv_used for r in group_records(scene.service)), HEAL_S, "it has blocks", 0.01)
        left_s = time.monotonic()
        wait_for(lambda: not any(r.kv_used for r in group_records(scene.service)), HEAL_S, "its blocks are free", 0.01)
        waits_s.append(time.monotonic() - left_s)
    waits_s.sort()
    print(f"blocks are free after {waits_s[50]:.3f} s (p50), {waits_s[98]:.3f} s (p99)")
    laws.check_kv(scene.service)
    laws.check_alive(scene.service, [], scene.known)


# ---- a gateway ----


def held_streams(scene: Scene) -> list[Call]:
    """Streams that run in both groups, which are held, so that none ends. A group that was slow for a moment is avoided
    for another: then once more."""

    def is_decided(calls: list[Call]) -> bool:
        running = [record.running for record in group_records(scene.service)]
        in_one = sum(running) == len(calls) and 0 in running
        return len(scene.held()) == 2 or in_one or any(call.is_over for call in calls)

    for _ in range(5):
        calls = streams(scene, 8, 600)
        for call in calls:
            call.wait_for_tokens(1)
        scene.faults.hold_any_step()
        wait_for(lambda calls=calls: is_decided(calls), HEAL_S, "held, or over")  # type: ignore[misc]
        if len(scene.held()) == 2 and not any(call.is_over for call in calls):
            return calls
        scene.faults.release()
        for call in calls:
            call.result()
    raise AssertionError("five times, all streams ran in one group")


def test_a_gateway_that_dies_leaves_no_orphan_and_no_clean_end(scene: Scene) -> None:
    """FT-05: its clients see a broken transfer, its requests end in their groups, each has a row."""
    scene.wait_until_two_serve()
    calls = held_streams(scene)
    aborted = sum_aborted(scene)
    victim = gateway_at(scene, calls[0].port)
    cut = [call for call in calls if gateway_at(scene, call.port).pid == victim.pid]
    victim.kill()
    killed_s = time.monotonic()
    scene.faults.release()
    for call in cut:
        call.result()
        assert call.error is not None and not call.ended and not call.is_ok
    wait_for(lambda: sum_aborted(scene) == aborted + len(cut), HEAL_S, "its requests are aborted", 0.02)
    print(f"{len(cut)} orphans are aborted {time.monotonic() - killed_s:.2f} s after their gateway's death")
    for call in calls:
        assert call in cut or call.result().is_ok
    ids = {call.id for call in cut}
    wait_for(lambda: len(lost_rows(scene, ids)) == len(cut), HEAL_S, "a row for each")
    assert set(lost_rows(scene, ids)) == {(CLIENT_LOST, 0)}
    wait_for(lambda: len([p for p in scene.service.titled(GATEWAY) if is_alive(p)]) == 2, HEAL_S, "another gateway")
    laws.check_kv(scene.service)
    laws.check_alive(scene.service, [], scene.known)


def sum_aborted(scene: Scene) -> int:
    found = [decode_stats(record) for record in group_reports(scene.service)]
    return sum(stats.finished["abort"] for stats in found if stats is not None)


def lost_rows(scene: Scene, ids: set[str]) -> list[tuple[str | None, int]]:
    """Terminal state and tokens of these rows."""
    return [(row.terminal, row.completion_tokens) for row in laws.bills(scene.service) if row.id in ids]
