"""The policies through which a candidate is looked at (NUMERICS: the verdict's lenses).

A candidate is a delta on a production policy. In place it runs as it is; *isolated* the delta sits
on float32 everywhere else; the *twin* is production with only the delta's sites undone.
"""

from __future__ import annotations

import dataclasses

from kernjax.precision.fields import FIELDS
from kernjax.precision.named import named_policy
from kernjax.precision.policy import Policy, Setting, apply


def delta(candidate: Policy, production: Policy) -> tuple[Setting, ...]:
    """What the candidate changes of production, in reading order; empty when it changes nothing."""
    return candidate.settings(production)


def isolated(candidate: Policy, production: Policy) -> Policy:
    """float32 everywhere but at the sites that the candidate changes.

    Equal to `f32` when the candidate only removes rounding (p_f32): it adds no error of its own.
    """
    return apply(delta(candidate, production), named_policy("f32"))


def twin(candidate: Policy, production: Policy) -> Policy:
    """Production with the sites that the candidate changes as in `f32`.

    Equal to production where these are unrounded already (recurrent state, chunk length).
    """
    truth = named_policy("f32")
    undone = (
        dataclasses.replace(setting, value=FIELDS[setting.field].get(truth))
        for setting in delta(candidate, production)
    )
    # A per-layer setting that changes nothing is dropped, so that the text can be read back.
    kept = [s for s in undone if not s.layers or FIELDS[s.field].get(production) != s.value]
    return apply(kept, production)
