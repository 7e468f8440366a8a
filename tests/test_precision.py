"""Policies: the record and its fields, per-layer settings, differences, lenses, unused sites."""

from __future__ import annotations

import dataclasses
import json

import hypothesis
import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernjax.base.errors import UserError
from kernjax.precision import (
    FIELDS,
    LayerPolicy,
    Policy,
    Setting,
    apply,
    delta,
    diff,
    executed_sites,
    isolated,
    parse_policy,
    policy_names,
    twin,
)
from kernjax.precision.fields import Implementations, Value
from kernjax.precision.sites import KINDS
from pallas_kernels import attention, delta_rule
from pallas_kernels.formats import BF16, E4M3, E4M3_448, F32, Format
from pallas_kernels.implementations import PLATFORM_DEFAULTS
from pallas_kernels.ops import OPS

SITES = """
    activations weights dequantise logits
    attention.q attention.k attention.v attention.scores attention.p attention.m attention.l
    attention.acc attention.row_sum attention.rescale_threshold attention.block_k attention.dot
    kv_cache.k kv_cache.v kv_cache.k_scale kv_cache.v_scale
    delta_rule.qk delta_rule.state delta_rule.chunk_state delta_rule.state_operand delta_rule.h
    delta_rule.v_new delta_rule.inverse delta_rule.w delta_rule.u delta_rule.p delta_rule.g
    delta_rule.g_cumsum delta_rule.exp_g delta_rule.beta delta_rule.chunk delta_rule.dot
    conv dot prefill_window
    attention.prefill.implementation attention.decode.implementation
    delta_rule.chunked.implementation delta_rule.recurrent.implementation
""".split()
HYBRID = ["linear_attention"] * 3 + ["full_attention"]


def another(name: str) -> str:
    """A valid value of the field that is not the one `bf16` has."""
    candidates = ("m5", "default", "rounded", "3", "32", "reference", "layer")
    now = FIELDS[name].get(parse_policy("bf16"))
    for text in candidates:
        try:
            if FIELDS[name].parse(text) != now:
                return text
        except ValueError:
            continue
    raise AssertionError(name)


# --- the record -----------------------------------------------------------------------------------


def test_every_rounding_site_is_a_field_and_every_field_a_leaf_of_the_record() -> None:
    assert list(FIELDS) == SITES


@pytest.mark.parametrize("name", SITES)
def test_a_field_sets_one_leaf_and_nothing_else(name: str) -> None:
    base = parse_policy("bf16")
    changed = parse_policy(f"bf16,{name}={another(name)}")
    assert type(FIELDS[name].get(changed)) is type(FIELDS[name].get(base))
    assert [change.field for change in base.diff(changed)] == [name]
    assert {n: FIELDS[n].get(changed) for n in FIELDS if n != name} == {
        n: FIELDS[n].get(base) for n in FIELDS if n != name
    }


def test_implementations_are_those_of_the_ops() -> None:
    fields = {f.name.replace("_", ".") for f in dataclasses.fields(Implementations)}
    assert fields == {op.replace("_", ".") for op in OPS}
    tables = (attention.PREFILL, attention.DECODE, delta_rule.RECURRENT)
    accepted = {*(name for table in tables for name in table), *sum(PLATFORM_DEFAULTS.values(), ())}
    for name in accepted:
        policy = parse_policy(f"bf16,attention.decode.implementation={name}")
        assert policy.implementation("attention.decode") == name
        assert policy.implementation("attention.prefill") is None


def test_policies_are_static_under_jit() -> None:
    traces = []

    def double(x: float, policy: Policy) -> float:
        traces.append(policy)
        return 2 * x

    run = jax.jit(double, static_argnums=1)
    for _ in range(2):
        assert run(1.0, parse_policy("bf16,delta_rule.state=m7@layers=3")) == 2.0
    run(1.0, parse_policy("bf16,delta_rule.state=m6@layers=3"))
    assert len(traces) == 2


def test_a_name_is_not_part_of_what_a_policy_computes() -> None:
    assert parse_policy("fp8_scaled") == parse_policy("bf16,attention.p=fp8*448")
    assert hash(parse_policy("fp8_scaled")) == hash(parse_policy("bf16,attention.p=fp8*448"))
    assert Policy() == parse_policy("f32")


# --- layers ---------------------------------------------------------------------------------------


def test_a_layer_gets_its_own_settings_and_equal_layers_are_equal() -> None:
    policy = parse_policy("bf16,attention.p=fp8*448@layers=3,7,delta_rule.state=m7@layers=4-6")
    layers = [policy.for_layer(i) for i in range(8)]
    assert [layer.attention.p for layer in layers] == [BF16] * 3 + [E4M3_448] + [BF16] * 3 + [
        E4M3_448
    ]
    assert [layer.delta_rule.state for layer in layers] == [F32] * 4 + [
        Format(mantissa_bits=7)
    ] * 3 + [F32]
    assert len(set(layers)) == 3
    assert all(type(layer) is LayerPolicy for layer in layers)
    assert policy.for_layer(0) == policy.without_overrides() == parse_policy("bf16").for_layer(9)


