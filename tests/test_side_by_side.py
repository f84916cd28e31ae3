"""Steps side by side: the order, what is held, how it stops, and that nothing is traced twice."""

import itertools
import signal
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxablate import sweep as sweep_module
from jaxablate.edits import remove_blocks
from jaxablate.nodes import chunks
from jaxablate.placement import OneDevice
from jaxablate.problem import Problem
from jaxablate.side_by_side import side_by_side
from jaxablate.sweep import Sweep, SweepOptions
from jaxablate.windows import windows

WAIT = 30  # seconds after which a test that hangs fails


@pytest.mark.parametrize("at_once", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_results_come_in_order(at_once, count):
    double = jax.jit(lambda x: 2 * x)
    found = list(side_by_side(lambda n: double(jnp.float32(n)), range(count), at_once))
    assert [float(x) for x in found] == [2.0 * n for n in range(count)]


def test_the_second_is_computed_while_the_first_still_is():
    both = threading.Barrier(2, timeout=WAIT)

    waited = []

    class Slow:
        def block_until_ready(self) -> "Slow":
            waited.append(both.wait())
            return self

    # One after the other, the first would wait for ever: the barrier breaks and raises.
    assert len(list(side_by_side(lambda _: Slow(), range(4), 2))) == len(waited) == 4


def test_items_are_read_only_a_little_ahead():
    read = []

    def items():
        for n in itertools.count():
            read.append(n)
            yield n

    results = side_by_side(jnp.float32, items(), 2)
    for n in range(5):
        next(results)
        assert len(read) <= n + 3
    results.close()


@pytest.mark.parametrize("at_once", [1, 2])
def test_an_item_is_let_go_when_it_is_through(at_once):
    class Item:
        pass

    kept: list[weakref.ref] = []

    def items():
        for _ in range(8):
            kept.append(weakref.ref(item := Item()))
            yield item
            del item

    for n, _ in enumerate(side_by_side(lambda item: jnp.zeros(()), items(), at_once)):
        # With one at a time the items' own generator still has the last one.
        assert eventually(lambda: all(ref() is None for ref in kept[: n + at_once - 1]))  # noqa: B023
    assert len(kept) == 8


def eventually(condition) -> bool:
    """Whether it comes true: a thread may still be on its way out of a function."""
    stop = time.monotonic() + WAIT
    while not condition() and time.monotonic() < stop:
        time.sleep(0.01)
    return condition()


def test_an_error_of_a_step_is_raised_in_its_turn_and_ends_the_rest():
    called = []

    def step(n: int) -> jax.Array:
        called.append(n)
        if n == 3:
            raise ValueError("the fourth")
        return jnp.float32(n)

    results = side_by_side(step, range(100), 2)
    assert [float(next(results)) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="the fourth"):
        next(results)
    assert max(called) <= 6


def test_a_consumer_that_stops_leaves_the_rest_uncomputed():
    called = []

    def step(n: int) -> jax.Array:
        called.append(n)
        return jnp.float32(n)

    for _ in side_by_side(step, range(1000), 2):
        break
    assert float(next(side_by_side(step, [5], 2))) == 5  # the threads still serve others
    assert len(called) <= 5


@pytest.mark.usefixtures("interrupted_by_default")
def test_ctrl_c_leaves_the_rest_uncomputed():
    called, go_on, main = [], threading.Event(), threading.main_thread().ident

    class Slow:
        def block_until_ready(self) -> "Slow":
            assert go_on.wait(WAIT)
            return self

    def step(n: int) -> Slow:
        called.append(n)
        return Slow()

    def interrupt() -> None:
        assert eventually(lambda: len(called) == 2)
        signal.pthread_kill(main, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        list(side_by_side(step, range(9), 2))
    interrupter.join()
    go_on.set()
    assert float(next(side_by_side(jnp.float32, [5], 2))) == 5
    assert called == [0, 1]


def test_steps_are_called_in_turn():
    """So that what they share is computed once, and no shape is compiled by two threads."""
    inside, most = [], []

    def step(n: int) -> jax.Array:
        inside.append(n)
        time.sleep(0.02)  # the other thread's turn
        most.append(len(inside))
        inside.remove(n)
        return jnp.float32(n)

    list(side_by_side(step, range(6), 2))
    assert most == [1] * 6


def test_steps_run_on_the_callers_default_device():
    seen = []

    def step(n: int) -> jax.Array:
        seen.append(jax.config.jax_default_device)
        return jnp.float32(n)

    device = jax.devices("cpu")[-1]
    with jax.default_device(device):
        list(side_by_side(step, range(3), 2))
    list(side_by_side(step, range(3), 2))
    assert seen == [device] * 3 + [None] * 3


@pytest.mark.parametrize(
    ("count", "inside", "lanes", "at_once", "sizes"),
    [
        (8, 16, 1, 1, [8]),
        (8, 16, 1, 2, [4, 4]),
        (40, 16, 1, 2, [8, 8, 8, 8, 4, 4]),
        (5, 16, 1, 2, [2, 2, 1]),
        (13, 8, 1, 2, [4, 4, 2, 2, 1]),
        (13, 12, 1, 3, [4, 4, 4, 1]),
        (7, 4, 1, 1, [4, 2, 1]),
        (11, 2, 4, 1, [8, 3]),
        (3, 1, 1, 1, [1, 1, 1]),
        (0, 4, 1, 2, []),
    ],
)
def test_chunks_are_powers_of_two_that_keep_both_threads_busy(count, inside, lanes, at_once, sizes):
    items = list(range(count))
    found = list(chunks(items, inside, lanes, at_once))
    assert [len(chunk) for chunk in found] == sizes
    assert list(itertools.chain(*found)) == list(range(count))
    assert items == []


def test_no_more_chunks_side_by_side_than_states_fit_inside(monkeypatch):
    """The memory of a block is that of `chunk_tokens`, however many calls share it."""
    config = tiny.llama_config(num_layers=3)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, 9).astype(np.int32)
    problem = Problem(windows(ids, 8, 8, None))
    inside: list[tuple[int, int]] = []

    def watched(step, items, at_once):
        for item in items:
            states = len(item[1] if isinstance(item, tuple) else item)
            inside.append((states, at_once))
            yield step(item)

    sets = [remove_blocks(s) for n in (1, 2) for s in itertools.combinations(range(3), n)]
    model = tiny.random_model(config)
    found = {}
    for states in (1, 2, 4, 16):
        inside.clear()
        with monkeypatch.context() as patch:
            patch.setattr(OneDevice, "__init__", lambda self: setattr(self, "at_once", 2))
            patch.setattr(sweep_module, "side_by_side", watched)
            engine = Sweep(model, problem, SweepOptions(chunk_tokens=8 * states))
            found[states] = engine.run(sets)
        blocks = [pair for pair in inside if pair[0] * pair[1]]
        assert max(n * at_once for n, at_once in blocks) <= states
    for nll in found.values():
        np.testing.assert_allclose(nll, found[1], rtol=1e-5)
