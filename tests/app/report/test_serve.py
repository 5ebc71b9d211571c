"""A real server on 127.0.0.1: what it answers, to whom, and that it follows the run."""

import gzip
import http.client
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from reason_llm.app.report.serve import Server, make_server
from reason_llm.errors import ConfigError
from report_runs import group, record, write_run

pytestmark = pytest.mark.long  # a port, and time


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


def ask(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=300)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def data(server: Server) -> dict[str, Any]:
    status, content = ask(server, "/data")
    assert status == 200
    value: dict[str, Any] = orjson.loads(content)
    return value


def test_it_answers_with_the_page_its_data_and_rollouts(server: Server) -> None:
    status, content = ask(server, "/")
    assert status == 200
    assert b"connect-src 'self'" in content
    assert b'id="data"' not in content
    found = data(server)
    assert found["live"] is True
    assert found["runs"][0]["steps"] == [0, 1]
    status, blob = ask(server, "/rollouts?run=0&step=0")
    assert status == 200
    assert b'"texts":["1","2"]' in gzip.decompress(blob)
    assert ask(server, "/data?after=" + found["version"]) == (204, b"")


def test_it_reads_again_what_has_changed_and_nothing_else(server: Server, folder: Path) -> None:
    before = data(server)
    kept = server.followed.examined[0].rollouts.steps[0]
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(orjson.dumps(record(2)) + b"\n")
    after = data(server)
    assert after["version"] != before["version"]
    assert after["runs"][0]["step"] == 2
    assert server.followed.examined[0].rollouts.steps[0] is kept


def test_a_run_that_cannot_be_read_for_a_while_is_told_of(server: Server, folder: Path) -> None:
    content = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(b"nonsense\n")
    status, told = ask(server, "/data")
    assert status == 503
    assert b"metrics.jsonl:1" in told
    (folder / "metrics.jsonl").write_bytes(content)
    assert data(server)["runs"][0]["step"] == 1


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "evil.example:80", ""])
def test_a_client_that_addressed_another_name_gets_nothing(server: Server, host: str) -> None:
    status, content = ask(server, "/data", Host=host)
    assert status == 421
    assert b"runs" not in content


def test_there_is_nothing_else(server: Server) -> None:
    for path in (
        "/metrics.jsonl",
        "/../setup.py",
        "/rollouts",
        "/rollouts?run=0&step=9",
        "/rollouts?run=x&step=0",
        "//etc/passwd",
    ):
        assert ask(server, path)[0] == 404, path
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(server, "/", method)[0] == 501
    assert server.server_address[0] == "127.0.0.1"


def test_the_terminal_stays_the_user_s(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    request = f"GET /data HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n".encode()
    for _ in range(5):  # a tab that is closed while it loads: what is sent is answered by a reset
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=300) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(request)
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=300) as client:
        client.sendall(request.replace(b"/data", b"http://["))
        assert client.recv(100).startswith(b"HTTP/1.0 404")
    assert data(server)["live"] is True
    assert capfd.readouterr() == ("", "")


def test_a_port_that_is_taken_is_named(server: Server, folder: Path) -> None:
    with pytest.raises(ConfigError, match=f"--port {server.server_port} cannot be listened on"):
        make_server([folder], server.server_port)
