"""Writing a converted checkpoint (`converted.py`): once, by one process or many."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from kernjax.base.errors import UserError
from kernjax.base.files import write_text
from kernjax.model.config import ModelConfig
from kernjax.model.params import leaves
from kernjax.pods import Pod
from kernjax.weights.converted import (
    PARAMS,
    SCHEMA_VERSION,
    SUMMARY,
    UNFINISHED,
    checkpointer,
    is_converted,
    stored_files,
)
from kernjax.weights.digests import shared_digests
from kernjax.weights.identity import weights_sha256
from kernjax.weights.load import load_params

# A device reads whole chunks: small ones, so that it reads little besides its own part.
_CHUNK_BYTES = 16 << 20
_SMALL_FILES = (".json", ".jinja", ".model", ".tiktoken", ".txt")


def convert_checkpoint(
    source: str | Path,
    out: str | Path,
    *,
    mesh: Mesh | None = None,
    overwrite: bool = False,
    progress: bool = False,
    pod: Pod | None = None,
) -> str:
    """Writes the HF directory `source` as a converted checkpoint to `out`; the weights' identity.

    With a `mesh` each process holds, and writes, the parts of its devices. An interrupted
    conversion is begun anew by the next one.
    """
    import orbax.checkpoint as ocp

    source, out, pod = Path(source), Path(out), pod or Pod()
    config, digests = ModelConfig.from_directory(source), shared_digests(pod)
    params = load_params(source, config, mesh=mesh, progress=progress)
    identity = weights_sha256(source, config, digests)
    word = pod.broadcast("conversion", lambda: _begin(source, out, overwrite))
    if not (out / UNFINISHED).is_file() or (out / UNFINISHED).read_text() != word:
        raise UserError(
            f"{out} is not shared by the hosts: this one does not see what process 0 wrote there.",
            "All hosts write one checkpoint.",
            "Choose an --out on a file system that all of them mount.",
        )
    arguments = jax.tree.map(lambda leaf: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), params)
    with checkpointer() as writer:
        writer.save(
            (out / PARAMS).absolute(),
            args=ocp.args.PyTreeSave(item=params, save_args=arguments),
        )
    pod.barrier("parameters are written")
    files = stored_files(out)
    told = {
        "schema_version": SCHEMA_VERSION,
        "weights_sha256": identity,
        "dtypes": {
            "/".join(path): [leaf.dtype.name, list(leaf.shape)] for path, leaf in leaves(params)
        },
        "files": {file.name: digest for file, digest in zip(files, digests(files), strict=True)},
    }
    pod.broadcast("summary", lambda: _end(out, told))
    return identity


def _begin(source: Path, out: Path, overwrite: bool) -> str:
    """Empties what an earlier conversion left, and copies the small files; a word for all hosts."""
    if out.resolve() == source.resolve():
        raise UserError("--out is the model's own directory.", todo="Choose another --out.")
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file.", "A converted checkpoint is a directory.")
    if out.is_dir() and any(out.iterdir()) and not is_converted(out):
        raise UserError(
            f"{out} is not empty and holds no converted checkpoint.",
            "A conversion is written to a place of its own.",
            "Choose another --out.",
        )
    if (out / SUMMARY).exists() and not (out / UNFINISHED).exists() and not overwrite:
        raise UserError(
            f"{out} holds a converted checkpoint.",
            todo="Use it as it is, or pass --overwrite to convert anew.",
        )
    out.mkdir(parents=True, exist_ok=True)
    word = secrets.token_hex(16)
    write_text(out / UNFINISHED, word)  # first: from here on it does not load
    for path in out.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != UNFINISHED:
            path.unlink()
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in _SMALL_FILES and ".index." not in path.name:
            shutil.copyfile(path, out / path.name)
    return word


def _end(out: Path, told: Mapping[str, Any]) -> None:
    write_text(out / SUMMARY, json.dumps(told, indent=1, sort_keys=True) + "\n")
    (out / UNFINISHED).unlink()
