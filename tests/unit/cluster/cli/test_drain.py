"""`tandem drain` and POST /admin/drain, on a gateway over a fake backend: what is asked, said and refused."""

from typing import Any

import pytest

from tandem.cluster.cli.client.endpoint import EndpointError, NotThere
from tandem.cluster.cli.live import drain as drain_verb
from tandem.cluster.gateway.generation.dispatch import DrainingGroup, DrainState
from tandem.configs.errors import SettingsError
from tandem.configs.schema import GatewaySettings
from tests.support.fake_backend import FakeBackend
from tests.unit.cluster.cli.test_talking import problem, service, tandem
from tests.unit.gateway.rig import error_of, gateway

KEYS = GatewaySettings(api_keys=("sk-one",), admin_keys=("sk-admin",))


def state(*groups: str, others: int = 1, **more: Any) -> DrainState:
    shown = [DrainingGroup(id=group, state="draining", running=2, waiting=0) for group in groups]
    return DrainState(kind="group", id="g1", groups=shown, other_groups=others, timeout_s=5.0, **more)


class Course(dict[str, DrainState]):
    """What a backend says of a drain, one state after the other; then there is no such group."""

    def __init__(self, *states: DrainState) -> None:
        self.states = list(states)

    def get(self, target: str, default: Any = None) -> Any:  # type: ignore[override]
        return self.states.pop(0) if target == "g1" and self.states else None


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain_verb, "LOOK_S", 0.0)


async def test_a_drain_is_followed_to_its_end_and_each_change_is_said_once() -> None:
    backend = FakeBackend(drain_states=Course(state("g1"), state("g1"), state(others=1)))
    async with service(backend) as (_, url):
        done = await tandem("drain", "g1", "--url", url, "--timeout", "5")
    assert (done.exit_code, done.stdout) == (0, "group g1 is drained; groups that serve: 1\n")
    assert done.stderr == "tandem: group g1 draining, running 2, waiting 0\n"
    assert backend.drained == [("g1", 5.0)] * 3


async def test_a_group_that_is_gone_has_ended_and_the_only_one_is_named() -> None:
    async with service(FakeBackend(drain_states=Course(state("g1", others=0)))) as (_, url):
        done = await tandem("drain", "g1", "--url", url)
    assert done.exit_code == 0 and "is drained" in done.stdout
    assert "no other group serves: requests are held until the next one has loaded" in done.stderr


async def test_without_waiting_the_order_is_all() -> None:
    backend = FakeBackend(drain_states=Course(state("g1"), state()))
    async with service(backend) as (_, url):
        done = await tandem("drain", "g1", "--url", url, "--no-wait")
        assert (done.exit_code, done.stdout) == (0, "") and backend.drained == [("g1", None)]
        assert "answered 404: There is no g2" in problem(await tandem("drain", "g2", "--url", url))
    assert isinstance((await tandem("drain", "g1", "--timeout", "-1")).exception, SettingsError)


class Answers:
    """An Endpoint with answers of its own."""

    url = "http://x"

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)

    def post(self, route: str, body: Any) -> bytes:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return bytes(answer)


NODE = b'{"kind":"node","id":"n","groups":[],"other_groups":1,"timeout_s":5,"gateways":1}'


def test_what_takes_too_long_is_a_status_of_its_own_and_an_answer_that_fails_is_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    times = iter([0.0, 1.0, 2.0, 99.0])
    failing: Any = Answers(NODE, EndpointError("down"), NODE)
    slow = drain_verb.DrainWatch(failing, "n", 5.0, lambda: next(times), lambda seconds: None)
    assert slow.begin(True) == 1
    said = capsys.readouterr().err.splitlines()
    assert (
        said[:2] == ["tandem: gateways there: 1", "tandem: no answer now: down"] and "not over within 35 s" in said[-1]
    )
    gone: Any = Answers(NODE, NotThere("404"))
    assert drain_verb.DrainWatch(gone, "n", 5.0, lambda: 0.0, lambda seconds: None).begin(True) == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "target"),
        ({"target": ""}, "target"),
        ({"target": 3}, "target"),
        ({"target": "g1", "timeout_s": -1}, "timeout_s"),
        ({"target": "g1", "timeout_s": True}, "timeout_s"),
        ({"target": "g1", "force": True}, "force"),
    ],
)
async def test_bad_bodies_are_refused_by_name(body: dict[str, Any], param: str) -> None:
    async with gateway() as rig:
        refused = await rig.client.post("/admin/drain", json=body)
        assert refused.status_code == 400 and error_of(refused)["param"] == param and not rig.backend.drained


async def test_it_takes_an_admin_key() -> None:
    async with service(FakeBackend(drain_states=Course(state("g1"))), settings=KEYS) as (rig, url):
        for key, words in (("sk-one", "403"), ("sk-none", "does not accept this key")):
            assert words in problem(await tandem("drain", "g1", "--url", url, "--api-key", key))
        assert not rig.backend.drained
        done = await tandem("drain", "g1", "--url", url, "--api-key", "sk-admin")
        assert done.exit_code == 0, done
