"""Named policies: one TOML file each in `configs/policies/`.

    description = "..."            one sentence: what it emulates
    source = "..."                 where that comes from
    base = "bf16"                  the policy it changes; left out: all float32
    complete = true                a whole engine's precision, not a change to judge
    [fields]
    attention.p = "fp8*448"        field = value, as after --policy=NAME

A value may end in @layers=3,5-7, and is then written as a string.
"""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernjax.base.errors import UserError
from kernjax.base.resources import data_dir
from kernjax.precision.fields import nearest
from kernjax.precision.policy import Policy, Setting, apply

_KEYS = {"description": str, "source": str, "base": str, "complete": bool, "fields": dict}


@dataclasses.dataclass(frozen=True)
class Description:
    """What a policy's file says about it, and the settings it makes on its base."""

    name: str
    description: str
    source: str
    base: str | None
    complete: bool
    settings: tuple[Setting, ...]


def policy_names() -> list[str]:
    """Names that `parse_policy` accepts, in alphabetical order."""
    return sorted(path.stem for path in data_dir("configs").glob("policies/*.toml"))


@functools.cache
def describe(name: str) -> Description:
    """The file of the named policy; UserError for an unknown name or a malformed file."""
    path = data_dir("configs") / "policies" / f"{name}.toml"
    if name not in policy_names():
        raise UserError(
            f"Policy {name!r} does not exist.",
            f"Named policies: {', '.join(policy_names())}.",
            nearest(name, policy_names(), "Did you mean {}?"),
        )
    return read_policy_file(path)


def read_policy_file(path: Path) -> Description:
    """One policy file; UserError naming the file and what is wrong in it."""
    from kernjax.precision.grammar import check_settings, parse_setting

    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not TOML: {error}.") from None
    wrong = [key for key, value in table.items() if type(value) is not _KEYS.get(key)]
    missing = [key for key in ("description", "source", "fields") if key not in table]
    if wrong or missing:
        raise UserError(
            f"{path}: keys {wrong} are unknown or of the wrong type, {missing} are missing.",
            f"Keys: {', '.join(f'{key} ({kind.__name__})' for key, kind in _KEYS.items())}.",
        )
    try:
        settings = tuple(
            parse_setting(f"{name}={value}") for name, value in _flat(table["fields"]).items()
        )
        base = named_policy(table["base"]) if "base" in table else Policy()
        check_settings(settings, base)
    except UserError as error:
        raise UserError(f"{path}: {error.found}", error.expected, error.todo) from None
    return Description(
        name=path.stem,
        description=table["description"],
        source=table["source"],
        base=table.get("base"),
        complete=table.get("complete", False),
        settings=settings,
    )


def named_policy(name: str) -> Policy:
    """The named policy with its whole chain of bases applied."""
    about = describe(name)
    base = Policy() if about.base is None else named_policy(about.base)
    return dataclasses.replace(apply(about.settings, base), name=name)


def complete_policy(name: str) -> Policy:
    """The nearest policy of `name`'s chain of bases that describes a whole engine."""
    about = describe(name)
    while not about.complete and about.base is not None:
        about = describe(about.base)
    return named_policy(about.name)


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
