"""`ray up configs/cluster/aws.yaml` against moto's EC2, whose instances are machines of a lab, to its end."""

from tests.launch.instances import Instances
from tests.launch.machines import Machine
from tests.launch.page import blocks
from tests.launch.play_local import DEPLOY_S, DOWN_S, KEY, UP_S, check_stream
from tests.launch.record import Record, check
from tests.launch.wheels import environment, wheel_folder
from tools.lab import Lab

NEEDS = ("sshd", "ssh", "ssh-keygen", "rsync", "curl", "openssl", "venv")
REQUIREMENTS = ("moto[server,ec2,iam,ssm]>=5.1,<6", "awscli>=1.44,<2")
CLOUD, REGION = "192.0.2.5", "us-west-2"
URL = f"http://{CLOUD}:5000"
FILES = {
    "config": f"[default]\nregion = {REGION}\nendpoint_url = {URL}\n",
    "credentials": "[default]\naws_access_key_id = an-id\naws_secret_access_key = a-secret\n",
}
"""Of ~/.aws: of who launches, and of every instance, in place of a role's credentials."""


def play(record: Record) -> None:
    """LaunchError where something is not as the page says."""
    wheels = wheel_folder()
    place = environment("aws", REQUIREMENTS)
    _, roles, files, up, ask, down = blocks("Amazon EC2", KEY)
    with Lab("you", "cloud") as lab:
        cloud = Machine(lab.nodes["cloud"], "cloud", [CLOUD], wheels)
        server = [str(place / "bin" / "moto_server"), "-H", CLOUD, "-p", "5000"]
        cloud.start(server, {"MOTO_IAM_LOAD_MANAGED_POLICIES": "true"}, log="moto.log")
        you = Machine(lab.nodes["you"], "you", ["192.0.2.2"], wheels)
        you.write_files(".aws", FILES)
        record.wait_for(lambda: _answers(you), 60, "moto serves")
        with Instances(lab, cloud.node, URL, REGION, FILES, wheels, record) as instances:
            you.shell(record, f"export PATH=$PATH:{place}/bin\n{roles}")
            you.shell(record, files)
            you.shell(record, up, UP_S)
            types = sorted(one["InstanceType"] for one in instances.alive())
            check(types == ["g6.12xlarge", "m6i.2xlarge"], f"a head and the node that it launched, not {types}")
            check_stream(you.shell(record, f"{ask}\nkill $!", DEPLOY_S))
            you.shell(record, down, DOWN_S)
            record.wait_for(lambda: not instances.alive(), DOWN_S, "EC2 has no instance that runs")


def _answers(you: Machine) -> bool:
    return you.start(["curl", "-fsS", "-o", "/dev/null", f"{URL}/moto-api/"]).wait() == 0
