"""A producer of distributions: a model directory under a policy, with somebody's kernels."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from kernjax import __version__
from kernjax.base.errors import UserError
from kernjax.base.hashing import sha256_bytes, sha256_file
from kernjax.model import Decoder, ModelConfig, plan_execution
from kernjax.model.packed import Packed
from kernjax.model.params import DTYPES, abstract_params, leaves, tree_of
from kernjax.model.separate import separated, suits
from kernjax.plugins import Kernel, check_called, check_layers, check_lse, check_policy
from kernjax.pods import Pod
from kernjax.precision import Policy, executed_sites
from kernjax.scoring.batch import RowPlan, Scorer
from kernjax.scoring.compilation import use_compilation_cache
from kernjax.scoring.programs import compilers
from kernjax.scoring.routes import check_routes, route_extras
from kernjax.scoring.sketch import SKETCH_DIM
from kernjax.texts import Corpus
from kernjax.weights import (
    format_mesh,
    load_params,
    mesh_plans,
    shared_digests,
    weights_sha256,
)
from pallas_kernels.formats import Format, round_to
from pallas_kernels.xla_cpu import sums_are_right

_PACKAGES = ("jax", "jaxlib", "flax", "ml_dtypes", "numpy")


# Of a batch: its size, context length, decode length and one plan a segment.
Shape = tuple[int, int, int, list[RowPlan]]
# Who runs next in the same command, and on what.
Following = tuple[Scorer, list[Shape]]


class Producer(Protocol):
    """What a recording is made with: scores batches, and says what it is."""

    policy: Policy
    vocab_size: int

    def identity(self) -> dict[str, Any]:
        """Keyword arguments of `build_manifest`, less corpus, batch size and reference."""
        ...

    def check_corpus(self, corpus: Corpus) -> None:
        """UserError when the policy sets something that this corpus never executes."""
        ...

    def compiling(
        self, batches: list[Shape], following: Sequence[Following] = ()
    ) -> contextlib.AbstractContextManager[None]:
        """While it is open, what these batches need may be compiled beside what runs.

        And after that what `following` producers will need.
        """
        ...

    def score(
        self,
        tokens: np.ndarray,
        context_len: int,
        plans: list[RowPlan],
        progress: Callable[[int], None] = lambda done: None,
    ) -> list[dict[str, np.ndarray]]:
        """As `Scorer.score`."""
        ...


class Checkpoint:
    """A model directory, read once for all the producers that share it.

    The weights as last asked for stay in memory: policies that differ in anything else load and
    hash nothing again. The processes of a `pod` share the hashing: all must have the same
    files.
    """

    def __init__(
        self,
        directory: str | Path,
        mesh: Mesh | None = None,
        progress: bool = False,
        pod: Pod | None = None,
    ) -> None:
        self.directory, self.mesh, self._progress = Path(directory), mesh, progress
        self.pod = pod or Pod()
        self.config = ModelConfig.from_directory(directory)
        self._held: tuple[tuple[str, bool], dict[str, Any]] | None = None

    def params(self, dtype: str, packed: bool = False) -> dict[str, Any]:
        """The parameter tree, matrices in `dtype` (bfloat16, float16 or float32).

        `packed`: quantised ones stay as they are in memory, and their values are in `dtype`.
        """
        if self._held is None or self._held[0] != (dtype, packed):
            self._held = None  # the old ones may go before the new ones come
            loaded = load_params(
                self.directory,
                self.config,
                dtype=dtype,
                mesh=self.mesh,
                packed=packed,
                progress=self._progress,
            )
            if suits(self.mesh):
                loaded = separated(loaded, self.config)
            self._held = (dtype, packed), loaded
        return self._held[1]

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """A manifest's `model` and `tokenizer_sha256`."""
        return model_identity(self.directory, self.config, self.pod)