def test_an_override_stands_on_top_of_the_same_field_set_everywhere() -> None:
    policy = parse_policy("bf16,attention.p=fp8@layers=3,attention.p=f16")
    assert str(policy.for_layer(3).attention.p) == "fp8"
    assert str(policy.for_layer(2).attention.p) == "f16"


def test_layers_that_execute_their_sites_are_accepted() -> None:
    kinds = HYBRID * 2
    for text in (
        "attention.p=fp8@layers=3,7",
        "attention.p=fp8@layers=0-7",
        "delta_rule.state=m7@layers=0-5",
        "delta_rule.qk=bf16@layers=4",
        "conv=m5@layers=0",
        "activations=f32@layers=3,4",
    ):
        parse_policy(f"bf16,{text}").validate_layers(8, kinds)
    parse_policy("fp8_scaled").validate_layers(8, kinds)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("attention.p=fp8@layers=8", "names layer 8. The model has 8 layers, counted from 0"),
        ("attention.p=fp8@layers=3-9", "names layer 9"),
        ("attention.p=fp8@layers=2", "layer 2 never executes attention.p. Layers of kind full_att"),
        ("attention.p=fp8@layers=3,4", "layer 4 never executes attention.p"),
        ("attention.p=fp8@layers=0-2", "layers 0-2 never executes attention.p"),
        ("kv_cache.k=fp8@layers=0", "kind full_attention: 3, 7"),
        ("delta_rule.state=m7@layers=3", "kind linear_attention: 0, 1, 2, 4, 5, 6"),
        ("conv=m5@layers=7", "never executes conv"),
    ],
)
def test_layers_that_do_not_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(UserError) as error:
        parse_policy(f"bf16,{text}").validate_layers(8, HYBRID * 2)
    assert complaint in str(error.value)


# --- sites that a run executes --------------------------------------------------------------------


def unused(text: str, kinds: list[str], windows: int = 2, decode_steps: int = 4) -> list[str]:
    executed = executed_sites(kinds, windows=windows, decode_steps=decode_steps)
    return parse_policy(text).unused_sites(executed)


@pytest.mark.parametrize("name", policy_names())
def test_a_hybrid_with_windows_and_decode_executes_every_named_policy(name: str) -> None:
    assert unused(name, HYBRID) == []


@pytest.mark.parametrize(
    ("text", "kinds", "windows", "decode_steps", "expected"),
    [
        ("fp8_scaled", ["linear_attention"], 2, 4, ["attention.p"]),
        ("kv_fp8", ["linear_attention"], 2, 4, ["kv_cache.k", "kv_cache.v"]),
        ("state_bf16", ["full_attention"], 2, 4, ["delta_rule.state"]),
        ("fla", ["full_attention"], 2, 4,
         [f"delta_rule.{site}" for site in "qk state_operand h v_new inverse w u p".split()]),
        ("state_bf16", HYBRID, 1, 0, ["delta_rule.state"]),  # stored once, never read again
        ("state_bf16", HYBRID, 1, 1, []),
        ("state_bf16", HYBRID, 2, 0, []),
        ("chunk32", HYBRID, 0, 4, ["delta_rule.chunk"]),
        ("bf16,delta_rule.state=m7@layers=0", ["full_attention"], 2, 4, ["delta_rule.state"]),
        ("bf16,attention.decode.implementation=xla", HYBRID, 2, 0,
         ["attention.decode.implementation"]),
        ("bf16", ["linear_attention"], 1, 0, []),  # a whole engine's policy, not a change
        ("hf_bf16", ["full_attention"], 1, 0, []),
        ("hf_bf16,delta_rule.g=bf16", ["full_attention"], 1, 0, ["delta_rule.g"]),
    ],
)  # fmt: skip
def test_a_site_that_is_never_executed_is_found(
    text: str, kinds: list[str], windows: int, decode_steps: int, expected: list[str]
) -> None:
    assert unused(text, kinds, windows, decode_steps) == expected
    executed = executed_sites(kinds, windows=windows, decode_steps=decode_steps)
    if expected:
        with pytest.raises(UserError, match="which this run never executes") as error:
            parse_policy(text).check_executed(executed)
        assert all(site in error.value.found for site in expected)
    else:
        parse_policy(text).check_executed(executed)


def test_unknown_kinds_of_layers_are_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="mamba"):
        executed_sites(["mamba"], windows=1, decode_steps=0)
    everything = executed_sites(KINDS, windows=2, decode_steps=1)
    assert everything == set(FIELDS)


# --- differences, lenses, manifests ---------------------------------------------------------------


