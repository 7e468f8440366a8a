"""Judging recordings: compare, calibrate, judge. NumPy only; never imports jax.

`kernjax.judge` is this package and also the function: the module object is callable, so that
`kernjax.judge(comparison, band)` works whether or not somebody imported a submodule before.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from kernjax.judge.band import Band as Band
from kernjax.judge.calibrate import calibrate as calibrate
from kernjax.judge.case import Finding as Finding
from kernjax.judge.comparison import Comparison as Comparison
from kernjax.judge.comparison import compare as compare
from kernjax.judge.gates import Gate as Gate
from kernjax.judge.gates import Outcome as Outcome
from kernjax.judge.verdict import Verdict as Verdict
from kernjax.judge.verdict import judge as judge


class _CallableModule(types.ModuleType):
    """This package, callable as the function of the same name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Verdict:
        return judge(*args, **kwargs)

    @property
    def __wrapped__(self) -> Any:
        # inspect.signature and help() show the function's own parameters.
        return judge


sys.modules[__name__].__class__ = _CallableModule
