"""Starts the processes of one run on this machine, as launchers do on many hosts."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


@dataclasses.dataclass
class Process:
    """A running command. `lines` grows by what it writes to standard error; `said` is set then."""

    popen: subprocess.Popen
    lines: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.said = threading.Condition()
        self.out: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=pair)
            for pair in ((self.popen.stderr, self.lines), (self.popen.stdout, self.out))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream, lines: list[str]) -> None:
        for line in stream:
            with self.said:
                lines.append(line.rstrip("\n"))
                self.said.notify_all()
        with self.said:
            self.said.notify_all()

    def wait_for(self, text: str, timeout: float) -> bool:
        """Whether a line with `text` came before the process ended."""
        with self.said:
            self.said.wait_for(
                lambda: any(text in line for line in self.lines) or self.popen.poll() is not None,
                timeout,
            )
            return any(text in line for line in self.lines)

    def wait(self, timeout: float = 300) -> int:
        code = self.popen.wait(timeout)
        for reader in self._readers:
            reader.join()
        return code

    @property
    def result(self) -> dict:
        """The JSON object that ends its standard output."""
        return json.loads(self.out[-1])

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def worker(self) -> int | None:
        """The pid of its forked child, where the work is done; None when there is none yet."""
        for entry in Path("/proc").glob("[0-9]*/stat"):
            try:
                words = entry.read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it ended meanwhile
            if int(words[1]) == self.popen.pid:
                return int(entry.parent.name)
        return None


def start(
    module: str, *flags: str, devices: int = 1, cwd: Path | None = None, **env: str
) -> Process:
    """`python -m module flags...` on so many virtual devices."""
    return Process(
        subprocess.Popen(
            [sys.executable, "-m", module, *flags],
            cwd=cwd,
            env=os.environ
            | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": str(ROOT)}
            | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    )


def start_pod(module: str, flags: Sequence[str], count: int, **more) -> list[Process]:
    """The same command `count` times, as one run."""
    address = f"--coordinator_address=localhost:{free_port()}"
    return [
        start(module, *flags, address, f"--num_processes={count}", f"--process_id={index}", **more)
        for index in range(count)
    ]
