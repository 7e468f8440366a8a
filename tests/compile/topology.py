"""TPU chips as compile targets: libtpu's compiler runs anywhere (`pip install 'jax[tpu]'`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}


def quiet() -> None:
    """Environment for libtpu, before jax is imported: no log files of gigabytes, no lock file."""
    os.environ["TPU_MIN_LOG_LEVEL"] = "3"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")


def compile_for(
    chip: str, function: Callable[..., Any], *avals: Any, heads_first: tuple[int, ...] = ()
) -> Any:
    """The compiled `function` for one core of `chip`; raises what a TPU would raise.

    Arguments number `heads_first`, caches [B, S, G, H], lie in memory as [B, G, S, H].
    """
    import jax
    from jax.experimental import topologies
    from jax.experimental.layout import Format, Layout
    from jax.sharding import SingleDeviceSharding

    topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip])
    here = SingleDeviceSharding(topology.devices[0])
    turned = Format(Layout((0, 2, 1, 3)), here)
    places = tuple(turned if n in heads_first else here for n in range(len(avals)))
    return jax.jit(function, in_shardings=places, out_shardings=here).lower(*avals).compile()
