"""Loading kernels by name: what runs, what is refused and in which words; the examples."""

from __future__ import annotations

import hashlib
import itertools
import sys
import types
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernjax.base.errors import UserError
from kernjax.model import plan_execution
from kernjax.plugins import (
    check_called,
    check_layers,
    check_output,
    check_policy,
    expected_output,
    load_kernel,
    load_kernels,
)
from kernjax.precision import parse_policy
from pallas_kernels import attention, delta_rule
from pallas_kernels.attention.formats import AttentionFormats
from pallas_kernels.delta_rule.formats import DeltaRuleFormats
from pallas_kernels.formats import BF16
from pallas_kernels.ops import OPS

ROOT = Path(__file__).resolve().parent.parent
RIGHT = "attention.prefill=examples.kernels.online_softmax:attention"
BUGGY = "attention.prefill=examples.kernels.online_softmax:attention_without_rescale"
_unique = itertools.count()


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes source as a module into an empty current directory; returns the module's name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def write(source: str) -> str:
        name = f"plug_in_{next(_unique)}"
        (tmp_path / f"{name}.py").write_text(source)
        return name

    return write


@pytest.fixture
def from_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT)


PREFILL = """
from pallas_kernels import attention
def prefill(q, k, v, *, q_offset, kv_length, scale=None, k_scale=1.0, v_scale=1.0, formats):
    o = attention.prefill(q, k, v, q_offset=q_offset, kv_length=kv_length, formats=formats)
    return {result}
"""


def attention_inputs(tokens: int = 40, capacity: int = 300, offset: int = 200):
    """Two sequences with peaked scores and NaN in the cache's unused slots."""
    rng = np.random.default_rng(0)
    q = 3 * rng.standard_normal((2, tokens, 4, 16)).astype(np.float32)
    k = rng.standard_normal((2, capacity, 2, 16)).astype(np.float32)
    v = rng.standard_normal((2, capacity, 2, 8)).astype(np.float32)
    length = np.array([offset + tokens, 30], np.int32)
    for row, filled in enumerate(length):
        k[row, filled:], v[row, filled:] = np.nan, np.nan
    start = np.array([offset, 0], np.int32)
    return (jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)), {
        "q_offset": jnp.asarray(start),
        "kv_length": jnp.asarray(length),
    }


def delta_inputs(tokens: int = 3):
    rng = np.random.default_rng(1)
    q, k = (jnp.asarray(rng.standard_normal((2, tokens, 1, 4)), jnp.float32) for _ in "qk")
    v = jnp.asarray(rng.standard_normal((2, tokens, 3, 5)), jnp.float32)
    g, beta = -jnp.ones((2, tokens, 3)), jnp.full((2, tokens, 3), 0.5)
    return q, k, v, g, beta, jnp.zeros((2, 3, 4, 5))


def message(spec: str) -> str:
    with pytest.raises(UserError) as error:
        load_kernel(spec)
    return str(error.value)


# --- what runs -----------------------------------------------------------------------------------


def test_a_kernel_has_the_name_and_hash_of_its_file(plug_in) -> None:
    name = plug_in(PREFILL.format(result="o"))
    kernel = load_kernel(f"attention.prefill={name}:prefill")
    digest = hashlib.sha256(Path(f"{name}.py").read_bytes()).hexdigest()
    assert kernel.op == "attention.prefill"
    assert kernel.to_dict() == {"name": f"{name}:prefill", "sha256": digest}


def test_a_kernel_runs_in_place_of_its_op_under_jit(plug_in) -> None:
    name = plug_in(PREFILL.format(result="2 * o"))
    kernel = load_kernel(f"attention.prefill={name}:prefill")
    args, keywords = attention_inputs()
    run = jax.jit(lambda *a: kernel(*a, **keywords, formats=AttentionFormats()))
    assert not kernel.was_called
    np.testing.assert_allclose(run(*args), 2 * attention.prefill(*args, **keywords), rtol=1e-5)
    assert kernel.was_called
    check_called({kernel.op: kernel})


def test_every_argument_is_passed_every_time(plug_in) -> None:
    name = plug_in(
        "from pallas_kernels import delta_rule\n"
        "def f(q, k, v, g, beta, initial_state, *, lengths, scale, formats):\n"
        "    assert initial_state is lengths is scale is None, (lengths, scale)\n"
        "    return delta_rule.chunked(q, k, v, g, beta, formats=formats)\n"
    )
    kernel = load_kernel(f"delta_rule.chunked={name}:f")
    o, state = kernel(*delta_inputs()[:5])
    assert (o.shape, state.shape) == ((2, 3, 3, 5), (2, 3, 4, 5))