class JaxProducer:
    """Our own model. `hidden=True` adds per-layer sketches of the residual stream, `full=True` the
    log-probabilities of the whole vocabulary, `routes="rows"` the experts it went to, to every row;
    `routes="all"` those of every token too.

    `directory` is an HF directory, or a `Checkpoint` that several producers share (with its mesh
    and its pod). `scorer` is that of `scorer_of_shapes` for the same arguments.
    """

    def __init__(
        self,
        directory: str | Path | Checkpoint,
        policy: Policy,
        kernels: Mapping[str, Kernel] | None = None,
        *,
        mesh: Mesh | None = None,
        hidden: bool = False,
        full: bool = False,
        routes: str | None = None,
        progress: bool = False,
        pod: Pod | None = None,
        scorer: Scorer | None = None,
    ) -> None:
        if not isinstance(directory, Checkpoint):
            directory = Checkpoint(directory, mesh, progress, pod)
        self.checkpoint, self.mesh = directory, directory.mesh
        self.policy, self.hidden, self.full, self.routes = policy, hidden, full, routes
        self.kernels = dict(kernels or {})
        config = self.config = self.checkpoint.config
        self.vocab_size = config.vocab_size
        check_fits(config, policy, self.kernels, self.mesh)
        check_routes(config, routes)
        use_compilation_cache()
        if not sums_are_right():
            raise UserError(
                "This jax computes wrong sums on this machine (a known fault of XLA on CPUs).",
                "kernjax sets --xla_cpu_experimental_ynn_fusion_type=-reduce when it is imported"
                " before jax has started.",
                "Import kernjax first, leave that flag out of XLA_FLAGS, or take jax 0.12.",
            )
        params = self.checkpoint.params(
            _load_dtype(policy.weights), packed=policy.dequantise == "layer"
        )
        self.decoder = Decoder(config, rounded(params, config, policy.weights))
        on_mesh = mesh_plans(config, self.mesh)
        self.execution = plan_execution(policy, config.num_layers, self.kernels, **on_mesh)
        self.scorer = scorer or Scorer(
            self.decoder,
            self.execution,
            policy.prefill_window,
            hidden=hidden,
            full=full,
            routes=routes,
            mesh=self.mesh,
        )
        if scorer is not None:
            scorer.hold(self.decoder)

    @property
    def spans_hosts(self) -> bool:
        """Whether it lies on devices of several processes, which then call it together."""
        return self.mesh is not None and self.mesh.is_multi_process

    def identity(self) -> dict[str, Any]:
        extras = {}
        if self.hidden:
            shape = [self.config.num_layers, SKETCH_DIM]
            extras["hidden_sketch"] = {"dtype": "float32", "shape": shape}
        if self.full:
            extras["logprobs"] = {"dtype": "float32", "shape": [self.vocab_size]}
        extras |= route_extras(self.config, self.routes)
        return {
            **self.checkpoint.identity,
            "policy": self.policy.to_dict(),
            "kernels": {op: kernel.to_dict() for op, kernel in sorted(self.kernels.items())},
            "engine": "jax",
            "versions": {"kernjax": __version__, **{name: version(name) for name in _PACKAGES}},
            "device": device_name(self.mesh),
            "mesh": None if self.mesh is None else format_mesh(self.mesh),
            "prefill_window": self.policy.prefill_window,
            "logits_dtype": self.policy.logits.dtype,
            "commit": commit(),
            "extras": extras,
        }

    def check_corpus(self, corpus: Corpus) -> None:
        window = self.policy.prefill_window
        self.policy.check_executed(
            executed_sites(
                self.config.layer_types,
                windows=max(-(-segment.context_len // window) for segment in corpus.segments),
                decode_steps=max(segment.score_len for segment in corpus.segments),
            )
        )

    @contextlib.contextmanager
    def compiling(
        self, batches: list[Shape], following: Sequence[Following] = ()
    ) -> Iterator[None]:
        if self.mesh is not None or self.kernels:
            # Arguments without their shardings would compile for one device; and a plug-in is
            # traced where its errors belong, in the call that needs it.
            yield
            return
        pool = compilers()
        try:
            for shape in batches:
                self.scorer.prepare(pool, *shape)
            with pool.show():
                for scorer, shapes in following:
                    for shape in shapes:
                        scorer.prepare(pool, *shape)
                yield
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def score(
        self,
        tokens: np.ndarray,
        context_len: int,
        plans: list[RowPlan],
        progress: Callable[[int], None] = lambda done: None,
    ) -> list[dict[str, np.ndarray]]:
        rows = self.scorer.score(tokens, context_len, plans, progress)
        check_called(self.kernels)
        return rows


def scorer_of_shapes(
    config: ModelConfig, policy: Policy, *, full: bool = False, routes: str | None = None
) -> Scorer:
    """A scorer that can compile for a policy whose weights nobody has read yet."""
    held = DTYPES[_load_dtype(policy.weights)]
    shapes = tree_of(
        (path, jax.ShapeDtypeStruct(spec.shape, spec.dtype(held)))
        for path, spec in leaves(abstract_params(config))
    )
    execution = plan_execution(policy, config.num_layers)
    decoder = Decoder(config, separated(shapes, config) if suits(None) else shapes)
    return Scorer(decoder, execution, policy.prefill_window, full=full, routes=routes)


def check_fits(
    config: ModelConfig,
    policy: Policy,
    kernels: Mapping[str, Kernel],
    mesh: Mesh | AbstractMesh | None = None,
) -> None:
    """UserError where policy or kernels name layers or ops that such a model does not have, and
    where a kernel cannot attend to a part of the keys on a mesh that splits them."""
    policy.validate_layers(config.num_layers, config.layer_types)
    check_policy(kernels, policy)
    check_layers(kernels, config.layer_types)
    if mesh is not None and mesh_plans(config, mesh).get("sequence"):
        check_lse(kernels)


def model_identity(directory: Path, config: ModelConfig, pod: Pod | None = None) -> dict[str, Any]:
    """A manifest's `model` and `tokenizer_sha256` for an HF directory, whoever computes."""
    tokenizer = directory / "tokenizer.json"
    return {
        "model": {
            "name": directory.name,
            "weights_sha256": weights_sha256(directory, config, shared_digests(pod or Pod())),
            "config_sha256": sha256_file(directory / "config.json"),
            "vocab_size": config.vocab_size,
        },
        "tokenizer_sha256": sha256_file(tokenizer) if tokenizer.is_file() else None,
    }


def rounded(params: Mapping[str, Any], config: ModelConfig, weights: Format) -> dict[str, Any]:
    """The parameter tree, matrices on the grid of `weights`; norms and gates stay float32."""
    specs = dict(leaves(abstract_params(config)))
    if weights.is_exact or _load_dtype(weights) != "float32":
        return dict(params)

    def on_grid(leaf: Any) -> Any:
        if isinstance(leaf, Packed):
            return dataclasses.replace(leaf, rounding=weights)
        return jax.tree.map(lambda array: round_to(array, weights), leaf)

    return tree_of(
        (path, leaf if specs[path].keep_float32 else on_grid(leaf)) for path, leaf in leaves(params)
    )


def _load_dtype(weights: Format) -> str:
    """What the matrices are held in: the format's own dtype where a matrix product takes it."""
    plain = weights.storage_dtype.name
    return plain if plain in ("bfloat16", "float16") else "float32"


def device_name(mesh: Mesh | None = None) -> str:
    """Kind and number of what computes: reductions may be ordered by either.

    Of a mesh its devices, on whatever hosts; otherwise those of this host.
    """
    device = jax.local_devices()[0]
    # XLA on a CPU splits some reductions by the number of threads.
    count = os.cpu_count() if device.platform == "cpu" else jax.local_device_count()
    if mesh is not None and device.platform != "cpu":
        count = mesh.size
    return f"{device.platform}:{device.device_kind} x {count}"


@functools.cache
def commit() -> str | None:
    """The git commit of the code that runs, with `-dirty` and a hash of the difference where files
    differ; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        said = _git(root, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
        said = said.decode().strip()
        if said.endswith("-dirty"):
            # Two states of a tree that differ are two producers.
            said += "-" + sha256_bytes(_git(root, "diff", "HEAD"))[:12]
    except (OSError, subprocess.SubprocessError):
        return None
    return said


def _git(root: Path, *words: str) -> bytes:
    command = ["git", "-C", str(root), *words]
    return subprocess.run(command, capture_output=True, check=True, timeout=20).stdout


def check_tokenizer(producer: Producer, corpus: Corpus, tokenizer_sha256: str | None) -> None:
    """UserError unless the ids of `corpus` are ids of this model."""
    corpus.check_vocabulary(producer.vocab_size)
    if corpus.tokenizer_sha256 and tokenizer_sha256 and corpus.tokenizer_sha256 != tokenizer_sha256:
        raise UserError(
            f"Corpus {corpus.name} was tokenised with tokenizer {corpus.tokenizer_sha256[:12]}, the"
            f" model has {tokenizer_sha256[:12]}.",
            "The ids mean other texts.",
            "Build the corpus with this model (kernjax.corpus build).",
        )
