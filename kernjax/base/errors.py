"""Errors a user can act on: what was found, what was expected, what to do."""

from __future__ import annotations

EXIT_PASS = 0
EXIT_FAIL = 1
EXIT_INCONCLUSIVE = 2
EXIT_COULD_NOT_JUDGE = 3


class UserError(Exception):
    """Something outside the program must change; commands print it and exit with code 3.

    `found` says what is there (with its value and the artefact's name), `expected` what would have
    been right, `todo` the next step. The message is the three joined by spaces.
    """

    def __init__(self, found: str, expected: str = "", todo: str = "") -> None:
        self.found, self.expected, self.todo = found, expected, todo
        super().__init__(" ".join(part for part in (found, expected, todo) if part))


class HostLost(UserError):
    """A run lost one of its processes, and nothing is wrong with what it was given.

    The same command, started again as it is, may succeed; the JSON line says `"again": true`.
    """
