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

`Flags` is an absl FlagValues of the command alone (not the process-wide `flags.FLAGS`): two
commands may be imported into one process, as tests do, and libraries cannot add flags to ours.
"""

from __future__ import annotations

import dataclasses
import difflib
import errno
import json
import logging
import math
import os
import re
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from absl import flags as absl_flags

from kernjax.base.errors import (
    EXIT_COULD_NOT_JUDGE,
    EXIT_FAIL,
    EXIT_INCONCLUSIVE,
    EXIT_PASS,
    UserError,
)

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
Holder = absl_flags.FlagHolder  # `.value`: what the command line says, or the default

log = logging.getLogger("kernjax")


@dataclasses.dataclass(frozen=True)
class _Entry:
    """What the manual and the errors say of one flag."""

    help: str
    expected: str
    is_required: bool


class Flags(absl_flags.FlagValues):
    """The flags of one command. Each method defines one and returns its absl FlagHolder.

    `name` is the command's (`record`), `manual` its module docstring. `positional` names what may
    stand on the command line besides flags (`ACTION`); without it, anything there is an error.
    `required=True` flags have no default and must be given. `heading(text)` starts a new group in
    the manual.
    """

    def __init__(self, name: str, manual: str | None, *, positional: str | None = None) -> None:
        super().__init__()
        self.set_gnu_getopt(True)  # flags may stand after positional words
        # FlagValues takes every attribute that is set for a flag's value, hence the dictionary.
        self.__dict__["_name"] = name
        self.__dict__["_manual"] = textwrap.dedent(manual or "").strip()
        self.__dict__["_positional"] = positional
        self.__dict__["_groups"] = [("Flags", {})]

    @property
    def command_name(self) -> str:
        """The command's name as a person types it: `kernjax.record`."""
        return f"kernjax.{self._name}"

    def heading(self, text: str) -> None:
        """Starts a new group of flags in the manual."""
        self._groups.append((text, {}))

    def string(
        self, name: str, default: str | None, help: str, *, required: bool = False
    ) -> Holder[str]:
        """A text flag."""
        self._note(name, help, "text", required)
        return absl_flags.DEFINE_string(name, default, help, flag_values=self)

    def integer(
        self,
        name: str,
        default: int | None,
        help: str,
        *,
        required: bool = False,
        lower_bound: int | None = None,
        upper_bound: int | None = None,
    ) -> Holder[int]:
        """A whole number, within the bounds (inclusive)."""
        self._note(name, help, "a whole number" + _within(lower_bound, upper_bound), required)
        return absl_flags.DEFINE_integer(
            name, default, help, lower_bound, upper_bound, flag_values=self
        )

    def number(
        self,
        name: str,
        default: float | None,
        help: str,
        *,
        required: bool = False,
        lower_bound: float | None = None,
        upper_bound: float | None = None,
    ) -> Holder[float]:
        """A number, within the bounds (inclusive)."""
        self._note(name, help, "a number" + _within(lower_bound, upper_bound), required)
        return absl_flags.DEFINE_float(
            name, default, help, lower_bound, upper_bound, flag_values=self
        )

    def boolean(self, name: str, default: bool, help: str) -> Holder[bool]:
        """A switch: --name or --noname."""
        self._note(name, help, "true or false", False)
        return absl_flags.DEFINE_boolean(name, default, help, flag_values=self)

    def enum(
        self,
        name: str,
        default: str | None,
        values: Sequence[str],
        help: str,
        *,
        required: bool = False,
    ) -> Holder[str]:
        """One of the given words."""
        self._note(name, help, f"one of {', '.join(values)}", required)
        return absl_flags.DEFINE_enum(name, default, list(values), help, flag_values=self)

    def multi_string(self, name: str, help: str, *, required: bool = False) -> Holder[list[str]]:
        """A text flag that may be repeated; its value is a list, empty when not given."""
        self._note(name, f"{help} (may be repeated)", "text", required)
        return absl_flags.DEFINE_multi_string(name, [], help, flag_values=self)

    def comma_list(
        self, name: str, default: Sequence[str], help: str, *, required: bool = False
    ) -> Holder[list[str]]:
        """Words separated by commas; its value is a list."""
        self._note(name, help, "words separated by commas", required)
        return absl_flags.DEFINE_list(name, list(default), help, flag_values=self)

    def parse(self, argv: Sequence[str]) -> list[str]:
        """Reads the command line (without the program's name); returns the positional words.

        Every value is back at its default first, so a process may parse several command lines.
        Raises UserError for unknown flags, bad values, missing required flags, stray words, and
        flag files that cannot be read.
        """
        self.unparse_flags()
        try:
            words = self([self.command_name, *argv])[1:]
        except absl_flags.UnrecognizedFlagError as error:
            raise self._unknown_flag(error.flagname) from None
        except absl_flags.CantOpenFlagFileError as error:
            cause = str(error).removeprefix("ERROR:: ")
            raise UserError(f"--flagfile: {cause}.", "Expected a readable file.") from None
        except absl_flags.IllegalFlagValueError as error:
            raise self._bad_value(error) from None
        except absl_flags.Error as error:
            raise UserError(f"{error}.", todo=self._see_help()) from None
        if self["help"].value:
            return words
        missing = [
            f"--{name}"
            for name, entry in self._entries().items()
            if entry.is_required and self[name].value in (None, "", [])
        ]
        if missing:
            plural = "are" if len(missing) > 1 else "is"
            raise UserError(f"{' and '.join(missing)} {plural} missing.", todo=self._see_help())
        if words and self._positional is None:
            raise UserError(
                f"{words[0]!r} is not a flag.",
                f"{self.command_name} takes flags only, written --name=value.",
                self._see_help(),
            )
        return words

    def format_manual(self) -> str:
        """The docstring, then the flags by group with their defaults."""
        lines = [self._manual, ""]
        for heading, entries in self._groups:
            if entries:
                lines.append(f"{heading}:")
                for name, entry in entries.items():
                    lines += self._describe(self[name], entry)
                lines.append("")
        lines += [
            "For every command:",
            "  --flagfile=FILE   reads flags from a file, one a line",
            "  --debug_log=FILE  appends the traceback of an error to this file",
            "  --help            prints this manual",
        ]
        return "\n".join(lines)

    def _note(self, name: str, help: str, expected: str, is_required: bool) -> None:
        self._groups[-1][1][name] = _Entry(help, expected, is_required)

    def _entries(self) -> dict[str, _Entry]:
        return {name: entry for _, group in self._groups for name, entry in group.items()}

    def _describe(self, flag: absl_flags.Flag, entry: _Entry) -> list[str]:
        head = f"  --[no]{flag.name}" if flag.boolean else f"  --{flag.name}"
        if values := getattr(flag.parser, "enum_values", None):
            head += f"={'|'.join(values)}"
        if entry.is_required:
            head += " (required)"
        elif flag.default not in (None, "", []):
            head += f" (default: {flag.default_as_str.strip(chr(39))})"
        margin = " " * 6
        text = textwrap.wrap(entry.help, 94, initial_indent=margin, subsequent_indent=margin)
        return [head, *text]

    def _unknown_flag(self, name: str) -> UserError:
        known = sorted(name for name in self if len(name) > 1)
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"Did you mean --{near[0]}?" if near else f"Known: --{', --'.join(known)}."
        return UserError(f"Unknown flag --{name}.", hint, self._see_help())

    def _bad_value(self, error: absl_flags.IllegalFlagValueError) -> UserError:
        # absl's text: "flag --NAME=VALUE: reason", the reason in Python's words.
        match = re.match(r"flag --(\w+)=(.*?): ", str(error), re.DOTALL)
        entry = self._entries().get(match[1]) if match else None
        if match is None or entry is None:
            return UserError(f"{error}.", todo=self._see_help())
        return UserError(
            f"--{match[1]}={match[2]!r} cannot be read.",
            f"Expected {entry.expected}.",
            self._see_help(),
        )

    def _see_help(self) -> str:
        return f"`python -m {self.command_name} --help` prints the manual."


