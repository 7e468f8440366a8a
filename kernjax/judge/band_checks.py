"""Does a band agree with itself? What follows from its normals' numbers is computed again.

`check` is called on every band that is read: of the file's numbers only the normals' own are
believed, and the rest is computed from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kernjax.base.errors import UserError
from kernjax.judge.comparison import DECODE, PHASES
from kernjax.judge.gates import Limit, Row
from kernjax.judge.intervals import Estimate
from kernjax.judge.limits import leave_one_out, limits_of, merge_flip_bins
from kernjax.judge.margin_tables import confident_range, largest_range
from kernjax.judge.metrics import MARGIN_EDGES

if TYPE_CHECKING:
    from kernjax.judge.band import Band

MIN_NORMALS = 4
_DIGITS = 1e-5
"""Relative: limits are kept to six digits, and sums differ in the last bits between machines."""

_SUBJECT = ("model", "tokenizer_sha256", "corpus")
_QUANTILES = ("p1", "p10", "p25", "p50", "p90", "p99", "p99.9", "max")
_FIRST_COUNTED = 2  # the first bin of margins that the tables of flips count
_CALIBRATE = "A band file is only ever written by kernjax.calibrate: calibrate again."


def check(band: Band) -> None:
    """UserError where the band does not agree with itself; TypeError, ValueError or KeyError where
    it is no band that `to_dict` wrote.
    """
    _check_parts(band)
    _check_numbers(band)
    _check_limits(band)
    _check_flip_margins(band)


def _check_parts(band: Band) -> None:
    """TypeError, ValueError or KeyError where what no number depends on is not as written."""
    subject = {key: band.reference.get(key) for key in _SUBJECT}
    for producer in band.producers:
        if not isinstance(producer, Mapping) or not isinstance(producer["digest"], str):
            raise TypeError(f"a producer is {producer!r:.60}")
        if (own := {key: producer.get(key) for key in _SUBJECT}) != subject:
            raise ValueError(f"producer {producer['name']} is of {own!r:.200}")
    for party in (band.reference, *band.producers):
        if not all(isinstance(party.get(key, {}), Mapping) for key in ("model", "corpus")):
            raise TypeError("a model or corpus is no object")
        if not isinstance(party.get("logits_dtype", ""), str):
            raise TypeError(f"logits_dtype {party['logits_dtype']!r}")
    if not all(isinstance(entry, Mapping) for entry in band.bad):
        raise TypeError("a known-bad recording is no object")
    kinds = {segment.kind for segment in band.segments}
    for entry in band.strata:
        quantiles = [entry[name] for name in _QUANTILES]
        if entry["kind"] not in kinds or entry["phase"] not in PHASES:
            raise ValueError(f"a stratum of {entry['kind']}, {entry['phase']}")
        if type(entry["context_len"]) is not int or not 0 <= entry["mean"] <= quantiles[-1]:
            raise ValueError(f"a stratum at {entry['context_len']} of mean {entry['mean']}")
        if not all(a <= b for a, b in zip([0.0, *quantiles], quantiles, strict=False)):
            raise ValueError(f"quantiles {quantiles}")


def _check_numbers(band: Band) -> None:
    """UserError unless there are enough producers and every limit is a number."""
    count = len(band.normals)
    if count < MIN_NORMALS or len(band.producers) != count:
        raise UserError(
            f"The band names {len(band.producers)} producers and has the numbers of {count}.",
            f"Expected the numbers of each, and at least {MIN_NORMALS}.",
            _CALIBRATE,
        )
    decoded = "early" in band.normals[0].log_mean
    if decoded != (band.level == DECODE):
        raise UserError(
            f"The band decides on {PHASES[band.level]} rows.",
            f"Its normals have {'' if decoded else 'no '}decoded ones.",
            _CALIBRATE,
        )
    numbers = {
        **{f"limit {key}": limit.allowed for key, limit in band.limits.items()},
        **{name: band.margins.get(name) for name in ("confident_margin", "largest_flip_margin")},
        "sigma": band.margins.get("sigma"),
        "max_allowed_ratio": band.settings.get("max_allowed_ratio"),
    }
    for name, value in numbers.items():
        usable = type(value) in (int, float) and math.isfinite(value)
        if not usable or (name == "max_allowed_ratio" and value < 1):
            raise UserError(
                f"The band's {name} is {value!r}.",
                "Expected a finite number" + (", at least 1." if usable else "."),
                _CALIBRATE,
            )


def _check_limits(band: Band) -> None:
    """UserError unless the limits are what the normals' numbers give, of exactly their rows.

    A gate that was left out, or misspelt, would be a gate that nobody looks at.
    """
    flips = np.mean([normal.flips.sum(axis=0) for normal in band.normals], axis=0)
    if band.flip_bins != (bins := merge_flip_bins(flips)):
        raise UserError(
            f"The band tests flips in the bins {band.flip_bins}.",
            f"Its normals' flips give {bins}.",
            _CALIBRATE,
        )
    rows = band.predeclared
    loo = leave_one_out(band.segments, band.normals, rows)
    expected = limits_of(rows, loo)
    known = {row.key for row in rows}
    if unknown := [key for key in band.limits if key not in known]:
        gates = ", ".join(dict.fromkeys(row.gate for row in rows))
        raise UserError(
            f"The band has a limit for {unknown[0]!r}, which is no row of its gates.",
            f"Gates: {gates}.",
            _CALIBRATE,
        )
    if missing := [key for key in expected if key not in band.limits]:
        raise UserError(
            f"The band lacks a limit for {missing[0]!r}, which its normals can be tested on.",
            "Every predeclared gate is evaluated.",
            _CALIBRATE,
        )
    given, computed = limits_to_dict(band.limits), limits_to_dict(expected)
    for key, values in computed.items():
        for name, value in values.items():
            if not _same(given[key][name], value):
                raise UserError(
                    f"The band's limit {key} has {name} {given[key][name]}.",
                    f"Its normals' numbers give {value}.",
                    _CALIBRATE,
                )
    for index, producer in enumerate(band.producers):
        if producer["ratio"] != (ratios := ratios_of(rows, loo, index)):
            raise UserError(
                f"The band's producer {producer['name']} is at {producer['ratio']}.",
                f"The normals' numbers give {ratios}.",
                _CALIBRATE,
            )
    floor = detection_floor(rows, expected)
    if band.detection_floor.keys() != floor.keys() or not all(
        _same(band.detection_floor[kind], value) for kind, value in floor.items()
    ):
        raise UserError(
            f"The band's detection floor is {band.detection_floor}.",
            f"Its normals' numbers give {floor}.",
            _CALIBRATE,
        )


def _check_flip_margins(band: Band) -> None:
    """UserError unless the flip margins are what the normals' counts give."""
    tables, largest = band.margins["tables"], band.margins["largest_flip_margin"]
    if tables.keys() != {segment.kind for segment in band.segments}:
        raise ValueError(f"counts by margin of the kinds {sorted(tables)}")
    flips = np.sum([normal.flips.sum(axis=0) for normal in band.normals], axis=0)
    shown = [entry["flips"] * len(band.normals) for entry in band.margins["bins"]]
    counted = sum(sum(table["flips"]) for table in tables.values())
    # The counts are of all phases, from a margin of 0.05 on; the normals' of the deciding one.
    if not np.allclose(shown, flips, rtol=_DIGITS) or counted < flips[_FIRST_COUNTED:].sum():
        raise UserError(
            f"The band's normals have {flips.tolist()} flips by margin.",
            f"Its tables say {[float(f'{n:.6g}') for n in shown]}, and {counted} from "
            f"{MARGIN_EDGES[1]:.2g} on.",
            _CALIBRATE,
        )
    for name, (low, high) in (
        ("largest_flip_margin", largest_range(tables)),
        ("confident_margin", confident_range(tables, len(band.normals), largest)),
    ):
        if not low * (1 - _DIGITS) <= band.margins[name] <= high * (1 + _DIGITS):
            raise UserError(
                f"The band's {name} is {band.margins[name]:.6g}.",
                f"Its normals' counts by margin put it between {low:.6g} and {high:.6g}.",
                _CALIBRATE,
            )


