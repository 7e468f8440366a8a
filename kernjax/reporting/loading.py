"""Verdicts back from their files, checked: reports are redrawn from these."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernjax.base.errors import UserError
from kernjax.judge.case import SEVERITIES, Finding
from kernjax.judge.comparison import PHASES
from kernjax.judge.gates import Gate, Outcome
from kernjax.judge.lenses import IncumbentRow, IsolatedDepth, IsolatedLaw
from kernjax.judge.strata import MarginBin, Stratum
from kernjax.judge.verdict import Verdict
from kernjax.reporting.json import SCHEMA_VERSION

VERDICT_FILE = "verdict.json"
FIGURES_FILE = "figures.json"
FIGURES_VERSION = 1


def load_verdict(path: str | Path) -> tuple[Verdict, dict[str, Any]]:
    """The verdict of a verdict.json (or of the directory with one), and the whole JSON value.

    UserError: no such file, no JSON, a newer schema, something missing or of another type. What
    JSON cannot hold (NaN, infinity) comes back as None.
    """
    file = Path(path)
    if file.is_dir():
        file = file / VERDICT_FILE
    line = read_json(file, "verdict", SCHEMA_VERSION)
    if "verdict" not in line and "error" in line:
        raise UserError(f"{file} holds an error, not a verdict: {line['error']}")
    for key, example in _EXTRAS.items():
        if line.get(key) is not None:
            _check_shape(line[key], example, f"{file}, {key}")
    try:
        return verdict_of(line), line
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(
            f"{file} is no verdict of kernjax.check: {what}.",
            "The keys are those of the JSON line that check ends with.",
            "Run check with --output_dir once more.",
        ) from error


def load_figures(path: str | Path) -> dict[str, Any] | None:
    """What lies in figures.json beside the verdict; None where there is none."""
    file = Path(path)
    file = (file if file.is_dir() else file.parent) / FIGURES_FILE
    if not file.exists():
        return None
    value = read_json(file, "figures file", FIGURES_VERSION)
    _check_shape(value, _FIGURES, str(file))
    return value


def load_cause(path: str | Path, name: str) -> dict[str, Any]:
    """The JSON value of `locate` or `sweep`, from its file or its directory."""
    file = Path(path)
    file = file / f"{name}.json" if file.is_dir() else file
    value = read_json(file, f"result of kernjax.{name}", 1)
    _check_shape(value, _CAUSES[name], str(file))
    return value


def read_json(file: Path, what: str, version: int) -> dict[str, Any]:
    """The object in a JSON file whose `schema_version` is at most `version`; else UserError."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"There is no {what} at {file}.", todo="`--output_dir` of the command writes one."
        ) from None
    except OSError as error:
        raise UserError(f"Could not read {file}: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is no JSON: {error}.", f"Expected a {what}.") from error
    found = value.get("schema_version") if isinstance(value, dict) else None
    if not isinstance(found, int | str) or isinstance(found, bool):
        raise UserError(
            f"{file} has no schema_version.", f"Expected a {what} of kernjax, a JSON object."
        )
    major = str(found).partition(".")[0]
    if not major.isdecimal() or int(major) > version:
        raise UserError(
            f"{file} has schema version {found!r}.",
            f"This kernjax reads versions up to {version}.",
            "Use the kernjax that wrote it, or a newer one.",
        )
    return value


# What the page reads of a file, as an example of each thing: a number, a text, one item of a list,
# or all the items of a list of that length. A tuple holds alternatives.
_NUMBER = (0.0, None)
_PAIR = [0.0, 0.0]
_TEXT = ("", None)
_LIKELY = [0.0, _TEXT, _NUMBER]  # id, text, probability
_PASSED = [0.0, _TEXT, _NUMBER, 0.0]  # id, text, KL, 1 where it was predicted
_FIGURES = {
    "kinds": [""],
    "cdf": [{"kind": "", "zeros": 0.0, "candidate": [_PAIR], "normal": [_PAIR]}],
    "normal_strata": [{"kind": "", "context_len": 0.0, "mean": 0.0}],
    "steps": [
        {
            "kind": "",
            "candidate": [{"first": 0.0, "last": 0.0, "mean": 0.0}],
            "normal": [{"first": 0.0, "last": 0.0, "mean": 0.0}],
        }
    ],
    "scatter": {"points": [[0.0, 0.0, 0, 0]], "of": 0.0, "flips": 0.0},
    "margins": {"sigma": _NUMBER, "expected": [0.0]},
    "worst": [
        {
            "segment": "",
            "kind": "",
            "context_len": 0.0,
            "pos": 0.0,
            "kl": _NUMBER,
            "margin": _NUMBER,
            "flipped": False,
            "reference": [_LIKELY],
            "candidate": [_LIKELY],
            "strip": [_PASSED],
        }
    ],
}
_KL_ROWS = [{"kind": "", "context_len": 0.0, "kl_median": _NUMBER, "kl_mean": _NUMBER}]
_EXTRAS = {  # of a verdict's file: what a run knows beside the verdict
    "command": "",
    "runs": [{"run": "", "tokens": 0.0, "seconds": _NUMBER}],
    "cost": {"compile_s": _NUMBER, "peak_memory_bytes": _NUMBER, "peak_device_bytes": _NUMBER},
    "notes": [""],
    "twin": _KL_ROWS,
    "wall_s": _NUMBER,
}
_CAUSES = {
    "locate": {"sentence": "", "layers": [{"layers": [0], "share": _NUMBER}]},
    "sweep": {
        "sentence": "",
        "knee": ("", None),
        "points": [
            {
                "format": "",
                "ratios": [
                    {"kind": "", "mean": "", "ratio": _NUMBER, "low": _NUMBER, "high": _NUMBER}
                ],
            }
        ],
    },
}


