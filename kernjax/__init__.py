"""kernjax: the merge gate for inference kernels. `python -m kernjax` lists the commands."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernjax.judge import compare as compare
    from kernjax.judge import judge as judge
    from kernjax.recording import load_recording as load_recording

__version__ = "0.1.0"

# Lazy, so that judging two recordings never pays for (or needs) jax.
_PUBLIC = {
    "load_recording": "kernjax.recording",
    "compare": "kernjax.judge",
    "judge": "kernjax.judge",
}


def __getattr__(name: str) -> Any:
    # `kernjax.judge` is a package as well as a function: the import system wins once a
    # submodule was imported, so the package itself is made callable in kernjax/judge.
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
