"""Server of the report of running runs: a page on 127.0.0.1 that polls for new data.

It answers GET for the page, its data and its rollouts, and nothing else, and only to a client that
addressed it by its own name: another site whose name resolves to this machine gets nothing.
"""

import hashlib
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from reason_llm.app.report.page import as_json, live_page
from reason_llm.app.report.payload import Examined, blobs, examine, to_value
from reason_llm.app.report.rollouts import StepRollouts, read_step
from reason_llm.app.report.runs import read_runs
from reason_llm.app.report.token_texts import TokenTexts
from reason_llm.errors import ConfigError, ReasonError, one_line, shown

HTML, JSON, GZIP, TEXT = (
    "text/html; charset=utf-8", "application/json", "application/octet-stream",
    "text/plain; charset=utf-8",
)  # fmt: skip


def serve(
    folders: list[Path],
    port: int,
    ready: Callable[[str], None],
    waits: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Serve the report of the runs until interrupted, once all of them have begun.

    Args:
        port: 0 for a free one.
        ready: is given the address once it answers.
        waits: is given a folder whose run has not begun yet.

    Raises:
        ReasonError: a folder is no run, or the port is taken.
    """
    for folder in folders:
        if has_not_begun(folder):
            waits(folder)
        while has_not_begun(folder):
            time.sleep(WAIT_SECONDS)
    with make_server(folders, port) as server:
        ready(f"http://127.0.0.1:{server.server_port}/")
        server.serve_forever()


def has_not_begun(folder: Path) -> bool:
    """Whether a run may still begin in this folder: there is none, or one without its records."""
    if not folder.exists():
        return True
    if not folder.is_dir() or (folder / "metrics.jsonl").exists():
        return False
    return {each.name for each in folder.glob("[!.]*")} <= BEFORE_RECORDS


def make_server(folders: list[Path], port: int) -> "Server":
    """A server that is bound and not yet answering; raises as ``serve``."""
    followed = Followed(folders)
    followed.refresh()
    try:
        server = Server(("127.0.0.1", port), followed)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--port {port} cannot be listened on ({one_line(error)}); leave it out"
        ) from error
    return server


BEFORE_RECORDS = {
    *("resolved_config.yaml", "environment.json", "start", "buffers", "buffer.json"),
    "conditioning.json",
}
"""In a run's folder before its first record."""
WAIT_SECONDS = 0.5
"""Between two looks for a run that has not begun."""


class Followed:
    """The current data of the runs, read again when one of their files has changed."""

    def __init__(self, folders: list[Path]) -> None:
        self.folders = folders
        self.version = ""
        self.examined: list[Examined] = []
        self._lock = threading.Lock()
        self._steps: dict[tuple[str, int, int], StepRollouts] = {}

    def refresh(self) -> None:
        """Read the files that have changed.

        Raises:
            ReasonError: as ``read_runs``.
        """
        with self._lock:
            version = self._signature()
            if version == self.version:
                return
            runs = read_runs(self.folders)
            self.examined = [examine(run, 1 / len(runs), self._read) for run in runs]
            self.version = version

    def _signature(self) -> str:
        found = hashlib.sha256()
        for folder in self.folders:
            for path in (*sorted(folder.glob("*.json*")), *sorted((folder / "buffers").glob("*"))):
                try:
                    status = path.stat()
                except FileNotFoundError:  # a run replaces and deletes while it goes on
                    continue
                found.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
        return found.hexdigest()[:16]

    def _read(
        self, path: Path, tokens: TokenTexts | None, most_rollouts: int, most_bytes: int
    ) -> StepRollouts:
        """Rollouts of an archive, read again only if it has changed or exceeds the bounds, which
        fall with every further archive."""
        status = path.stat()
        key = (str(path), status.st_size, status.st_mtime_ns)
        known = self._steps.get(key)
        if known is not None and len(known.blob) <= most_bytes:
            held = sum(len(group.rewards) for group in known.groups)
            if held <= most_rollouts or len(known.groups) == 1:
                return known
        self._steps[key] = read_step(path, tokens, most_rollouts, most_bytes)
        return self._steps[key]


class Server(ThreadingHTTPServer):
    """HTTP server of the followed runs, with at most ``MOST_CONNECTIONS`` at once of at most
    ``LONGEST_SECONDS`` each."""

    MOST_CONNECTIONS = 32
    LONGEST_SECONDS = 60.0
    daemon_threads = True

    def __init__(self, address: tuple[str, int], followed: Followed) -> None:
        self.followed = followed
        self._free = threading.BoundedSemaphore(self.MOST_CONNECTIONS)
        super().__init__(address, Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle the request in its own thread, or refuse it."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle the request for at most ``LONGEST_SECONDS``, however slow the client is."""
        timer = threading.Timer(self.LONGEST_SECONDS, _cut, (request,))
        timer.daemon = True
        timer.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            timer.cancel()
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of clients that went away, such as a closed tab."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def _cut(request: Any) -> None:
    with suppress(OSError):  # it is closed already
        request.shutdown(socket.SHUT_RDWR)


class Handler(BaseHTTPRequestHandler):
    """One request."""

    timeout = 10.0
    """Seconds that a client may be silent."""

    server: Server
    server_version = "reason_llm"
    sys_version = ""

    def do_GET(self) -> None:
        """The page, its data, or a step's rollouts."""
        if not self._is_addressed_by_name():
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, TEXT, b"ask for 127.0.0.1")
            return
        path, _, query = self.path.partition("?")
        asked = {name: values[0] for name, values in parse_qs(query).items()}
        try:
            self.server.followed.refresh()
        except (ReasonError, OSError) as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, TEXT, shown(error).encode())
            return
        if path == "/":
            self._answer(HTTPStatus.OK, HTML, live_page(self.server.followed.examined))
        elif path == "/data":
            self._data(asked.get("after"))
        elif path == "/rollouts":
            self._rollouts(asked)
        else:
            self._answer(HTTPStatus.NOT_FOUND, TEXT, b"there is /, /data and /rollouts")

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: the terminal is the user's."""

    def _is_addressed_by_name(self) -> bool:
        port = self.server.server_address[1]
        return self.headers.get("Host") in (f"127.0.0.1:{port}", f"localhost:{port}")

    def _data(self, after: str | None) -> None:
        version = self.server.followed.version
        if after == version:
            self._answer(HTTPStatus.NO_CONTENT, TEXT, b"")
            return
        value = to_value(self.server.followed.examined) | {"live": True, "version": version}
        self._answer(HTTPStatus.OK, JSON, as_json(value))

    def _rollouts(self, asked: dict[str, str]) -> None:
        found = blobs(self.server.followed.examined)
        try:
            blob = found[int(asked["run"]), int(asked["step"])]
        except (KeyError, ValueError):
            self._answer(HTTPStatus.NOT_FOUND, TEXT, b"there is no such run and step")
            return
        self._answer(HTTPStatus.OK, GZIP, blob)

    def _answer(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Content-Security-Policy", "frame-ancestors 'none'")
        self.end_headers()
        self.wfile.write(content)
