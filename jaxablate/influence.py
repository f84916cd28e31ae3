"""Head influence: the effect of how many of an article's keys one KV head keeps.

As defined with arXiv 2602.16284 and its public code: in the baseline every KV head of every layer
is compacted at the same ratio; a configuration re-fits one head to another number of keys. What
stands outside the article (template, attention sink) is never compacted, and positions of later
tokens do not change.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxablate import compaction
from jaxablate.attention import LayerPrefix
from jaxablate.compaction import CompactedHead
from jaxablate.edits import Configuration, baseline, keep_keys
from jaxablate.errors import UserError
from jaxablate.prefill import LayerCache, prefill
from jaxablate.problem import HeadPrefix, Problem, pad_prefixes, padded_length
from jaxablate.prompts import Case

REFERENCE_QUERIES = ("repeat", "context", "random")

Counts = Mapping[tuple[int, int], Sequence[int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompactionSettings:
    """How a head's keys are chosen and fitted; all of it changes numbers and is recorded.

    Attributes:
      method: `select` (keys as they are), or with fitted β and values, up to `match`.
      selection: how keys are ordered, see `compaction.SELECTIONS`.
      reference_queries: over which queries: those of the article's own tokens (`context`), of a
        suffix that repeats it (`repeat`), or normally distributed ones (`random`).
      max_queries: thin the reference queries of each query head to this many positions.
      seed: of random queries, random selection and thinning.
    """

    method: str = "select"
    selection: str = "rms"
    reference_queries: str = "context"
    max_queries: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("method", self.method, compaction.METHODS),
            ("selection", self.selection, compaction.SELECTIONS),
            ("reference_queries", self.reference_queries, REFERENCE_QUERIES),
        ):
            if value not in allowed:
                raise UserError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
        if self.max_queries is not None and self.max_queries < 1:
            raise UserError(f"max_queries is {self.max_queries}; it must be at least 1")


@dataclasses.dataclass(frozen=True, eq=False)
class CompactedContext:
    """A context whose article keys can be kept in any of the fitted numbers, per KV head.

    Attributes:
      keys, values: per layer [P, K, H], of the whole context, after the rotation.
      article: [start, stop) of the compactable positions.
      heads: (layer, kv_head, count) -> what is kept, indices relative to the article's start.
    """

    keys: Sequence[np.ndarray]
    values: Sequence[np.ndarray]
    article: tuple[int, int]
    heads: Mapping[tuple[int, int, int], CompactedHead]

    def head_prefix(self, layer: int, kv_head: int, count: int) -> HeadPrefix:
        """Keys [R, H], values [R, H], bias [R]: what is never compacted, then the kept ones.

        Raises:
          UserError: this head was not fitted to that number of keys.
        """
        head = self.heads.get((layer, kv_head, count))
        if head is None:
            raise UserError(f"L{layer}H{kv_head} was not fitted to {count} keys")
        return self._join(layer, kv_head, head.keys, head.values, head.beta)

    def prefix(self, count: Callable[[int, int], int]) -> list[LayerPrefix]:
        """Every layer with `count(layer, kv_head)` keys per head, padded to its longest head."""
        layers = []
        for layer, keys in enumerate(self.keys):
            heads = range(keys.shape[1])
            rows = [self.head_prefix(layer, head, count(layer, head)) for head in heads]
            layers.append(stack_heads(rows))
        return layers

    def full_prefix(self) -> list[LayerPrefix]:
        """Every layer with all keys: the uncompacted cache."""
        layers = []
        for layer, (keys, values) in enumerate(zip(self.keys, self.values)):
            start, stop = self.article
            rows = [
                self._join(layer, head, keys[start:stop, head], values[start:stop, head], None)
                for head in range(keys.shape[1])
            ]
            layers.append(stack_heads(rows))
        return layers

    def _join(self, layer: int, kv_head: int, keys, values, beta) -> HeadPrefix:
        start, stop = self.article
        outside = np.r_[0:start, stop : len(self.keys[layer])]
        dtype = self.keys[layer].dtype
        bias = np.zeros(len(outside) + len(keys), np.float32)
        if beta is not None:
            bias[len(outside) :] = beta
        return (
            np.concatenate([self.keys[layer][outside, kv_head], np.asarray(keys, dtype)]),
            np.concatenate([self.values[layer][outside, kv_head], np.asarray(values, dtype)]),
            bias,
        )


def stack_heads(rows: Sequence[HeadPrefix]) -> LayerPrefix:
    """One layer's heads [K, R, H], padded to the longest of the layer in few distinct sizes."""
    length = padded_length(max(len(bias) for _, _, bias in rows))
    return LayerPrefix(*(array[0] for array in pad_prefixes([rows], length)))


