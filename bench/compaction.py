"""Time of the fits of attention matching, as ratios to the plain way of doing the same.

    python bench/compaction.py [--quick] [--nosweep]

Random heads of SmolLM2's sizes on this machine (n 5,937 queries, T 1,942 keys, H 64; --quick: a
quarter of both). Prints for the 51 ratios 0, 0.01, … 0.5:
  β      one factorisation for all ratios / the same method with one per ratio (E, Gram matrix,
         factor), and how far three of the ratios are from a float64 least squares
  values a Gram matrix per ratio / a float32 least squares, on three of the ratios, and how many
         iterations conjugate gradients take that the β fit's factor preconditions

and for a whole sweep of SmolLM2 with `match` (article 1,942 tokens, 958 scored, 8 heads x 8 ratios,
all 90 heads fitted at the baseline) which share of the time the fits take.
Both sides are run one after the other, so a busy machine slows both; still, run it alone.
"""

import math
import sys
import time
import unittest.mock
from pathlib import Path

import jax
import numpy as np
import scipy.linalg
from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1]))

import convert
from bench.tasks import INFLUENCE_HEADS as SWEPT_HEADS
from bench.tasks import RATIOS as SWEPT_RATIOS
from jaxablate import influence
from jaxablate.compaction import fit_heads, key_order, num_kept
from jaxablate.matching import Columns, fit_beta, fit_values
from jaxablate.selection import attention_statistics
from jaxablate.sweep import Sweep
from jaxablate.text import load_tokenizer, plain_case, read_documents

_QUICK = flags.DEFINE_bool("quick", False, "a quarter of the queries and keys")
_SWEEP = flags.DEFINE_bool("sweep", True, "the share of the fits in a whole sweep, too")
RATIOS = [percent / 100 for percent in range(51)]
SPOTS = (10, 25, 50)  # indices of ratios that are also solved by least squares


def random_head(num_queries: int, num_keys: int, size: int = 64):
    """Keys that drift along the text and queries that resemble them: κ as of trained heads."""
    rng = np.random.default_rng(0)
    drift = np.cumsum(rng.normal(size=(num_keys, size)) * 0.1, axis=0)
    keys = rng.normal(size=(num_keys, size)) + 0.3 * drift
    near = keys[rng.integers(num_keys, size=num_queries)]
    queries = near + rng.normal(size=(num_queries, size))
    return tuple(a.astype(np.float32) for a in (queries, keys, rng.normal(size=keys.shape)))


def timed(function, repeats: int = 3) -> float:
    """Best of a few runs after one that compiles, in seconds."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def beta_of_its_own(matrix: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """The β fit of one size, by the book: least squares, clamp, two projected steps."""
    low, high = math.exp(-3), math.exp(3)
    weights = scipy.linalg.lstsq(matrix, mass, lapack_driver="gelsy", check_finite=False)[0]
    weights = np.clip(weights, low, high)
    vector = np.ones(matrix.shape[1])
    for _ in range(20):
        image = matrix.T @ (matrix @ vector)
        step = np.linalg.norm(vector) / np.linalg.norm(image)
        vector = image / np.linalg.norm(image)
    for _ in range(2):
        gradient = matrix.T @ (matrix @ weights - mass)
        weights = np.clip(weights - step * gradient, low, high)
    return np.log(weights)


def iterations_needed(table: np.ndarray, target: np.ndarray, factor: np.ndarray) -> int:
    """Conjugate gradients on XᵀX, preconditioned by a factor of EᵀE, until X C moves by 1e-5."""

    def precondition(residual):
        half = scipy.linalg.solve_triangular(factor, residual, lower=True)
        return scipy.linalg.solve_triangular(factor, half, lower=True, trans=1)

    residual = table.T @ target
    direction = improved = precondition(residual)
    product = np.sum(residual * improved, axis=0)
    for count in range(1, 501):
        image = table @ direction
        length = product / np.maximum(np.sum(image**2, axis=0), 1e-300)
        residual = residual - length * (table.T @ image)
        if np.linalg.norm(image * length) < 1e-5 * np.linalg.norm(target):
            return count
        improved = precondition(residual)
        previous, product = product, np.sum(residual * improved, axis=0)
        direction = improved + direction * (product / previous)
    return 501


def report_beta(queries, kept, statistics, columns, matrix, sizes) -> np.ndarray:
    """Print the β fit's time against a solve per ratio; returns our β of all sizes."""

    def alone(count: int):
        own = Columns(queries[None], statistics.row_max, kept[None, :count], 2**30)
        return fit_beta(own, statistics.mass, np.array([[count]]))

    def together():
        every = Columns(queries[None], statistics.row_max, kept[None], 2**30)
        return fit_beta(every, statistics.mass, sizes)

    ours = timed(together)
    theirs = timed(lambda: [alone(int(count)) for count in sizes[0]], repeats=1)
    print(f"β      {len(RATIOS)} ratios: one factor {ours:.3f} s, one per ratio {theirs:.3f} s")
    print(f"β      {theirs / ours:.1f} times faster")
    beta, _ = fit_beta(columns, statistics.mass, sizes)
    for i in SPOTS:
        count = sizes[0, i]
        start = time.perf_counter()
        own = beta_of_its_own(matrix[:, :count], statistics.mass[0])
        seconds = time.perf_counter() - start
        moved = matrix[:, :count] @ (np.exp(beta[0, i, :count]) - np.exp(own))
        apart = np.linalg.norm(moved) / np.linalg.norm(statistics.mass)
        print(f"β      t {count}: float64 lstsq {seconds:.3f} s, ‖E (w - w')‖/‖Z‖ {apart:.1e}")
    return beta


