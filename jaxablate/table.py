"""Sweeps over plain text as one table: what a notebook calls, and the experiments build on."""

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from jaxablate import scoring
from jaxablate.curves import block_lengths, block_sums
from jaxablate.documents import Document
from jaxablate.edits import Configuration
from jaxablate.errors import UserError
from jaxablate.problem import Problem
from jaxablate.sweep import Sweep, SweepOptions
from jaxablate.tokenizer import Tokenizer
from jaxablate.windows import Batch, windows

# Tokens of one problem: enough for large matrix products, few enough for many states in memory.
PROBLEM_TOKENS = 2048


def text_batches(
    document: Document,
    tokenizer: Tokenizer,
    *,
    seq_len: int = 256,
    stride: int | None = None,
    max_tokens: int | None = None,
    bos: str = "auto",
    problem_tokens: int = PROBLEM_TOKENS,
) -> list[Batch]:
    """A document cut into windows that score each token once, in batches of about equal work.

    Args:
      stride: tokens between windows; None is seq_len, windows that do not overlap.
      max_tokens: use only the document's first tokens.
      bos: "auto" (as the tokenizer does), "always" or "never".

    Raises:
      UserError: too little text, a window or stride out of range.
    """
    lead = tokenizer.leading_bos(bos)
    if max_tokens is not None:
        tokens = tokenizer.encode_start(document.text, max_tokens)[:max_tokens]
    else:
        tokens = tokenizer.encode(document.text)
    if len(tokens) < 2:
        raise UserError(f"{document.name}: the text has {len(tokens)} tokens; 2 are needed")
    whole = windows(tokens, seq_len, stride or seq_len, lead)
    rows = max(1, problem_tokens // whole.inputs.shape[1])
    return [take_rows(whole, i, i + rows) for i in range(0, len(whole.inputs), rows)]


def take_rows(batch: Batch, start: int, stop: int) -> Batch:
    """Some rows of a batch, without the columns that are padding in all of them."""
    rows = slice(start, stop)
    width = int(batch.lengths[rows].max())
    return Batch(
        inputs=batch.inputs[rows, :width],
        positions=batch.positions[rows, :width],
        targets=batch.targets[rows, :width],
        scored=batch.scored[rows, :width],
        lengths=batch.lengths[rows],
    )


def sweep_table(
    model,
    problems: Problem | Sequence[Problem],
    configurations: Sequence[Configuration],
    options: SweepOptions | None = None,
    *,
    seed: int = 0,
    on_problem: Callable[[int, int], None] | None = None,
) -> pd.DataFrame:
    """Evaluate configurations on problems and compare each with the baseline.

    Args:
      model: a Transformer (see `checkpoint.Checkpoint.restore`).
      problems: one, or several whose tokens are pooled.
      seed: of the bootstrap.
      on_problem: called with (problems done, of how many).

    Returns: one row per configuration, the baseline first: configuration (its key), nll_sum,
      scored_tokens, log_ppl, ppl, delta_log_ppl, delta_ppl, low, high (95 % paired bootstrap of
      delta_log_ppl over blocks of tokens).
    """
    problems = [problems] if isinstance(problems, Problem) else list(problems)
    values, weights = [], []
    for done, problem in enumerate(problems):
        engine = Sweep(model, problem, options or SweepOptions())
        nll = np.concatenate([engine.baseline_nll[None], engine.run(configurations)])
        parts = [block_sums(line) for line in nll]
        values.append(np.asarray(parts))
        count = len(parts[0])
        weights.append(block_lengths(nll.shape[1], count))
        if on_problem is not None:
            on_problem(done + 1, len(problems))
    units = scoring.Units(
        kind="blocks",
        values=np.concatenate(values, axis=1),
        weights=np.concatenate(weights).astype(np.float64),
    )
    keys = ["", *[configuration.key for configuration in configurations]]
    return comparison_table(units, keys, seed=seed)


def comparison_table(units: scoring.Units, keys: Sequence[str], *, seed: int = 0) -> pd.DataFrame:
    """The table of `sweep_table` from NLL sums per block; the first line is the baseline."""
    interval = scoring.bootstrap(scoring.paired_units(units), seed=seed)
    sums, tokens = units.values.sum(axis=1), units.weights.sum()
    log_ppl = sums / tokens
    return pd.DataFrame(
        {
            "configuration": list(keys),
            "nll_sum": sums,
            "scored_tokens": int(tokens),
            "log_ppl": log_ppl,
            "ppl": [scoring.exp_or_inf(value) for value in log_ppl],
            "delta_log_ppl": interval.estimate,
            "delta_ppl": [scoring.delta_perplexity(value, log_ppl[0]) for value in log_ppl],
            "low": interval.low,
            "high": interval.high,
        }
    )


def sums_table(rows: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """The table of `sweep_table` from NLL sums alone, without intervals: of estimated rows.

    Raises:
      UserError: a configuration that was not computed on every batch.
    """
    batches = len(rows[["document", "document_digest", "question"]].drop_duplicates())
    found = rows.groupby("configuration", sort=False).agg(
        nll_sum=("nll_sum", "sum"), scored_tokens=("scored_tokens", "sum"), have=("nll_sum", "size")
    )
    for key, have in found.have.items():
        if have != batches:
            raise UserError(f"configuration {key!r} was computed on {have} of {batches}")
    found = found.drop(columns="have").reset_index()
    first = found.configuration == baseline
    found = pd.concat([found[first], found[~first]], ignore_index=True)
    found["log_ppl"] = found.nll_sum / found.scored_tokens
    base = found.log_ppl[0]
    return found.assign(
        ppl=[scoring.exp_or_inf(value) for value in found.log_ppl],
        delta_log_ppl=found.log_ppl - base,
        delta_ppl=[scoring.delta_perplexity(value, base) for value in found.log_ppl],
        low=np.nan,
        high=np.nan,
    )


def units_of_rows(rows: pd.DataFrame, baseline: str) -> tuple[scoring.Units, list[str]]:
    """Blocks of tokens of every configuration of a plain-text experiment, the baseline first.

    Args:
      rows: as `results.read_rows` gives them; (document, question) names one batch of windows.

    Raises:
      UserError: a configuration that was not computed on every batch.
    """
    batches = rows[["document", "document_digest", "question"]].drop_duplicates()
    keys = [baseline, *[key for key in rows.configuration.unique() if key != baseline]]
    groups = dict(tuple(rows.groupby("configuration", sort=False)))
    values = []
    for key in keys:
        if key not in groups or len(groups[key]) != len(batches):
            have = len(groups.get(key, ()))
            raise UserError(f"configuration {key!r} was computed on {have} of {len(batches)}")
        values.append(np.concatenate(groups[key].block_nll.to_list()))
    first = groups[baseline]
    lengths = [
        block_lengths(total, len(blocks))
        for total, blocks in zip(first.scored_tokens, first.block_nll)
    ]
    weights = np.concatenate(lengths).astype(np.float64)
    return scoring.Units(kind="blocks", values=np.stack(values), weights=weights), keys