def test_kernels_of_one_file_are_equal_and_hashable(plug_in) -> None:
    name = plug_in(PREFILL.format(result="o"))
    first, second = (load_kernel(f"attention.prefill={name}:prefill") for _ in range(2))
    assert first == second and hash(first) == hash(second)


def test_an_edit_of_any_file_behind_a_kernel_is_another_kernel(plug_in) -> None:
    """The named module, the file of a jitted or made function, and what they import."""
    makes = "def make(times):\n    def f(q, k, v, **rest):\n        return q * times * SCALE\n"
    deep = plug_in("SCALE = 1\ndef scale():\n    return SCALE\n")
    inner = plug_in(f"import {deep}\nfrom {deep} import SCALE\n{makes}    return f\n")
    outer = plug_in(f"import jax\nfrom {inner} import make\nf = jax.jit(make(1))\n")

    def sha256() -> str:
        for name in (deep, inner, outer):
            sys.modules.pop(name, None)
        return load_kernel(f"attention.prefill={outer}:f").sha256

    seen = [sha256()]
    assert sha256() == seen[0]
    for name in (outer, inner, deep):
        with open(f"{name}.py", "a") as file:
            file.write("# edited\n")
        seen.append(sha256())
    assert len(set(seen)) == 4


def test_several_kernels(plug_in) -> None:
    name = plug_in(
        PREFILL.format(result="o") + "def decode(*args, **kwargs):\n    return prefill(*args)\n"
    )
    specs = [f"attention.prefill={name}:prefill", f"attention.decode={name}:decode"]
    kernels = load_kernels(specs)
    assert list(kernels) == ["attention.prefill", "attention.decode"]
    with pytest.raises(
        UserError, match=f"{name}:prefill for attention.prefill was never called; .*{name}:decode"
    ):
        check_called(kernels)
    with pytest.raises(UserError, match="names attention.prefill twice"):
        load_kernels([specs[0], specs[0]])


def test_a_kernel_may_be_restricted_to_layers(plug_in) -> None:
    name = plug_in(PREFILL.format(result="o"))
    kernel = load_kernel(f"attention.prefill={name}:prefill@layers=3,7-9")
    assert [layer for layer in range(12) if kernel.covers(layer)] == [3, 7, 8, 9]
    assert kernel.name == f"{name}:prefill" and kernel.to_dict()["layers"] == "3,7-9"
    everywhere = load_kernel(f"attention.prefill={name}:prefill")
    assert everywhere.covers(11) and "layers" not in everywhere.to_dict()
    assert kernel != everywhere

    plans = plan_execution(parse_policy("f32"), 12, {kernel.op: kernel}).layers
    assert [bool(plan.kernels) for plan in plans] == [kernel.covers(i) for i in range(12)]
    kinds = (["linear_attention"] * 3 + ["full_attention"]) * 3
    with pytest.raises(UserError, match="layers 8-9"):
        check_layers({kernel.op: load_kernel(f"{kernel.op}={name}:prefill@layers=3,8-9")}, kinds)
    with pytest.raises(UserError, match="layers 12-12"):
        check_layers({kernel.op: load_kernel(f"{kernel.op}={name}:prefill@layers=12")}, kinds)
    check_layers({kernel.op: load_kernel(f"{kernel.op}={name}:prefill@layers=3,7")}, kinds)
    with pytest.raises(UserError, match="no list of layers"):
        load_kernel(f"attention.prefill={name}:prefill@3")


def test_every_public_op_can_stand_in_for_itself() -> None:
    for op, function in OPS.items():
        spec = f"{op}={function.__module__}:{function.__name__}"
        assert load_kernel(spec).function is function


# --- what is refused ------------------------------------------------------------------------------


def test_an_unknown_op_is_refused_with_the_list() -> None:
    text = message("attention.prefil=a:b")
    assert "'attention.prefil' is no op" in text
    assert all(op in text for op in OPS)
    assert "Did you mean 'attention.prefill'?" in text


@pytest.mark.parametrize("spec", ["attention.prefill", "attention.prefill=a", "", "=", "a:b"])
def test_what_is_not_op_module_function(spec: str) -> None:
    assert "OP=module:function" in message(spec)


def test_a_path_is_not_a_module() -> None:
    assert "is a file's path" in message("attention.prefill=kernels/mine.py:prefill")


