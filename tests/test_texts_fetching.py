"""Fetching, against a server on this machine that resumes, drops connections and lies."""

from __future__ import annotations

import hashlib
import http.server
import socket
import threading

import pytest

from kernjax.base.errors import UserError
from kernjax.texts import Mirror, Source, fetch_all

DATA = bytes(range(256)) * 800  # 204,800 bytes


class Server:
    """Serves DATA under any path but /missing; `plan` says what goes wrong, request by request."""

    def __init__(self) -> None:
        self.plan: list[str] = []
        self.ranges: list[str | None] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self)

            def log_message(self, *args) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        asked = handler.headers.get("Range")
        self.ranges.append(asked)
        step = self.plan.pop(0) if self.plan else "well"
        if handler.path == "/missing":
            handler.send_error(404)
            return
        if step.isdigit():
            handler.send_error(int(step))
            return
        data = DATA if step != "lie" else DATA[::-1]
        start = 0
        if asked and step != "no ranges":
            start = int(asked.removeprefix("bytes=").rstrip("-"))
            if start >= len(data):
                handler.send_error(416)
                return
            handler.send_response(206)
            shown = start if step != "other range" else start + 1
            handler.send_header("Content-Range", f"bytes {shown}-{len(data) - 1}/{len(data)}")
        else:
            handler.send_response(200)
        handler.send_header("Content-Length", str(len(data) - start))
        handler.end_headers()
        rest = data[start:]
        handler.wfile.write(rest if step != "drop" else rest[: len(rest) // 2])
        handler.wfile.flush()
        if step == "drop":
            handler.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def source(self, path: str = "file", *, sized: bool = True) -> Source:
        port = self._server.server_address[1]
        return Source(
            f"http://127.0.0.1:{port}/{path}",
            hashlib.sha256(DATA).hexdigest(),
            f"o/r/1/{path}",
            size=len(DATA) if sized else None,
        )


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    server = Server()
    yield server
    server.close()


class Meter:
    def __init__(self) -> None:
        self.total = 0

    def __call__(self, count: int) -> None:
        self.total += count


def fetch(server, tmp_path, *, source=None, mirror=None):
    """Fetches one source; checks that the progress ends at the file's size and nothing is left."""
    meter = Meter()
    source = source or server.source()
    (fetched,) = fetch_all([source], tmp_path, mirror, meter, pause_s=0)
    assert fetched.path == tmp_path / source.key and fetched.path.read_bytes() == DATA
    assert meter.total == fetched.size == len(DATA)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [fetched.path]
    return fetched


@pytest.mark.parametrize("sized", [True, False])
def test_a_file_arrives_whole_and_is_not_fetched_twice(server, tmp_path, sized):
    source = server.source(sized=sized)
    assert fetch(server, tmp_path, source=source).how == "network"
    assert fetch(server, tmp_path, source=source).how == "present"
    assert server.ranges == [None]


@pytest.mark.parametrize("sized", [True, False])
def test_dropped_connections_are_resumed_where_they_stopped(server, tmp_path, sized):
    server.plan = ["drop", "drop"]
    fetch(server, tmp_path, source=server.source(sized=sized))
    half = len(DATA) // 2
    assert server.ranges == [None, f"bytes={half}-", f"bytes={half + half // 2}-"]


def test_a_later_run_resumes_an_earlier_one(server, tmp_path):
    part = tmp_path / "o/r/1/file.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(DATA[:1000])
    fetch(server, tmp_path)
    assert server.ranges == ["bytes=1000-"]


@pytest.mark.parametrize("length", [len(DATA), len(DATA) + 5])
def test_a_part_that_is_complete_or_too_long(server, tmp_path, length):
    part = tmp_path / "o/r/1/file.part"
    part.parent.mkdir(parents=True)
    part.write_bytes((DATA + b"extra")[:length])
    fetch(server, tmp_path)
    assert server.ranges == ([] if length == len(DATA) else [f"bytes={length}-", None])


@pytest.mark.parametrize(
    ("plan", "requests"),
    [
        (["no ranges"], 1),  # the server sends all of it again
        (["other range"], 2),  # it resumes somewhere else
        (["well"], 2),  # the part is not this file's start: the hash tells
    ],
)
def test_what_cannot_be_resumed_starts_over(server, tmp_path, plan, requests):
    part = tmp_path / "o/r/1/file.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"z" * 1000)
    server.plan = plan
    fetch(server, tmp_path)
    assert server.ranges == ["bytes=1000-", None][:requests]


def test_a_busy_server_is_asked_again(server, tmp_path):
    server.plan = ["503", "429"]
    fetch(server, tmp_path)
    assert len(server.ranges) == 3


def failure(server, tmp_path, source=None) -> str:
    meter = Meter()
    with pytest.raises(UserError) as caught:
        fetch_all([source or server.source()], tmp_path, None, meter, pause_s=0)
    assert not (tmp_path / "o/r/1/file").exists()
    assert meter.total == 0
    return str(caught.value)


def test_wrong_bytes_are_thrown_away(server, tmp_path):
    server.plan = ["lie"]
    message = failure(server, tmp_path)
    assert "its sha256 is" in message and f"Expected {hashlib.sha256(DATA).hexdigest()}" in message
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]
    assert len(server.ranges) == 1


def test_a_missing_file_is_not_asked_for_again(server, tmp_path):
    message = failure(server, tmp_path, server.source("missing"))
    assert "HTTP 404" in message and "--mirror=DIR" in message
    assert len(server.ranges) == 1


def test_a_server_that_always_drops_keeps_what_came(server, tmp_path):
    server.plan = ["drop"] * 10
    message = failure(server, tmp_path)
    assert "the connection ended after" in message and "resumes it" in message
    part = tmp_path / "o/r/1/file.part"
    assert DATA.startswith(part.read_bytes()) and len(part.read_bytes()) > len(DATA) // 2
    server.plan = []
    fetch(server, tmp_path)


def test_nobody_listens(server, tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}/file"
        source = Source(address, "0" * 64, "o/r/1/file", size=3)
        assert "refused" in failure(server, tmp_path, source)


@pytest.mark.parametrize("address", ["file:///etc/hostname", "ftp://h/x", "x"])
def test_only_web_addresses_are_read(server, tmp_path, address):
    assert "is no address" in failure(server, tmp_path, Source(address, "0" * 64, "o/r/1/file"))


def test_a_mirror_needs_no_network(server, tmp_path):
    (tmp_path / "mirror").mkdir()
    (tmp_path / "mirror" / "anything").write_bytes(DATA)
    cache = tmp_path / "cache"
    assert fetch(server, cache, mirror=Mirror(tmp_path / "mirror")).how == "mirror"
    assert server.ranges == []


def test_files_before_the_failure_stay(server, tmp_path):
    sources = [server.source("a"), server.source("missing"), server.source("c")]
    seen = []
    with pytest.raises(UserError, match="missing could not be fetched"):
        fetch_all(sources, tmp_path, on_file=seen.append, pause_s=0)
    assert [fetched.source for fetched in seen] == sources[:1]
    assert (tmp_path / "o/r/1/a").read_bytes() == DATA
    assert not (tmp_path / "o/r/1/c").exists()
