"""When the private Redis has started: when it takes commands, not when it has a socket."""

import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import redis

from tandem.cluster.process import redis_server
from tandem.cluster.process.redis_server import RedisServer
from tandem.configs.environment import short_temp_folder
from tandem.configs.errors import SettingsError

LOADING = """#!{python}
import re, socket, sys
config = open(sys.argv[1]).read()
path = re.search("^unixsocket (.*)$", config, re.M)[1]
server = socket.socket(socket.AF_UNIX)
server.bind(path)
server.listen()
pings = 0
while True:
    client, _ = server.accept()
    may_ask = "requirepass" not in config
    with client, client.makefile("rb") as lines:
        for line in lines:
            if line == b"AUTH secret\\r\\n":
                may_ask = True
                client.sendall(b"+OK\\r\\n")
            elif not may_ask:
                client.sendall(b"-NOAUTH Authentication required.\\r\\n")
            else:
                pings += 1
                open(path + ".pings", "w").write(str(pings))
                client.sendall(b"+PONG\\r\\n" if pings > 2 else b"-LOADING the dataset\\r\\n")
"""


@pytest.mark.parametrize("listen", [None, ("127.0.0.1", 1, "secret")], ids=["socket", "password"])
def test_a_server_that_reads_what_an_earlier_one_left_has_not_started(
    listen: tuple[str, int, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(tempfile.mkdtemp(prefix="tr-", dir=short_temp_folder()))
    binary = folder / "loading"
    binary.write_text(LOADING.format(python=sys.executable))
    binary.chmod(binary.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(redis_server, "find_binary", lambda: str(binary))
    server = RedisServer(folder / "redis", listen=listen)
    try:
        server.start()
        assert Path(f"{server.socket_path}.pings").read_text() == "3"
    finally:
        server.stop()
        shutil.rmtree(folder)


def test_data_in_a_folder_of_its_own_outlives_the_server_and_is_one_servers(tmp_path: Path) -> None:
    data = tmp_path / 'kept "here"'
    folders = [Path(tempfile.mkdtemp(prefix="tr-", dir=short_temp_folder())) for _ in range(3)]
    script = "import sys; from pathlib import Path; from tandem.cluster.process.redis_server import RedisServer; "
    script += "server = RedisServer(Path(sys.argv[1]), data=Path(sys.argv[2])); server.start(); "
    script += "print(server.url, flush=True); sys.stdin.read(); server.stop()"

    def started(folder: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", script, str(folder), str(data)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    try:
        with started(folders[0]) as first:
            assert first.stdout is not None
            url = first.stdout.readline().strip()
            redis.Redis.from_url(url).set("kept", "1")
            with pytest.raises(SettingsError, match="another service has its data in") as error:
                RedisServer(folders[1], data=data).start()
            assert error.value.flag == "--state-dir"
            first.communicate()
        with started(folders[2]) as second:
            assert second.stdout is not None
            assert redis.Redis.from_url(second.stdout.readline().strip()).get("kept") == b"1"
            second.communicate()
        assert (data / "lock").stat().st_mode & 0o77 == 0 and data.stat().st_mode & 0o77 == 0
    finally:
        for folder in folders:
            shutil.rmtree(folder)
