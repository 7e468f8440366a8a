"""A parent that says in words how its child ended, even where the child could not.

When a peer or the coordinator is lost, jax's runtime ends the process with SIGABRT from a thread of
its own, in whatever the program is doing: no exit code of ours, no JSON line. So the work runs in a
forked child (before jax is imported, when the process is small and has one thread), and the parent
waits. The child ends when the parent is gone, however that came; signals are passed on to it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable

Tell = Callable[[str], None]

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def guarded(work: Callable[[Tell], int], explain: Callable[[int, list[str]], Exception]) -> int:
    """The exit code of `work`, which runs in a child process.

    `work` gets a function that tells the parent a line. Where a signal ended the child, the parent
    raises `explain(signal number, lines told)`; but `exit CODE`, told last, counts as its end.
    """
    life, alive = os.pipe()
    told, tell = os.pipe()
    child: list[int] = []
    waiting: list[int] = []  # signals that came before there was a child

    def pass_on(number: int, frame: object) -> None:
        del frame
        if child:
            os.kill(child[0], number)
        else:
            waiting.append(number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(alive)
        os.close(told)
        # Of its own group: an interrupt at the terminal reaches the parent, which passes it on.
        os.setpgid(0, 0)
        threading.Thread(target=_end_with_parent, args=(life,), daemon=True).start()
        code = 3
        try:
            code = work(lambda line: _write(tell, line))
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            # Without the interpreter's exit: jax would wait there for peers that are gone.
            os._exit(code)
    child.append(pid)
    os.close(life)
    os.close(tell)
    for number in waiting:
        os.kill(pid, number)
    try:
        _, status = os.waitpid(pid, 0)
    finally:
        child.clear()
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(alive)
    lines = _read(told)
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    if lines and lines[-1].startswith("exit "):
        return int(lines[-1].removeprefix("exit "))
    raise explain(-code, lines)


def _end_with_parent(life: int) -> None:
    os.read(life, 1)  # nobody writes: it returns when the parent's end is closed
    os._exit(3)


def _write(descriptor: int, line: str) -> None:
    try:
        os.write(descriptor, line.encode() + b"\n")
    except OSError:
        pass  # the parent is gone, and this process is about to be


def _read(descriptor: int) -> list[str]:
    # Not until end of file: a process that the child left behind may still hold the other end.
    os.set_blocking(descriptor, False)
    try:
        return os.read(descriptor, 1 << 16).decode().splitlines()
    except BlockingIOError:
        return []
    finally:
        os.close(descriptor)
