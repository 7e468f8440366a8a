"""Joining the other processes of a run, through jax.distributed."""

from __future__ import annotations

import dataclasses
import socket
import time

from kernjax.base.errors import HostLost, UserError
from kernjax.pods.pod import Joined

# A peer that sends nothing for so long is dead: the others end well within a minute.
HEARTBEAT_S = 30
_SHUTDOWN_S = 20


@dataclasses.dataclass(frozen=True)
class Settings:
    """Where and as what to join; None: the cluster knows. `timeout_s`: for the others to come."""

    address: str | None
    count: int | None
    index: int | None
    timeout_s: int


def join(settings: Settings) -> Joined:
    """Joins; UserError where the coordinator cannot be reached.

    Where others do not come, or have other numbers than they should, jax ends the process.
    """
    began = time.monotonic()
    if settings.address is not None and settings.index:
        _wait_for(settings.address, settings.timeout_s)
    import jax

    # The public module has no access to its key-value store; Orbax takes it from here too.
    from jax._src import distributed

    # It would swallow SIGTERM: what is recorded is on disk, so a preempted process may go at once.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            settings.address,
            settings.count,
            settings.index,
            initialization_timeout=max(1, round(settings.timeout_s - time.monotonic() + began)),
            heartbeat_timeout_seconds=HEARTBEAT_S,
            shutdown_timeout_seconds=_SHUTDOWN_S,
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise UserError(
            f"This process could not join the others at {settings.address or 'auto'}: {reason}.",
            "Process 0 runs on that host, and every process has a --process_id of its own.",
            "Check --coordinator_address, --num_processes and --process_id on every host; `auto`"
            " works on TPU pods, GKE, Slurm and Open MPI.",
        ) from error
    state = distributed.global_state
    return Joined(state.client, state.process_id, state.num_processes)


def _wait_for(address: str, timeout_s: float) -> None:
    """Returns when something listens at HOST:PORT.

    Asked before jax is: where it gets no connection it ends the process without a reason.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout_s
    while True:
        left = deadline - time.monotonic()
        try:
            with socket.create_connection((host.strip("[]"), int(port)), max(1, min(5, left))):
                return
        except OSError as error:
            # A name that is not known yet may be soon: hosts of a cluster start one by one.
            if left <= 1:
                raise HostLost(
                    f"The coordinator {address} was not reachable for {timeout_s:g} s"
                    f" ({error.strerror or error}).",
                    "Expected process 0 to run on that host, and the port to be open between the"
                    " hosts.",
                    "Check --coordinator_address, and that process 0 was started.",
                ) from None
            time.sleep(1)
