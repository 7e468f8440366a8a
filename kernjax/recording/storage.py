"""Where a recording lies: a local directory or a bucket, seen as TensorStore keys and values.

Every write of one key is atomic and durable when it returns (temporary file, fsync and rename on a
disk; one put in a bucket). All failures of the storage become `UserError`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

import tensorstore as ts

from kernjax.base.errors import UserError

# One context: bounds the threads of all arrays together, and makes memory:// one store a process.
_CONTEXT = ts.Context()
# TensorStore's temporary file while it writes a key; a kill may leave one behind.
_TEMPORARY = ".__lock"


@contextlib.contextmanager
def storage_errors(action: str, where: str) -> Iterator[None]:
    """Turns what TensorStore or the system raise inside into a UserError with its reason."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # TensorStore maps its statuses to several exception types.
        # Without the [source locations='...'] that TensorStore appends.
        reason = re.sub(r"\s*\[.*\]\s*$", "", str(error).replace("\n", " ")).rstrip(".")
        lowered = reason.lower()
        if any(sign in lowered for sign in ("no space", "resource_exhausted", "failed to write")):
            todo = "Free space there, or choose another place, and run the same command again."
        elif "permission" in lowered or "unauthenticated" in lowered:
            todo = "Check the permissions or credentials, and run the same command again."
        elif "zip" in lowered:
            reason += " (the file was cut short or damaged, or is no zip)"
            todo = "Copy it again from where it came, or record it anew."
        else:
            todo = "Check the path and that its storage is reachable."
        raise UserError(f"Could not {action} {where}: {reason}.", todo=todo) from error


class Store:
    """The keys below one local directory (any path) or URL (`gs://bucket/path`)."""

    def __init__(self, kvstore: ts.KvStore, name: str, directory: str | None) -> None:
        self._kvstore, self.name, self._directory = kvstore, name, directory

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Store:
        """Opens without touching; nothing need exist there yet. A .zip file opens read-only."""
        name = os.fspath(path)
        is_url, directory = "://" in name, None
        if not name.endswith("://"):
            name = name.rstrip("/") or "/"
        if is_url:
            spec: Any = name + ("" if name.endswith(".zip") else "/")
        else:
            directory = os.path.abspath(os.path.expanduser(name))
            spec = {"driver": "file", "path": directory}
            if not os.path.isfile(directory):
                spec["path"] = directory.rstrip("/") + "/"
            elif not name.endswith(".zip"):
                raise UserError(f"{name} is a file.", "A recording is a directory, gs:// or .zip.")
        with storage_errors("open", name):
            if name.endswith(".zip") and (directory is None or os.path.isfile(directory)):
                base = spec if isinstance(spec, dict) else ts.KvStore.Spec(spec).to_json()
                spec, directory = {"driver": "zip", "base": base}, None
            kvstore = ts.KvStore.open(spec, context=_CONTEXT).result()
        return cls(kvstore, name, directory)

    def child(self, prefix: str) -> Store:
        """The store of the keys that start with `prefix` (which ends in a slash)."""
        spec = self._kvstore.spec().to_json()
        spec["path"] = spec.get("path", "") + prefix
        with storage_errors("open", self.name):
            kvstore = ts.KvStore.open(spec, context=_CONTEXT).result()
        directory = None if self._directory is None else os.path.join(self._directory, prefix)
        return Store(kvstore, f"{self.name}/{prefix.rstrip('/')}", directory)

    def exists(self) -> bool:
        """Whether at least one value lies here, whatever it is."""
        if self._directory is None:
            return bool(self.keys())
        walk = os.walk(self._directory)
        return any(not name.endswith(_TEMPORARY) for _, _, names in walk for name in names)

    def keys(self, prefix: str = "") -> list[str]:
        """The keys that start with `prefix`, sorted."""
        with storage_errors("list", self.name):
            found = self._kvstore.list(_range(prefix)).result()
        return sorted(key.decode() for key in found)

    def read(self, key: str) -> bytes | None:
        """The value of a key, or None where there is none."""
        return self.read_many([key])[0]

    def read_many(self, keys: Iterable[str]) -> list[bytes | None]:
        """The values of several keys, fetched at once."""
        with storage_errors("read", self.name):
            results = [future.result() for future in [self._kvstore.read(key) for key in keys]]
        return [bytes(result.value) if result.state == "value" else None for result in results]

    def write(self, key: str, value: bytes) -> None:
        """Sets a key; on return the value is whole and durable, or a UserError was raised."""
        with storage_errors("write", f"{self.name}/{key}"):
            self._kvstore.write(key, value).result()

    def write_new(self, key: str, value: bytes) -> bytes:
        """Sets a key unless it exists; returns the value it has now (maybe another host's)."""
        with storage_errors("write", f"{self.name}/{key}"):
            before = self._kvstore.read(key).result()
            if before.state == "value":
                return bytes(before.value)
            self._kvstore.write(key, value, if_equal=before.stamp.generation).result()
            return bytes(self._kvstore.read(key).result().value)

    def delete(self, prefix: str) -> None:
        """Deletes every key that starts with `prefix` (a key, or a folder with its slash)."""
        with storage_errors("delete", f"{self.name}/{prefix}"):
            self._kvstore.delete_range(_range(prefix)).result()
            if self._directory is not None and prefix.endswith("/"):
                _prune(os.path.join(self._directory, prefix))

    def array(self, name: str, metadata: dict[str, Any], create: bool) -> ts.TensorStore:
        """Opens the zarr3 array `name/`, creating it where `create` says so and it is absent."""
        spec = {
            "driver": "zarr3",
            "kvstore": self.child(name + "/")._kvstore.spec().to_json(),
            "metadata": metadata,
            # A lost chunk must be an error, not a block of fill values.
            "fill_missing_data_reads": False,
            "store_data_equal_to_fill_value": True,
        }
        with storage_errors("create" if create else "open", f"array {self.name}/{name}"):
            return ts.open(spec, context=_CONTEXT, open=True, create=create).result()


def _range(prefix: str) -> ts.KvStore.KeyRange:
    if not prefix:
        return ts.KvStore.KeyRange()
    return ts.KvStore.KeyRange(prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1))


def _prune(directory: str) -> None:
    # TensorStore deletes files only; empty folders would make two equal recordings look different.
    for folder, _, _ in os.walk(directory, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(folder)
