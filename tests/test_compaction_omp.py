"""Greedy residual selection in Gram form against matching pursuit by definition."""

import math

import numpy as np
import pytest

from jaxablate.compaction import key_order
from jaxablate.errors import UserError
from jaxablate.omp import greedy_order


def head(num_queries=120, num_keys=40, size=8, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((num_queries, size), (num_keys, size), (num_keys, size))
    return tuple(rng.normal(size=shape).astype(np.float32) * 1.5 for shape in shapes)


def exponentials(queries, keys):
    scores = queries.astype(np.float64) @ keys.astype(np.float64).T / math.sqrt(keys.shape[1])
    return np.exp(scores - scores.max(axis=1, keepdims=True))


def pursuit_by_definition(matrix, limit, keys_per_step, refit_every):
    """On E itself, every refit a least squares of its own."""
    mass = matrix.sum(axis=1)
    chosen, weights, steps = [], [], 0
    while len(chosen) < limit:
        residual = mass - matrix[:, chosen] @ np.array(weights)
        correlation = matrix.T @ residual
        correlation[chosen] = -np.inf
        new = np.argsort(-correlation)[: min(keys_per_step, limit - len(chosen))]
        chosen += new.tolist()
        weights = [*weights, *[1.0] * len(new)]
        steps += 1
        if steps % refit_every == 0:
            solved = np.linalg.lstsq(matrix[:, chosen], mass, rcond=None)[0]
            weights = np.clip(solved, math.exp(-3), math.exp(3)).tolist()
    return chosen


@pytest.mark.parametrize(("keys_per_step", "refit_every"), [(1, 1), (4, 1), (3, 2)])
def test_gram_form_chooses_what_the_definition_chooses(keys_per_step, refit_every):
    queries, keys, _ = head(seed=2)
    # Keys that resemble each other: least squares leaves the bounds of w.
    matrix = exponentials(queries, np.repeat(keys[:10], 4, axis=0) + 0.1 * keys)
    fallback = np.arange(40, dtype=np.int32)
    order = greedy_order(matrix.T @ matrix, fallback, 25, keys_per_step, refit_every)
    assert order[:25].tolist() == pursuit_by_definition(matrix, 25, keys_per_step, refit_every)
    assert order[25:].tolist() == sorted(set(range(40)) - set(order[:25].tolist()))


def test_key_order_chooses_from_queries_and_keys():
    queries, keys, _ = head(seed=1)
    order = key_order(queries, keys, "omp", limit=16)
    expected = pursuit_by_definition(exponentials(queries, keys), 16, 4, 1)
    assert order[:16].tolist() == expected
    rest = [index for index in key_order(queries, keys, "rms") if index not in expected]
    assert order[16:].tolist() == rest
    assert sorted(key_order(queries, keys, "omp").tolist()) == list(range(40))


def test_where_keys_resemble_each_other_omp_leaves_less_of_the_mass_than_the_scores_do():
    queries, keys, _ = head()
    keys = np.repeat(keys[:10], 4, axis=0) + 0.1 * keys
    matrix = exponentials(queries, keys)
    mass = matrix.sum(axis=1)
    scored = key_order(queries, keys, "rms")
    greedy = greedy_order(matrix.T @ matrix, scored, 10, keys_per_step=1)

    def missing(order):
        chosen = matrix[:, order[:10]]
        weights = np.linalg.lstsq(chosen, mass, rcond=None)[0]
        return np.linalg.norm(chosen @ weights - mass)

    assert missing(greedy) < 0.5 * missing(scored)


def test_dependent_keys_end_the_choice_and_the_rest_follows_the_scores():
    queries, keys, _ = head()
    twice = np.concatenate([keys[:20], keys[:20]])
    assert sorted(key_order(queries, twice, "omp").tolist()) == list(range(40))


def test_steps_below_one_are_refused():
    for steps in ((0, 1), (1, 0)):
        with pytest.raises(UserError, match="at least 1"):
            greedy_order(np.eye(3), np.arange(3, dtype=np.int32), 3, *steps)
