"""A collector that keeps the spans that it is sent over OTLP, by HTTP or gRPC, in threads of this process."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class Received(NamedTuple):
    """A span, ids in hex. begin_s, end_s: wall clock. error: its words, None where it has not failed."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    begin_s: float
    end_s: float
    attributes: dict[str, Any]
    resource: dict[str, Any]
    error: str | None
    is_server: bool


class Receiver:
    """The spans so far."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self._has_news = threading.Condition()

    def take(self, asked: Any) -> Any:
        """Keeps what is in an ExportTraceServiceRequest; returns the answer."""
        with self._has_news:
            for of_resource in asked.resource_spans:
                resource = values(of_resource.resource.attributes)
                for scope in of_resource.scope_spans:
                    self.spans += [received(span, resource) for span in scope.spans]
            self._has_news.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for(self, count: int, request_id: str, timeout_s: float = 60.0) -> list[Received]:
        """The spans of the traces that this request has, once there are so many."""

        def found() -> list[Received]:
            ids = {span.trace_id for span in self.spans if span.attributes.get("gen_ai.request.id") == request_id}
            return [span for span in self.spans if span.trace_id in ids]

        with self._has_news:
            assert self._has_news.wait_for(lambda: len(found()) >= count, timeout_s), self.spans
            return found()


def values(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


def received(span: Any, resource: dict[str, Any]) -> Received:
    return Received(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        begin_s=span.start_time_unix_nano / 1e9,
        end_s=span.end_time_unix_nano / 1e9,
        attributes=values(span.attributes),
        resource=resource,
        error=span.status.message if span.status.code == 2 else None,
        is_server=span.kind == 2,
    )


@contextmanager
def over_http() -> Iterator[tuple[Receiver, str]]:
    """A receiver, and its endpoint."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            answer = receiver.take(trace_service_pb2.ExportTraceServiceRequest.FromString(body)).SerializeToString()
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield receiver, f"http://127.0.0.1:{server.server_port}/v1/traces"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def over_grpc() -> Iterator[tuple[Receiver, str]]:
    """The same over gRPC."""
    receiver = Receiver()

    class Service(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            del context
            return receiver.take(request)

    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield receiver, f"http://127.0.0.1:{port}"
        finally:
            server.stop(None).wait()
