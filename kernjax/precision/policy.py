"""`Policy`: a model's precision, with per-layer settings; frozen, hashable, comparable.

Two policies are equal when they compute the same: the name is only how one is called.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kernjax.base.errors import UserError
from kernjax.precision import sites
from kernjax.precision.fields import FIELDS, LayerPolicy, Value, field, show

Span = tuple[int, int]  # first and last layer, both included


def spans_text(spans: Iterable[Span]) -> str:
    """`3,5-7`, as layers are written."""
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One field at one value: everywhere, or at some layers only."""

    field: str
    value: Value
    layers: tuple[Span, ...] = ()

    def covers(self, layer: int) -> bool:
        return any(first <= layer <= last for first, last in self.layers)

    @property
    def target(self) -> str:
        """The field and its layers as written: `attention.p@layers=3,5-7`."""
        return f"{self.field}@layers={spans_text(self.layers)}" if self.layers else self.field

    def __str__(self) -> str:
        name, at, layers = self.target.partition("@")
        return f"{name}={show(self.value)}{at}{layers}"


class Change(NamedTuple):
    """One line of a difference; values as written on a command line."""

    field: str
    a: str
    b: str


@dataclasses.dataclass(frozen=True)
class Policy(LayerPolicy):
    """A `LayerPolicy` for every layer: the fields, and `overrides` on top at single layers.

    `name` is the named policy it was written from; `str(policy)` is text that `parse_policy`
    reads back to an equal policy.
    """

    overrides: tuple[Setting, ...] = ()
    name: str = dataclasses.field(default="f32", compare=False)

    def for_layer(self, layer: int) -> LayerPolicy:
        """What layer `layer` (counted from 0) runs: the fields with its overrides applied."""
        record = self.without_overrides()
        for setting in self.overrides:
            if setting.covers(layer):
                record = FIELDS[setting.field].set(record, setting.value)
        return record

    def without_overrides(self) -> LayerPolicy:
        """The fields alone: what holds outside the layers (embedding, final norm, logits)."""
        shared = dataclasses.fields(LayerPolicy)
        return LayerPolicy(**{leaf.name: getattr(self, leaf.name) for leaf in shared})

    def settings(self, base: Policy) -> tuple[Setting, ...]:
        """What has to be set on `base` to get this policy, in reading order.

        UserError when `base` has per-layer settings that this policy lacks: a setting can be
        added to a policy, not taken away.
        """
        if missing := [s for s in base.overrides if s not in self.overrides]:
            raise UserError(
                f"Policy {self} lacks the per-layer settings {', '.join(map(str, missing))} of"
                f" {base}.",
                "A policy is compared with one whose per-layer settings it shares.",
                "Write them into both, or into neither.",
            )
        changed = (Setting(leaf.name, leaf.get(self)) for leaf in FIELDS.values())
        return (
            *(s for s in changed if s.value != FIELDS[s.field].get(base)),
            *(s for s in self.overrides if s not in base.overrides),
        )

    def diff(self, other: Policy) -> list[Change]:
        """Where two policies differ, in reading order; layers a side does not set are "-"."""
        changes = [
            Change(leaf.name, show(leaf.get(self)), show(leaf.get(other)))
            for leaf in FIELDS.values()
            if leaf.get(self) != leaf.get(other)
        ]
        mine, theirs = ({s.target: show(s.value) for s in p.overrides} for p in (self, other))
        for target in dict.fromkeys((*mine, *theirs)):
            if mine.get(target) != theirs.get(target):
                changes.append(Change(target, mine.get(target, "-"), theirs.get(target, "-")))
        return changes

    def __str__(self) -> str:
        from kernjax.precision.named import named_policy  # named policies are Policies

        return ",".join([self.name, *map(str, self.settings(named_policy(self.name)))])

    def to_dict(self) -> dict[str, Any]:
        """For a manifest: name, text, and every field and override spelled out as strings."""
        return {
            "name": self.name,
            "text": str(self),
            "fields": {leaf.name: show(leaf.get(self)) for leaf in FIELDS.values()},
            "overrides": [str(setting) for setting in self.overrides],
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Policy:
        """The policy of a manifest. A field the manifest lacks did not exist yet: unrounded."""
        from kernjax.precision.grammar import parse_setting

        policy = cls(name=record["name"])
        for name, text in record["fields"].items():
            setting = parse_setting(f"{name}={text}")
            policy = FIELDS[name].set(policy, setting.value)
        overrides = tuple(parse_setting(text) for text in record.get("overrides", ()))
        return dataclasses.replace(policy, overrides=overrides)

    def validate_layers(self, n_layers: int, layer_kinds: Sequence[str]) -> None:
        """UserError for layers the model does not have, or that never execute the site.

        layer_kinds: one of `sites.KINDS` a layer. Of a range, one layer that executes is enough.
        """
        if len(layer_kinds) != n_layers:
            raise ValueError(f"{n_layers=} does not match {len(layer_kinds)=}.")
        for setting in self.overrides:
            kind = sites.kind_of(setting.field)
            fitting = [i for i, k in enumerate(layer_kinds) if kind is None or k == kind]
            for first, last in setting.layers:
                if last >= n_layers:
                    raise UserError(
                        f"Policy setting {setting} names layer {last}.",
                        f"The model has {n_layers} layers, counted from 0.",
                    )
                if not any(first <= layer <= last for layer in fitting):
                    where = f"layer {first}" if first == last else f"layers {first}-{last}"
                    raise UserError(
                        f"Policy setting {setting}: {where} never executes {setting.field}.",
                        f"Layers of kind {kind}: {', '.join(map(str, fitting)) or 'none'}.",
                    )

    def unused_sites(self, executed: Collection[str]) -> list[str]:
        """Fields this policy changes that are not in `executed` (see `sites.executed_sites`).

        "Changes" is counted from the complete policy it builds on (`f32`, `bf16`, ...): that bf16
        also says how attention rounds is no error in a model without attention.
        """
        from kernjax.precision.named import complete_policy

        asked = {setting.field for setting in self.settings(complete_policy(self.name))}
        return [name for name in FIELDS if name in asked and name not in executed]

    def check_executed(self, executed: Collection[str]) -> None:
        """UserError for the first field this policy changes that the run never executes."""
        if unused := self.unused_sites(executed):
            raise UserError(
                f"Policy {self} sets {', '.join(unused)}, which this run never executes: it would"
                " be judged identical for the wrong reason.",
                f"Executed: {', '.join(name for name in FIELDS if name in executed)}.",
                "Drop the field, or record a model and corpus that reach it (decode steps, several"
                " prefill windows).",
            )


def apply(settings: Iterable[Setting], base: Policy) -> Policy:
    """`base` with the settings made; one it already has is no error here (composition is free).

    UserError for a field that does not exist, ValueError for a value its record refuses.
    """
    policy = base
    for setting in settings:
        leaf = field(setting.field)
        if setting.layers:
            policy = dataclasses.replace(policy, overrides=(*policy.overrides, setting))
        else:
            policy = leaf.set(policy, setting.value)
    return policy


def diff(a: Policy, b: Policy) -> list[Change]:
    """Where two policies differ, in reading order."""
    return a.diff(b)
