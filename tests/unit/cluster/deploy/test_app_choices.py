"""What `serve run` decides from the nodes there are: device, loopback or not."""

from typing import Any

import pytest

from tandem.cluster.deploy.nodes import (
    choose_home,
    cluster_device,
    gateways_for,
    memory_note,
    on_cluster,
)
from tandem.cluster.group.engine_opener import loading_note, with_own_step_log
from tandem.cluster.wire.serve_proxy import check_open
from tandem.cluster.wire.service_facts import check_home
from tandem.configs.bundled import DEMO_MODEL
from tandem.configs.errors import SettingsError
from tandem.configs.load import build_settings, settings_from_serve_args
from tandem.workers.engine.executor import ExecutorReady


def node(name: str, **resources: float) -> dict[str, Any]:
    return {"NodeID": name, "Resources": resources}


HEAD, WITH_GPU = node("a", CPU=8), node("b", CPU=8, GPU=4)


def test_the_device_is_as_asked_even_before_its_nodes_are_there() -> None:
    assert cluster_device("cuda", []) == "cuda"
    assert cluster_device("cpu", [4.0]) == "cpu"


def test_the_device_not_asked_for_is_what_the_cluster_has_now(caplog: pytest.LogCaptureFixture) -> None:
    assert cluster_device(None, [4.0]) == "cuda"
    assert cluster_device(None, []) == "cpu"
    assert "no node has a GPU now" in caplog.text


def test_a_cluster_has_a_home_only_where_it_is_said_to_stay_one_node() -> None:
    assert choose_home(True, [HEAD]) == "a"
    assert choose_home(None, [HEAD]) is None and choose_home(False, [HEAD, WITH_GPU]) is None


def test_sizes_of_steps_follow_the_memory_of_the_clusters_gpus_not_of_the_machine_that_starts_it() -> None:
    asked: list[str] = []

    def memory(node_id: str) -> int | None:
        asked.append(node_id)
        return 80 * 2**30

    engine = on_cluster(build_settings("demo", {}), [HEAD, WITH_GPU], memory).engine
    assert (engine.device.device, engine.scheduler.max_num_seqs, asked) == ("cuda", 256, ["b"])
    engine = on_cluster(build_settings("demo", {"device": "cuda"}), [HEAD], memory).engine
    assert (engine.device.device, engine.scheduler.max_num_seqs, asked) == ("cuda", 64, ["b"]), "none is there yet"
    assert on_cluster(build_settings("demo", {}), [HEAD], memory).engine.device.device == "cpu"


def test_groups_that_the_nodes_do_not_hold_wait_for_more() -> None:
    settings = on_cluster(build_settings(str(DEMO_MODEL), {"device": "cpu", "kv_cache_memory_bytes": 2**30}), [HEAD])
    nodes = [node(name, CPU=1, memory=2**29) for name in "abc"]
    assert memory_note(settings, nodes) is None
    line = memory_note(settings, nodes[:2])
    assert line is not None and line.startswith("the 2 nodes that are here now are too small, and groups wait for more")
    assert "--kv-cache-memory-bytes" in line


def test_a_single_node_that_cannot_be_is_refused() -> None:
    with pytest.raises(SettingsError, match="2 nodes") as refused:
        choose_home(True, [HEAD, WITH_GPU])
    assert refused.value.flag == "single_node"


def test_a_process_away_from_home_says_what_to_set() -> None:
    check_home("a", "a")
    with pytest.raises(SettingsError, match=r"placed on node b.*`single_node: true`"):
        check_home("a", "b")


def test_nodes_have_several_gateways_unless_args_say() -> None:
    assert [gateways_for(nodes) for nodes in (1, 2, 8, 9, 64)] == [2, 2, 2, 3, 16]
    assert gateways_for(1, stays_alone=True) == 1
    args: dict[str, Any] = {"model_loading_config": {"model_id": "demo"}}
    assert settings_from_serve_args(args, 3).gateway.num_gateways == 3
    for section in ("gateway_config", "engine_kwargs"):
        for name in ("api_server_count", "api-server-count"):
            if (section, name) != ("gateway_config", "api-server-count"):
                assert settings_from_serve_args({**args, section: {name: 1}}, 3).gateway.num_gateways == 1


@pytest.mark.parametrize(("size", "words"), [(3 * 2**20, "3.0 MiB"), (5 * 2**29, "2.5 GiB")])
def test_a_group_says_what_loading_took(size: int, words: str) -> None:
    ready = ExecutorReady(
        num_blocks=1,
        pipeline_parallel_size=1,
        device="cpu",
        dtype="float32",
        threads=1,
        weight_bytes=size,
        block_bytes=1,
        load_s=1.26,
    )
    assert loading_note(ready) == f"{words} of weights loaded in 1.3 s"


def test_groups_do_not_share_a_step_log() -> None:
    engine = build_settings("m", {"step_log": "/logs/steps.jsonl"}).engine
    logs = [with_own_step_log(engine, group).step_log for group in ("a1", "b2")]
    assert logs == ["/logs/steps-a1.jsonl", "/logs/steps-b2.jsonl"]
    assert with_own_step_log(build_settings("m", {}).engine, "a1").step_log is None


@pytest.mark.parametrize("host", [None, "127.0.0.1", "localhost", "::1"])
def test_an_open_service_is_behind_a_proxy_on_loopback(host: str | None) -> None:
    check_open("open", host)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "::"])
def test_an_open_service_behind_a_public_proxy_is_refused(host: str) -> None:
    for auth in (None, "required"):
        check_open(auth, host)
    with pytest.raises(SettingsError, match=f"loopback only.* host {host}") as caught:
        check_open("open", host)
    assert caught.value.flag == "auth"
