"""How much of a difference is rounding: the noise floor of a sweep in a coarse dtype.

In bfloat16 every block rounds what it adds to the residual stream to 8 bits, and two evaluations
that round differently differ in their loss. The baseline is repeated with each value before every
block moved at random by as much as rounding may move it; how far its log-perplexity then moves is
how far that of a configuration may be from what exact arithmetic gives.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Float, Key

from jaxablate.sweep import Sweep

REPEATS = 8
_NAME = "rounding "
# A floor covers this many standard deviations.
_DEVIATIONS = 2.0


def configuration_names(dtype: str) -> list[str]:
    """What the repeats are called in rows; none in float32: far below any effect."""
    return [] if dtype == "float32" else [f"{_NAME}{i}" for i in range(REPEATS)]


def repeats(engine: Sweep, count: int = REPEATS, seed: int = 0) -> Float[np.ndarray, "n M"]:
    """Token NLL of the baseline, each time with other rounding errors.

    Args:
      engine: whose baseline; its activations' dtype sets the size of a rounding step.
    """
    place, key = engine.place, jax.random.key(seed)
    size = max(1, engine.chunk_tokens // engine.problem.batch.inputs.size) * place.lanes
    sizes = [min(size, count - start) for start in range(0, count, size)]
    chunks = [place.gather([engine.trunk[0]] * n, -n % place.lanes) for n in sizes]
    for layer in range(engine.model.config.num_layers):
        block = engine.model.block(layer)
        for i, x in enumerate(chunks):
            x = _round_otherwise(x, jax.random.fold_in(jax.random.fold_in(key, layer), i))
            chunks[i] = place.plain_step(block, x, engine.rope, engine.prefix(layer))
    nll = [engine.score(x)[:n] for x, n in zip(chunks, sizes)]
    return np.concatenate(nll)


@jax.jit
def _round_otherwise(x: Float[Array, "S B T D"], key: Key[Array, ""]) -> Float[Array, "S B T D"]:
    """Every value moved by up to half a step of its dtype, and rounded again."""
    step = jnp.float32(jnp.finfo(x.dtype).eps / 2)
    moves = jax.random.uniform(key, x.shape, jnp.float32, -1, 1)
    return (x.astype(jnp.float32) * (1 + step * moves)).astype(x.dtype)


def is_repeat(rows: pd.DataFrame) -> pd.Series:
    """Which rows are repeats of the baseline."""
    return rows.configuration.str.startswith(_NAME)


def without_repeats(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[~is_repeat(rows)]


def noise_floor(rows: pd.DataFrame, baseline: str) -> float:
    """What |Δ log-perplexity| must exceed to be more than rounding; NaN without repeats.

    Twice the root mean square, over the repeats, of their Δ log-perplexity from the baseline on all
    documents together, weighted as the table's differences are: documents alike.
    """
    wanted = rows[is_repeat(rows) | (rows.configuration == baseline)]
    if wanted.configuration.nunique() < 2:
        return float("nan")
    sums = wanted.groupby(["configuration", "document"])[["nll_sum", "scored_tokens"]].sum()
    log_ppl = (sums.nll_sum / sums.scored_tokens).groupby("configuration").mean()
    moved = log_ppl.drop(baseline) - log_ppl[baseline]
    return _DEVIATIONS * float(np.sqrt(np.mean(np.square(moved))))


def describe(floor: float, dtype: str) -> str:
    """The line that stands above a table."""
    return (
        f"noise floor ±{floor:.2g} in Δ log-perplexity: rounding in {dtype}, twice the RMS of "
        f"{REPEATS} repeats of the baseline"
    )