def _check_shape(value: Any, example: Any, where: str) -> None:
    """UserError unless the value has the example's keys and types, all the way down."""
    options = example if isinstance(example, tuple) else (example,)
    for option in options:
        if isinstance(option, dict) and isinstance(value, dict):
            if missing := sorted(option.keys() - value.keys()):
                raise UserError(f"{where} lacks {', '.join(missing)}.", "Make it once more.")
            for key, part in option.items():
                _check_shape(value[key], part, f"{where}, {key}")
            return
        if isinstance(option, list) and isinstance(value, list):
            if len(option) not in (1, len(value)):
                continue
            items = option if len(option) > 1 else option * len(value)
            for item, part in zip(value, items, strict=True):
                _check_shape(item, part, where)
            return
        if isinstance(value, bool) or isinstance(option, bool):
            if type(option) is type(value):
                return
            continue
        if isinstance(option, float) and isinstance(value, int | float):
            return
        if isinstance(option, int) and isinstance(value, int):
            return
        if option is None and value is None or isinstance(option, str) and isinstance(value, str):
            return
    raise UserError(f"{where} holds {value!r:.60}.", "Another type was expected.")


def verdict_of(line: Mapping[str, Any]) -> Verdict:
    """The verdict in the value of a JSON line; KeyError, TypeError or ValueError where it fails."""
    isolated, incumbent = line["isolated"] or {}, line["incumbent"] or {}
    parties = {name: _mapping(line[name], name) for name in ("reference", "candidate", "band")}
    for name in ("isolated", "incumbent", "repeat"):
        if line.get(name):
            party = _mapping(line[name], name)
            parties[name] = {k: party.get(k) for k in ("path", "label", "digest")}
    verdict = _made(
        Verdict,
        {
            **line,
            "outcome": line["verdict"],
            "gates": _rows(Gate, line["gates"]),
            "findings": _rows(Finding, line["findings"]),
            "strata": _rows(Stratum, line["strata"]),
            "margin_bins": _rows(MarginBin, line["margin_bins"]),
            "isolated": _rows(IsolatedDepth, isolated.get("depths", ())),
            "isolated_laws": _rows(IsolatedLaw, isolated.get("laws", ())),
            "incumbent": _rows(IncumbentRow, incumbent.get("rows", ())),
            "differences": tuple(tuple(map(str, row)) for row in line["differences"]),
            "changes": tuple(tuple(map(str, row)) for row in line.get("changes", ())),
            "parties": parties,
        },
    )
    for name in ("perplexity", "accuracy_bound"):
        for pair in getattr(verdict, name).values():
            if len(pair) != 2 or not all(v is None or isinstance(v, int | float) for v in pair):
                raise ValueError(f"{name} is not made of pairs of numbers")
    for name in ("differences", "changes"):
        if any(len(row) != 3 for row in getattr(verdict, name)):
            raise ValueError(f"{name} is not made of triples")
    for phase in (verdict.deciding_phase, *(stratum.phase for stratum in verdict.strata)):
        if phase not in PHASES:
            raise ValueError(f"a phase is {phase!r:.60}, none of {', '.join(PHASES)}")
    for finding in verdict.findings:
        if finding.severity not in SEVERITIES:
            raise ValueError(f"a severity is {finding.severity!r:.60}")
    if line.get("exit_code") != verdict.exit_code:
        raise ValueError(f"exit_code is {line.get('exit_code')!r} beside {verdict.outcome}")
    return verdict


def _rows(cls: type, rows: Any) -> tuple[Any, ...]:
    return tuple(_made(cls, _mapping(row, cls.__name__)) for row in rows)


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} is {type(value).__name__}, not an object")
    return value


def _made(cls: type, values: Mapping[str, Any]) -> Any:
    """An instance of the dataclass from the keys that it knows, their plain types checked."""
    hints = typing.get_type_hints(cls)
    chosen = {}
    for field in dataclasses.fields(cls):
        required = field.default is dataclasses.MISSING
        required &= field.default_factory is dataclasses.MISSING
        if field.name not in values:
            if required:
                raise KeyError(field.name)
            continue
        chosen[field.name] = _checked(values[field.name], hints[field.name], field.name)
    return cls(**chosen)


def _checked(value: Any, hint: Any, name: str) -> Any:
    if hint is Outcome:
        return Outcome(value)
    origin = typing.get_origin(hint)
    options = typing.get_args(hint) if origin in (types.UnionType, typing.Union) else (hint,)
    kinds = tuple(typing.get_origin(option) or option for option in options)
    if float in kinds:
        kinds += (int, type(None))  # whole numbers are numbers; null stands for what is not finite
    if Mapping in kinds or dict in kinds:
        kinds += (Mapping,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise TypeError(f"{name} is {value!r:.80}")
    if isinstance(value, Mapping):
        inner = typing.get_args(next(o for o in options if typing.get_origin(o) is dict))[1]
        numbers = {int, float} & {inner, *typing.get_args(inner)}
        if (
            numbers
            and typing.get_origin(inner) is not tuple
            and not all(
                v is None or (isinstance(v, int | float) and not isinstance(v, bool))
                for v in value.values()
            )
        ):
            raise TypeError(f"{name} holds something that is not a number")
    return value
