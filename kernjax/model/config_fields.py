"""Typed access to the fields of an HF `config.json`; every refusal names the field and the file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernjax.base.errors import UserError

CHECKPOINT_DTYPES = ("bfloat16", "float16", "float32")


def read_config_json(directory: str | Path) -> dict[str, Any]:
    """The parsed `config.json` of an HF directory."""
    directory = Path(directory)
    path = directory / "config.json"
    if not directory.is_dir():
        raise UserError(
            f"--model directory {directory} "
            + ("is not a directory." if directory.exists() else "does not exist."),
            "Expected an HF directory (config.json and safetensors).",
        )
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(
            f"{directory} has no config.json.",
            "Expected an HF directory (config.json and safetensors).",
            "Download the whole checkpoint.",
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} could not be read as JSON: {error}.", "", "Download config.json again."
        ) from None
    if not isinstance(config, dict):
        raise UserError(f"{path} holds a JSON {type(config).__name__}.", "Expected an object.")
    return config


class Fields:
    """Typed access to a config's fields; every refusal names the field and the file."""

    def __init__(
        self, config: Mapping[str, Any], artefact: str, outer: Mapping[str, Any] | None = None
    ) -> None:
        self.config, self.artefact, self.outer = config, artefact, outer or {}

    def error(self, found: str, expected: str) -> UserError:
        return UserError(
            f"{self.artefact}: {found}.", f"Expected {expected}.", "Defaults are never assumed."
        )

    def whole(self, name: str) -> int:
        value = self.config.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.bad(name, value, "a positive whole number")
        return value

    def real(self, name: str, source: Mapping[str, Any] | None = None) -> float:
        value = (self.config if source is None else source).get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.bad(name, value, "a positive number")
        if not (math.isfinite(value) and value > 0):
            raise self.bad(name, value, "a positive number")
        return float(value)

    def only(self, values: Mapping[str, tuple[Any, ...]]) -> None:
        """UserError for a field that has none of the `values` implemented."""
        for name, allowed in values.items():
            if name in self.config and self.config[name] not in allowed:
                raise UserError(
                    f"{self.artefact}: {name}={self.config[name]!r} is not implemented.",
                    f"Implemented: {' or '.join(map(repr, allowed))}.",
                )

    def tied(self) -> bool:
        tie = self.shared("tie_word_embeddings")
        if not isinstance(tie, bool):
            raise self.bad("tie_word_embeddings", tie, "true or false")
        return tie

    def dtype(self) -> str:
        dtype = self.shared("dtype", "torch_dtype")
        if dtype not in CHECKPOINT_DTYPES:
            raise self.bad("dtype", dtype, f"one of {', '.join(CHECKPOINT_DTYPES)}")
        return dtype

    def bad(self, name: str, value: Any, expected: str) -> UserError:
        found = f"field {name} is missing" if value is None else f"{name}={value!r}"
        return self.error(found, f"{name} to be {expected}")

    def shared(self, *names: str) -> Any:
        """A field that the wrapper may hold at its top level, or in text_config, or in both."""
        found = {
            f"{where}{name}": source[name]
            for where, source in (("text_config.", self.config), ("top-level ", self.outer))
            for name in names
            if source.get(name) is not None
        }
        if len(set(map(repr, found.values()))) > 1:
            raise self.error(" but ".join(f"{k}={v!r}" for k, v in found.items()), "one value")
        return next(iter(found.values()), None)