def compact_context(
    model,
    case: Case,
    counts: Counts,
    settings: CompactionSettings = CompactionSettings(),
    *,
    dtype=None,
    on_layer: Callable[[int], None] | None = None,
) -> CompactedContext:
    """Prefill a context with its full cache and fit its KV heads to the numbers of keys asked for.

    Args:
      model: as `sweep.Model`.
      counts: (layer, kv_head) -> numbers of article keys, each 1 to T; heads left out are not
        fitted.
      on_layer: called with each layer's index when it is done.
    """
    suffix = case.reference_ids if settings.reference_queries == "repeat" else case.context_ids[:0]
    tokens = np.concatenate([case.context_ids, suffix])
    length = len(case.context_ids)
    keys, values, heads = [], [], {}
    for layer, cache in enumerate(prefill(model, tokens, dtype)):
        keys.append(cache.k[:length].copy())
        values.append(cache.v[:length].copy())
        wanted = {head: n for (of, head), n in counts.items() if of == layer and n}
        for (head, count), fit in _fit_layer(cache, case, wanted, layer, settings).items():
            heads[layer, head, count] = fit
        if on_layer is not None:
            on_layer(layer)
    return CompactedContext(keys, values, case.article_range, heads)


def _fit_layer(
    cache: LayerCache,
    case: Case,
    counts: Mapping[int, Sequence[int]],
    layer: int,
    settings: CompactionSettings,
) -> dict[tuple[int, int], CompactedHead]:
    """Fit some KV heads of a layer; returns (kv_head, count) -> CompactedHead."""
    if not counts:
        return {}
    heads = sorted(counts)
    start, stop = case.article_range
    queries = _reference_queries(cache, case, heads, layer, settings)
    fit = compaction.fit_heads(
        queries,
        np.moveaxis(cache.k[start:stop, heads], 1, 0),
        np.moveaxis(cache.v[start:stop, heads], 1, 0),
        [sorted(set(counts[head])) for head in heads],
        method=settings.method,
        selection=settings.selection,
        seed=(settings.seed, layer),
        head_ids=heads,
    )
    return {(heads[i], count): head for (i, count), head in fit.heads.items()}


def _reference_queries(
    cache: LayerCache,
    case: Case,
    heads: Sequence[int],
    layer: int,
    settings: CompactionSettings,
) -> np.ndarray:
    """[len(heads), n, H], the query heads of each group one after the other along n."""
    kv_heads, size = cache.k.shape[1:]
    start, stop = case.article_range
    if settings.reference_queries == "repeat":
        start, stop = len(case.context_ids), len(cache.q)
    group = cache.q.shape[1] // kv_heads
    # [n, K, G, H] -> [K, G, n, H]
    queries = cache.q[start:stop].reshape(stop - start, kv_heads, group, size)
    queries = np.moveaxis(queries, 0, 2)
    if settings.reference_queries == "random":
        # Normal directions at the length of the head's own queries, drawn for every head of the
        # layer: a head's must not depend on which others are fitted.
        rng = np.random.default_rng((settings.seed, layer))
        spread = np.sqrt(np.mean(np.square(queries.astype(np.float32)), axis=(2, 3), keepdims=True))
        queries = rng.standard_normal(queries.shape).astype(np.float32) * spread
    queries = queries[list(heads)]
    thinned = compaction.thin_queries(queries, settings.max_queries, (settings.seed, layer))
    return np.asarray(thinned).reshape(len(heads), -1, size)


def influence_counts(
    model_heads: Sequence[tuple[int, int]],
    swept: Sequence[tuple[int, int]],
    baseline_count: int,
    grid: Sequence[int],
) -> dict[tuple[int, int], list[int]]:
    """Numbers of keys to fit each head to: the baseline's for all, the grid for the swept ones."""
    counts = {head: [baseline_count] for head in model_heads}
    for head in swept:
        counts[head] = sorted({baseline_count, *grid})
    return counts


def head_configuration(head: tuple[int, int], count: int, baseline_count: int) -> Configuration:
    """One head at `count` keys; at the baseline's own count this is the baseline itself."""
    return baseline() if count == baseline_count else keep_keys({head: count})


def influence_problem(
    context: CompactedContext, case: Case, baseline_count: int, length: int | None = None
) -> Problem:
    """The sweep's problem: all heads at the baseline's count, one head at a time re-fitted."""
    return Problem(
        batch=case.batch(length),
        prefix=context.prefix(lambda layer, head: baseline_count),
        head_prefix=context.head_prefix,
    )
