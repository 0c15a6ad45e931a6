"""A hub on loopback: as much of its HTTP as an upload of small files asks for."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeHub(ThreadingHTTPServer):
    """Attributes: asked: method and path of each request. created: what was said of new repositories. files: path of
    each that was committed. status: of the answer to a login."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[str] = []
        self.created: list[dict[str, Any]] = []
        self.files: list[str] = []
        self.status = 200

    @property
    def address(self) -> str:
        """Of the hub."""
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Serves until the end of the block."""
    with FakeHub() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_HEAD(self) -> None:  # of a file, asked for at a revision that there is not
        self.send_response(404)
        self.send_header("X-Error-Code", "RevisionNotFound")
        self.end_headers()

    def do_GET(self) -> None:
        self._answer({"name": "owner", "type": "user"}, self.server.status)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("/repos/create"):
            self.server.created.append(json.loads(body))
            self._answer({"url": f"{self.server.address}/owner/name"})
        elif self.path.endswith("/preupload/main"):
            files = [{"path": one["path"], "uploadMode": "regular"} for one in json.loads(body)["files"]]
            self._answer({"files": [{**one, "shouldIgnore": False} for one in files]})
        elif self.path.endswith("/commit/main"):
            lines = [json.loads(line) for line in body.splitlines()]
            self.server.files += [line["value"]["path"] for line in lines if line["key"] == "file"]
            self._answer({"commitUrl": f"{self.server.address}/owner/name/commit/0", "commitOid": "0" * 40})
        else:
            self._answer({"errors": [], "warnings": []})

    def _answer(self, content: dict[str, Any], status: int = 200) -> None:
        self.server.asked.append(f"{self.command} {self.path}")
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...
