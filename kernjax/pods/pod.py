"""The processes that make one run together, as one of them sees them.

They talk through the key-value store of jax's coordinator (process 0), not through their devices:
a device collective with a lost peer waits for ever on some platforms.
"""

from __future__ import annotations

import collections
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from kernjax.base.errors import HostLost, UserError

T = TypeVar("T")

_POLL_MS = 5_000  # one wait for a key; waiting goes on until it is there or the run ends
_WEEK_MS = 7 * 24 * 3600 * 1000  # barriers: how long the others may still have to compute
_PIECE = 1 << 20  # bytes of a value under one key: gRPC bounds a message
_HEARD_S = 10  # how long a failing process waits for the others to have heard
_FAILURE = "kernjax/failure"


class Pod:
    """A run of one process: what the commands see unless they are told to join others.

    `index` is this process among `count`. Every method must be called by all processes in the same
    order, except where it says otherwise.
    """

    index, count = 0, 1

    @property
    def is_first(self) -> bool:
        """Whether this is the process that does what is done once."""
        return self.index == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This process's part of the items: every `count`-th."""
        return items[self.index :: self.count]

    def barrier(self, name: str) -> None:
        """Returns when all processes are here."""

    def gather(self, name: str, value: Any) -> list[Any]:
        """The JSON values of all processes, by index."""
        return [value]

    def broadcast(self, name: str, make: Callable[[], T]) -> T:
        """What `make` gives on the first process (a JSON value); the others do not call it."""
        return make()

    def check_same(self, what: str, values: Mapping[str, Any], todo: str) -> None:
        """UserError, on all processes, where their values (JSON) differ; it names two of them."""
        per_process = self.gather(what, values)
        for other, theirs in enumerate(per_process):
            if theirs == per_process[0]:
                continue
            keys = sorted(per_process[0].keys() | theirs.keys())
            differing = [key for key in keys if per_process[0].get(key) != theirs.get(key)]
            lines = "".join(
                f"\n  {key}: {_short(per_process[0].get(key))} on process 0,"
                f" {_short(theirs.get(key))} on process {other}"
                for key in differing
            )
            raise UserError(
                f"The processes of this run differ in their {what}:{lines}\n",
                "Together they make one recording, so all must compute the same.",
                todo,
            )


class Joined(Pod):
    """One of several processes, connected to the coordinator's client of jax.distributed."""

    def __init__(self, client: Any, index: int, count: int) -> None:
        self._client, self.index, self.count = client, index, count
        self._turns: collections.Counter[str] = collections.Counter()
        self.failure: UserError | None = None  # what another process announced
        self.announced = False  # whether this one failed, and says so itself

    def barrier(self, name: str) -> None:
        self._client.wait_at_barrier(self._key(name), _WEEK_MS)

    def gather(self, name: str, value: Any) -> list[Any]:
        key = self._key(name)
        self._put(f"{key}/{self.index}", json.dumps(value))
        return [json.loads(self._wait(f"{key}/{index}")) for index in range(self.count)]

    def broadcast(self, name: str, make: Callable[[], T]) -> T:
        key = self._key(name)
        if self.is_first:
            self._put(key, json.dumps(make()))
        return json.loads(self._wait(key))

    def agree(self, code: int) -> int:
        """The exit code of all, once all have come here; 3 where they came to different ones."""
        codes = self.gather("exit code", code)
        if len(set(codes)) > 1:
            raise UserError(
                f"The processes of this run came to different exit codes: {codes}.",
                "The same inputs give the same verdict on every host.",
                "Compare the hosts' versions and files.",
            )
        return code

    def announce(self, message: str, again: bool = False) -> None:
        """Tells the others that this process failed, whatever they are doing; the first one counts.

        `again`: for the loss of a host, as `HostLost` means it. Returns when they have heard, or
        after some seconds: the coordinator must outlive that.
        """
        self.announced = True
        try:
            told = {"index": self.index, "message": message, "again": again}
            self._put(_FAILURE, json.dumps(told))
        except Exception:
            return  # somebody was first, or the coordinator is gone
        deadline = time.monotonic() + _HEARD_S
        for index in range(self.count):
            left = int(1000 * (deadline - time.monotonic()))
            if index != self.index and left > 0:
                try:
                    self._client.blocking_key_value_get(f"kernjax/heard/{index}", left)
                except Exception:
                    return

    def watch(self, on_failure: Callable[[UserError], None]) -> None:
        """From now on `on_failure` is called, in a thread, with what another process announced."""

        def wait() -> None:
            announced = json.loads(self._wait(_FAILURE))
            if not self.announced:
                kind = HostLost if announced["again"] else UserError
                self.failure = kind(
                    f"process {announced['index']} of {self.count} failed, and with it the run:"
                    f" {announced['message']}"
                )
            try:
                # Said also by one that fails itself: unheard, the first would wait on, and be ended
                # by the coordinator's end before it has told its own error.
                self._client.key_value_set(f"kernjax/heard/{self.index}", "")
            except Exception:
                pass  # the coordinator is gone: this process ends all the same
            if self.failure is not None:
                on_failure(self.failure)

        threading.Thread(target=wait, name="kernjax-pod", daemon=True).start()

    def leave(self) -> None:
        """Disconnects, once all have come here."""
        import jax

        jax.distributed.shutdown()

    def _key(self, name: str) -> str:
        self._turns[name] += 1
        return f"kernjax/{name}/{self._turns[name]}"

    def _put(self, key: str, text: str) -> None:
        pieces = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
        for number, piece in enumerate(pieces[1:], 1):
            self._client.key_value_set(f"{key}+{number}", piece)
        # Last: who sees it finds the others.
        self._client.key_value_set(key, f"{len(pieces)} {pieces[0]}")

    def _wait(self, key: str) -> str:
        """The text that `_put` wrote, however long it takes."""
        count, _, text = self._wait_for_one(key).partition(" ")
        return text + "".join(self._wait_for_one(f"{key}+{n}") for n in range(1, int(count)))

    def _wait_for_one(self, key: str) -> str:
        while True:
            try:
                return self._client.blocking_key_value_get(key, _POLL_MS)
            except Exception as error:
                # A lost coordinator ends the process by itself (see guardian.py).
                if "DEADLINE_EXCEEDED" not in str(error):
                    time.sleep(1)


def _short(value: Any) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
