"""Flags that many commands have, declared once: the same name means the same everywhere.

`_MODEL = shared_flags.model(FLAGS)`, where others are `FLAGS.string(...)`.
"""

from __future__ import annotations

from typing import Any

from kernjax.base.flags import Flags, Holder


def model(flags: Flags) -> Holder[Any]:
    """--model: a directory for `kernjax.base.resources.model_directory`."""
    return flags.string("model", "demo", "HF directory of the model (or gs://, hf://), or `demo`.")


def corpus(flags: Flags) -> Holder[Any]:
    """--corpus: for `kernjax.texts.load_corpus`."""
    return flags.string("corpus", "demo", "demo, demo-deep, local, article, or a manifest.")


def reference(flags: Flags) -> Holder[Any]:
    """--reference, of commands that judge; None stands for `default_reference`."""
    help = "The ground truth's recording; default: the demo's."
    return flags.string("reference", None, help)


def batch_size(flags: Flags) -> Holder[Any]:
    """--batch_size: it changes no number, only memory and time."""
    help = "Segments of one depth run together."
    return flags.integer("batch_size", 16, help, lower_bound=1)


def mesh(flags: Flags) -> Holder[Any]:
    """--mesh: for `kernjax.weights.parse_mesh`."""
    return flags.string("mesh", None, "Devices, e.g. data=1,tensor=8.")


def mirror(flags: Flags) -> Holder[Any]:
    """--mirror: where a text corpus's sources lie instead of on the network."""
    return flags.string("mirror", None, "Directory with a text corpus's sources.")