def test_a_module_that_is_not_there(plug_in) -> None:
    text = message("attention.prefill=no_such_module_at_all.sub:f")
    assert "there is no module 'no_such_module_at_all'" in text
    assert str(Path.cwd()) in text


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import no_such_dependency\n", "ModuleNotFoundError: No module named 'no_such_dep"),
        ("x = 1\nraise RuntimeError('needs a\\nTPU')\n", "RuntimeError: needs a ("),
        ("def f(:\n", "SyntaxError: "),
        ("import sys\nsys.exit(0)\n", "SystemExit"),
    ],
)
def test_a_module_that_does_not_import(plug_in, source: str, cause: str) -> None:
    name = plug_in(source)
    text = message(f"attention.prefill={name}:f")
    assert f"module {name!r} does not import: {cause}" in text
    assert f"{name}.py:" in text
    assert "\n" not in text


def test_a_missing_function_is_refused_with_those_there_are(plug_in) -> None:
    name = plug_in("import math\nfrom math import sin\ndef prefill(): ...\ndef _own(): ...\n")
    text = message(f"attention.prefill={name}:prefil")
    assert "has no 'prefil'" in text
    assert "Functions there: prefill." in text
    assert "Did you mean 'prefill'?" in text


def test_a_value_is_not_a_function(plug_in) -> None:
    name = plug_in("TILE = 3\n")
    assert "'TILE' is a int, not a function" in message(f"attention.prefill={name}:TILE")


@pytest.mark.parametrize(
    ("op", "parameters", "complaint"),
    [
        ("attention.prefill", "q, k, v", "does not take q_offset, kv_length, scale"),
        (
            "attention.decode",
            "q, k, v, *, q_offset, kv_length, scale=None, k_scale=1, v_scale=1",
            "does not take formats",
        ),
        ("attention.prefill", "q, k, **rest", "too many positional arguments"),
        ("attention.prefill", "q, k, v, block, **rest", "missing a required argument: 'block'"),
        ("attention.prefill", "*, q, k, v, **rest", "too many positional arguments"),
        ("delta_rule.chunked", "q, k, v, g, beta, **rest", "too many positional arguments"),
        (
            "delta_rule.recurrent",
            "q, k, v, g, beta, state",
            "does not take lengths, scale, formats",
        ),
    ],
)
def test_a_signature_that_cannot_take_the_call(plug_in, op, parameters, complaint) -> None:
    name = plug_in(f"def f({parameters}): ...\n")
    text = message(f"{op}={name}:f")
    assert complaint in text
    assert f"{op} is called as f(q, k, v, " in text
    assert "implementation" not in text


def test_keywords_may_be_swallowed(plug_in) -> None:
    name = plug_in("def f(q, k, v, **unused): return q\ndef g(*args, **unused): return args[0]\n")
    load_kernel(f"attention.prefill={name}:f")
    load_kernel(f"delta_rule.chunked={name}:g")


def test_a_function_without_a_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "its parameters cannot be read" in message("attention.prefill=builtins:max")
    module = types.ModuleType("made_in_memory")
    exec("def f(*args, **kwargs): ...", vars(module))
    monkeypatch.setitem(sys.modules, "made_in_memory", module)
    assert "no file whose hash" in message("attention.prefill=made_in_memory:f")


def test_a_policy_may_not_choose_the_same_op(plug_in) -> None:
    name = plug_in(PREFILL.format(result="o"))
    kernels = load_kernels([f"attention.prefill={name}:prefill"])
    check_policy(kernels, parse_policy("bf16,attention.decode.implementation=xla"))
    with pytest.raises(UserError, match=r"Drop the kernel or attention\.prefill\.implementation"):
        check_policy(kernels, parse_policy("bf16,attention.prefill.implementation=xla"))


# --- what it returns ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "found"),
    [
        ("o.astype('bfloat16')", "bfloat16[2, 40, 4, 8]"),
        ("o.swapaxes(1, 2)", "float32[2, 4, 40, 8]"),
        ("(o, o)", "(float32[2, 40, 4, 8], float32[2, 40, 4, 8])"),
        ("[o]", "(float32[2, 40, 4, 8])"),
        ("None", "a NoneType"),
    ],
)
def test_a_wrong_output_is_refused_while_tracing(plug_in, result: str, found: str) -> None:
    name = plug_in(PREFILL.format(result=result))
    kernel = load_kernel(f"attention.prefill={name}:prefill")
    args, keywords = attention_inputs()
    with pytest.raises(UserError) as error:
        jax.eval_shape(lambda *a: kernel(*a, **keywords, formats=AttentionFormats()), *args)
    assert error.value.found == f"Kernel {name}:prefill for attention.prefill returned {found}."
    assert error.value.expected == "attention.prefill returns float32[2, 40, 4, 8]."


