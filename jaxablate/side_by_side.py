"""Independent compiled steps two at a time on a CPU.

The threads of one compiled step wait for each other at the end of each of its operations, and a
small operation has too little for all of them. A second step, of other states, fills those gaps.
"""

import collections
import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import jax

Item = TypeVar("Item")
Result = TypeVar("Result")

# Steps at a time: more gained nothing on two cores.
_STEPS = 2
# Tracing, compiling and handing over, one thread at a time: no shape is compiled twice.
_hand_over = threading.Lock()


def steps_at_once() -> int:
    """How many compiled steps JAX's default backend gains from at a time."""
    several_cores = (os.cpu_count() or 1) > 1
    return _STEPS if jax.default_backend() == "cpu" and several_cores else 1


def side_by_side(
    step: Callable[[Item], Result], items: Iterable[Item], at_once: int
) -> Iterator[Result]:
    """Results of a step for every item, in order; as many as `at_once` are computed at a time.

    `items` is read `at_once` + 1 ahead at most, and an item is let go as soon as it is through.
    Where the consumer stops early, what has begun is finished and the rest is not.

    Args:
      step: returns arrays of compiled functions without waiting for them; called in turn, though
        on different threads. Of the caller's JAX contexts it sees `jax.default_device` alone.
      at_once: 1 calls it in this thread and waits for nothing.
    """
    if at_once == 1:
        yield from map(step, items)
        return
    # A thread's computations run one after the other, so each step at a time needs its own.
    pool = _threads(at_once)
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    under_way: collections.deque[Future[Result]] = collections.deque()
    try:
        for item in items:
            under_way.append(pool.submit(_finish, step, item, device))
            del item
            if len(under_way) > at_once:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        for future in under_way:
            future.cancel()


def _finish(step: Callable[[Item], Result], item: Item, device: jax.Device | str | None) -> Result:
    with jax.default_device(device):
        with _hand_over:
            result = step(item)
        return jax.block_until_ready(result)


@functools.cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="step")
