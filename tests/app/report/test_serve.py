"""What the server of the report answers, to whom, and that it follows the run; and a real one on
127.0.0.1."""

import gzip
import http.client
import io
import socket
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from reason_llm.app.report.serve import Handler, LiveRuns, Server, make_server
from reason_llm.errors import ConfigError
from report_runs import group, record, write_run

PORT = 8000
TOKEN = "t-o_k3n" * 6
COOKIE = f"reason_llm_{PORT}={TOKEN}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    groups = [[group(["1", "2"], [0.0, 1.0])]]
    return write_run(tmp_path / "run", [record(0), record(1)], groups)


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    with make_server([folder], 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Wire:
    """A connection without a port: one request, and what was answered."""

    def __init__(self, request: str) -> None:
        self.request, self.answer = request.encode(), b""

    def settimeout(self, seconds: float) -> None:
        """As of a socket."""

    def makefile(self, *_: object) -> io.BytesIO:
        """The request for the server, then the answer for the client."""
        return io.BytesIO(self.answer or self.request)

    def sendall(self, content: bytes) -> None:
        self.answer += content


@pytest.fixture
def followed(folder: Path) -> LiveRuns:
    return LiveRuns([folder])


def answer_to(
    followed: LiveRuns,
    path: str,
    method: str = "GET",
    host: str = f"127.0.0.1:{PORT}",
    cookie: str = COOKIE,
) -> http.client.HTTPResponse:
    head = f"Host: {host}\r\nCookie: {cookie}" if cookie else f"Host: {host}"
    wire: Any = Wire(f"{method} {path} HTTP/1.1\r\n{head}\r\n\r\n")
    address = ("127.0.0.1", PORT)
    server: Any = SimpleNamespace(live=followed, server_address=address, token=TOKEN)
    Handler(wire, ("127.0.0.1", 1), server)
    answer = http.client.HTTPResponse(wire)
    answer.begin()
    return answer


def ask(followed: LiveRuns, path: str, **given: str) -> tuple[int, bytes]:
    answer = answer_to(followed, path, **given)
    return answer.status, answer.read()


def data(followed: LiveRuns) -> dict[str, Any]:
    status, content = ask(followed, "/data")
    assert status == 200
    value: dict[str, Any] = orjson.loads(content)
    return value


def test_it_answers_with_the_page_its_data_and_rollouts(followed: LiveRuns) -> None:
    status, content = ask(followed, "/")
    assert status == 200
    assert b"connect-src 'self'" in content
    assert b'id="data"' not in content
    found = data(followed)
    assert found["live"] is True
    assert found["runs"][0]["steps"] == [0, 1]
    status, blob = ask(followed, "/rollouts?run=0&step=0")
    assert status == 200
    assert b'"texts":["1","2"]' in gzip.decompress(blob)
    assert ask(followed, "/data?after=" + found["version"]) == (204, b"")


def test_it_reads_again_what_has_changed_and_nothing_else(followed: LiveRuns, folder: Path) -> None:
    before = data(followed)
    kept = followed.examined[0].rollouts.steps[0]
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(orjson.dumps(record(2)) + b"\n")
    after = data(followed)
    assert after["version"] != before["version"]
    assert after["runs"][0]["step"] == 2
    assert followed.examined[0].rollouts.steps[0] is kept


def test_an_archive_is_read_again_where_the_page_may_hold_less(folder: Path) -> None:
    (path,) = (folder / "buffers").iterdir()
    many = LiveRuns([write_run(folder.parent / "many", [record(0)], [
        [group(["1", "2"], [0.0, 1.0])] * 3])])  # fmt: skip
    (other,) = (folder.parent / "many" / "buffers").iterdir()
    kept = many._read(other, None, 6, 1 << 20)
    assert many._read(other, None, 6, len(kept.blob)) is kept
    assert len(many._read(other, None, 5, 1 << 20).groups) == 2
    small = many._read(path, None, 2, 1 << 20)
    assert many._read(path, None, 1, 1 << 20) is small  # a group is not divided
    assert many._read(path, None, 2, len(small.blob) - 1) is not small


def test_a_run_that_cannot_be_read_for_a_while_is_told_of(followed: LiveRuns, folder: Path) -> None:
    content = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(b"nonsense\n")
    status, told = ask(followed, "/data")
    assert status == 503
    assert b"metrics.jsonl:1" in told
    (folder / "metrics.jsonl").write_bytes(content)
    assert data(followed)["runs"][0]["step"] == 1


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "127.0.0.1", "localhost", f"evil.example:{PORT}", f"127.0.0.1:{PORT}0",
     f"127.0.0.1:{PORT - 1}", f"127.0.0.1.evil.example:{PORT}", f"notlocalhost:{PORT}"],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/", "/data", "/rollouts?run=0&step=0"])
