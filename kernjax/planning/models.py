"""Models by their configs alone: nothing here needs weights."""

from __future__ import annotations

import json
from math import gcd
from typing import Any

from kernjax.base.errors import UserError
from kernjax.base.resources import data_dir, model_directory
from kernjax.model.config import ModelConfig
from kernjax.model.config_fields import read_config_json
from kernjax.weights.quantisation import MXFP4, BlockScaledFP8, Scheme, read_scheme

_FORMATS: dict[str, Scheme | None] = {"plain": None, "fp8": BlockScaledFP8(), "mxfp4": MXFP4()}


def model_names() -> list[str]:
    """Configs that come with kernjax, as published without vision.

    qwen3.8-27b is that of Qwen/Qwen3.8-27B, revision 1d4bf0f2; kimi-k3 of moonshotai/Kimi-K3.
    """
    return sorted(path.stem for path in data_dir("configs").glob("models/*.json"))


def read_model(name: str) -> ModelConfig:
    """The config of a bundled name, or of a directory that has a config.json (`demo` too)."""
    config, artefact = _raw(name)
    return ModelConfig.from_dict(config, artefact=artefact)


def read_format(name: str, wanted: str) -> Scheme | None:
    """How the model's matrices lie in its files: `published` as its config declares; or as named.

    None: they are not quantised (`plain`); else `fp8` and `mxfp4`.
    """
    if wanted != "published":
        return _FORMATS[wanted]
    return read_scheme(*_raw(name))


def _raw(name: str) -> tuple[dict[str, Any], str]:
    """The content of config.json, and what it is called."""
    if name in model_names():
        path = data_dir("configs") / "models" / f"{name}.json"
        return json.loads(path.read_bytes()), str(path)
    directory = model_directory(name)
    if not directory.exists():
        raise UserError(
            f"--model={name} is neither a directory nor a name.",
            f"Names: {', '.join(['demo', *model_names()])}.",
        )
    return read_config_json(directory), f"{directory}/config.json"


def default_mesh(config: ModelConfig, devices: int) -> str:
    """The mesh for so many devices in which no key/value head is held twice.

    As much tensor parallelism as the heads allow, the rest of the devices split the width. Of
    latent attention every device has the one latent, so that its query heads decide.
    """
    heads = config.num_kv_heads if config.latent is None else config.num_heads
    tensor = gcd(devices, heads, config.linear_key_heads)
    return f"fsdp={devices // tensor},tensor={tensor}"
