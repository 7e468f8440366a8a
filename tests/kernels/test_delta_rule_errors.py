"""What the delta rule refuses, before it traces anything."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from delta_rule_cases import FAMILIES, case

from pallas_kernels import delta_rule
from pallas_kernels.delta_rule import DeltaRuleFormats
from pallas_kernels.formats import BF16
from pallas_kernels.ops import OPS

KNOWN = case(20, FAMILIES[:1])  # Hk 2, Hv 6, K 32, V 24


@pytest.mark.parametrize(
    "name, value, says",
    [
        ("q", KNOWN.q[0], "q has shape"),
        ("q", KNOWN.q.astype(np.int32), "q has dtype int32"),
        ("k", KNOWN.k[:, :-1], "k has shape"),
        ("k", KNOWN.k.astype(jnp.float8_e4m3fn), "k has dtype float8_e4m3fn"),
        ("v", KNOWN.v[:, :, :5], "Hv=5 heads and q has Hk=2"),
        ("v", KNOWN.v[:, :-1], "v has shape"),
        ("v", KNOWN.v[:, :, :0], "none empty"),
        ("g", KNOWN.g[..., None], "g has shape"),
        ("beta", KNOWN.beta[..., :2], "beta has shape"),
        ("state", KNOWN.state[..., :-1], "state has shape"),
    ],
)
@pytest.mark.parametrize("op", ["chunked", "recurrent"])
def test_arrays_that_do_not_fit(op, name, value, says):
    with pytest.raises(ValueError, match=rf"delta_rule\.{op}.*{says}"):
        getattr(delta_rule, op)(*KNOWN._replace(**{name: value}))


@pytest.mark.parametrize(
    "options, says",
    [
        ({"lengths": np.array([20, 20], np.int32)}, "lengths has shape"),
        ({"lengths": np.array([20.0], np.float32)}, "lengths .*float32"),
        ({"scale": 0.0}, "scale=0.0"),
        ({"scale": float("nan")}, "scale=nan"),
        ({"formats": "bf16"}, "formats='bf16'"),
        ({"implementation": "cuda"}, "'cuda' is not one of"),
        ({"implementation": ()}, "implementation"),
    ],
)
def test_options_that_do_not_fit(options, says):
    with pytest.raises(ValueError, match=says):
        delta_rule.chunked(*KNOWN, **options)


@pytest.mark.parametrize("fields, says", [({"chunk": 48}, "chunk=48"), ({"dot": "tf32"}, "'tf32'")])
def test_formats_that_do_not_exist(fields, says):
    with pytest.raises(ValueError, match=says):
        DeltaRuleFormats(**fields)


def test_too_many_steps():
    with pytest.raises(ValueError, match="T=20 tokens; allowed are 1 to 8"):
        delta_rule.recurrent(*KNOWN)


def test_an_implementation_refuses_what_it_cannot_compute():
    with pytest.raises(NotImplementedError, match="nothing to round for h, p, dot"):
        delta_rule.chunked(
            *KNOWN,
            formats=DeltaRuleFormats(h=BF16, p=BF16, state=BF16, dot="default"),
            implementation="recurrence",
        )
    with jax.enable_x64(True):
        wide = KNOWN._replace(q=KNOWN.q.astype(np.float64))
        with pytest.raises(NotImplementedError, match="float64"):
            delta_rule.chunked(*wide, implementation="xla")
        with pytest.raises(ExceptionGroup):
            delta_rule.recurrent(*(x[:, :8] for x in wide[:5]), wide.state, implementation=("xla",))


def test_the_tables_name_what_there_is():
    assert OPS["delta_rule.chunked"] is delta_rule.chunked
    assert OPS["delta_rule.recurrent"] is delta_rule.recurrent
    assert {"reference", "xla"} <= set(delta_rule.CHUNKED) & set(delta_rule.RECURRENT)
