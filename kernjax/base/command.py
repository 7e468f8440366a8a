"""How every command runs: flags, manual, exit codes, and errors without tracebacks.

A command is a module at the top of `kernjax/`, written like this:

    '''First line: what it does, as `python -m kernjax` lists it.

    The rest of the docstring is the manual that --help prints.
    '''
    from kernjax.base import command

    FLAGS = command.Flags("record", __doc__)
    _OUT = FLAGS.string("out", None, "Directory to write.", required=True)

    def main(args: list[str]) -> int:
        from kernjax.scoring import ...          # heavy imports inside: see below
        command.print_json({"out": _OUT.value})  # the last line of standard output
        return command.EXIT_PASS

    if __name__ == "__main__":
        command.run(main, FLAGS)

Python itself ends with code 1 on an exception, which here means FAIL. So everything that may raise,
imports of jax and of the other rooms included, happens inside `main`, where `run` turns it into
exit code 3 and one line on standard error.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from absl import flags as absl_flags

from kernjax.base.errors import (
    EXIT_COULD_NOT_JUDGE,
    EXIT_FAIL,
    EXIT_INCONCLUSIVE,
    EXIT_PASS,
    HostLost,
    UserError,
)
from kernjax.base.flags import Flags
from kernjax.base.showing import for_logs

__all__ = [
    "EXIT_COULD_NOT_JUDGE",
    "EXIT_FAIL",
    "EXIT_INCONCLUSIVE",
    "EXIT_PASS",
    "Flags",
    "UserError",
    "execute",
    "guard",
    "log",
    "print_json",
    "run",
]

Main = Callable[[list[str]], "int | None"]

log = logging.getLogger("kernjax")


def print_json(value: Mapping[str, Any]) -> None:
    """Prints `value` as one line of JSON: the data that ends a command's standard output.

    NumPy scalars and arrays become numbers and lists, paths become text; JSON has no NaN and no
    infinity, they become null. No text in it is a command to the CI runner that reads the log.
    """
    line = json.dumps(_plain(value), allow_nan=False).replace("##[", "#\\u0023[")
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def run(main: Main, flags: Flags) -> NoReturn:
    """Runs a command on `sys.argv` and ends the process with its exit code."""
    interrupted = False

    def noting(words: list[str]) -> int | None:
        nonlocal interrupted
        try:
            return main(words)
        except KeyboardInterrupt:
            interrupted = True
            raise

    code = execute(noting, flags, sys.argv[1:])
    if interrupted:
        # Threads of the compiler and of XLA still run: Python would wait for them for half a
        # minute, or crash as it shuts down under them.
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def execute(main: Main, flags: Flags, argv: Sequence[str]) -> int:
    """Runs a command in this process on `argv` (without the program's name); its exit code."""
    # Libraries (orbax) read the process-wide absl flags; nobody else parses them.
    absl_flags.FLAGS.mark_as_parsed()

    def body() -> int | None:
        words = flags.parse(argv)
        if flags["help"].value:
            print(flags.format_manual())
            return EXIT_PASS
        return main(words)

    return guard(body, flags.command_name, lambda: flags["debug_log"].value)


def guard(
    body: Callable[[], int | None], name: str, debug_log: Callable[[], str | None] = lambda: None
) -> int:
    """Calls `body`; its exit code, or 3 with one line on standard error when anything is raised.

    The last line of standard output is then {"exit_code": 3, "error": ...}, so that whoever reads
    the JSON line always finds one; of a `HostLost` it also has "again": true. `body` returning None
    means 0; a code outside 0..3 becomes 3. `debug_log` names a file to append the traceback to.
    """
    _log_to_stderr()
    _print_anything()
    try:
        code = body()
        sys.stdout.flush()  # a full disk or a closed pipe shows up here at the latest
        return EXIT_PASS if code is None else _valid_code(code)
    except SystemExit as error:
        return _valid_code(EXIT_PASS if error.code is None else error.code)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            _die_on_second_interrupt()
        message = explain(error)
        if path := debug_log():
            message += _append_traceback(path)
        _report(name, message, again=isinstance(error, HostLost))
        return EXIT_COULD_NOT_JUDGE


def explain(error: BaseException) -> str:
    """One line (or a UserError's own text) that says what happened, for standard error."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted. A recording that was begun goes on with the same command."
    if isinstance(error, BrokenPipeError):
        return "the reader of the output went away before it was complete."
    if isinstance(error, MemoryError):
        return f"out of memory: {_first_line(error) or 'an allocation failed'}."
    text = _first_line(error)
    if "No space left on device" in text or getattr(error, "errno", 0) in (
        errno.ENOSPC,
        errno.EDQUOT,
    ):
        where = getattr(error, "filename", None)
        return f"the disk is full{f' ({where})' if where else ''}: {text}. Free some space."
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}." if error.filename else f"{error.strerror}."
    if isinstance(error, BaseExceptionGroup):
        return f"{error.message}: " + "; ".join(explain(part) for part in error.exceptions)
    if isinstance(error, NotImplementedError) and text:
        return f"not supported: {text}"
    return (
        f"unexpected {type(error).__name__}: {text or '(no message)'} [{_origin(error)}]. "
        "--debug_log=FILE writes the traceback."
    )


def _log_to_stderr() -> None:
    if not log.handlers:
        handler = _StderrHandler()
        handler.setFormatter(_Lines("%(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False


def _print_anything() -> None:
    """Where standard output cannot hold a character (a Latin-1 locale), an escape stands for it."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:  # tests put other objects there
        reconfigure(errors="backslashreplace")


class _Lines(logging.Formatter):
    """Messages name files and segments that others wrote."""

    def format(self, record: logging.LogRecord) -> str:
        return for_logs(super().format(record))


class _StderrHandler(logging.StreamHandler):
    """Writes to whatever `sys.stderr` is now: tests and progress bars replace it."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    @property
    def stream(self):
        return sys.stderr

    @stream.setter
    def stream(self, value) -> None:
        pass


def _report(name: str, message: str, again: bool) -> None:
    try:
        sys.stderr.write(for_logs(f"{name}: {message}\n"))
        sys.stderr.flush()
        hint = {"again": True} if again else {}
        print_json({"exit_code": EXIT_COULD_NOT_JUDGE, "error": message, **hint})
    except (OSError, ValueError):
        # Standard output is the thing that broke. Python flushes it once more at exit and would
        # end with code 120 and a message of its own.
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except (OSError, ValueError):
            pass


def _append_traceback(path: str) -> str:
    try:
        with open(path, "a", encoding="utf-8") as file:
            traceback.print_exc(file=file)
    except OSError as error:
        return f" (The traceback could not be written to {path}: {error.strerror}.)"
    return f" (The traceback is in {path}.)"


def _die_on_second_interrupt() -> None:
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    except ValueError:
        pass  # not the main thread: only tests


def _valid_code(code: Any) -> int:
    if isinstance(code, str):
        sys.stderr.write(code.rstrip("\n") + "\n")
    return int(code) if code in (0, 1, 2, 3) else EXIT_COULD_NOT_JUDGE


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "").rstrip(".")


def _origin(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "no traceback"
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    if hasattr(value, "tolist"):  # NumPy scalar or array
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value)
