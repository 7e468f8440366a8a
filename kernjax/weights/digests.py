"""Hashes of tensors and files, several at a time, on one host or shared among many."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np

from kernjax.base.hashing import sha256_json
from kernjax.pods import Pod

_BLOCK = 1 << 24


class Hashed(Protocol):
    """A tensor, or a file: what it is called, and its bytes."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def bytes(self) -> np.ndarray:
        """uint8 [n], mapped."""
        ...


Digests = Callable[[Sequence[Hashed]], list[str]]


def sha256_of_all(items: Sequence[Hashed]) -> list[str]:
    """The hex SHA-256 of every item's bytes (hashing releases the interpreter lock)."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(_sha256, items))


def shared_digests(pod: Pod) -> Digests:
    """Hashes as `sha256_of_all`, each process of the pod its share: all must have the same files.

    UserError where their names, shapes or numbers differ.
    """

    def digests(items: Sequence[Hashed]) -> list[str]:
        headers = sha256_json([[item.name, item.dtype, list(item.shape)] for item in items])
        pod.check_same(
            "checkpoint", {"names and shapes": headers}, "Give every host the same --model."
        )
        shares = pod.gather("hashes", sha256_of_all(pod.share(items)))
        return [shares[at % pod.count][at // pod.count] for at in range(len(items))]

    return digests


def _sha256(item: Hashed) -> str:
    digest = hashlib.sha256()
    data = item.bytes()
    for at in range(0, len(data), _BLOCK):
        digest.update(data[at : at + _BLOCK])
    return digest.hexdigest()
