"""Programs compiled ahead: traced once, the same bits, errors where the call is."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernjax.scoring.programs import Program, compilers


def counted():
    traces = []

    def function(x, y):
        traces.append(x.shape)
        return jnp.sin(x) @ y

    return function, traces


def test_a_prepared_call_is_traced_once_and_gives_the_same_bits():
    function, traces = counted()
    ahead, plain = Program(function), Program(function)
    x, y = np.ones((3, 4), np.float32), np.arange(20, dtype=np.float32).reshape(4, 5)
    with compilers() as pool:
        shape = jax.ShapeDtypeStruct((3, 4), np.float32)
        ahead.prepare(pool, shape, y)
        ahead.prepare(pool, shape, y)
        first = ahead(x, y)
    assert traces == [(3, 4)]
    np.testing.assert_array_equal(ahead(x, y), first)
    assert traces == [(3, 4)]
    np.testing.assert_array_equal(plain(x, y), first)


def test_shapes_that_were_not_prepared_compile_on_the_call():
    function, traces = counted()
    program = Program(function)
    with compilers() as pool:
        program.prepare(pool, np.ones((3, 4), np.float32), np.ones((4, 5), np.float32))
    out = program(np.ones((2, 4), np.float32), np.ones((4, 5), np.float32))
    assert out.shape == (2, 5) and traces == [(3, 4), (2, 4)]


def test_an_error_ahead_is_raised_by_the_call():
    def wrong(x):
        raise ValueError("no such tile")

    program = Program(wrong)
    with compilers() as pool:
        program.prepare(pool, np.ones(3, np.float32))
    with pytest.raises(ValueError, match="no such tile"):
        program(np.ones(3, np.float32))


def test_a_donated_argument_is_gone():
    program = Program(lambda x: x + 1, donate=(0,))
    x = jnp.ones((1024,))
    with compilers() as pool:
        program.prepare(pool, x)
    np.testing.assert_array_equal(program(x), np.full(1024, 2.0, np.float32))
    assert x.is_deleted()


def test_what_compiles_ahead_is_counted(caplog, monkeypatch):
    monkeypatch.setattr("kernjax.base.progress._QUIET_S", -1.0)
    function, _ = counted()
    program, y = Program(function), np.ones((4, 5), np.float32)
    with caplog.at_level("INFO", "kernjax"), compilers() as pool:
        for rows in (2, 3):
            program.prepare(pool, np.ones((rows, 4), np.float32), y)
        with pool.show():
            for rows in (2, 3):
                program(np.ones((rows, 4), np.float32), y)
            pool.shutdown()
    (message,) = caplog.messages
    assert message.startswith("compiling: 2 programs in ")


def test_a_preparation_that_was_called_off_compiles_on_the_call():
    release, started = threading.Event(), threading.Event()

    def slow(x):
        started.set()
        release.wait(10)
        return x + 1

    first, second = Program(slow), Program(lambda x: x * 2)
    pool, x = ThreadPoolExecutor(1), np.ones(3, np.float32)
    first.prepare(pool, x)
    started.wait(10)
    second.prepare(pool, x)
    pool.shutdown(wait=False, cancel_futures=True)  # the first has begun, the second has not
    release.set()
    np.testing.assert_array_equal(second(x), [2, 2, 2])
    np.testing.assert_array_equal(first(x), [2, 2, 2])
    with compilers() as pool:
        second.prepare(pool, x)
    np.testing.assert_array_equal(second(x), [2, 2, 2])
