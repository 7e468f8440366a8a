"""The choice of an implementation: by name, by order, by platform, and never silently."""

from __future__ import annotations

import jax
import pytest

from pallas_kernels import implementations
from pallas_kernels.implementations import names_to_try, run_first


def _refuse(*args, **kwargs):
    raise NotImplementedError("needs a chip")


def _break(*args, **kwargs):
    raise RuntimeError("a bug")


TABLE = {
    "xla": lambda x, *, y: ("xla", x, y),
    "reference": lambda x, *, y: ("reference", x, y),
    "mosaic_gpu": _refuse,
    "mosaic_tpu": _refuse,
    "broken": _break,
}


def test_none_is_the_platforms_own():
    assert jax.default_backend() == "cpu"
    assert names_to_try("op", TABLE, None) == ("xla",)
    assert run_first("op", TABLE, None, 1, y=2) == ("xla", 1, 2)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_accelerators_fall_back_to_their_kernel(monkeypatch, platform):
    """XLA first: a kernel that no chip has run yet computes no ground truth unasked."""
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    assert names_to_try("op", TABLE, None) == ("xla", f"mosaic_{platform}")
    assert run_first("op", TABLE, None, 1, y=2)[0] == "xla"
    only_xla = {"xla": TABLE["xla"]}
    assert names_to_try("op", only_xla, None) == ("xla",)


def test_unknown_platform_uses_xla(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "quantum")
    assert names_to_try("op", TABLE, None) == ("xla",)


def test_a_name_must_run_or_raise():
    assert run_first("op", TABLE, "reference", 1, y=2) == ("reference", 1, 2)
    with pytest.raises(NotImplementedError, match="needs a chip"):
        run_first("op", TABLE, "mosaic_gpu", 1, y=2)


def test_a_tuple_is_tried_in_order():
    names = ("mosaic_gpu", "reference", "xla")
    assert run_first("op", TABLE, names, 1, y=2) == ("reference", 1, 2)


def test_all_refusals_are_reported():
    with pytest.raises(ExceptionGroup, match="op: every implementation refused") as group:
        run_first("op", TABLE, ("mosaic_gpu", "mosaic_tpu"), 1, y=2)
    assert all(isinstance(e, NotImplementedError) for e in group.value.exceptions)
    notes = [e.__notes__ for e in group.value.exceptions]
    assert [("mosaic_gpu" in n[0], "mosaic_tpu" in n[0]) for n in notes] == [
        (True, False),
        (False, True),
    ]


def test_a_bug_is_not_a_refusal():
    with pytest.raises(RuntimeError, match="a bug"):
        run_first("op", TABLE, ("broken", "xla"), 1, y=2)


@pytest.mark.parametrize("names", ["mosaic", ("xla", "mosaic")])
def test_unknown_names_list_the_known(names):
    with pytest.raises(ValueError, match=r"op: implementation 'mosaic' is not one of \['broken'"):
        run_first("op", TABLE, names, 1, y=2)


@pytest.mark.parametrize("value", [(), 3, ["xla"]])
def test_anything_else_is_refused(value):
    with pytest.raises(ValueError, match="must be None, one of"):
        run_first("op", TABLE, value, 1, y=2)


def test_no_implementation_for_the_platform():
    with pytest.raises(NotImplementedError, match="no implementation for platform 'cpu'"):
        run_first("op", {"mosaic_gpu": _refuse}, None)


def test_every_default_is_a_tuple_of_names():
    for names in implementations.PLATFORM_DEFAULTS.values():
        assert isinstance(names, tuple) and names[0] == "xla"
