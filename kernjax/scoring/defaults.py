"""What is bundled for a model and a corpus. Without jax: a verdict on recordings needs none."""

from __future__ import annotations

from pathlib import Path

from kernjax.base.errors import UserError
from kernjax.base.resources import demo_recording, model_directory
from kernjax.texts import find_manifest, load_corpus


def default_reference(model: str, corpus: str) -> str:
    """Where the bundled reference for `corpus` lies; UserError when there is none."""
    return _bundled(model, corpus, "reference", f"{corpus}.f32.zip")


def default_band(model: str, corpus: str) -> str:
    """Where the bundled band for `corpus` lies; UserError when there is none."""
    return _bundled(model, corpus, "band", f"{corpus}.band.json")


def _bundled(model: str, corpus: str, what: str, name: str) -> str:
    path = demo_recording(name)
    if model != "demo" or not path.exists():
        # What is wrong with the model or the corpus comes first: it is what the user mistyped.
        from kernjax.model import ModelConfig

        directory = model_directory(model)
        ModelConfig.from_directory(directory)
        find_manifest(corpus)
        if Path(corpus).is_file():
            load_corpus(corpus, directory if (directory / "tokenizer.json").is_file() else None)
        raise UserError(
            f"--{what} is missing, and there is none bundled for --model={model}"
            f" --corpus={corpus}.",
            "The demo's own are bundled for its corpora `demo` and `demo-deep`.",
            "Make one: kernjax.record --policy=f32 for a reference, kernjax.calibrate for a band.",
        )
    # In a checkout as one would type it: reports name it, and so do the commands in them.
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