@pytest.mark.parametrize(
    ("result", "found"),
    [
        ("o", "float32[2, 3, 3, 5]"),
        ("(o, s.swapaxes(2, 3))", "(float32[2, 3, 3, 5], float32[2, 3, 5, 4])"),
        ("(o, s, s)", "(float32[2, 3, 3, 5], float32[2, 3, 4, 5], float32[2, 3, 4, 5])"),
        ("(o, s.astype('bfloat16'))", "(float32[2, 3, 3, 5], bfloat16[2, 3, 4, 5])"),
    ],
)
@pytest.mark.parametrize("op", ["chunked", "recurrent"])
def test_a_wrong_state_is_refused(plug_in, op: str, result: str, found: str) -> None:
    name = plug_in(
        "from pallas_kernels import delta_rule\n"
        "def f(*args, **kwargs):\n"
        f"    o, s = delta_rule.{op}(*args, **kwargs)\n"
        f"    return {result}\n"
    )
    kernel = load_kernel(f"delta_rule.{op}={name}:f")
    with pytest.raises(UserError) as error:
        jax.eval_shape(lambda *a: kernel(*a, formats=DeltaRuleFormats()), *delta_inputs())
    assert f"returned {found}." in error.value.found
    assert "returns (float32[2, 3, 3, 5], float32[2, 3, 4, 5])." in error.value.expected


def test_expected_outputs_are_what_the_ops_return() -> None:
    args, keywords = attention_inputs(tokens=4)
    for op in (attention.prefill, attention.decode):
        out = jax.eval_shape(lambda *a, op=op: op(*a, **keywords), *args)
        expected = expected_output(f"attention.{op.__name__}", *args, **keywords)
        check_output(f"attention.{op.__name__}", out, *expected)
    for op in (delta_rule.chunked, delta_rule.recurrent):
        out = jax.eval_shape(op, *delta_inputs())
        expected = expected_output(f"delta_rule.{op.__name__}", *delta_inputs())
        check_output(f"delta_rule.{op.__name__}", out, *expected)


def test_nan_is_left_to_the_judgement(plug_in) -> None:
    name = plug_in(PREFILL.format(result="o * float('nan')"))
    kernel = load_kernel(f"attention.prefill={name}:prefill")
    args, keywords = attention_inputs()
    assert bool(jnp.isnan(kernel(*args, **keywords, formats=AttentionFormats())).all())


def test_an_exception_inside_is_one_line_with_its_place_and_the_call(plug_in) -> None:
    name = plug_in(
        "def f(q, k, v, **unused):\n    raise ValueError('tile 128\\ndoes not divide')\n"
    )
    kernel = load_kernel(f"attention.prefill={name}:f")
    args, keywords = attention_inputs()
    with pytest.raises(UserError) as error:
        kernel(*args, **keywords, formats=AttentionFormats())
    assert f"{name}:f for attention.prefill raised ValueError: tile 128 (" in str(error.value)
    assert f"{name}.py:2)" in str(error.value)
    assert "q float32[2, 40, 4, 16], k float32[2, 300, 2, 16]" in str(error.value)


# --- the documented examples ----------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 200])
@pytest.mark.parametrize("formats", [AttentionFormats(), AttentionFormats(p=BF16)], ids=str)
def test_the_right_example_agrees_with_the_reference(from_root, offset, formats) -> None:
    kernel = load_kernel(RIGHT)
    args, keywords = attention_inputs(offset=offset)
    keywords |= {"k_scale": 0.5, "v_scale": 2.0}
    want = attention.prefill(*args, **keywords, implementation="reference")
    got = jax.jit(lambda *a: kernel(*a, **keywords, formats=formats))(*args)
    tolerance = 2e-5 if formats.p != BF16 else 2e-2  # of one P rounding
    np.testing.assert_allclose(got, want, atol=tolerance)
    assert not np.isnan(got).any()


def test_the_right_example_decodes_too(from_root) -> None:
    kernel = load_kernel(RIGHT.replace("prefill", "decode"))
    args, keywords = attention_inputs(tokens=1, offset=257)
    want = attention.decode(*args, **keywords, implementation="reference")
    got = kernel(*args, **keywords, formats=AttentionFormats())
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_the_buggy_example_is_wrong_only_beyond_its_first_tile(from_root) -> None:
    kernel = load_kernel(BUGGY)
    formats = AttentionFormats()
    args, keywords = attention_inputs(offset=0)
    short = kernel(*args, **keywords, formats=formats)
    np.testing.assert_allclose(
        short, attention.prefill(*args, **keywords, implementation="reference"), atol=2e-5
    )
    args, keywords = attention_inputs(offset=200)
    deep = kernel(*args, **keywords, formats=formats)
    want = attention.prefill(*args, **keywords, implementation="reference")
    assert float(jnp.abs(deep[0] - want[0]).max()) > 0.1
