"""The persistent compilation cache: a second run of the same programs skips the compiler."""

from __future__ import annotations

import jax

from kernjax.texts import default_cache_dir


def use_compilation_cache() -> None:
    """Keeps compiled programs in the user's cache directory, unless jax was told where."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(default_cache_dir() / "xla"))
        # The default leaves out what compiles in under a second, which is most of a small model.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