def detection_floor(rows: Sequence[Row], limits: Mapping[str, Limit]) -> dict[str, float]:
    """By kind: the smallest uniform R, all depths, that the level gate FAILs with 95 % power."""
    return {
        str(row.kind): float(f"{math.exp(limits[row.key].detectable):.4g}")
        for row in rows
        if row.gate == "level" and row.context is None and row.statistic == "geometric"
        if row.key in limits
    }


def ratios_of(
    rows: Sequence[Row], loo: Mapping[str, Sequence[Estimate]], index: int
) -> dict[str, float]:
    """A producer's R against the others, by level row of all depths, for people."""
    return {
        row.stratum: float(f"{math.exp(loo[row.key][index].value):.4g}")
        for row in rows
        if row.gate == "level" and row.context is None and row.key in loo
    }


def _same(given: Any, computed: Any) -> bool:
    """Whether a number of the file is the computed one, to the digits it is kept with."""
    if isinstance(computed, str):
        return given == computed
    return math.isclose(given, computed, rel_tol=_DIGITS, abs_tol=1e-12)


def limits_to_dict(limits: Mapping[str, Limit]) -> dict[str, dict[str, Any]]:
    """Limits in the unit people read (a ratio, or a mass), to six digits."""
    result = {}
    for key, limit in limits.items():
        shown = math.exp if limit.is_log else float
        values = {name: float(f"{shown(value):.6g}") for name, value in limit.values().items()}
        result[key] = {"unit": "ratio" if limit.is_log else "mass"} | values
    return result
