"""An OpenTelemetry collector for tests: a server that takes spans by OTLP over HTTP."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.timing import until


class Collector:
    """A collector in a thread of this process. `spans` has what arrived, in OTLP's messages."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        collector = self
        self.spans: list[Any] = []
        self.services: set[str] = set()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                given = ExportTraceServiceRequest.FromString(body)
                for resource in given.resource_spans:
                    named = {one.key: one.value.string_value for one in resource.resource.attributes}
                    collector.services.add(named["service.name"])
                    for scope in resource.scope_spans:
                        collector.spans.extend(scope.spans)
                self.send_response(200 if self.path == "/v1/traces" else 404)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]

    def wait(self, reached: Callable[[], bool]) -> None:
        """Wait until spans have arrived."""
        until(reached, lambda: [span.name for span in self.spans])

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
