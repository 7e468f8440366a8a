"""The catalogue of planted faults: every row can be run, does something, and controls do not.

What single faults compute is checked against independent NumPy forms in
tests/kernels/test_faults_oracle.py.
"""

from __future__ import annotations

import inspect

import pytest

from kernjax.base.errors import UserError
from kernjax.faults import CATALOGUE, CONTROLS, FAULTS, NORMALS, SHORT, attention, delta_rule, find
from kernjax.faults.catalogue import ATTENTION, DELTA_RULE
from kernjax.faults.measure import RED_AT_OP, ratio_at_op
from kernjax.plugins import load_kernels
from kernjax.precision import parse_policy
from pallas_kernels.ops import OPS

FORMS = ("control_online_softmax", "control_chunk_form", "control_token_form")


def test_the_catalogue_is_large_enough_and_has_every_op():
    assert len(FAULTS) >= 30 and len(CONTROLS) >= 5 and len(NORMALS) >= 4
    assert len({row.id for row in CATALOGUE}) == len(CATALOGUE)
    assert {op for row in FAULTS for op, _ in row.kernels} == set(OPS)
    assert {op for row in find(list(SHORT)) for op, _ in row.kernels} == set(OPS)
    assert all(row.expected == "green" for row in CONTROLS)
    assert {row.expected for row in FAULTS} == {"red", "floor"}
    assert sum(row.expected == "red" for row in FAULTS) >= 30


@pytest.mark.parametrize("row", CATALOGUE, ids=lambda row: row.id)
def test_every_row_comes_through_the_door(row):
    kernels = load_kernels(row.specs)
    assert set(kernels) == {op for op, _ in row.kernels}
    for kernel in kernels.values():
        assert kernel.function.__doc__ and len(kernel.sha256) == 64
    policy = parse_policy(",".join(filter(None, ("bf16", row.settings))))
    assert (str(policy) == "bf16") == (row.settings == "")
    assert row.what and row.source and (row.needs or not row.at_op)


def test_normal_producers_are_policies():
    assert len({str(parse_policy(name)) for name in NORMALS}) == len(NORMALS)


@pytest.mark.parametrize("module, rows", [(attention, ATTENTION), (delta_rule, DELTA_RULE)])
def test_no_fault_is_left_out_of_the_catalogue(module, rows):
    own = {
        name
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and function.__module__ == module.__name__
        and name[0] != "_"
    }
    listed = {name for row in (*rows, *CONTROLS) for _, name in row.kernels}
    assert own - listed == set()


@pytest.mark.parametrize("row", FAULTS, ids=lambda row: row.id)
def test_a_fault_differs_on_inputs_that_trigger_it(row):
    size, ratio = ratio_at_op(row)
    assert size.largest > (0.01 if row.expected == "red" else 1e-4)
    # A wrong line is no rounding; what may hide below the floor may be as small as one.
    assert row.expected == "floor" or ratio > RED_AT_OP


@pytest.mark.parametrize("row", CONTROLS, ids=lambda row: row.id)
def test_a_control_does_not(row):
    size, _ = ratio_at_op(row)
    assert size.largest < (1e-5 if row.id in FORMS else 0.03)


def test_rows_are_found_by_id_in_the_catalogues_order():
    last, first = CATALOGUE[-1].id, CATALOGUE[0].id
    assert [row.id for row in find([last, first])] == [first, last]
    with pytest.raises(UserError, match="'scale_thrice'.*scale_twice"):
        find(["scale_thrice"])
