"""Carries out `gleaner report`: it writes the page of a run into a file, or serves the page while the run trains."""

import hmac
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cluster import files
from cluster.errors import WrongInput
from cluster.files import writing
from learner.driver.console import escaped
from learner.tools.report.page import (
    Block,
    Sample,
    Step,
    Words,
    advantage_of,
    blocks_of,
    head_of,
    mismatch_file,
    model_of,
    packed,
    page,
    read_step,
    sampled,
    title_of,
    trained_of,
)
from learner.tools.report.summary import (
    Run,
    begun,
    read_run,
    read_runs,
)

# The server of --live. It listens on 127.0.0.1 only, for browsers of this machine. A key in the address keeps other
# users of the machine out. A request with another Host is refused, so that a web page cannot reach the server through a
# name that resolves to 127.0.0.1 (DNS rebinding).

HEADERS = {
    "Cache-Control": "no-store", "Content-Security-Policy": "frame-ancestors 'none'", "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}  # fmt: skip
PATIENCE_S = 10.0  # seconds for a browser to send a request, and to take the answer
MOST = 64  # most connections at once, each of which has a thread
DIGITS = 18  # most digits of a step's number; int() refuses thousands


class Watched:
    """The report of a run folder that is being written to. Blocks are made when they are asked for; the block of a step
    is made once. Methods may be called from several threads.

    limit: most bytes of packed completions.
    """

    def __init__(self, folder: Path, against: Path | None, limit: int) -> None:
        self._folder, self._against, self._limit = folder, against, limit
        self._words = Words(model_of(read_run(folder)))
        self._steps: dict[tuple[str, int, bool, int | None], Step] = {}
        self._sample, self._lock = Sample(), threading.Lock()

    def page(self) -> Iterator[str]:
        """Returns the page without blocks, which its script requests."""
        return page(title_of(self._runs()), {}, live=True)

    def block(self, name: str) -> Block | None:
        """Returns the present block of that name; None if there is none. Raises WrongInput."""
        with self._lock:
            if name == "head":
                runs = self._runs()
                self._read(runs[0])
                return packed(head_of(runs, self._words))
            if name == "index":
                return packed(self._sample.index)
            if name == "pieces":
                known = self._words.known
                return packed(self._words.pieces(sorted(self._sample.token_ids)) if known else {})
            step = name.removeprefix("step-")
            return self._sample.blocks.get(int(step)) if step.isdecimal() and len(step) <= DIGITS else None

    def _runs(self) -> list[Run]:
        return read_runs(self._folder, self._against)

    def _read(self, run: Run) -> None:
        known, before = self._words.known, self._steps
        advantage, trained = advantage_of(run), trained_of(run)
        self._steps = {}

        def step(file: Path, most: int | None) -> Step:
            # A resumed run writes both files again, and the mismatch is written only after the step.
            mark = (file.name, file.stat().st_mtime_ns, mismatch_file(file).exists(), most)
            made = before.get(mark) or read_step(file, most, advantage=advantage, trained=trained, tokens=known)
            self._steps[mark] = made
            return made

        self._sample = sampled(run.rollouts, step, self._limit)
        run.remarks.extend(self._sample.remarks)


class _Handler(BaseHTTPRequestHandler):
    server: "LiveServer"
    protocol_version = "HTTP/1.1"
    timeout = PATIENCE_S

    def do_GET(self) -> None:
        """Answers with the page, or with one of its blocks."""
        if self.headers.get("Host") not in self.server.hosts:
            return self._answer(HTTPStatus.FORBIDDEN, "this report is served to 127.0.0.1 only\n")
        parts = self.path.split("/")
        if len(parts) != 3 or not hmac.compare_digest(parts[1].encode(), self.server.key.encode()):
            return self._answer(HTTPStatus.NOT_FOUND, "no such page; use the address that gleaner report printed\n")
        watched, name = self.server.watched, parts[2]
        try:
            found = watched.block(name) if name else "".join(watched.page())
        except (OSError, WrongInput) as error:
            return self._answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n")
        if found is None:
            return self._answer(HTTPStatus.NOT_FOUND, "no such part of the report\n")
        return self._answer(HTTPStatus.OK, found, "text/plain" if name else "text/html")

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing: with a line for each request the printed address would scroll away."""

    def _answer(self, status: HTTPStatus, text: str, kind: str = "text/plain") -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in {
            **HEADERS,
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


class LiveServer(ThreadingHTTPServer):
    """A server that listens from its creation on. `serve_forever` answers at most MOST connections at once, and closes
    others. port: 0 for any free port. Raises OSError."""

    daemon_threads = True

    def __init__(self, watched: Watched, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.watched, self.key = watched, secrets.token_urlsafe(16)
        self._places = threading.BoundedSemaphore(MOST)
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers in a new thread; closes the connection if there are MOST already."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers until the connection ends, and gives its place free."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Reports an error, unless a browser only left in the middle of an answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        """The address for a browser on this machine, with the key."""
        return f"http://127.0.0.1:{self.server_port}/{self.key}/"


LOOK_S = 0.5  # seconds between two looks at a run that has no step yet


def report(run: Path, out: Path | None, against: Path | None, limit: int) -> int:
    """Writes the page of the run folder `run` and says where: to `out`, or report.html in that folder.

    against: another run folder to compare with. limit: bytes of packed completions. Returns the exit code: 0, 1 where
    the page cannot be written, 2 where there is nothing to report on.
    """
    target = run / "report.html" if out is None else out
    try:
        title, blocks = blocks_of(run, against, limit)
    except (OSError, WrongInput) as error:
        return _failed(error, 2)
    partial = target.with_name(target.name + ".partial")
    try:
        with writing(partial):
            partial.unlink(missing_ok=True)  # in a folder that others can write to it may be a link, or a FIFO
            with partial.open("x", encoding="utf-8", newline="\n") as file:
                file.writelines(page(title, blocks))
            os.replace(partial, target)
    except OSError as error:
        return _failed(f"--out: {target} cannot be written ({error.strerror}); give another file", 1)
    print(f"report   {escaped(str(target))}")
    return 0


def serve(run: Path, against: Path | None, limit: int, port: int) -> int:
    """Waits until the run has something to show, then serves the page to browsers of this machine until Ctrl-C. port: 0
    for any free port. Returns the exit code: 0, 1 if the port is taken, 2 if there is nothing to report on."""
    try:
        _wait_for_first_step(run)
        watched = Watched(run, against, limit)
    except (OSError, WrongInput) as error:
        return _failed(error, 2)
    except KeyboardInterrupt:
        return 0
    try:
        server = LiveServer(watched, port)
    except (OSError, OverflowError) as error:
        return _failed(f"--port: must be one that is free, got {port}: {error}", 1)
    with server:
        print(f"report   {server.address}   (for this machine only; Ctrl-C ends it, and not the run)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


def _wait_for_first_step(run: Path) -> None:
    """Waits while a run is starting: its folder is locked, and has no step yet. Ctrl-C ends the waiting."""
    if files.is_locked(run) and not begun(run):
        print(f"waiting for the first step of {run}; Ctrl-C ends the waiting, and not the run", flush=True)
        while files.is_locked(run) and not begun(run):
            time.sleep(LOOK_S)


def _failed(error: object, code: int) -> int:
    print(f"error: {escaped(str(error))}", file=sys.stderr)
    return code
