"""The flags with which a command joins other processes, and how it runs as one of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from kernjax.base import command
from kernjax.base.errors import EXIT_COULD_NOT_JUDGE, HostLost, UserError
from kernjax.pods.guardian import Tell, guarded
from kernjax.pods.joining import HEARTBEAT_S, Settings, join
from kernjax.pods.pod import Joined, Pod

# What may differ between hosts without a difference in what is computed.
_OWN = ("process_id", "coordinator_address", "join_timeout", "mirror")
_GRACE_S = 3  # for what failed here to be said, before what failed elsewhere is
_LOST_PEER = ("Gloo", "NCCL", "Socket closed", "onnection reset", "onnection closed", "UNAVAILABLE")

Body = Callable[[Pod], "int | None"]


class PodFlags:
    """`--coordinator_address`, `--num_processes`, `--process_id` and `--join_timeout` of a command.

    `again` says what the same command does when it is started again.
    """

    def __init__(self, flags: command.Flags, again: str) -> None:
        self._flags, self._again = flags, again
        flags.heading("On many hosts (the same command on each; see docs/pods.md)")
        self._address = flags.string(
            "coordinator_address",
            None,
            "HOST:PORT of process 0, or `auto`: what the cluster says (TPU pod, GKE, Slurm).",
        )
        self._count = flags.integer(
            "num_processes", None, "How many processes make the run.", lower_bound=1
        )
        self._index = flags.integer(
            "process_id", None, "Which of them this one is, from 0.", lower_bound=0
        )
        self._timeout = flags.integer(
            "join_timeout", 300, "Seconds to wait for the others at the start.", lower_bound=1
        )

    def settings(self) -> Settings | None:
        """What the flags say, None for a run of one process; UserError where they do not fit."""
        address, count, index = self._address.value, self._count.value, self._index.value
        if address is None and count is None and index is None:
            # GKE and queued TPU slices name all hosts here. One name, or none: a run of its own.
            if len(os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",")) < 2:
                return None
            address = "auto"
        if address == "auto":
            return Settings(None, count, index, self._timeout.value)
        if count == 1 and not index:
            return None
        given = {"coordinator_address": address, "num_processes": count, "process_id": index}
        if missing := [f"--{name}" for name, value in given.items() if value is None]:
            raise UserError(
                f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing.",
                "A run on many hosts says the address of process 0, how many processes there are,"
                " and which one this is.",
                "Give all three, or --coordinator_address=auto on a cluster that knows them.",
            )
        if index >= count:
            raise UserError(
                f"--process_id={index} with --num_processes={count}.",
                f"Expected 0 to {count - 1}: every process has a number of its own.",
            )
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise UserError(
                f"--coordinator_address={address!r} cannot be read.",
                "Expected HOST:PORT, the host of process 0 and a port that is free there.",
            )
        return Settings(address, count, index, self._timeout.value)

    def run(self, body: Body) -> int:
        """Runs `body` with the pod that the flags describe; the exit code of all its processes.

        With one process that is all. With more, `body` runs in a child (see guardian.py), and when
        it raises on one of them, all end with 3 and say whose failure it was.
        """
        settings = self.settings()
        if settings is None:
            return body(Pod()) or 0
        return guarded(
            lambda tell: self._work(settings, body, tell),
            lambda number, told: self._lost(settings, number, told),
        )

    def _work(self, settings: Settings, body: Body, tell: Tell) -> int:
        joined: list[Joined] = []

        def everything() -> int:
            pod = join(settings)
            joined.append(pod)
            tell(f"joined {pod.index} {pod.count}")
            pod.watch(lambda failure: self._end(pod, failure))
            try:
                pod.check_same("flags", self._shared(), "Start the same command on all hosts.")
                return pod.agree(body(pod) or 0)
            except BaseException as error:
                error = self._explained(pod, error)
                pod.announce(command.explain(error), again=isinstance(error, HostLost))
                raise error from None

        code = self._guard(everything)
        if not joined:
            return code
        if code != EXIT_COULD_NOT_JUDGE:
            tell(f"exit {code}")
            joined[0].leave()
        elif joined[0].is_first:
            # The others heard through this process; losing it would end them without that text.
            time.sleep(2 * _GRACE_S)
        return code

    def _shared(self) -> dict[str, str]:
        """The flags that decide what is computed, by name, as they are written."""
        shared: dict[str, str] = {}
        for word in self._flags.given():
            name = word.partition("=")[0]
            if name.removeprefix("--") not in _OWN:
                shared[name] = f"{shared[name]} {word}" if name in shared else word
        return shared

    def _guard(self, work: Callable[[], int]) -> int:
        name = self._flags.command_name
        return command.guard(work, name, lambda: self._flags["debug_log"].value)

    def _explained(self, pod: Joined, error: BaseException) -> BaseException:
        """The error; where it comes from a lost connection, what was lost."""
        if isinstance(error, UserError) or not any(sign in str(error) for sign in _LOST_PEER):
            return error
        time.sleep(_GRACE_S)  # a process that failed, and did not die, says so
        if pod.failure is not None:
            return pod.failure
        reason = next(line for line in str(error).splitlines() if line.strip())
        return HostLost(
            f"Process {pod.index} of {pod.count} lost the connection to another process of this"
            f" run, which died or cannot be reached ({reason[:200]}).",
            "All of them are needed to the end.",
            self._again,
        )

    def _end(self, pod: Joined, failure: UserError) -> None:
        """Ends this process for another one's failure, in the middle of whatever it does."""
        time.sleep(_GRACE_S)
        if pod.announced:
            return  # what failed here is said in its own words

        def fail() -> int:
            raise failure

        code = self._guard(fail)
        if pod.is_first:
            time.sleep(2 * _GRACE_S)  # the others hear through this process
        os._exit(code)

    def _lost(self, settings: Settings, number: int, told: list[str]) -> Exception:
        name = signal.Signals(number).name
        joined = next((line.split()[1:] for line in told if line.startswith("joined ")), None)
        if joined is None:
            who = "This process"
            if settings.index is not None:
                who = f"Process {settings.index} of {settings.count}"
            return HostLost(
                f"{who} could not join the others at {settings.address or 'auto'} within"
                f" {settings.timeout_s} s ({name}).",
                "Every process starts within that time, with the same --coordinator_address and"
                " --num_processes and a --process_id of its own.",
                "Check the address, the port and that all hosts were started, then start all"
                " again.",
            )
        who = f"Process {joined[0]} of {joined[1]}"
        if number == signal.SIGABRT:
            return HostLost(
                f"{who} was ended because another process of this run died, or could not be"
                f" reached for {HEARTBEAT_S} s.",
                "All of them are needed to the end; the log of the one that died says why.",
                self._again,
            )
        return HostLost(
            f"{who} was ended by {name} (preempted, out of memory, or stopped by hand).",
            todo=self._again,
        )
