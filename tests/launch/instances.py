"""Machines of a lab for the instances that moto's EC2 says there are: what a hypervisor is to EC2."""

import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import boto3
from botocore.exceptions import BotoCoreError

from tests.launch.machines import Machine
from tests.launch.record import Record
from tools.lab import Lab, Node

ALIVE = ("pending", "running")
PERIOD_S = 0.5


class Instances:
    """A context manager. cloud: the node on which moto serves, at `url`. files: what every instance has in the folder
    ~/.aws of its user."""

    def __init__(
        self, lab: Lab, cloud: Node, url: str, region: str, files: Mapping[str, str], wheels: Path, record: Record
    ) -> None:
        self._lab = lab
        self._cloud = cloud
        self._files = files
        self._wheels = wheels
        self._record = record
        self._machines: dict[str, Machine] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow)
        secrets = {"aws_access_key_id": "an-id", "aws_secret_access_key": "a-secret"}
        self._ec2 = boto3.client("ec2", region_name=region, endpoint_url=url, **secrets)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def alive(self) -> list[dict[str, Any]]:
        """The instances that EC2 says there are now."""
        with self._cloud.network():
            found = self._ec2.describe_instances()["Reservations"]
        return [one for group in found for one in group["Instances"] if one["State"]["Name"] in ALIVE]

    def _follow(self) -> None:
        while not self._over.wait(PERIOD_S):
            try:
                wanted = {one["InstanceId"]: one for one in self.alive()}
            except BotoCoreError:
                continue  # moto has not begun to serve
            for name, one in wanted.items():
                if name not in self._machines:
                    self._machines[name] = self._boot(one)
            for name in self._machines.keys() - wanted.keys():
                self._record.say(f"EC2 ends {name}")
                self._machines.pop(name).node.kill()

    def _boot(self, one: Mapping[str, Any]) -> Machine:
        """A machine at the instance's addresses, into which its key pair lets."""
        addresses = [one["PrivateIpAddress"], one["PublicIpAddress"]]
        self._record.say(f"EC2 starts {one['InstanceId']}, {one['InstanceType']}, at {', '.join(addresses)}")
        with self._cloud.network():
            (pair,) = self._ec2.describe_key_pairs(KeyNames=[one["KeyName"]], IncludePublicKey=True)["KeyPairs"]
        machine = Machine(self._lab.add(f"vm{len(self._lab.nodes)}"), "ubuntu", addresses, self._wheels)
        machine.write_files(".aws", self._files)
        machine.start_sshd(pair["PublicKey"])
        return machine
