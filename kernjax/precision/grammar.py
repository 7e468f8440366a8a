"""The grammar of `--policy`: NAME[,field=value[@layers=3,5-7]]...

    bf16,attention.p=fp8*448,delta_rule.state=m7@layers=0-5

Formats are read by `Format.parse` (f32, bf16, f16, fp8, each optionally *SCALE; mN). What cannot
have been meant is an error: an unknown name, a value out of range, a field set twice, a setting
that changes nothing, layers for a field that belongs to the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from kernjax.base.errors import UserError
from kernjax.precision.fields import FIELDS, field, show
from kernjax.precision.named import named_policy
from kernjax.precision.policy import Policy, Setting, Span, apply

_GRAMMAR = "A policy is NAME[,field=value[@layers=3,5-7]]..., e.g. bf16,attention.p=fp8*448."


def parse_policy(text: str) -> Policy:
    """The policy that `text` describes; UserError for anything else."""
    # A comma before a digit belongs to a list of layers: names of fields start with a letter.
    name, *parts = re.split(r",(?!\s*\d)", text.strip())
    if not name or "=" in name:
        raise UserError(f"Policy {text!r} does not start with a name.", _GRAMMAR)
    base = named_policy(name.strip())
    settings = tuple(parse_setting(part.strip()) for part in parts)
    check_settings(settings, base)
    return apply(settings, base)


def parse_setting(text: str) -> Setting:
    """`field=value` or `field=value@layers=3,5-7` as a Setting."""
    assignment, at, layers = text.partition("@")
    name, equals, value = (part.strip() for part in assignment.partition("="))
    if not (name and equals and value):
        raise UserError(f"Policy setting {text!r} is not field=value.", _GRAMMAR)
    leaf = field(name)
    spans = parse_layers(text, layers) if at else ()
    if spans and not leaf.per_layer:
        raise UserError(
            f"Policy setting {text!r}: {name} belongs to the whole model, not to a layer.",
            "Per-layer fields: all but "
            + ", ".join(other.name for other in FIELDS.values() if not other.per_layer)
            + ".",
        )
    try:
        return Setting(name, leaf.parse(value), spans)
    except ValueError as error:
        why = str(error).rstrip(".")
        raise UserError(
            f"Policy setting {text!r}: {value!r} is no value of {name}: {why}."
        ) from None


def check_settings(settings: Iterable[Setting], base: Policy) -> None:
    """UserError when a setting is made twice, or changes nothing of `base`."""
    seen: list[Setting] = []
    for setting in settings:
        for other in seen:
            if other.field == setting.field and _overlap(other, setting):
                raise UserError(f"Policy sets {setting.field} twice: {other} and {setting}.")
        seen.append(setting)
    everywhere = apply((s for s in seen if not s.layers), base)
    for setting in seen:
        # An override is compared with what its layers would run without it.
        before = everywhere if setting.layers else base
        layers = [layer for a, b in setting.layers for layer in range(a, b + 1)]
        records = [before.for_layer(layer) for layer in layers] or [before]
        if all(FIELDS[setting.field].get(record) == setting.value for record in records):
            raise UserError(
                f"Policy setting {setting} changes nothing.",
                f"{setting.field} already is {show(setting.value)} in {before}.",
            )


def parse_layers(text: str, layers: str) -> tuple[Span, ...]:
    """`layers=3,5-7` as spans; UserError that quotes the whole `text` it stands in."""
    key, _, numbers = layers.partition("=")
    spans: list[Span] = []
    for part in numbers.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if key.strip() != "layers" or first > last:
            raise UserError(
                f"{text!r}: {'@' + layers!r} is no list of layers.",
                "Layers are written @layers=3,5-7, counted from 0.",
            )
        spans.append((first, last))
    return tuple(spans)


def _overlap(a: Setting, b: Setting) -> bool:
    if not a.layers or not b.layers:
        return not a.layers and not b.layers
    return any(x <= v and u <= y for x, y in a.layers for u, v in b.layers)
