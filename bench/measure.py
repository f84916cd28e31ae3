"""Timing side by side: alternating repeats, medians and spreads, floors of the same run."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds: the median of the repeats, the fastest and the slowest."""

    median: float
    low: float
    high: float
    first: float  # the warm-up, compilation included

    def __str__(self) -> str:
        return f"{self.median:.3g} s ({self.low:.3g} to {self.high:.3g})"


def interleaved(
    functions: Mapping[str, Callable[[], Any]],
    repeats: int,
    check: Callable[[dict[str, Any]], None] | None = None,
    before: Callable[[], None] | None = None,
) -> dict[str, Timing]:
    """Time several functions in turn, so that a busy moment of the machine hits all alike.

    Each is called once to warm up, then `repeats` times; every function must wait for its result.

    Args:
      check: called with the results of the warm-up: speed of a wrong answer is worth nothing.
      before: called before every call, outside its time.
    """
    results: dict[str, Any] = {}

    def keep(name: str) -> None:
        results[name] = functions[name]()

    def timed(function: Callable[[], Any]) -> float:
        if before is not None:
            before()
        return _seconds(function)

    first = {name: timed(functools.partial(keep, name)) for name in functions}
    if check is not None:
        check(results)
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            times[name].append(timed(function))
    return {
        name: Timing(statistics.median(found), min(found), max(found), first[name])
        for name, found in times.items()
    }


def _seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the benchmark's table.

    Attributes:
      what: the task, with its size.
      ours, rival: seconds; rival_name: who the rival is.
      bar: the ratio rival / ours that is to be reached, or None.
      floor: seconds that cannot be undercut, measured beside it.
      floor_name: what takes them; the operations at the rate of a matrix product, if not said.
      note: whatever else was measured.
    """

    what: str
    ours: Timing
    rival: Timing | None = None
    rival_name: str = ""
    bar: float | None = None
    floor: float | None = None
    note: str = ""
    floor_name: str = "matrix products"

    @property
    def ratio(self) -> float | None:
        return None if self.rival is None else self.rival.median / self.ours.median

    @property
    def share_of_floor(self) -> float | None:
        return None if self.floor is None else self.floor / self.ours.median


def matmul_rate(tokens: int = 2048, inner: int = 576, outer: int = 1536) -> Callable[[], float]:
    """A function that measures float32 operations per second of one matrix product, about 0.1 s."""
    import jax
    import jax.numpy as jnp

    a, b = jnp.ones((tokens, inner)), jnp.ones((inner, outer))
    product = jax.jit(lambda a, b: a @ b)
    product(a, b).block_until_ready()

    def measure() -> float:
        done, start = 0, time.perf_counter()
        while time.perf_counter() - start < 0.1:
            product(a, b).block_until_ready()
            done += 1
        return 2.0 * tokens * inner * outer * done / (time.perf_counter() - start)

    return measure


def table(rows: list[Row]) -> str:
    """The rows as text, aligned."""
    head = ["what", "ours", "rival", "ratio", "bar", "floor", "share", "note"]
    lines = [head]
    for row in rows:
        lines.append(
            [
                row.what,
                str(row.ours),
                f"{row.rival} {row.rival_name}" if row.rival else row.rival_name,
                "" if row.ratio is None else f"{row.ratio:.2f}x",
                "" if row.bar is None else f"{row.bar:g}x",
                "" if row.floor is None else f"{row.floor:.3g} s {row.floor_name}",
                "" if row.share_of_floor is None else f"{row.share_of_floor:.2f}",
                row.note,
            ]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines
    )
