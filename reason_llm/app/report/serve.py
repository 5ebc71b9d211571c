"""Server of the report of running runs: a page on 127.0.0.1 that polls for new data.

It answers GET for the page, its data and its rollouts, only with its token, which is in the address
that it prints and then in a cookie. So other users of the machine, and sites whose names resolve to
it, get nothing.
"""

import hashlib
import hmac
import secrets
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import orjson

from reason_llm.app.report.page import live_page
from reason_llm.app.report.payload import Examined, blobs, examine, to_value
from reason_llm.app.report.rollouts import StepRollouts, read_step
from reason_llm.app.report.runs import read_runs
from reason_llm.app.report.token_texts import TokenTexts
from reason_llm.errors import ConfigError, ReasonError, one_line, shown

HTML, JSON = "text/html; charset=utf-8", "application/json"
GZIP, TEXT = "application/octet-stream", "text/plain; charset=utf-8"
BEFORE_RECORDS = {"resolved_config.yaml", "environment.json", "start", "buffers", "buffer.json"}
"""Files of a run's folder before its first record."""
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}
WAIT_SECONDS = 0.5
"""Polling interval while a run has not begun."""


def serve(folders: list[Path], port: int, say: Callable[[str], None]) -> None:
    """Wait until all runs have begun, then serve their report until interrupted. ``say`` receives
    the names of runs that are waited for, and the address."""
    for folder in folders:
        if has_not_begun(folder):
            say(f"waiting for {folder} to begin; Ctrl-C ends")
        while has_not_begun(folder):
            time.sleep(WAIT_SECONDS)
    with make_server(folders, port) as server:
        say(f"following on {server.url}")
        server.serve_forever()


def has_not_begun(folder: Path) -> bool:
    """Whether a run may still begin in this folder: there is none, or one without its records."""
    if not folder.exists():
        return True
    if not folder.is_dir() or (folder / "metrics.jsonl").exists():
        return False
    return {path.name for path in folder.glob("[!.]*")} <= BEFORE_RECORDS


def make_server(folders: list[Path], port: int) -> "Server":
    """A server that is bound and not yet answering; raises as ``serve``."""
    live = LiveRuns(folders)
    live.refresh()
    try:
        return Server(("127.0.0.1", port), live)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--port {port} cannot be listened on ({one_line(error)}); leave it out"
        ) from error


class LiveRuns:
    """The current data of the runs, read again when one of their files has changed."""

    def __init__(self, folders: list[Path]) -> None:
        self.folders = folders
        self.version = ""
        self.examined: list[Examined] = []
        self._lock = threading.Lock()
        self._steps: dict[tuple[str, int, int], StepRollouts] = {}

    def refresh(self) -> None:
        """Read the files that have changed; raises as ``read_runs``."""
        with self._lock:
            version = self._signature()
            if version == self.version:
                return
            runs = read_runs(self.folders)
            self.examined = [examine(run, 1 / len(runs), self._read) for run in runs]
            self.version = version

    def _signature(self) -> str:
        digest = hashlib.sha256()
        for folder in self.folders:
            for path in (*sorted(folder.glob("*.json*")), *sorted((folder / "buffers").glob("*"))):
                try:
                    status = path.stat()
                except FileNotFoundError:  # a live run replaces and deletes files
                    continue
                digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
        return digest.hexdigest()[:16]

    def _read(
        self, path: Path, tokens: TokenTexts | None, max_rollouts: int, max_bytes: int
    ) -> StepRollouts:
        """Rollouts of an archive, cached until it changes or exceeds the bounds, which fall with
        every further archive."""
        status = path.stat()
        key = (str(path), status.st_size, status.st_mtime_ns)
        cached = self._steps.get(key)
        if cached is None or (
            len(cached.blob) > max_bytes
            or (
                len(cached.groups) > 1 and sum(len(g.rewards) for g in cached.groups) > max_rollouts
            )
        ):
            self._steps[key] = cached = read_step(path, tokens, max_rollouts, max_bytes)
        return cached


class Server(ThreadingHTTPServer):
    """HTTP server of the live runs."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], live: LiveRuns) -> None:
        self.live = live
        self.token = secrets.token_urlsafe(32)
        super().__init__(address, Handler)

    @property
    def url(self) -> str:
        """The address with its token."""
        return f"http://127.0.0.1:{self.server_port}/?token={self.token}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of clients that went away, such as a closed tab."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """One request."""

    timeout = 10.0
    """Seconds that a client may be silent."""

    server: Server
    _cookie: str | None = None
    """Set for a client with the token in its address."""
    server_version = "reason_llm"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer with the page, its data, or a step's rollouts."""
        port = self.server.server_address[1]
        if self.headers.get("Host") not in (f"127.0.0.1:{port}", f"localhost:{port}"):
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, TEXT, b"ask for 127.0.0.1")
            return
        path, _, query = self.path.partition("?")
        fields = {name: values[0] for name, values in parse_qs(query).items()}
        cookie = f"reason_llm_{port}"  # cookies are those of all ports
        if is_new := self._is_token(fields.get("token", "")):
            self._cookie = f"{cookie}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
        if not (is_new or self._is_token(self._cookies().get(cookie, ""))):
            refusal = b"the token is missing or wrong; open the address that report --serve printed"
            self._answer(HTTPStatus.FORBIDDEN, TEXT, refusal)
            return
        live = self.server.live
        try:
            live.refresh()
        except (ReasonError, OSError) as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, TEXT, shown(error).encode())
            return
        if path == "/":
            self._answer(HTTPStatus.OK, HTML, live_page(live.examined))
        elif path == "/data" and fields.get("after") == live.version:
            self._answer(HTTPStatus.NO_CONTENT, TEXT, b"")
        elif path == "/data":
            value = to_value(live.examined) | {"live": True, "version": live.version}
            self._answer(HTTPStatus.OK, JSON, orjson.dumps(value))
        else:
            by_key = {f"{run} {step}": b for (run, step), b in blobs(live.examined).items()}
            blob = by_key.get(f"{fields.get('run')} {fields.get('step')}")
            if path == "/rollouts" and blob is not None:
                self._answer(HTTPStatus.OK, GZIP, blob)
            else:
                self._answer(HTTPStatus.NOT_FOUND, TEXT, b"there is no such page, run or step")

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(errors="replace"), self.server.token.encode())

    def _cookies(self) -> dict[str, str]:
        pairs = (
            part.partition("=")
            for header in self.headers.get_all("Cookie", [])
            for part in header.split(";")
        )
        return {name.strip(): value.strip() for name, _, value in pairs}

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: the terminal is the user's."""

    def _answer(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        for header, value in HEADERS.items():
            self.send_header(header, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if self._cookie is not None:
            self.send_header("Set-Cookie", self._cookie)
        self.end_headers()
        self.wfile.write(content)
