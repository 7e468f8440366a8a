"""The decoder's parameters, described once and abstractly; everything else is a map over this.

`abstract_params(config)` is a nested dict of `ParamSpec`: loading, sharding, random initialisation,
saving and planning walk it, so that no shape is written down twice and nothing is materialised to
know one. Layers with the same parameters are stacked on a leading axis, in the order they occur, so
that the decoder can scan them. A stack that does not occur has no subtree.

Dimensions: D hidden, F intermediate, N/G query/key-value heads of dim H, Hk/Hv key/value heads of
the delta rule of dims K/V, C = 2*Hk*K + Hv*V channels (q, k, v in this order). Matrices are stored
[in, out], so that a projection is x @ w.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from kernjax.base.errors import UserError
from kernjax.model.config import LINEAR, STACKS, ModelConfig

LeafPath: TypeAlias = tuple[str, ...]
Initializer: TypeAlias = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]

DTYPES: dict[str, np.dtype] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}


def weight_dtype(dtype: str | DTypeLike) -> np.dtype:
    """`dtype` as one that weights can be held in; UserError for any other."""
    result = DTYPES.get(dtype) if isinstance(dtype, str) else np.dtype(dtype)
    if result is None or result not in DTYPES.values():
        raise UserError(f"Weights cannot be held as {dtype!r}.", f"Known: {', '.join(DTYPES)}.")
    return result


def _fan_in(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Matrices [..., in, out]: outputs of unit variance for inputs of unit variance."""
    return rng.standard_normal(shape, dtype=np.float32) * shape[-2] ** -0.5


