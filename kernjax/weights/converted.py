"""Converted checkpoints: the parameter tree as Orbax writes it, read straight into any mesh.

A directory with

- `config.json`, the tokenizer's files and whatever else is small in the HF directory, as it lies;
- `params/`: the tree of `abstract_params(config)` by Orbax, in chunks, each parameter in the
  smallest dtype that holds its values (quantised weights are dequantised);
- `kernjax.json`, last: the HF weights' identity and the hash of every file in `params/`. Without it
  the conversion was interrupted, and the directory does not load.

The identity is that of the HF weights, so recordings of either form are of one model; that the
files are those that were converted is checked wherever the identity is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from kernjax.base.errors import UserError
from kernjax.model.config import ModelConfig
from kernjax.model.params import abstract_params, leaves, tree_of, weight_dtype
from kernjax.weights.digests import Digests, sha256_of_all
from kernjax.weights.match import text_tensors
from kernjax.weights.sharding import partition_spec

SUMMARY, PARAMS, UNFINISHED = "kernjax.json", "params", "kernjax.unfinished"
SCHEMA_VERSION = 1

_AGAIN = "Convert it again (kernjax.convert)."


def is_converted(directory: str | Path) -> bool:
    """Whether a directory is a converted checkpoint, whole or not."""
    return any((Path(directory) / name).exists() for name in (SUMMARY, UNFINISHED))


@dataclass(frozen=True)
class StoredFile:
    """A file below `params/`, to be hashed as a tensor is."""

    name: str
    path: Path
    shape: tuple[int, ...]
    dtype: str = "file"

    def bytes(self) -> np.ndarray:
        """Mapped: uint8 [size]."""
        if not self.shape[0]:
            return np.empty(0, np.uint8)
        return np.memmap(self.path, np.uint8, "r")


def summary(directory: str | Path) -> dict[str, Any]:
    """`kernjax.json`; UserError where the conversion was interrupted or is of another version."""
    path = Path(directory) / SUMMARY
    if not path.exists() or (Path(directory) / UNFINISHED).exists():
        raise UserError(
            f"{directory} is a conversion that was interrupted.",
            f"Expected {SUMMARY}, which is written last.",
            _AGAIN,
        )
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
        version = parsed["schema_version"]
        if version == SCHEMA_VERSION:
            return {key: parsed[key] for key in ("weights_sha256", "dtypes", "files")}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not what kernjax writes: {error!r}.", todo=_AGAIN) from None
    raise UserError(
        f"{path} has schema_version={version!r}.",
        f"This kernjax reads version {SCHEMA_VERSION}.",
        _AGAIN,
    )


def check_readable(directory: str | Path, config: ModelConfig) -> None:
    """UserError where the weights in `directory`, HF's or converted, are not a model of `config`.

    By names and shapes: no values are read.
    """
    if not is_converted(directory):
        text_tensors(directory, config)
        return
    told = summary(directory)
    sizes = {file.name for file in stored_files(Path(directory))}
    if missing := told["files"].keys() - sizes:
        _refuse(directory, f"{len(missing)} files are missing ({min(missing)})")
    expected = {"/".join(path): list(spec.shape) for path, spec in leaves(abstract_params(config))}
    if expected != {name: shape for name, (_, shape) in told["dtypes"].items()}:
        _refuse(directory, "its parameters are not those that config.json demands")


def converted_sha256(directory: str | Path, digests: Digests = sha256_of_all) -> str:
    """The identity of the HF weights it was made of; UserError where a file is not what was made.

    Reads everything once, as `weights_sha256` does; `digests` may share that among hosts.
    """
    expected = summary(directory)
    files = stored_files(Path(directory))
    found = {file.name: digest for file, digest in zip(files, digests(files), strict=True)}
    _check_files(directory, expected["files"], found)
    return expected["weights_sha256"]


def load_converted(
    directory: str | Path,
    config: ModelConfig,
    *,
    dtype: Any = None,
    mesh: Mesh | None = None,
    packed: bool = False,
) -> dict[str, Any]:
    """As `load_params`, of a converted checkpoint: the same bits.

    Every device reads the chunks that hold its part. UserError where files or parameters are
    missing or of another shape, and where they are to be `packed`: they were dequantised. That
    their bytes are right is `converted_sha256`'s to say.
    """
    import orbax.checkpoint as ocp

    check_readable(directory, config)
    if packed:
        refuse_packed(directory)
    dtypes = summary(directory)["dtypes"]
    specs = dict(leaves(abstract_params(config)))
    wanted = None if dtype is None else weight_dtype(dtype)

    def place(path: tuple[str, ...], spec: Any) -> Any:
        if mesh is None:
            return SingleDeviceSharding(jax.local_devices()[0])
        return NamedSharding(mesh, partition_spec(spec.axes, spec.units, mesh))

    arguments = tree_of(
        (
            path,
            ocp.ArrayRestoreArgs(
                sharding=place(path, spec),
                global_shape=spec.shape,
                dtype=spec.dtype(
                    weight_dtype(dtypes["/".join(path)][0]) if wanted is None else wanted
                ),
            ),
        )
        for path, spec in specs.items()
    )
    item = jax.tree.map(lambda one: 0, arguments)
    with checkpointer() as reader:
        try:
            return reader.restore(
                (Path(directory) / PARAMS).absolute(),
                args=ocp.args.PyTreeRestore(item=item, restore_args=arguments),
            )
        except Exception as error:  # Orbax and TensorStore have many
            reason = str(error).strip().splitlines()[0].rstrip(".") if str(error) else repr(error)
            _refuse(directory, f"it could not be read ({reason[:300]})", error)


def refuse_packed(directory: str | Path) -> NoReturn:
    """There is nothing to keep quantised in memory."""
    held = (
        "was dequantised when it was converted" if is_converted(directory) else "is not quantised"
    )
    raise UserError(
        f"dequantise=layer keeps weights quantised in memory, but {directory} {held}.",
        "Expected an HF directory in block-scaled FP8 or MXFP4.",
        "Leave dequantise=layer out, or name the HF directory: the bits are the same.",
    )


def stored_files(directory: Path) -> list[StoredFile]:
    """The files of `params/`, by name."""
    found = (path for path in (directory / PARAMS).rglob("*") if path.is_file())
    return [
        StoredFile(str(path.relative_to(directory)), path, (path.stat().st_size,))
        for path in sorted(found)
    ]


def _check_files(directory: str | Path, expected: Mapping[str, str], found: Mapping) -> None:
    wrong = sorted(
        name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)
    )
    if wrong:
        _refuse(directory, f"{len(wrong)} of its files differ from what was written ({wrong[0]})")


def _refuse(directory: str | Path, why: str, cause: BaseException | None = None) -> Any:
    raise UserError(
        f"{directory} is not the checkpoint that was converted: {why}.",
        "Expected it as kernjax.convert left it.",
        f"Copy it again, or: {_AGAIN[0].lower()}{_AGAIN[1:]}",
    ) from cause


def checkpointer() -> Any:
    import orbax.checkpoint as ocp

    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
