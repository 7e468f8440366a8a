"""Attention against float64: lengths, heads, scales, formats, splits; refusals of bad input."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    CHECKS,
    ROUNDINGS,
    Case,
    assert_true,
    check_rounding,
    dense,
    make,
    ours,
    row_errors,
    tiled,
)

from pallas_kernels import attention
from pallas_kernels.attention import DECODE, PREFILL, AttentionFormats
from pallas_kernels.formats import BF16, E4M3, E4M3_448, F16

XLA = ("reference", "xla")


@pytest.mark.parametrize("name", XLA)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_check(check, name):
    check(ours(name))


@pytest.mark.parametrize("name", XLA)
@pytest.mark.parametrize("site", ROUNDINGS)
def test_rounding(site, name):
    check_rounding(ours(name), ROUNDINGS[site])


def test_both_tables_hold_the_same_implementations():
    kernels = {"mosaic_tpu", "mosaic_tpu_interpret", "mosaic_gpu"}  # files of their own
    assert set(PREFILL) == set(DECODE) == {*XLA, *kernels}


def test_reference_in_float64_is_the_oracle():
    """Only the named sites round: dense to 1e-14, tiled to rare flips of a float32 double tie."""
    with jax.enable_x64(True):
        for formats, oracle, bound in (
            (AttentionFormats(), dense, 1e-14),
            (AttentionFormats(p=E4M3_448, m=BF16, acc=F16, block_k=64), tiled, 1e-6),
        ):
            case = make(20)._replace(formats=formats)
            q, k, v = (x.astype(np.float64) for x in case[:3])
            o = attention.prefill(
                q, k, v, q_offset=case.q_offset, kv_length=case.kv_length, formats=formats,
                implementation="reference",
            )  # fmt: skip
            truth = oracle(case)
            assert o.dtype == jnp.float64
            assert np.linalg.norm(o - truth) <= bound * np.linalg.norm(truth)


@pytest.mark.parametrize(
    "stored, formats",
    [
        ("bfloat16", AttentionFormats(block_k=64)),
        ("float16", AttentionFormats(block_k=64)),
        ("bfloat16", AttentionFormats(q=BF16, p=E4M3_448, block_k=64)),
        ("float8_e4m3fn", AttentionFormats(q=BF16, block_k=64)),
    ],
)
def test_narrow_cache(stored, formats):
    """A cache of narrow floats is read exactly, NaN past its end, by float32 and bf16 dots."""
    case = make(21)
    k, v = (np.asarray(jnp.asarray(x).astype(stored)) for x in (case.k, case.v))
    case = case._replace(k=k, v=v, formats=formats)
    error = row_errors(ours("xla").prefill(case), tiled(case))
    assert np.quantile(error, 0.7) <= 2e-6 and error.max() < 1e-2


def test_many_query_tiles():
    """More queries than one tile takes, not a multiple of it, over several key tiles."""
    case = make(22, B=1, T=1300, S=1500, N=2, G=1, H=8, Hv=8)
    assert_true(ours("xla").prefill(case), case)
    formats = AttentionFormats(q=BF16, k=BF16, v=BF16, p=BF16)
    rounded = case._replace(formats=formats)
    o, oracle = ours("xla").prefill(rounded), tiled(rounded)
    assert np.linalg.norm(o - oracle) <= 3e-5 * np.linalg.norm(oracle)


@pytest.mark.parametrize(
    "shape",
    [
        dict(B=1, T=1, S=1, N=1, G=1, H=1, Hv=1),
        dict(B=1, T=1, S=40, N=1, G=1, H=64, Hv=32),
        dict(B=16, T=1, S=64, N=2, G=1, H=64, Hv=64),
        dict(B=1, T=40, S=41, N=6, G=6, H=8, Hv=8),
    ],
    ids=str,
)
def test_bfloat16_dots_in_degenerate_shapes(shape):
    """XLA:CPU refuses some bfloat16 dots when they run; none of ours may be among them."""
    lengths = (shape["S"],) * shape["B"]
    formats = AttentionFormats(q=BF16, k=BF16, v=BF16, p=E4M3, block_k=32)
    case = make(23, lengths=lengths, **shape)._replace(formats=formats)
    call = ours("xla").decode if shape["T"] <= 8 else ours("xla").prefill
    np.testing.assert_allclose(call(case), tiled(case), rtol=0, atol=1e-2)


def test_decode_reads_only_what_is_used():
    """Slots past kv_length change no bit, whatever they hold."""
    case = make(24, T=4, lengths=(100, 60))
    clean = case._replace(k=np.nan_to_num(case.k, nan=3.0), v=np.nan_to_num(case.v, nan=-7.0))
    for name in XLA:
        assert ours(name).decode(case).tobytes() == ours(name).decode(clean).tobytes()


def test_block_k_changes_bits_only_where_a_site_rounds():
    case = make(25, S=150)
    for formats, same in ((AttentionFormats(), True), (AttentionFormats(p=E4M3_448), False)):
        o = [
            ours("xla").prefill(case._replace(formats=dataclasses.replace(formats, block_k=b)))
            for b in (32, 64)
        ]
        apart = np.linalg.norm(o[0] - o[1]) / np.linalg.norm(o[0])
        assert (apart < 1e-6) == same, apart


def test_reference_gradient_is_the_numerical_one():
    """In float64, with NaN in the unused slots, where it is 0."""
    case = make(26, B=1, T=5, S=9, H=4, Hv=3, lengths=(7,))
    weights = np.random.default_rng(0).standard_normal((1, 5, 4, 3))
    with jax.enable_x64(True):

        @jax.jit
        def loss(q, k, v):
            o = attention.prefill(
                q, k, v, q_offset=case.q_offset, kv_length=case.kv_length,
                implementation="reference",
            )  # fmt: skip
            return jnp.sum(o * weights)

        args = [jnp.asarray(x, jnp.float64) for x in case[:3]]
        gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*args)
        for i, gradient in enumerate(gradients):
            step = np.zeros(args[i].shape)
            step[0, 2, 1, 2] = 1e-6
            up, down = (loss(*args[:i], args[i] + s, *args[i + 1 :]) for s in (step, -step))
            assert abs((up - down) / 2e-6 - gradient[0, 2, 1, 2]) < 1e-8
        assert all((np.asarray(gradient[:, 7:]) == 0).all() for gradient in gradients[1:])


@pytest.mark.parametrize("dot, marks", [("highest", True), ("default", False)])
@pytest.mark.parametrize("name", XLA)
def test_dot_precision_is_stated_in_the_program(name, dot, marks):
    """On TPU and NVIDIA an f32 dot that does not say HIGHEST is bf16 or TF32."""
    case = make(28)
    lowered = jax.jit(attention.prefill, static_argnames=("formats", "implementation")).lower(
        *case[:3], q_offset=case.q_offset, kv_length=case.kv_length,
        formats=AttentionFormats(dot=dot), implementation=name,
    )  # fmt: skip
    dots = [line for line in lowered.as_text().splitlines() if "dot_general" in line]
    assert dots
    assert all(("HIGHEST" in line) == marks for line in dots)


def test_memory_is_linear_in_context():
    """The compiled prefill of 2048 queries over 64k keys holds no [T, S] array (512 MB a head)."""
    q = jax.ShapeDtypeStruct((1, 2048, 2, 16), jnp.float32)
    kv = jax.ShapeDtypeStruct((1, 65_536, 1, 16), jnp.float32)
    n = jax.ShapeDtypeStruct((1,), jnp.int32)

    def call(q, k, v, q_offset, kv_length):
        return attention.prefill(
            q, k, v, q_offset=q_offset, kv_length=kv_length, implementation="xla"
        )

    stats = jax.jit(call).lower(q, kv, kv, n, n).compile().memory_analysis()
    assert stats.temp_size_in_bytes < 32e6


GOOD = make(30, B=2, T=3, S=8, N=4, G=2, H=4, Hv=4, lengths=(8, 6))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(q=GOOD.q[0]), r"q has shape \(3, 4, 4\)"),
        (dict(q=GOOD.q.astype(np.int32)), "q has dtype int32"),
        (dict(q=GOOD.q[:, :0]), "q has T=0"),
        (dict(k=GOOD.k[..., :3]), r"k has shape \(2, 8, 2, 3\)"),
        (dict(k=GOOD.k[:1]), r"k has shape \(1, 8, 2, 4\)"),
        (dict(v=GOOD.v[:, :7]), r"v has shape \(2, 7, 2, 4\)"),
        (dict(q=GOOD.q[:, :, :3]), "N=3 heads and k has G=2"),
        (dict(q_offset=GOOD.q_offset[:1]), r"q_offset has shape \(1,\)"),
        (dict(kv_length=GOOD.kv_length.astype(np.float32)), "kv_length .* float32"),
        (dict(scale=0.0), "scale=0.0"),
        (dict(k_scale=-1.0), "k_scale=-1.0"),
        (dict(v_scale=float("nan")), "v_scale=nan"),
        (dict(v_scale=np.ones(2, np.float32)), "v_scale=.*one finite positive number"),
        (dict(formats="bf16"), "formats='bf16'"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
@pytest.mark.parametrize("op", [attention.prefill, attention.decode])
def test_bad_arguments_are_named(op, change, message):
    case = GOOD._replace(**change)
    rest = {name: getattr(case, name) for name in Case._fields[3:]}
    with pytest.raises(ValueError, match=f"attention.{op.__name__}: .*{message}"):
        op(case.q, case.k, case.v, **rest)


def test_decode_takes_at_most_eight_tokens():
    case = make(31, T=9, S=20)
    with pytest.raises(ValueError, match="T=9 tokens; allowed are 1 to 8"):
        ours("xla").decode(case)


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("p", "bf16", "p='bf16' must be a Format"),
        ("row_sum", "both", "row_sum='both'"),
        ("rescale_threshold", -1.0, "rescale_threshold=-1.0"),
        ("block_k", 0, "block_k=0"),
        ("block_k", 64.0, "block_k=64.0"),
        ("dot", "high", "dot='high'"),
    ],
)
def test_bad_formats_are_named(field, value, message):
    with pytest.raises(ValueError, match=message):
        AttentionFormats(**{field: value})


def test_unknown_implementation_lists_the_known():
    with pytest.raises(ValueError, match=r"'mosaic' is not one of \['mosaic_gpu', "):
        ours("mosaic").prefill(GOOD)


def test_xla_refuses_float64():
    with jax.enable_x64(True):
        args = [x.astype(np.float64) for x in GOOD[:3]]
        lengths = dict(q_offset=GOOD.q_offset, kv_length=GOOD.kv_length)
        with pytest.raises(NotImplementedError, match="float64"):
            attention.prefill(*args, **lengths, implementation="xla")
        o = attention.prefill(*args, **lengths, implementation=("xla", "reference"))
        assert o.dtype == jnp.float64


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("name", ["reference", "xla"])
def test_a_layer_of_a_stack_is_that_layer_bit_for_bit(name, dtype):
    case = make(3, T=5)
    kept = (slice(None), slice(None, -40))  # no poison: the stack's other layers hold it
    k, v = (jnp.asarray(x[kept]).astype(dtype) for x in (case.k, case.v))
    rest = {"q_offset": case.q_offset - 60, "kv_length": case.kv_length - 60}
    alone = attention.prefill(case.q, k, v, implementation=name, **rest)
    nan = jnp.full_like(k, jnp.nan)
    stacks = (jnp.stack([nan, x, nan]) for x in (k, v))
    call = jax.jit(functools.partial(attention.prefill, implementation=name))
    in_stack = call(case.q, *stacks, layer=jnp.int32(1), **rest)
    np.testing.assert_array_equal(in_stack, jax.jit(lambda: alone)())


def test_a_layer_needs_stacks_and_an_index():
    case = make(4)
    rest = {"q_offset": case.q_offset, "kv_length": case.kv_length}
    with pytest.raises(ValueError, match="k has shape .*5 axes"):
        attention.prefill(case.q, case.k, case.v, layer=jnp.int32(0), **rest)
    with pytest.raises(ValueError, match="layer has shape"):
        attention.prefill(case.q, case.k[None], case.v[None], layer=jnp.zeros(2), **rest)
