"""A recording in a bucket: the same objects, through TensorStore's Google Cloud Storage driver.

The bucket is a small server on this machine that answers the five requests the driver makes
(get, put, conditional put, list, delete), strongly consistent as the real one is.
"""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
import urllib.parse

import pytest
from recording_rows import record, tree

CHILD = """
import sys
sys.path.insert(0, {tests!r})
from recording_rows import make_manifest, make_rows, make_segments, record
from kernjax.base.errors import UserError
from kernjax.recording import RecordingWriter, load_recording
url, segments = "gs://my-bucket/runs/r", make_segments()
writer = RecordingWriter.create(url, make_manifest(), segments)
writer.write(2, make_rows(segments[2]))
try:
    load_recording(url)
except UserError as error:
    print(error)
writer = RecordingWriter.open_or_create(url, make_manifest(), segments)
print(writer.missing())
for index in writer.missing():
    writer.write(index, make_rows(segments[index]))
print(writer.finish())
print(load_recording(url).identity)
writer = RecordingWriter.open_or_create(url, make_manifest(), segments, overwrite=True)
for index in writer.missing():
    writer.write(index, make_rows(segments[index], seed=1))
print(load_recording(url).identity)
writer.finish()
print(load_recording(url).identity)
"""


class Bucket(http.server.ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Requests)
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.generation = 0
        self.lock = threading.Lock()


class Requests(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Bucket

    def do_GET(self) -> None:
        name, query = self.parse()
        if name is not None:
            found = self.server.objects.get(name)
            self.answer(404) if found is None else self.answer(200, found[0], found[1])
            return
        start, end = query.get("startOffset", ""), query.get("endOffset", "\uffff")
        items = [
            self.metadata(name)
            for name in sorted(self.server.objects)
            if name >= start and (name < end or not end)
        ]
        self.answer(200, json.dumps({"items": items}).encode())

    def do_POST(self) -> None:
        _, query = self.parse()
        body = self.rfile.read(int(self.headers["content-length"]))
        name = query["name"]
        with self.server.lock:
            now = self.server.objects.get(name, (b"", 0))[1]
            if "ifGenerationMatch" in query and int(query["ifGenerationMatch"]) != now:
                return self.answer(412)
            self.server.generation += 1
            self.server.objects[name] = (body, self.server.generation)
        self.answer(200, json.dumps(self.metadata(name)).encode())

    def do_DELETE(self) -> None:
        name, _ = self.parse()
        with self.server.lock:
            known = self.server.objects.pop(name or "", None) is not None
        self.answer(204 if known else 404)

    def parse(self) -> tuple[str | None, dict[str, str]]:
        url = urllib.parse.urlsplit(self.path)
        _, _, name = url.path.partition("/b/my-bucket/o/")
        return urllib.parse.unquote(name) or None, dict(urllib.parse.parse_qsl(url.query))

    def metadata(self, name: str) -> dict[str, str]:
        value, generation = self.server.objects[name]
        return {"name": name, "size": str(len(value)), "generation": str(generation)}

    def answer(self, status: int, body: bytes = b"", generation: int | None = None) -> None:
        self.send_response(status)
        if generation is not None:
            self.send_header("x-goog-generation", str(generation))
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Quiet: pytest shows what fails."""


@pytest.fixture
def bucket():
    server = Bucket()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_recording_in_a_bucket(bucket, tmp_path):
    address = f"127.0.0.1:{bucket.server_port}"
    environment = {
        **os.environ,
        "TENSORSTORE_GCS_HTTP_URL": f"http://{address}",
        # No machine's credentials are looked for: this bucket is public.
        "GCE_METADATA_ROOT": address,
        "HOME": str(tmp_path),
        "CLOUDSDK_CONFIG": str(tmp_path),
    }
    environment.pop("GOOGLE_APPLICATION_CREDENTIALS", None)
    code = CHILD.format(tests=os.path.dirname(__file__))
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    incomplete, missing, finished, first, during, second = done.stdout.strip().splitlines()
    assert "3 of 4 segments are missing (prose-0, code-1, code-3)" in incomplete
    assert missing == "[0, 1, 3]"
    assert finished == first == during != second
    record(tmp_path / "local", seed=1)
    stored = {name.removeprefix("runs/r/"): value for name, (value, _) in bucket.objects.items()}
    for name, value in stored.items():
        assert (tmp_path / "local" / name).read_bytes() == value, name
    assert stored.keys() == tree(tmp_path / "local").keys()
