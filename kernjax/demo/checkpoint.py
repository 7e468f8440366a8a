"""A training run on disk: one npz with parameters, optimiser state and counters, replaced whole."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kernjax.base.errors import UserError

FILE = "checkpoint.npz"


@dataclasses.dataclass
class Progress:
    """Counters of a run; with the parameters they are all that a resumed run needs."""

    step: int = 0
    windows: int = 0  # drawn of each kind so far
    tokens: int = 0
    progress: float = 0.0  # share of the run done, in [0, 1]
    seconds: float = 0.0  # spent in training steps
    started: float = 0.0  # Unix time of the first start


def save(workdir: Path, params: Any, opt_state: Any, progress: Progress) -> None:
    """Writes the checkpoint beside the old one, then replaces it atomically."""
    arrays = {f"params{jax.tree_util.keystr(path)}": leaf for path, leaf in _leaves(params)}
    arrays |= {f"optimiser{jax.tree_util.keystr(path)}": leaf for path, leaf in _leaves(opt_state)}
    meta = np.frombuffer(json.dumps(dataclasses.asdict(progress)).encode(), np.uint8)
    partial = workdir / f"{FILE}.partial"
    with open(partial, "wb") as file:
        np.savez(file, progress=meta, **{k: np.asarray(v) for k, v in arrays.items()})
        file.flush()
        os.fsync(file.fileno())
    partial.replace(workdir / FILE)


def exists(workdir: Path) -> bool:
    return (workdir / FILE).exists()


def load(workdir: Path, params: Any, opt_state: Any) -> tuple[Any, Any, Progress]:
    """The checkpoint's contents in the structure of the given trees."""
    path = workdir / FILE
    with np.load(path) as file:
        progress = Progress(**json.loads(file["progress"].tobytes()))
        return (
            _fill(params, "params", file, path),
            _fill(opt_state, "optimiser", file, path),
            progress,
        )


def load_params(workdir: Path, params: Any) -> tuple[Any, Progress]:
    """Parameters and counters alone."""
    path = workdir / FILE
    if not path.exists():
        raise UserError(f"{path} does not exist.", "Expected a training run's --workdir.")
    with np.load(path) as file:
        progress = Progress(**json.loads(file["progress"].tobytes()))
        return _fill(params, "params", file, path), progress


def _leaves(tree: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_flatten_with_path(tree)[0]


def _fill(tree: Any, prefix: str, file: Any, path: Path) -> Any:
    def leaf(key: Any, like: Any) -> np.ndarray:
        name = f"{prefix}{jax.tree_util.keystr(key)}"
        shape = file[name].shape if name in file else None
        if shape != np.shape(like):
            raise UserError(
                f"{path} has {name} of shape {shape}.",
                f"Expected {np.shape(like)}.",
                "It was made with other settings: use another --workdir.",
            )
        return file[name]

    return jax.tree_util.tree_map_with_path(leaf, tree)