def test_a_difference_is_in_reading_order_with_values_as_written() -> None:
    a = parse_policy("bf16,conv=f32,attention.p=fp8*448,delta_rule.state=m7@layers=0-5")
    b = parse_policy("bf16,prefill_window=512,delta_rule.state=m6@layers=0-5")
    assert diff(a, b) == [
        ("attention.p", "fp8*448", "bf16"),
        ("conv", "f32", "bf16"),
        ("prefill_window", "2048", "512"),
        ("delta_rule.state@layers=0-5", "m7", "m6"),
    ]
    assert diff(a, parse_policy("bf16"))[-1] == ("delta_rule.state@layers=0-5", "m7", "-")
    assert diff(a, a) == []


def test_isolated_is_f32_with_only_the_change() -> None:
    bf16 = parse_policy("bf16")
    assert isolated(parse_policy("fp8_scaled"), bf16) == parse_policy("f32,attention.p=fp8*448")
    assert str(isolated(parse_policy("fp8_scaled"), bf16)) == "f32,attention.p=fp8*448"
    assert isolated(parse_policy("kv_fp8,attention.p=fp8"), parse_policy("kv_fp8")) == parse_policy(
        "f32,attention.p=fp8"
    )
    layered = parse_policy("bf16,delta_rule.state=m5@layers=1")
    assert isolated(layered, bf16) == parse_policy("f32,delta_rule.state=m5@layers=1")
    # A candidate that only removes rounding adds none by itself.
    assert isolated(parse_policy("p_f32"), bf16) == parse_policy("f32")


def test_twin_is_production_with_only_the_change_undone() -> None:
    bf16 = parse_policy("bf16")
    assert twin(parse_policy("fp8_scaled"), bf16) == parse_policy("p_f32")
    assert twin(parse_policy("state_bf16"), bf16) == bf16
    assert twin(parse_policy("bf16,attention.p=fp8@layers=3"), bf16) == parse_policy(
        "bf16,attention.p=f32@layers=3"
    )
    assert twin(parse_policy("bf16,delta_rule.state=m4@layers=0"), bf16) == bf16


def test_delta_applied_to_its_base_is_the_candidate() -> None:
    bf16 = parse_policy("bf16")
    for name in policy_names():
        candidate = parse_policy(name)
        assert apply(delta(candidate, bf16), bf16) == candidate
    assert delta(bf16, bf16) == ()


def test_composition_may_set_what_is_already_set() -> None:
    bf16 = parse_policy("bf16")
    assert apply([Setting("attention.p", BF16)], bf16) == bf16
    with pytest.raises(UserError, match="does not exist"):
        apply([Setting("attention.P", BF16)], bf16)


def test_per_layer_settings_of_production_cannot_be_taken_away() -> None:
    production = parse_policy("bf16,attention.p=f32@layers=3")
    both = apply([Setting("conv", F32)], production)
    assert delta(both, production) == (Setting("conv", F32),)
    with pytest.raises(UserError, match="lacks the per-layer settings attention.p=f32@layers=3"):
        delta(parse_policy("bf16,conv=f32"), production)


formats = st.sampled_from([BF16, E4M3, E4M3_448, Format("float16", 0.3), Format(mantissa_bits=5)])
fields = st.sampled_from([n for n in SITES if isinstance(FIELDS[n].get(Policy()), Format)])
spans = st.sampled_from([(), ((0, 0),), ((1, 4), (6, 6))])


@st.composite
def settings(draw: st.DrawFn) -> Setting:
    name = draw(fields)
    return Setting(name, draw(formats), draw(spans) if FIELDS[name].per_layer else ())


@hypothesis.settings(deadline=None)  # the machine may be busy
@given(
    st.sampled_from(policy_names()),
    st.lists(settings(), max_size=4, unique_by=lambda setting: setting.field),
    st.floats(1e-3, 1e3),
)
def test_text_and_manifest_are_read_back_exactly(
    name: str, changes: list[Setting], scale: Value
) -> None:
    base = parse_policy(name)
    changes = [s for s in changes if FIELDS[s.field].get(base) != s.value]
    changes = [*changes, *([Setting("kv_cache.k_scale", scale)] if scale != 1.0 else [])]
    policy = apply(changes, base)
    assert parse_policy(str(policy)) == policy
    record = json.loads(json.dumps(policy.to_dict()))
    assert Policy.from_dict(record) == policy
    assert record["text"] == str(policy)


def test_a_manifest_lists_every_field() -> None:
    record = parse_policy("fp8,delta_rule.state=m7@layers=2").to_dict()
    assert list(record["fields"]) == SITES
    assert record["fields"]["attention.p"] == "fp8"
    assert record["fields"]["delta_rule.chunk"] == "64"
    assert record["overrides"] == ["delta_rule.state=m7@layers=2"]
    assert (record["name"], record["text"]) == ("fp8", "fp8,delta_rule.state=m7@layers=2")


def test_a_manifest_from_before_a_field_existed_is_unrounded_there() -> None:
    record = parse_policy("bf16").to_dict()
    del record["fields"]["delta_rule.beta"]
    assert Policy.from_dict(record) == parse_policy("bf16")
    record["fields"]["delta_rule.betta"] = "bf16"
    with pytest.raises(UserError, match="'delta_rule.betta' does not exist"):
        Policy.from_dict(record)
