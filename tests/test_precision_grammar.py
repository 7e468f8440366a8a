"""The grammar of --policy and the policy files: what is read, and how what is not is refused."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from kernjax.base.errors import UserError
from kernjax.base.resources import data_dir
from kernjax.precision import FIELDS, Policy, describe, diff, parse_policy, policy_names
from kernjax.precision.named import complete_policy, named_policy, read_policy_file
from pallas_kernels.formats import BF16, E4M3, E4M3_448, F16, F32, Format


def refusal(text: str) -> str:
    with pytest.raises(UserError) as error:
        parse_policy(text)
    return str(error.value)


# --- what is read ---------------------------------------------------------------------------------


def test_a_name_alone() -> None:
    assert parse_policy("f32") == Policy()
    assert str(parse_policy(" bf16 ")) == "bf16"


def test_settings_and_layers() -> None:
    policy = parse_policy(
        "bf16,attention.p=fp8*448,delta_rule.state=m7@layers=0-5,8,attention.block_k=128"
    )
    assert policy.attention.p == E4M3_448
    assert policy.attention.block_k == 128
    assert policy.delta_rule.state == F32
    assert policy.for_layer(8).delta_rule.state == Format(mantissa_bits=7)
    assert policy.for_layer(6).delta_rule.state == F32
    assert policy.overrides[0].layers == ((0, 5), (8, 8))


def test_blanks_do_not_matter() -> None:
    spaced = parse_policy("bf16, attention.p = fp8 @ layers = 3, 5-7 , conv=f32")
    assert spaced == parse_policy("bf16,attention.p=fp8@layers=3,5-7,conv=f32")


def test_the_text_of_a_policy_is_in_reading_order() -> None:
    text = "bf16,conv=f32,attention.p=fp8*448@layers=3,weights=f32"
    assert str(parse_policy(text)) == "bf16,weights=f32,conv=f32,attention.p=fp8*448@layers=3"


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("bf61", ["Policy 'bf61' does not exist", "Named policies: bf16, ", "mean 'bf16'?"]),
        ("BF16", ["Policy 'BF16' does not exist", "mean 'bf16'?"]),
        ("", ["does not start with a name", "NAME[,field=value"]),
        ("attention.p=fp8", ["does not start with a name"]),
        ("../policies/bf16", ["does not exist"]),
        ("bf16,", ["'' is not field=value"]),
        ("bf16,attention.p", ["'attention.p' is not field=value"]),
        ("bf16,attention.p=", ["is not field=value"]),
        ("bf16,=fp8", ["is not field=value"]),
        ("bf16,fp8", ["'fp8' is not field=value"]),
        ("bf16,attention.P=fp8", ["'attention.P' does not exist", "mean 'attention.p'?"]),
        ("bf16,delta_rule.sate=m7", ["mean 'delta_rule.state'?", "Fields: activations, "]),
        ("bf16,zzz=1", ["'zzz' does not exist", "prefill_window"]),
        ("bf16,name=x", ["'name' does not exist"]),
        ("bf16,overrides=x", ["'overrides' does not exist"]),
        ("bf16,attention.p=fp9", ["'fp9' is no value of attention.p", "bf16, f16, fp8"]),
        ("bf16,attention.p=fp8*0", ["is no value of attention.p", "scale=0.0"]),
        ("bf16,delta_rule.state=m23", ["mantissa_bits=23 is not in 1..22"]),
        ("bf16,attention.row_sum=round", ["one of unrounded, rounded", "mean 'rounded'?"]),
        ("bf16,attention.rescale_threshold=-1", ["a finite number >= 0"]),
        ("bf16,attention.rescale_threshold=inf", ["a finite number >= 0"]),
        ("bf16,attention.block_k=0", ["a whole number >= 1"]),
        ("bf16,attention.block_k=1.5", ["a whole number >= 1"]),
        ("bf16,delta_rule.chunk=48", ["one of 16, 32, 64, 128"]),
        ("bf16,kv_cache.k_scale=0", ["a finite number > 0"]),
        ("bf16,kv_cache.k_scale=x", ["a finite number > 0"]),
        ("bf16,dot=high", ["one of highest, default", "mean 'highest'?"]),
        ("bf16,attention.prefill.implementation=xlaa", ["mosaic_tpu", "mean 'xla'?"]),
        ("bf16,prefill_window=0", ["a whole number >= 1"]),
        ("bf16,attention.p=bf16", ["changes nothing", "attention.p already is bf16 in bf16"]),
        ("fp8_scaled,attention.p=fp8*448", ["changes nothing", "in fp8_scaled"]),
        ("bf16,attention.p=bf16@layers=3", ["attention.p=bf16@layers=3 changes nothing"]),
        ("bf16,attention.p=fp8,attention.p=fp8@layers=3", ["changes nothing"]),
        ("bf16,attention.p=fp8,attention.p=f16", ["twice: attention.p=fp8 and attention.p=f16"]),
        ("bf16,attention.p=fp8,attention.p=fp8", ["twice"]),
        ("bf16,attention.p=fp8@layers=2-4,attention.p=f16@layers=4", ["attention.p twice"]),
        ("bf16,prefill_window=512@layers=3", ["prefill_window belongs to the whole model"]),
        (
            "bf16,logits=bf16@layers=3",
            ["logits belongs", "all but weights, dequantise, logits, prefill_window"],
        ),
        ("bf16,weights=f32@layers=3", ["weights belongs to the whole model"]),
        ("bf16,attention.p=fp8@layer=3", ["'@layer=3' is no list of layers", "@layers=3,5-7"]),
        ("bf16,attention.p=fp8@", ["is no list of layers"]),
        ("bf16,attention.p=fp8@layers=", ["is no list of layers"]),
        ("bf16,attention.p=fp8@layers=a", ["is no list of layers"]),
        ("bf16,attention.p=fp8@layers=5-3", ["is no list of layers"]),
        ("bf16,attention.p=fp8@layers=-1", ["is no list of layers"]),
        ("bf16,attention.p=fp8@layers=0-99999999999", ["is no list of layers"]),
        ("bf16,attention.p=fp8@layers=3@layers=4", ["is no list of layers"]),
    ],
)
def test_what_cannot_have_been_meant(text: str, parts: list[str]) -> None:
    found = refusal(text)
    for part in parts:
        assert part in found
    assert "\n" not in found


def test_the_lists_in_messages_are_complete() -> None:
    assert all(name in refusal("nothing") for name in policy_names())
    assert all(name in refusal("bf16,nothing=1") for name in FIELDS)


# --- the files ------------------------------------------------------------------------------------


def test_the_policies_that_the_documents_promise_are_there() -> None:
    promised = """f32 bf16 hf_bf16 p_f32 p_f16 fp8 fp8_scaled fp8_scaled_256 state_bf16 fla flashkda
        kv_fp8 rpa_v3 chunk32 chunk128 block256""".split()
    assert set(promised) <= set(policy_names())
    files = (data_dir("configs") / "policies").iterdir()
    assert sorted(path.name for path in files) == [f"{name}.toml" for name in policy_names()]


@pytest.mark.parametrize("name", policy_names())
def test_a_file_describes_itself_and_differs_from_its_base(name: str) -> None:
    about = describe(name)
    assert about.description.endswith(".") and about.source.endswith(".")
    assert "\n" not in about.description + about.source
    if about.base is not None:
        assert diff(parse_policy(name), parse_policy(about.base))
    assert str(parse_policy(name)) == name
    assert complete_policy(name).name in {"f32", "bf16", "hf_bf16"}


def test_no_two_files_are_the_same_policy() -> None:
    for a, b in itertools.combinations(policy_names(), 2):
        assert parse_policy(a) != parse_policy(b), (a, b)


def test_named_policies_say_what_the_documents_say() -> None:
    f32, bf16 = parse_policy("f32"), parse_policy("bf16")
    exact = (F32, "highest", "auto", "unrounded", "load", 0, 1, 64, 512, 2048)
    assert all(FIELDS[n].get(f32) in exact for n in FIELDS)
    assert (bf16.activations, bf16.weights, bf16.logits) == (BF16, BF16, F32)
    assert (bf16.attention.p, bf16.kv_cache.k, bf16.kv_cache.v) == (BF16, BF16, BF16)
    assert {bf16.attention.m, bf16.attention.l, bf16.attention.acc} == {F32}
    assert {bf16.delta_rule.state, bf16.delta_rule.beta, bf16.qk} == {F32}
    assert parse_policy("hf_bf16").logits == parse_policy("hf_bf16").delta_rule.beta == BF16
    assert parse_policy("fp8").attention.p == E4M3
    assert parse_policy("p_f16").attention.p == F16
    flashkda = parse_policy("flashkda").delta_rule
    assert (flashkda.chunk, flashkda.chunk_state, flashkda.state) == (16, BF16, F32)
    fla = parse_policy("fla").delta_rule
    assert (fla.state, fla.chunk_state, fla.state_operand, fla.v_new) == (F32, F32, BF16, BF16)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("not toml", "is not TOML"),
        ('description = "d."\nsource = "s."', "['fields'] are missing"),
        ('description = 1\nsource = "s."\n[fields]', "['description'] are unknown or of the wrong"),
        ('description = "d."\nsource = "s."\nbasis = "bf16"\n[fields]', "['basis'] are unknown"),
        ('description = "d."\nsource = "s."\n[fields]\nattention.P = "fp8"', "'attention.P' does"),
        ('description = "d."\nsource = "s."\n[fields]\nconv = 3', "'3' is no value of conv"),
        ('description = "d."\nsource = "s."\nbase = "bf61"\n[fields]', "'bf61' does not exist"),
        (
            'description = "d."\nsource = "s."\nbase = "bf16"\n[fields]\nattention.p = "bf16"',
            "changes nothing",
        ),
    ],
)
def test_a_malformed_file_is_refused_by_name(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        read_policy_file(path)
    assert str(path) in error.value.found
    assert complaint in str(error.value)


def test_a_file_may_restrict_to_layers(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'description = "d."\nsource = "s."\nbase = "bf16"\n'
        '[fields]\nattention.p = "fp8@layers=3,5-7"\ndelta_rule.chunk = 32\n'
    )
    assert [str(s) for s in read_policy_file(path).settings] == [
        "attention.p=fp8@layers=3,5-7",
        "delta_rule.chunk=32",
    ]


def test_a_base_is_applied_first() -> None:
    lazy = named_policy("fp8_lazy_rescale")
    assert (str(lazy.attention.p), lazy.attention.rescale_threshold) == ("fp8*256", 4.0)
    assert lazy.activations == BF16