def report_values(columns, statistics, matrix, sizes, beta) -> None:
    """Print the value fit's time per ratio against least squares, and what CG would need."""
    outputs = statistics.outputs
    total = timed(
        lambda: [fit_values(columns, outputs, sizes[:, i], beta[:, i]) for i in range(len(RATIOS))],
        repeats=1,
    )
    print(f"values {len(RATIOS)} ratios: ours {total:.3f} s")
    for i in SPOTS:
        count = int(sizes[0, i])
        ours = timed(lambda i=i: fit_values(columns, outputs, sizes[:, i], beta[:, i]))
        table = matrix[:, :count] * np.exp(beta[0, i, :count].astype(np.float64))
        table /= table.sum(axis=1, keepdims=True)
        narrow = table.astype(np.float32)
        start = time.perf_counter()
        solved = scipy.linalg.lstsq(narrow, outputs[0], lapack_driver="gelsy", check_finite=False)
        theirs = time.perf_counter() - start
        values = fit_values(columns, outputs, sizes[:, i], beta[:, i])[0][0, :count]
        apart = np.linalg.norm(table @ (values - solved[0])) / np.linalg.norm(outputs)
        weighted = matrix[:, :count] * np.exp(beta[0, i, :count].astype(np.float64))
        factor = np.linalg.cholesky(weighted.T @ weighted)
        iterations = iterations_needed(table, outputs[0].astype(np.float64), factor)
        # An iteration multiplies X and Xᵀ by H columns; a Gram matrix costs 5/8 of t columns.
        level = 0.625 * count / (2 * outputs.shape[-1])
        print(
            f"values t {count}: ours {ours:.3f} s, float32 lstsq {theirs:.3f} s, "
            f"{theirs / ours:.1f} times faster, ‖X (C - C')‖/‖AV‖ {apart:.1e}; CG needs "
            f"{iterations} iterations, worth it below {level:.1f}"
        )


def report_sweep(shrink: int) -> None:
    """Print the seconds of the fits, of prefill and of the sweep; compilation is done before."""
    checkpoint = convert.resolve("smollm2-135m-instruct")
    model, config = checkpoint.restore(), checkpoint.config
    tokenizer = load_tokenizer(checkpoint.tokenizer_dir)
    document = read_documents("pydoc", limit=1)[0]
    case = plain_case(
        document, tokenizer, article_tokens=1942 // shrink, scored_tokens=958 // shrink
    )
    every = [(i, j) for i in range(config.num_layers) for j in range(config.num_kv_heads)]
    base = num_kept(0.05, case.article_tokens)
    grid = [num_kept(ratio, case.article_tokens) for ratio in SWEPT_RATIOS]
    counts = influence.influence_counts(every, SWEPT_HEADS, base, grid)
    settings = influence.CompactionSettings(method="match")
    fits = 0.0

    def timed_fit(*arguments, **options):
        nonlocal fits
        start = time.perf_counter()
        fitted = fit_heads(*arguments, **options)
        fits += time.perf_counter() - start
        return fitted

    points = [(head, count) for head in SWEPT_HEADS for count in grid]
    configurations = [influence.head_configuration(h, count, base) for h, count in points]
    with unittest.mock.patch.object(influence.compaction, "fit_heads", timed_fit):
        for _ in range(2):
            fits, start = 0.0, time.perf_counter()
            context = influence.compact_context(model, case, counts, settings)
            fitted = time.perf_counter()
            Sweep(model, influence.influence_problem(context, case, base)).run(configurations)
            end = time.perf_counter()
    whole = end - start
    print(
        f"sweep  {len(points)} configurations: fits {fits:.1f} s, prefill "
        f"{fitted - start - fits:.1f} s, sweep {end - fitted:.1f} s; the fits are "
        f"{100 * fits / whole:.0f} % (bar 30 %)"
    )


def main(argv) -> None:
    del argv
    shrink = 4 if _QUICK.value else 1
    queries, keys, values = random_head(5937 // shrink, 1942 // shrink)
    print(f"n {len(queries)}, T {len(keys)}, device {jax.devices()[0].device_kind}")
    seconds = timed(lambda: attention_statistics(queries[None], keys[None], values[None]))
    print(f"scores and outputs of one head: {seconds:.3f} s")
    order = key_order(queries, keys)
    statistics = attention_statistics(queries[None], keys[None], values[None])
    sizes = np.array([[num_kept(ratio, len(keys)) for ratio in RATIOS]])
    with jax.enable_x64(True):
        kept = keys[order[: sizes.max()]]
        columns = Columns(queries[None], statistics.row_max, kept[None], 2**30)
        matrix = np.concatenate([np.asarray(chunk[0]) for _, chunk in columns])
        matrix = matrix[: len(queries), : len(kept)]
        beta = report_beta(queries, kept, statistics, columns, matrix, sizes)
        report_values(columns, statistics, matrix, sizes, beta)
    if _SWEEP.value:
        report_sweep(shrink)


if __name__ == "__main__":
    app.run(main)
