"""What holds many processes together: the guardian, the talk, the flags. None starts jax."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kernjax.base import command
from kernjax.base.errors import HostLost, UserError
from kernjax.pods import Pod, PodFlags
from kernjax.pods import pod as pod_module
from kernjax.pods.pod import Joined

ROOT = Path(__file__).resolve().parents[1]

GUARDED = """
import os, signal, sys, time
from kernjax.pods.guardian import guarded

def work(tell):
    tell("begun")
    print("worker", os.getpid(), flush=True)
    {body}

try:
    sys.exit(guarded(work, lambda number, told: RuntimeError(f"{{number}} {{told}}")))
except RuntimeError as error:
    print(error)
    sys.exit(9)
"""


def guard(body: str) -> subprocess.Popen:
    code = GUARDED.format(body=body)
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.mark.parametrize(
    "body, code, said",
    [
        ("return 0", 0, ""),
        ("return 2", 2, ""),
        ("os.abort()", 9, "6 ['begun']"),
        ("tell('exit 1'); os.abort()", 1, ""),
        ("raise ValueError", 3, ""),
    ],
)
def test_the_guardian_says_how_it_ended(body, code, said):
    process = guard(body)
    out = process.communicate(timeout=60)[0].splitlines()
    assert process.returncode == code
    assert out[0].startswith("worker") and out[1:] == [said][: bool(said)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_guardian_passes_signals_on(number):
    process = guard(f"signal.signal({number.value}, signal.SIG_DFL); print(); time.sleep(60)")
    assert process.stdout and process.stdout.readline().startswith("worker")
    process.stdout.readline()
    process.send_signal(number)
    assert process.communicate(timeout=30)[0] == f"{number.value} ['begun']\n"


def test_the_worker_ends_with_its_guardian():
    process = guard("time.sleep(60)")
    assert process.stdout
    worker = int(process.stdout.readline().split()[1])
    process.kill()
    process.wait()
    # Its standard output closes when it ends.
    assert process.stdout.read() == ""
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.kill(worker, 0)
            time.sleep(0.05)


class Store:
    """The calls of jax's distributed client that a pod makes, among threads."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()

    def key_value_set(self, key: str, value: str) -> None:
        with self.changed:
            if key in self.values:
                raise RuntimeError("ALREADY_EXISTS")
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, min(timeout_ms, 500) / 1000):
                raise RuntimeError("DEADLINE_EXCEEDED")
            return self.values[key]


def together(count: int, body: Callable[[Joined], object]) -> list[object]:
    """What `body` returns, or raises, on each of `count` processes (threads here)."""
    store, results = Store(), [None] * count

    def one(index: int) -> None:
        try:
            results[index] = body(Joined(store, index, count))
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=one, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_gather_and_broadcast(monkeypatch):
    monkeypatch.setattr(pod_module, "_PIECE", 7)  # values of many pieces

    def body(pod: Joined) -> object:
        twice = [pod.gather("x", {"who": pod.index, "n": n}) for n in range(2)]
        first = pod.broadcast("y", lambda: f"from {pod.index} " * 5)
        return twice, first, pod.share([10, 11, 12, 13, 14])

    results = together(3, body)
    for index, (twice, first, share) in enumerate(results):
        assert twice == [[{"who": i, "n": n} for i in range(3)] for n in range(2)]
        assert first == "from 0 " * 5
        assert share == [10 + index, 13 + index][: 2 if index < 2 else 1]


def test_a_difference_is_named_on_all():
    def body(pod: Joined) -> None:
        values = {"versions.jax": "0.12" if pod.index == 2 else "0.11", "same": 1}
        pod.check_same("inputs", values, "Install one version.")

    for error in together(3, body):
        assert isinstance(error, UserError)
        assert "versions.jax: 0.11 on process 0, 0.12 on process 2" in str(error)
        assert "same:" not in str(error) and "Install one version." in str(error)


def test_exit_codes_agree_or_nobody_passes():
    assert together(2, lambda pod: pod.agree(2)) == [2, 2]
    for error in together(2, lambda pod: pod.agree(pod.index)):
        assert isinstance(error, UserError) and "[0, 1]" in str(error)


@pytest.mark.parametrize("kind", [UserError, HostLost])
def test_a_failure_reaches_the_others(kind):
    heard: dict[int, UserError] = {}

    def body(pod: Joined) -> None:
        done = threading.Event()

        def on_failure(failure: UserError) -> None:
            heard[pod.index] = failure
            done.set()

        pod.watch(on_failure)
        if pod.index == 1:
            pod.announce("the disk is full.", again=kind is HostLost)
        else:
            assert done.wait(20)

    assert together(3, body) == [None] * 3
    assert heard.keys() == {0, 2} and {type(failure) for failure in heard.values()} == {kind}
    assert {str(failure) for failure in heard.values()} == {
        "process 1 of 3 failed, and with it the run: the disk is full."
    }


def test_who_fails_too_has_heard_of_the_first_failure():
    """Else the first waits for it in vain, longer than the coordinator stays."""
    ready = threading.Barrier(2, timeout=20)

    def body(pod: Joined) -> str | None:
        pod.watch(lambda failure: None)
        pod.announced = pod.index == 0  # it fails as well, and is about to say so
        ready.wait()
        if pod.index == 0:
            return None
        pod.announce("flags differ")
        return pod._client.blocking_key_value_get("kernjax/heard/0", 500)

    assert together(2, body) == [None, ""]


def test_a_pod_of_one_needs_nobody():
    pod = Pod()
    pod.barrier("x")
    pod.check_same("x", {"a": 1}, "")
    assert pod.gather("x", 1) == [1] and pod.broadcast("x", lambda: 2) == 2
    assert pod.share("abc") == "abc" and pod.is_first


@pytest.fixture
def settings(monkeypatch):
    monkeypatch.delenv("TPU_WORKER_HOSTNAMES", raising=False)
    flags = command.Flags("test", "A test.")
    pods = PodFlags(flags, "Again.")

    def parse(*words: str):
        flags.parse(words)
        return pods.settings()

    return parse


def test_settings(settings, monkeypatch):
    assert settings() is None
    assert settings("--num_processes=1") is None
    found = settings("--coordinator_address=h:1", "--num_processes=4", "--process_id=3")
    assert (found.address, found.count, found.index, found.timeout_s) == ("h:1", 4, 3, 300)
    assert settings("--coordinator_address=auto").address is None
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    assert settings() is None
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b")
    assert settings().address is None


@pytest.mark.parametrize(
    "words, message",
    [
        (["--num_processes=2"], "--coordinator_address and --process_id are missing"),
        (["--coordinator_address=h:1", "--num_processes=2"], "--process_id is missing"),
        (["--coordinator_address=h:1", "--num_processes=2", "--process_id=2"], "Expected 0 to 1"),
        (["--coordinator_address=h", "--num_processes=2", "--process_id=0"], "HOST:PORT"),
        (["--coordinator_address=h:0", "--num_processes=2", "--process_id=0"], "HOST:PORT"),
        (["--process_id=-1"], "--process_id='-1'"),
    ],
)
def test_settings_that_do_not_fit(settings, words, message):
    with pytest.raises(UserError, match=message):
        settings(*words)


def test_one_process_runs_in_this_one(capsys):
    flags = command.Flags("test", "A test.")
    pods = PodFlags(flags, "Again.")
    flags.parse([])
    pids = []
    assert pods.run(lambda pod: pids.append(os.getpid())) == 0
    assert pids == [os.getpid()] and json.dumps(capsys.readouterr().out) == '""'
