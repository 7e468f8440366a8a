"""The flags of a command: absl flags with a manual and with errors that say what was expected."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import re
import shlex
import textwrap
from collections.abc import Sequence
from typing import Any

from absl import flags as absl_flags

from kernjax.base.errors import UserError

log = logging.getLogger("kernjax")

Holder = absl_flags.FlagHolder  # `.value`: what the command line says, or the default


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

    It is an absl FlagValues of the command alone, not the process-wide `flags.FLAGS`: two commands
    may be imported into one process, as tests do, and libraries cannot add flags to ours.
    """

    def __init__(self, name: str, manual: str | None, *, positional: str | None = None) -> None:
        super().__init__()
        self.set_gnu_getopt(True)  # flags may stand after positional words
        # FlagValues takes every attribute that is set for a flag's value, hence the dictionary.
        self.__dict__["_name"] = name
        self.__dict__["_manual"] = textwrap.dedent(manual or "").strip()
        self.__dict__["_positional"] = positional
        self.__dict__["_groups"] = [("Flags", {})]
        absl_flags.DEFINE_boolean("help", False, "", short_name="h", flag_values=self)
        absl_flags.DEFINE_string("debug_log", None, "", flag_values=self)

    @property
    def command_name(self) -> str:
        """The command's name as a person types it: `kernjax.record`."""
        return f"kernjax.{self._name}"

    def heading(self, text: str) -> None:
        """Starts a new group of flags in the manual."""
        self._groups.append((text, {}))

    def string(
        self, name: str, default: str | None, help: str, *, required: bool = False
    ) -> Holder[Any]:
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
    ) -> Holder[Any]:
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
    ) -> Holder[Any]:
        """A number, within the bounds (inclusive)."""
        self._note(name, help, "a number" + _within(lower_bound, upper_bound), required)
        return absl_flags.DEFINE_float(
            name, default, help, lower_bound, upper_bound, flag_values=self
        )

    def boolean(self, name: str, default: bool, help: str) -> Holder[Any]:
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
    ) -> Holder[Any]:
        """One of the given words."""
        self._note(name, help, f"one of {', '.join(values)}", required)
        return absl_flags.DEFINE_enum(name, default, list(values), help, flag_values=self)

    def multi_string(self, name: str, help: str, *, required: bool = False) -> Holder[Any]:
        """A text flag that may be repeated; its value is a list, empty when not given."""
        self._note(name, f"{help} (may be repeated)", "text", required)
        return absl_flags.DEFINE_multi_string(name, [], help, flag_values=self)

    def comma_list(
        self, name: str, default: Sequence[str], help: str, *, required: bool = False
    ) -> Holder[Any]:
        """Words separated by commas; its value is a list."""
        self._note(name, help, "words separated by commas", required)
        return absl_flags.DEFINE_list(name, list(default), help, flag_values=self)

    def parse(self, argv: Sequence[str]) -> list[str]:
        """Reads the command line (without the program's name); returns the positional words.

        Every value is back at its default first, so a process may parse several command lines.
        Raises UserError for unknown flags, bad and empty values, missing required flags, stray
        words, and flag files that cannot be read.
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
        self._tell_repeated(argv)
        missing = [
            f"--{name}"
            for name, entry in self._entries().items()
            if entry.is_required and self[name].value in (None, "", [])
        ]
        if missing:
            plural = "are" if len(missing) > 1 else "is"
            raise UserError(f"{' and '.join(missing)} {plural} missing.", todo=self._see_help())
        if empty := [f"--{name}" for name in self._entries() if self._is_blank(name)]:
            raise UserError(
                f"{' and '.join(empty)} {'are' if empty[1:] else 'is'} given without a value.",
                "A variable that is not set in a script looks like this.",
                "Give a value, or leave the flag out.",
            )
        if words and self._positional is None:
            raise UserError(
                f"{words[0]!r} is not a flag.",
                f"{self.command_name} takes flags only, written --name=value.",
                self._see_help(),
            )
        return words

    def _is_blank(self, name: str) -> bool:
        """Whether a flag of text is there, and (one of) its text is nothing but spaces."""
        flag = self[name]
        values = flag.value if isinstance(flag.value, list) else [flag.value]
        blank = not values or any(isinstance(v, str) and not v.strip() for v in values)
        return bool(flag.present) and blank

    def _tell_repeated(self, argv: Sequence[str]) -> None:
        """The last one counts, as scripts expect that put theirs behind a default; it is said."""
        names = [word.lstrip("-").partition("=")[0] for word in argv if word.startswith("-")]
        for name in dict.fromkeys(names):
            known = name in self and not isinstance(self[name], absl_flags.MultiFlag)
            if known and names.count(name) > 1 and name != "flagfile":
                log.warning(
                    "--%s is given %d times: the last counts, %s.",
                    name,
                    names.count(name),
                    self[name].value,
                )

    def refuse(self, names: Sequence[str], beside: str, expected: str, todo: str = "") -> None:
        """UserError where one of these flags is not at its default: nothing would read it."""
        typed = [word.partition("=")[0] for word in self.given()]
        if given := [w for w in typed if w[2:] in names or (w[:4] == "--no" and w[4:] in names)]:
            *others, last = given
            listed = f"{', '.join(others)} and {last} are" if others else f"{last} is"
            raise UserError(
                f"{listed} given {beside}.",
                expected,
                todo or ("Drop them." if others else "Drop it."),
            )

    def given(self) -> list[str]:
        """The flags that differ from their defaults, one word each, as a command line takes them.

        `--debug_log` is none of them: it does not change what a command does.
        """
        words = []
        for name in self._entries():
            flag = self[name]
            if flag.value == flag.default:
                continue
            if flag.boolean:
                words.append(f"--{name}" if flag.value else f"--no{name}")
            elif isinstance(flag, absl_flags.MultiFlag):
                words += [f"--{name}={value}" for value in flag.value]
            elif isinstance(flag.value, list):
                words.append(f"--{name}={','.join(flag.value)}")
            else:
                words.append(f"--{name}={flag.value}")
        return words

    def as_typed(self, *without: str) -> str:
        """The command that does this once more from the same directory, less some flags."""
        words = [word for word in self.given() if word[2:].partition("=")[0] not in without]
        return shlex.join(["python", "-m", self.command_name, *words])

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
            default = (flag.default_as_str or "").strip("'")
            head += f" (default: {default})"
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
