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
    # `kernjax.judge` is a package as well as a function. Importing it sets the attribute to the
    # package, which kernjax/judge makes callable: give that, the first time too.
    if name in _PUBLIC:
        module = importlib.import_module(_PUBLIC[name])
        return globals().get(name) or getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
