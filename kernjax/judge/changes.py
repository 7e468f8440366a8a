"""What a candidate changes of what runs now: the first thing that a reader asks.

The reference differs from it in everything that production rounds; the change is what is left when
production's own recording stands beside it: the incumbent's, or that of the band's producer which
is the production policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernjax.judge.case import Case
from kernjax.judge.comparison import label
from kernjax.judge.strata import manifest_differences

BUILT_IN = "built in"

_POLICY: dict[str, Any] = {"fields": {}, "overrides": []}
_SETUP = ("engine", "mesh", "versions", "device", "batch_size", "prefill_window", "logits_dtype")


def changes(case: Case) -> tuple[str, tuple[tuple[str, str, str], ...]]:
    """What the candidate is set against, and (field, its value, the candidate's) where they differ.

    Fields of the policy, then kernels by op, then engine, versions and device, each as far as both
    manifests know it. The name is "" where nobody recorded what runs now.
    """
    name, ours = _production(case)
    if ours is None:
        return "", ()
    theirs = case.comparison.candidate_manifest
    policies = [
        {key: (one.get("policy") or {}).get(key, empty) for key, empty in _POLICY.items()}
        for one in (ours, theirs)
    ]
    asked = str((theirs.get("policy") or {}).get("text"))
    found = []
    for field, a, b in manifest_differences(*policies):
        short = field.removeprefix("fields.")
        # One side is older than the field: what it did is the default, unless it was asked for.
        if short in asked or "None" not in (a, b):
            found.append((short, a, b))
    kernels = [one.get("kernels") or {} for one in (ours, theirs)]
    for op in sorted({*kernels[0], *kernels[1]}):
        if kernels[0].get(op) != kernels[1].get(op):
            found.append((op, *(_kernel(one.get(op)) for one in kernels)))
    setup = [
        {key: one[key] for key in _SETUP if key in ours and key in theirs} for one in (ours, theirs)
    ]
    # The prefill window is a field of the policy and stands beside it.
    return name, tuple(dict.fromkeys([*found, *manifest_differences(*setup)]))


def _production(case: Case) -> tuple[str, Mapping[str, Any] | None]:
    if case.incumbent is not None:
        manifest = case.incumbent.candidate_manifest
        return label(manifest, case.incumbent.candidate_name), manifest
    for producer in case.band.producers:
        policy = producer.get("policy") or {}
        if policy.get("text") == case.band.production_policy and not producer.get("kernels"):
            return str(policy["text"]), producer
    return "", None


def _kernel(value: Any) -> str:
    """A kernel as `--kernel` names it; two of one name are told apart by their hash."""
    if value is None:
        return BUILT_IN
    if not isinstance(value, Mapping):
        return str(value)
    at = f"@layers={value['layers']}" if value.get("layers") else ""
    return f"{value.get('name')}{at} ({str(value.get('sha256'))[:8]})"
