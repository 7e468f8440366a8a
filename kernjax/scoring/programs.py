"""A jitted function whose compilations can be started ahead, beside what runs already.

Compiling takes as long as running on a small corpus, and XLA's compiler and its programs each
leave part of a machine idle. What was prepared and not begun when its threads were shut down
compiles when it is prepared again, or called.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from kernjax.base.progress import Work

# On a CPU LLVM's second level costs a third more compilation; the programs' time and bits stay.
CPU_OPTIONS = {"xla_backend_optimization_level": 1}
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
            compiler_options=CPU_OPTIONS if jax.default_backend() == "cpu" else None,
        )
        self._ahead: dict[Any, Future] = {}
        self._called: set[Any] = set()

    def prepare(self, pool: ThreadPoolExecutor, *args: Any) -> None:
        """Starts to compile for arguments of these shapes (arrays or ShapeDtypeStructs)."""
        key = _shapes(args)
        if key not in self._ahead or self._ahead[key].cancelled():
            self._ahead[key] = pool.submit(lambda: self._jit.lower(*args).compile())

    def __call__(self, *args: Any) -> Any:
        key = _shapes(args)
        ahead = self._ahead.get(key)
        if ahead is not None and not ahead.cancelled():
            return ahead.result()(*args)
        # The first call compiles before it returns.
        with Work("compiling", "program", 1, shown=_is_first() and key not in self._called) as work:
            result = self._jit(*args)
            work.advance()
        self._called.add(key)
        return result


class Compilers(ThreadPoolExecutor):
    """The threads that compile ahead; shut them down with `cancel_futures=True`."""

    def __init__(self) -> None:
        super().__init__(_THREADS, thread_name_prefix="compile")
        self._started: list[Future] = []

    def submit(self, *args: Any, **kwargs: Any) -> Future:
        """As any executor's, and counted."""
        self._started.append(future := super().submit(*args, **kwargs))
        return future

    def show(self) -> Work:
        """Shows how many of the programs submitted so far are compiled; close it in the end."""
        work = Work("compiling", "program", len(self._started), shown=_is_first())
        for future in self._started:
            future.add_done_callback(lambda done: None if done.cancelled() else work.advance())
        return work


def compilers() -> Compilers:
    """Threads for `Program.prepare`."""
    return Compilers()


def _is_first() -> bool:
    """Of many processes one speaks."""
    return jax.process_index() == 0


def _shapes(args: tuple[Any, ...]) -> Any:
    leaves, tree = jax.tree.flatten(args)
    return tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
