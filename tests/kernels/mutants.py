"""Kernel modules with one line of their source changed: faults planted in the real kernels.

Other than the NumPy forms with faults (`attention_faults.py`, `delta_rule_faults.py`), which show
that a check can see a fault, a mutant shows that it sees the fault in the kernel that it guards.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from unittest import mock


def mutant(package: str, modules: tuple[str, ...], old: str, new: str) -> types.ModuleType:
    """A copy of the last of `package`'s modules, after `old` became `new` in one of them.

    The others are executed anew, in the order given, so that each imports the changed one and the
    package keeps its own. AssertionError unless `old` is there exactly once: a fault that is
    planted nowhere would pass for one that nobody sees.
    """
    names = [f"{package}.{name}" for name in modules]
    sources = [inspect.getsource(importlib.import_module(name)) for name in names]
    found = sum(source.count(old) for source in sources)
    assert found == 1, f"{old!r} is {found} times in {', '.join(names)}"
    with mock.patch.dict(sys.modules):
        for name, source in zip(names, sources, strict=True):
            module = types.ModuleType(name)
            module.__file__ = importlib.import_module(name).__file__
            sys.modules[name] = module
            exec(compile(source.replace(old, new), module.__file__, "exec"), module.__dict__)
    return module
