"""S3 on loopback, as much of its REST protocol as reading objects takes: HEAD, ranged GET, a listing. One thread each.

Objects are a dict of "bucket/key". Requests must be signed with KEY (the signature itself is not computed). `cut`: GETs
of these end their connection in the middle, as a failing network does.
"""

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

KEY, SECRET = "tandem-test-key", "tandem-test-secret"
SIGNED = re.compile(rf"AWS4-HMAC-SHA256 Credential={KEY}/")
ERROR = "<?xml version='1.0'?><Error><Code>{}</Code><Message>{}</Message></Error>"
LISTING = (
    "<?xml version='1.0'?><ListBucketResult xmlns='http://s3.amazonaws.com/doc/2006-03-01/'>"
    "<Name>{}</Name><KeyCount>{}</KeyCount><IsTruncated>false</IsTruncated>{}</ListBucketResult>"
)
CONTENT = (
    "<Contents><Key>{}</Key><Size>{}</Size><ETag>&quot;1&quot;</ETag>"
    "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
)


class ObjectStore:
    """What the server holds. requests: "GET bucket/key" and so on, as they came."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.cut: set[str] = set()
        self.requests: list[str] = []
        self.url = ""

    @property
    def environment(self) -> dict[str, str]:
        """What a client finds it by."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
        }


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """A server on a free port of 127.0.0.1; it ends with the block."""
    store = ObjectStore()
    server = ThreadingHTTPServer(("127.0.0.1", 0), lambda *given: _Handler(store, *given))
    server.daemon_threads = True
    store.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, store: ObjectStore, *given: Any) -> None:
        self._store = store
        super().__init__(*given)

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        name, query = unquote(parts.path).strip("/"), parse_qs(parts.query)
        self._store.requests.append(f"{self.command} {name}")
        if not SIGNED.match(self.headers.get("Authorization", "")):
            self._send(403, ERROR.format("AccessDenied", "Access Denied").encode())
        elif "list-type" in query:
            self._send(200, self._listing(name, query.get("prefix", [""])[0]))
        elif (data := self._store.objects.get(name)) is None:
            self._send(404, ERROR.format("NoSuchKey", "The specified key does not exist.").encode())
        else:
            self._send_object(name, data)

    def _listing(self, bucket: str, prefix: str) -> bytes:
        keys = {name.partition("/")[2]: len(data) for name, data in self._store.objects.items()}
        found = [CONTENT.format(key, size) for key, size in sorted(keys.items()) if key.startswith(prefix)]
        return LISTING.format(bucket, len(found), "".join(found)).encode()

    def _send_object(self, name: str, data: bytes) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted is None:
            self._send(200, data, cuts=name in self._store.cut)
            return
        first, last = int(wanted[1]), min(int(wanted[2] or len(data)), len(data) - 1)
        where = {"Content-Range": f"bytes {first}-{last}/{len(data)}"}
        self._send(206, data[first : last + 1], where, cuts=name in self._store.cut)

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] = {}, cuts: bool = False) -> None:
        self.send_response(status)
        fixed = {"ETag": '"1"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT", "Accept-Ranges": "bytes"}
        for name, value in {**fixed, **headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: len(body) // 2] if cuts else body)
            self.close_connection = cuts
