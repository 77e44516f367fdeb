"""The report of `tandem doctor --cluster`: a table of nodes, what does not fit, what is good to know."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from tandem.cluster.cli.base.terminal import table
from tandem.configs.errors import SettingsError
from tandem.configs.limits import PORT_RANGE, Ports, parse_ports
from tandem.configs.schema import ModelSettings

if TYPE_CHECKING:
    from tandem.cluster.deploy.cluster_misfits import NodeReport

GIB, MIB = 2**30, 2**20
COLUMNS = ("node", "address", "Python", "torch", "Ray", "tandem", "devices", "cores", "memory", "/dev/shm", "files")


def report_cluster(address: str | None, model: str | None, port_range: str | None, *, as_json: bool) -> bool:
    """Asks all nodes of a running Ray and prints what they say; returns whether all of it fits. address: None for that
    of RAY_ADDRESS, or of this machine. SettingsError when no Ray answers, or there is no such model."""
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        ports = parse_ports(port_range)
    except ValueError as error:
        raise SettingsError(f"{port_range}: not FIRST-LAST, with 1024 <= FIRST <= LAST <= 65535", PORT_RANGE) from error
    from tandem.cluster.deploy.cluster_misfits import cluster_misfits, cluster_notes
    from tandem.workers.planning.model_source import pin_model

    pinned = None if model is None else pin_model(ModelSettings(model=model))
    is_local = pinned is not None and pinned.revision is None
    nodes, open_ray, lost = _asked(address, ports, pinned)
    problems = [*open_ray, *cluster_misfits(nodes, ports, model_is_local=is_local)]
    notes = [*lost, *cluster_notes(nodes, model_is_local=is_local)]
    if as_json:
        found = {"fits": not problems, "nodes": list(map(asdict, nodes)), "misfits": problems, "notes": notes}
        typer.echo(json.dumps(found, indent=1))
    else:
        _print(nodes, problems, notes, with_model=model is not None)
    return not problems


def node_row(node: "NodeReport") -> list[str]:
    """The cells of one node, for a table."""
    facts = node.facts
    if facts is None:
        return [node.name, node.address, "does not answer", *[""] * (len(COLUMNS) - 3)]
    return [
        node.name + (" (head)" if node.is_head else ""),
        node.address,
        facts.python,
        facts.torch or "none",
        facts.ray or "none",
        facts.tandem,
        f"{facts.gpus} GPU" if facts.gpus else "CPU",
        str(facts.cores),
        f"{facts.memory_bytes / GIB:.1f} GiB",
        "none" if facts.shm_bytes is None else f"{facts.shm_bytes / MIB:,.0f} MiB",
        "no limit" if node.open_files is None else str(node.open_files),
    ]


def _asked(address: str, ports: Ports, pinned: ModelSettings | None) -> "tuple[list[NodeReport], list[str], list[str]]":
    """Returns what the nodes of the Ray at an address say, a sentence if that Ray asks nobody for a token, and one for
    each node that it has lost."""
    from tandem.cluster.service import ray_node

    ray_node.prepare_environment(None)
    ray_node.load()
    import ray

    from tandem.cluster.deploy.cluster_misfits import lost_nodes
    from tandem.cluster.deploy.node_probe import ask_nodes

    ray_node.join(address, may_be_open=True)
    try:
        return ask_nodes(ports, pinned), ray_node.openness(address), lost_nodes(ray.nodes())
    finally:
        ray_node.shut_down()


def _print(nodes: "Sequence[NodeReport]", problems: Sequence[str], notes: Sequence[str], *, with_model: bool) -> None:
    head, rows = list(COLUMNS), [node_row(node) for node in nodes]
    if with_model:
        head.append("model")
        words = {True: "there", False: "not there", None: ""}
        rows = [[*row, words[node.has_model]] for row, node in zip(rows, nodes, strict=True)]
    for line in table([head, *rows], num_names=len(head)):
        typer.echo(line.rstrip())
    fits = "\nAll of this fits together, and every node reaches every other one"
    typer.echo("\nDoes not fit together" if problems else fits)
    for problem in problems:
        typer.echo(f"  - {problem}")
    if notes:
        typer.echo("\nGood to know")
        for note in notes:
            typer.echo(f"  - {note}")
