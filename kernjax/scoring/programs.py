"""A jitted function whose compilations can be started ahead, beside what runs already.

Compiling takes as long as running on a small corpus, and XLA's compiler and its programs each
leave part of a machine idle.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

# On a CPU LLVM's second level costs a third more compilation; the programs' time and bits stay.
_CPU_OPTIONS = {"xla_backend_optimization_level": 1}
_THREADS = 2


class Program:
    """`function`, compiled once per set of shapes, either on first use or ahead by `prepare`."""

    def __init__(
        self,
        function: Callable[..., Any],
        donate: tuple[int, ...] = (),
        out_shardings: Any = None,
    ) -> None:
        self._jit = jax.jit(
            function,
            donate_argnums=donate,
            out_shardings=out_shardings,
            compiler_options=_CPU_OPTIONS if jax.default_backend() == "cpu" else None,
        )
        self._ahead: dict[Any, Future] = {}

    def prepare(self, pool: ThreadPoolExecutor, *args: Any) -> None:
        """Starts to compile for arguments of these shapes (arrays or ShapeDtypeStructs)."""
        key = _shapes(args)
        if key not in self._ahead:
            self._ahead[key] = pool.submit(lambda: self._jit.lower(*args).compile())

    def __call__(self, *args: Any) -> Any:
        ahead = self._ahead.get(_shapes(args))
        return self._jit(*args) if ahead is None else ahead.result()(*args)


def compilers() -> ThreadPoolExecutor:
    """The threads that compile ahead; shut them down with `cancel_futures=True`."""
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="compile")


def _shapes(args: tuple[Any, ...]) -> Any:
    leaves, tree = jax.tree.flatten(args)
    return tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
