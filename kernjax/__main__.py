"""Lists the commands, or runs one: `python -m kernjax NAME ...` is `python -m kernjax.NAME ...`."""

from __future__ import annotations

import ast
import difflib
import runpy
import sys
from pathlib import Path

from kernjax.base import command
from kernjax.base.errors import UserError

_USAGE = """kernjax judges a kernel by what it does to a model's distributions.

  python -m kernjax NAME --flag=value ...   runs a command (`kernjax NAME` is the same)
  python -m kernjax NAME --help             prints its manual

Commands:"""


def commands() -> dict[str, str]:
    """Name -> first line of the docstring, of every command (read without importing it)."""
    table = {}
    for path in sorted(Path(__file__).resolve().parent.glob("*.py")):
        if not path.stem.startswith("_"):
            doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            table[path.stem] = doc.partition("\n")[0]
    return table


def dispatch(argv: list[str]) -> int:
    """Runs the command that `argv` names, or lists them all; the exit code."""
    table = commands()
    name = argv[0] if argv else "--help"
    if name in ("help", "--help", "-h", "-help"):
        width = max(map(len, table), default=0)
        print(_USAGE)
        for known, summary in table.items():
            print(f"  {known:{width}}  {summary}")
        return command.EXIT_PASS
    if name not in table:
        near = difflib.get_close_matches(name, table, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(table)}."
        raise UserError(f"There is no command {name!r}.", hint)
    sys.argv = [f"kernjax {name}", *argv[1:]]
    runpy.run_module(f"kernjax.{name}", run_name="__main__", alter_sys=True)
    return command.EXIT_PASS


def main() -> None:
    """The console script `kernjax`."""
    sys.exit(command.guard(lambda: dispatch(sys.argv[1:]), "kernjax"))


if __name__ == "__main__":
    main()
