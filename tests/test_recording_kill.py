"""A recording that is killed at any moment: nothing lost beyond a segment, nothing wrongly whole.

Twice over: every step of writing is broken off once, in this process, deterministically; and a real
process is ended with SIGKILL at random moments until it gets through.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
from recording_rows import make_manifest, make_rows, make_segments, record, tree

from kernjax.base.errors import UserError
from kernjax.recording import RecordingWriter, load_recording
from kernjax.recording.layout import Layout
from kernjax.recording.storage import Store

SEGMENTS = make_segments(3)


class Killed(BaseException):
    """Stands for the end of the process: nothing may catch it and go on."""


class Breaker:
    """Ends the process before (or, for a deletion, halfway through) the n-th change of the disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = -1
        delete = Store.delete

        def halfway(store, prefix):
            if self.step():
                for key in store.keys(prefix)[::2]:
                    delete(store, key)
                raise Killed
            delete(store, prefix)

        monkeypatch.setattr(Store, "delete", halfway)
        for owner, name in ((Store, "write"), (Store, "write_new"), (Layout, "pad")):
            monkeypatch.setattr(owner, name, self.before(getattr(owner, name)))

    def before(self, function):
        def broken(*args):
            if self.step():
                raise Killed
            return function(*args)

        return broken

    def step(self) -> bool:
        self.left -= 1
        return self.left == -1


def run(path, seed=0, **kwargs):
    writer = RecordingWriter.open_or_create(path, make_manifest(), SEGMENTS, **kwargs)
    for index in writer.missing():
        writer.write(index, make_rows(SEGMENTS[index], seed))
    writer.finish()


def test_broken_off_at_every_step(tmp_path, monkeypatch):
    record(tmp_path / "whole", count=3)
    whole = tree(tmp_path / "whole")
    breaker = Breaker(monkeypatch)
    for step in range(1000):
        path = tmp_path / str(step)
        breaker.left = step
        try:
            run(path)
            break
        except Killed:
            pass
        try:
            # Whole only once complete.json is there: then it may be used as it is.
            load_recording(path)
            assert (path / "complete.json").exists()
            with pytest.raises(UserError, match="already complete"):
                run(path)
        except UserError:
            assert not (path / "complete.json").exists()
            run(path)
        assert tree(path) == whole
    assert step >= 1 + 3 * 3 + 2, "manifest, three writes a segment, complete.json, markers"
    assert tree(tmp_path / str(step)) == whole


def test_overwriting_broken_off_at_every_step(tmp_path, monkeypatch):
    record(tmp_path / "old", count=3)
    record(tmp_path / "new", count=3, seed=1)
    old, new = (load_recording(tmp_path / name).identity for name in ("old", "new"))
    whole = tree(tmp_path / "new")
    breaker = Breaker(monkeypatch)
    seen = []
    for step in range(1000):
        path = tmp_path / str(step)
        shutil.copytree(tmp_path / "old", path)
        breaker.left = step
        try:
            run(path, seed=1, overwrite=True)
            break
        except Killed:
            pass
        # At every moment readers see one of the two, whole.
        seen.append(load_recording(path).identity)
        assert seen[-1] in (old, new)
        # The same command again ends with the new one, whatever was left.
        run(path, seed=1, overwrite=True)
        assert tree(path) == whole
    assert tree(path) == whole
    assert seen.index(new) > 3 * 3 and seen == sorted(seen, key=(old, new).index)
    assert seen.count(new) > 5, "the move itself was broken off at several steps"


def test_a_stopped_overwriting_goes_on_and_keeps_the_old_one(tmp_path):
    record(tmp_path / "r", count=3)
    old = load_recording(tmp_path / "r").identity
    writer = RecordingWriter.open_or_create(tmp_path / "r", make_manifest(), SEGMENTS, True)
    writer.write(1, make_rows(SEGMENTS[1], seed=1))
    assert load_recording(tmp_path / "r").identity == old
    with pytest.raises(UserError, match="already complete"):
        RecordingWriter.open_or_create(tmp_path / "r", make_manifest(), SEGMENTS)
    again = RecordingWriter.open_or_create(tmp_path / "r", make_manifest(), SEGMENTS, True)
    assert again.missing() == [0, 2]
    for index in again.missing():
        again.write(index, make_rows(SEGMENTS[index], seed=1))
    again.finish()
    # A second host that still holds its writer sees that all is done.
    assert writer.missing() == []
    assert load_recording(tmp_path / "r").identity != old
    assert not (tmp_path / "r" / ".next").exists()


CHILD = """
import sys
sys.path.insert(0, {tests!r})
from recording_rows import make_manifest, make_rows, make_segments
from kernjax.recording import RecordingWriter
segments = make_segments({count})
rows = [make_rows(segment) for segment in segments]
print("ready", flush=True)
sys.stdin.readline()
writer = RecordingWriter.open_or_create({path!r}, make_manifest(), segments)
print("opened", flush=True)
for index in writer.missing():
    if index % {hosts} == {host}:
        writer.write(index, rows[index])
        print(index, flush=True)
if {hosts} == 1:
    writer.finish()
print("finished", flush=True)
"""


def start(path, count, host=0, hosts=1):
    code = CHILD.format(
        tests=os.path.dirname(__file__), path=str(path), count=count, host=host, hosts=hosts
    )
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def go(child):
    assert child.stdin and child.stdout and child.stdout.readline() == "ready\n"
    child.stdin.write("go\n")
    child.stdin.flush()


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
def test_killed_at_random_moments(tmp_path):
    most = int(os.environ.get("KERNJAX_TEST_KILLS", "8"))  # a stress test asks for more
    count, path = 5 * most, tmp_path / "r"
    record(tmp_path / "whole", count)
    rng = random.Random(0)
    known: set[int] = set()
    kills = 0
    for attempt in range(most + 1):
        child = start(path, count)
        go(child)
        lines = []
        assert child.stdout
        if attempt < most:
            # After a few lines of progress, then at a random moment of what comes next.
            lines = [child.stdout.readline() for _ in range(rng.randint(0, 4))]
            time.sleep(rng.uniform(0, 0.005))
            child.kill()
        output = ("".join(lines) + child.stdout.read()).split()
        child.wait()
        if "finished" in output:
            break
        kills += 1
        fresh = {int(word) for word in output if word.isdigit()}
        assert not fresh & known, "a segment that was durable was lost"
        known |= fresh
        with pytest.raises(UserError, match="incomplete|does not exist"):
            load_recording(path)
    assert kills == most or attempt < most
    finished = load_recording(path)
    assert finished.identity == load_recording(tmp_path / "whole").identity
    assert tree(path) == tree(tmp_path / "whole")


def test_many_processes_write_one_recording(tmp_path):
    count, hosts = 10, 3
    record(tmp_path / "whole", count)
    children = [start(tmp_path / "r", count, host, hosts) for host in range(hosts)]
    for child in children:
        go(child)
    assert [child.wait(timeout=120) for child in children] == [0] * hosts
    writer = RecordingWriter.open_or_create(tmp_path / "r", make_manifest(), make_segments(count))
    assert writer.missing() == []
    writer.finish()
    assert tree(tmp_path / "r") == tree(tmp_path / "whole")
