"""`gleaner report`: the page of a run, into a file, or served while it trains."""

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

# The report while a run trains: served to browsers of this machine, behind a key in the address.
#
# Only 127.0.0.1 is listened on. The key keeps other users of the machine out; a request whose Host is another name is
# refused, so that a page of the web cannot reach it through a name that it points here (DNS rebinding).

HEADERS = {
    "Cache-Control": "no-store", "Content-Security-Policy": "frame-ancestors 'none'", "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}  # fmt: skip
PATIENCE_S = 10.0  # for a browser to say what it wants, and to take it
MOST = 64  # connections at once: each has a thread
DIGITS = 18  # of a step, at most; int() refuses thousands


class Watched:
    """A run folder that is being written to: blocks are made when they are asked for, a step's only once.

    Methods may be called from several threads.
    """

    def __init__(self, folder: Path, against: Path | None, limit: int) -> None:
        self._folder, self._against, self._limit = folder, against, limit
        self._words = Words(model_of(read_run(folder)))
        self._steps: dict[tuple[str, int, bool, int | None], Step] = {}
        self._sample, self._lock = Sample(), threading.Lock()

    def page(self) -> Iterator[str]:
        """Without blocks, which its script asks for."""
        return page(title_of(self._runs()), {}, live=True)

    def block(self, name: str) -> Block | None:
        """The block of that name as things are now; None if there is none. Raises WrongInput."""
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
            # A resumed run writes both again, and the mismatch is there only once the step was trained.
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
        """The page, or one of its blocks."""
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
        """Nothing: a line for each request would bury the address."""

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
    """Listens as soon as it is made; `serve_forever` answers, at most MOST connections at once, and closes others. port
    0: any that is free. Raises OSError."""

    daemon_threads = True

    def __init__(self, watched: Watched, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.watched, self.key = watched, secrets.token_urlsafe(16)
        self._places = threading.BoundedSemaphore(MOST)
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own, where there is a place for one."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """To the connection's end."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that leaves in the middle of an answer is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        """For a browser on this machine."""
        return f"http://127.0.0.1:{self.server_port}/{self.key}/"


LOOK_S = 0.5  # between two looks at a run that has no step yet


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
            partial.unlink(missing_ok=True)  # in a folder of others it may be a link, or a FIFO
            with partial.open("x", encoding="utf-8", newline="\n") as file:
                file.writelines(page(title, blocks))
            os.replace(partial, target)
    except OSError as error:
        return _failed(f"--out: {target} cannot be written ({error.strerror}); give another file", 1)
    print(f"report   {escaped(str(target))}")
    return 0


def serve(run: Path, against: Path | None, limit: int, port: int) -> int:
    """Serves the page to browsers of this machine until Ctrl-C, once the run has something to show. port: 0 for any
    that is free. Exit codes as above; 1 where the port is taken."""
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
    """Of a run that is starting: its folder is locked, and nothing else is there yet. Ctrl-C ends the waiting."""
    if files.is_locked(run) and not begun(run):
        print(f"waiting for the first step of {run}; Ctrl-C ends the waiting, and not the run", flush=True)
        while files.is_locked(run) and not begun(run):
            time.sleep(LOOK_S)


def _failed(error: object, code: int) -> int:
    print(f"error: {escaped(str(error))}", file=sys.stderr)
    return code