def test_a_client_that_addressed_another_name_gets_nothing(
    followed: LiveRuns, host: str, path: str
) -> None:
    assert ask(followed, path, host=host) == (421, b"ask for 127.0.0.1")
    assert ask(followed, path, host=f"localhost:{PORT}")[0] == 200


@pytest.mark.parametrize(
    "cookie",
    ["", "=", ";;", "token", f"reason_llm_{PORT}", f"reason_llm_{PORT}=", f"reason_llm_{PORT}=x",
     f"reason_llm_{PORT}={TOKEN}x", f"reason_llm_{PORT}={TOKEN[:-1]}", f"other={TOKEN}",
     f"reason_llm_{PORT - 1}={TOKEN}", f"reason_llm_{PORT}=\u00e9", 9000 * '"'],
)  # fmt: skip
@pytest.mark.parametrize(
    "path",
    ["/", "/data", "/rollouts?run=0&step=0", "/none", "/?token=", "/?token=x", "/?token=%FF%F0",
     f"/?token={TOKEN}x", f"/?Token={TOKEN}", f"/data?token={TOKEN[1:]}", "/#token"],
)  # fmt: skip
def test_without_its_token_nothing_is_told(
    folder: Path, followed: LiveRuns, path: str, cookie: str
) -> None:
    (folder / "metrics.jsonl").write_bytes(b"nonsense\n")  # which would be told of, if it were read
    answer = answer_to(followed, path, cookie=cookie)
    assert answer.status == 403
    assert answer.read().startswith(b"the token is missing or wrong; open the address")
    assert answer.getheader("Set-Cookie") is None


def test_the_token_in_the_address_is_kept_as_a_cookie(followed: LiveRuns) -> None:
    for path in ("/", "/data"):
        answer = answer_to(followed, f"{path}?token={TOKEN}", cookie=f"reason_llm_{PORT}=old")
        assert answer.status == 200
        assert answer.getheader("Set-Cookie") == (
            f"reason_llm_{PORT}={TOKEN}; HttpOnly; SameSite=Strict; Path=/"
        )
        again = answer_to(followed, path, cookie=f"a=b; reason_llm_{PORT}={TOKEN} ;c")
        assert (again.status, again.getheader("Set-Cookie")) == (200, None)


def test_every_server_has_a_token_of_its_own(folder: Path) -> None:
    urls = set()
    for _ in range(2):
        with make_server([folder], 0) as server:
            urls.add(server.url.partition("?token=")[2])
            assert server.url.startswith(f"http://127.0.0.1:{server.server_port}/?token=")
    assert len(urls) == 2 and min(map(len, urls)) >= 43  # 256 bits


def test_there_is_nothing_else(followed: LiveRuns) -> None:
    for path in (
        "/metrics.jsonl",
        "/../setup.py",
        "/rollouts",
        "/rollouts?run=0&step=9",
        "/rollouts?run=x&step=0",
        "//etc/passwd",
    ):
        assert ask(followed, path)[0] == 404, path
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(followed, "/", method=method)[0] == 501


@pytest.mark.long
def test_the_terminal_stays_the_user_s(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    head = f"Host: 127.0.0.1:{server.server_port}\r\n"
    head += f"Cookie: reason_llm_{server.server_port}={server.token}\r\n\r\n"
    request = f"GET /data HTTP/1.1\r\n{head}".encode()
    for _ in range(5):  # a tab that is closed while it loads: what is sent is answered by a reset
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=300) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(request)
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=300) as client:
        client.sendall(request.replace(b"/data", b"http://["))
        assert client.recv(100).startswith(b"HTTP/1.0 404")
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=300) as client:
        client.sendall(request)
        assert client.recv(100).startswith(b"HTTP/1.0 200")
    assert server.server_address[0] == "127.0.0.1"
    assert capfd.readouterr() == ("", "")


@pytest.mark.long
def test_a_browser_opens_the_address_and_then_needs_no_token(server: Server) -> None:
    jar = urllib.request.HTTPCookieProcessor()
    browser = urllib.request.build_opener(jar)
    data = f"http://127.0.0.1:{server.server_port}/data"
    with pytest.raises(urllib.error.HTTPError, match="403"):
        browser.open(data, timeout=300)
    with browser.open(server.url, timeout=300) as page, browser.open(data, timeout=300) as found:
        assert b"<title>" in page.read()
        assert orjson.loads(found.read())["live"] is True
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(data, timeout=300)


@pytest.mark.long
def test_a_port_that_is_taken_is_named(server: Server, folder: Path) -> None:
    with pytest.raises(ConfigError, match=f"--port {server.server_port} cannot be listened on"):
        make_server([folder], server.server_port)