def _within(lower: float | None, upper: float | None) -> str:
    if lower is not None and upper is not None:
        return f" from {lower:g} to {upper:g}"
    if lower is not None:
        return f" of at least {lower:g}"
    return f" of at most {upper:g}" if upper is not None else ""


def print_json(value: Mapping[str, Any]) -> None:
    """Prints `value` as one line of JSON: the data that ends a command's standard output.

    NumPy scalars and arrays become numbers and lists, paths become text; JSON has no NaN and no
    infinity, they become null.
    """
    sys.stdout.write(json.dumps(_plain(value), allow_nan=False) + "\n")
    sys.stdout.flush()


def run(main: Main, flags: Flags) -> NoReturn:
    """Runs a command on `sys.argv` and ends the process with its exit code."""
    code = execute(main, flags, sys.argv[1:])
    sys.exit(code)


def execute(main: Main, flags: Flags, argv: Sequence[str]) -> int:
    """Runs a command in this process on `argv` (without the program's name); its exit code."""
    # Libraries (orbax) read the process-wide absl flags; nobody else parses them.
    absl_flags.FLAGS.mark_as_parsed()
    _define_common(flags)

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
    the JSON line always finds one. `body` returning None means 0; a code outside 0..3 becomes 3.
    `debug_log` names a file to append the traceback to.
    """
    _log_to_stderr()
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
        _report(name, message)
        return EXIT_COULD_NOT_JUDGE


def explain(error: BaseException) -> str:
    """One line (or a UserError's own text) that says what happened, for standard error."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted."
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


def _define_common(flags: Flags) -> None:
    if "help" not in flags:
        absl_flags.DEFINE_boolean(
            "help", False, "Prints the manual.", short_name="h", flag_values=flags
        )
        absl_flags.DEFINE_string("debug_log", None, "File for tracebacks.", flag_values=flags)


def _log_to_stderr() -> None:
    if not log.handlers:
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False


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


def _report(name: str, message: str) -> None:
    try:
        sys.stderr.write(f"{name}: {message}\n")
        sys.stderr.flush()
        print_json({"exit_code": EXIT_COULD_NOT_JUDGE, "error": message})
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
    return code if code in (0, 1, 2, 3) and not isinstance(code, bool) else EXIT_COULD_NOT_JUDGE


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