def _embedding(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """[vocab, D]: tied logits of unit variance."""
    return rng.standard_normal(shape, dtype=np.float32) * shape[-1] ** -0.5


def _near_zero(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Zero-centred norm weights (the norm multiplies by 1 + w); not 0, so that w is exercised."""
    return rng.standard_normal(shape, dtype=np.float32) * 0.1


def _near_one(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Plain norm weights."""
    return 1 + rng.standard_normal(shape, dtype=np.float32) * 0.1


def _small(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Biases beside scores in 0..1."""
    return rng.standard_normal(shape, dtype=np.float32) * 0.1


def _depthwise(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """[..., C, taps]: uniform within 1/sqrt(taps), torch's initialisation of a depthwise conv."""
    bound = shape[-1] ** -0.5
    return rng.uniform(-bound, bound, shape).astype(np.float32)


def _log_decay(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """A_log = log A with A uniform in 1..16 (Mamba-2's initialisation)."""
    return np.log(rng.uniform(1, 16, shape)).astype(np.float32)


def _step_bias(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """softplus^-1 of steps log-uniform in 0.001..0.1 (Mamba-2's initialisation)."""
    step = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), shape))
    return (step + np.log(-np.expm1(-step))).astype(np.float32)


@dataclass(frozen=True)
class ParamSpec:
    """One parameter without its values.

    `axes` names each axis for the sharding rules (None: never sharded). `units` counts each axis in
    what may not be split: heads where the axis is heads * dim, elements elsewhere. `keep_float32`:
    held in float32 whatever the checkpoint's dtype (norms, A_log, dt_bias: they enter float32
    arithmetic and are small).
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    units: tuple[int, ...]
    initializer: Initializer
    keep_float32: bool = False

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def is_stack(self) -> bool:
        """Whether it is a matrix [in, out] of every layer of a stack."""
        return len(self.shape) == 3 and self.initializer is _fan_in

    def dtype(self, default: DTypeLike) -> np.dtype:
        """The dtype this parameter has in a model whose weights are `default`."""
        return DTYPES["float32"] if self.keep_float32 else np.dtype(default)


def abstract_params(config: ModelConfig) -> dict[str, Any]:
    """The parameter tree of `config` with `ParamSpec` leaves."""
    vocab, embed = (config.vocab_size, "vocab"), (config.hidden_size, "embed")
    spec = _spec_maker(config)
    tree: dict[str, Any] = {
        "embed": spec(vocab, embed, init=_embedding),
        "final_norm": spec((config.hidden_size, None), init=_norm(config), f32=True),
    }
    if not config.tie_word_embeddings:
        tree["lm_head"] = spec(embed, vocab)
    if config.block_size is not None:
        tree["output_res"] = _attention_residual(config, ())
    for name, layers in config.stacks.items():
        axis = (len(layers), "layers")
        mixer = _mixer(config, STACKS[name])
        experts = layers[0] in config.moe_layers
        mlp = {"moe": _moe(config, axis)} if experts else {"mlp": _mlp(config, axis)}
        tree[name] = _norms(config, axis) | mlp | mixer(config, axis)
    return tree


def _spec_maker(config: ModelConfig) -> Callable[..., ParamSpec]:
    indivisible = {
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "linear_heads": config.linear_value_heads,
        # q, k and v lie one after another; key heads divide value heads, so what divides the key
        # heads divides all three.
        "linear_qkv": config.linear_key_heads,
    }

    def spec(
        *dims: tuple[int, str | None], init: Initializer = _fan_in, f32: bool = False
    ) -> ParamSpec:
        return ParamSpec(
            shape=tuple(size for size, _ in dims),
            axes=tuple(axis for _, axis in dims),
            units=tuple(indivisible.get(axis or "", size) for size, axis in dims),
            initializer=init,
            keep_float32=f32,
        )

    return spec


def _norms(config: ModelConfig, layers: tuple[int, str]) -> dict[str, Any]:
    """What every layer has beside its mixer and its MLP."""
    spec, width = _spec_maker(config), (config.hidden_size, None)
    tree: dict[str, Any] = {
        "input_norm": spec(layers, width, init=_norm(config), f32=True),
        "post_norm": spec(layers, width, init=_norm(config), f32=True),
    }
    if config.block_size is not None:
        tree["mixer_res"] = _attention_residual(config, (layers,))
        tree["mlp_res"] = _attention_residual(config, (layers,))
    return tree


def _norm(config: ModelConfig) -> Initializer:
    return _near_zero if config.zero_centred else _near_one


def _attention_residual(
    config: ModelConfig, layers: tuple[tuple[int, str], ...]
) -> dict[str, ParamSpec]:
    """What scores the streams of a mixture, named as in `kernjax.model.residual`."""
    spec, width = _spec_maker(config), (config.hidden_size, None)
    return {
        "norm": spec(*layers, width, init=_near_one, f32=True),
        "proj": spec(*layers, width, init=_embedding, f32=True),
    }


def _mixer(
    config: ModelConfig, kind: str
) -> Callable[[ModelConfig, tuple[int, str]], dict[str, Any]]:
    if kind == LINEAR:
        return _linear_mixer if config.delta is None else _delta_mixer
    return _full_mixer if config.latent is None else _latent_mixer


def _mlp(config: ModelConfig, layers: tuple[int, str], size: int | None = None) -> dict[str, Any]:
    """A gated MLP of width `size` (None: intermediate_size)."""
    spec, embed = _spec_maker(config), (config.hidden_size, "embed")
    mlp = (config.intermediate_size if size is None else size, "mlp")
    return {
        "gate": spec(layers, embed, mlp),
        "up": spec(layers, embed, mlp),
        "down": spec(layers, mlp, embed),
    }


def _moe(config: ModelConfig, layers: tuple[int, str]) -> dict[str, Any]:
    """A mixture of experts, named as in `kernjax.model.moe`."""
    spec, moe = _spec_maker(config), config.moe
    assert moe is not None
    embed, one = (config.hidden_size, "embed"), (1, None)
    experts, inner = (moe.num_experts, "expert"), (moe.expert_size, "expert_mlp")
    # Not sharded: every device that computes an expert needs the whole of its inputs.
    width = (moe.latent_size or config.hidden_size, None)
    tree: dict[str, Any] = {
        # float32: small, and its rounding decides whole experts.
        "router": spec(layers, embed, experts, f32=True),
        "experts": {
            "gate": spec(layers, experts, width, inner),
            "up": spec(layers, experts, width, inner),
            "down": spec(layers, experts, inner, width),
        },
    }
    if moe.correction_bias:
        tree["correction"] = spec(layers, experts, init=_small, f32=True)
    if moe.shared_size:
        tree["shared"] = _mlp(config, layers, moe.shared_size)
    if moe.shared_gate:
        tree["shared_gate"] = spec(layers, embed, one)
    if moe.latent_size:
        tree["latent_down"] = spec(layers, embed, width)
        tree["latent_up"] = spec(layers, width, embed)
    if moe.latent_norm:
        tree["latent_norm"] = spec(layers, width, init=_near_one, f32=True)
    return tree


def _linear_mixer(config: ModelConfig, layers: tuple[int, str]) -> dict[str, Any]:
    spec, embed = _spec_maker(config), (config.hidden_size, "embed")
    qkv, value = (config.conv_channels, "linear_qkv"), (config.value_size, "linear_heads")
    heads = (config.linear_value_heads, "linear_heads")
    return {
        "qkv": spec(layers, embed, qkv),
        "z": spec(layers, embed, value),
        "b": spec(layers, embed, heads),
        "a": spec(layers, embed, heads),
        "conv": spec(layers, qkv, (config.conv_kernel, None), init=_depthwise),
        "A_log": spec(layers, heads, init=_log_decay, f32=True),
        "dt_bias": spec(layers, heads, init=_step_bias, f32=True),
        "norm": spec(layers, (config.linear_value_dim, None), init=_near_one, f32=True),
        "out": spec(layers, value, embed),
    }


def _full_mixer(config: ModelConfig, layers: tuple[int, str]) -> dict[str, Any]:
    spec, embed = _spec_maker(config), (config.hidden_size, "embed")
    heads = (config.num_heads * config.head_dim, "heads")
    kv_heads = (config.num_kv_heads * config.head_dim, "kv_heads")
    head_dim = (config.head_dim, None)
    return {
        "q": spec(layers, embed, heads),
        "gate": spec(layers, embed, heads),
        "k": spec(layers, embed, kv_heads),
        "v": spec(layers, embed, kv_heads),
        "q_norm": spec(layers, head_dim, init=_near_zero, f32=True),
        "k_norm": spec(layers, head_dim, init=_near_zero, f32=True),
        "o": spec(layers, heads, embed),
    }


def _delta_mixer(config: ModelConfig, layers: tuple[int, str]) -> dict[str, Any]:
    """Kimi Delta Attention, named as in `kernjax.model.kimi_delta`."""
    spec, embed = _spec_maker(config), (config.hidden_size, "embed")
    channels, heads = (
        (size, "linear_heads") for size in (config.key_size, config.linear_key_heads)
    )
    rank, taps = (config.linear_key_dim, None), (config.conv_kernel, None)
    tree: dict[str, Any] = {name: spec(layers, embed, channels) for name in ("q", "k", "v")}
    # Published in float32 even where the matrices are not.
    for name in ("conv_q", "conv_k", "conv_v"):
        tree[name] = spec(layers, channels, taps, init=_depthwise, f32=True)
    tree |= {
        "f_a": spec(layers, embed, rank),
        "f_b": spec(layers, rank, channels),
        "b": spec(layers, embed, heads),
        "A_log": spec(layers, heads, init=_log_decay, f32=True),
        "dt_bias": spec(layers, channels, init=_step_bias, f32=True),
    }
    if config.delta.full_rank_gate:
        tree["g"] = spec(layers, embed, channels)
    else:
        tree |= {"g_a": spec(layers, embed, rank), "g_b": spec(layers, rank, channels)}
    tree["norm"] = spec(layers, (config.linear_value_dim, None), init=_near_one, f32=True)
    tree["out"] = spec(layers, channels, embed)
    return tree


def _latent_mixer(config: ModelConfig, layers: tuple[int, str]) -> dict[str, Any]:
    """Latent attention, named as in `kernjax.model.latent_attention`."""
    spec, embed = _spec_maker(config), (config.hidden_size, "embed")
    latent, heads = config.latent, config.num_heads
    query = (heads * config.head_dim, "heads")
    rank, out = (latent.kv_rank, None), (heads * latent.value_dim, "heads")
    tree: dict[str, Any] = {}
    if latent.query_rank is None:
        tree["q"] = spec(layers, embed, query)
    else:
        low = (latent.query_rank, None)
        tree["q_a"] = spec(layers, embed, low)
        tree["q_norm"] = spec(layers, low, init=_near_one, f32=True)
        tree["q_b"] = spec(layers, low, query)
    tree["kv_a"] = spec(layers, embed, (latent.kv_rank + latent.rope_dim, None))
    tree["kv_norm"] = spec(layers, rank, init=_near_one, f32=True)
    tree["kv_b"] = spec(layers, rank, (heads * (latent.nope_dim + latent.value_dim), "heads"))
    if latent.output_gate:
        tree["gate"] = spec(layers, embed, out)
    tree["o"] = spec(layers, out, embed)
    return tree


def stacked_layers(config: ModelConfig, path: LeafPath) -> tuple[int, ...] | None:
    """The model's layer numbers along the leading axis of the leaf at `path`; None: no such axis.

    >>> stacked_layers(config, ("full", "q"))    # (3, 7, 11, ...)
    """
    return config.stacks.get(path[0])


def leaves(tree: Mapping[str, Any], prefix: LeafPath = ()) -> Iterator[tuple[LeafPath, Any]]:
    """(path, leaf) of a nested dict, in its own order."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, (*prefix, key))
        else:
            yield (*prefix, key), value


def tree_of(pairs: Iterator[tuple[LeafPath, Any]]) -> dict[str, Any]:
    """The nested dict that `leaves` would walk as `pairs`."""
    tree: dict[str, Any] = {}
    for path, leaf in pairs:
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


def random_params(
    config: ModelConfig, seed: int, dtype: str | DTypeLike = "float32"
) -> dict[str, Any]:
    """Random parameters of `config` as jax arrays, matrices in `dtype`; for tests and training.

    Drawn by NumPy, leaf by leaf from (seed, path): the same on every platform and jax version, and
    one leaf's values do not depend on the others.
    """

    dtype = weight_dtype(dtype)

    def draw(path: LeafPath, spec: ParamSpec) -> jax.Array:
        rng = np.random.default_rng([seed, zlib.crc32("/".join(path).encode())])
        return jnp.asarray(spec.initializer(rng, spec.shape), dtype=spec.dtype(dtype))

    return tree_of((path, draw(path, spec)) for path, spec in leaves(abstract_params(config)))
