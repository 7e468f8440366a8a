"""Where the bundled data lies: inside the wheel, or beside the package in a checkout."""

from __future__ import annotations

from pathlib import Path

from kernjax.base.remote import is_remote, stage

_PACKAGE = Path(__file__).resolve().parent.parent


def data_dir(name: str) -> Path:
    """The folder `configs` or `corpora`: `kernjax/data/NAME` in a wheel, `NAME` in a checkout."""
    installed = _PACKAGE / "data" / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def demo_dir() -> Path:
    """The bundled demo model: an HF directory."""
    return _PACKAGE / "demo" / "model"


def model_directory(name: str) -> Path:
    """The directory that `--model` names: `demo` is the bundled one, an address (`gs://`, `hf://`)
    one whose bytes are fetched as they are read."""
    if is_remote(name):
        return stage(name)
    return demo_dir() if name == "demo" else Path(name)


def demo_recording(name: str) -> Path:
    """A bundled recording or band of the demo, by its file name."""
    return _PACKAGE / "demo" / "recordings" / name
