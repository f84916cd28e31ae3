"""Estimates against exact sweeps of SmolLM2: how close, how fast, and curves to a tolerance.

    python bench/estimates.py                  # about 12 minutes on 2 quiet CPU cores
    python bench/estimates.py --only=heads     # the table of heads and the speeds, 6 minutes

Setting: Python's language reference, topic "types": an article of 1,024 tokens, 256 scored, every
head at 0.05 of the keys in the baseline, `select`, 4 protected tokens, keys ordered by the
article's last 512 queries. The table's points: 11 layers x 3 heads x 7 ratios.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging

sys.path.insert(0, str(Path(__file__).parents[1]))

import convert
from jaxablate import compaction, edits, first_order, influence, scoring, steps
from jaxablate.compaction import num_kept
from jaxablate.estimates import Estimates, estimate, refine_curves
from jaxablate.prefill import prefill
from jaxablate.prompts import Case
from jaxablate.sweep import Sweep
from jaxablate.text import load_tokenizer, plain_case, read_documents

_ONLY = flags.DEFINE_list("only", ["heads", "removals", "tolerance"], "Which parts to run.")
_TOPIC = flags.DEFINE_string("topic", "types", "Topic of Python's language reference.")
_DRAWS = flags.DEFINE_integer("draws", 16, "Backward passes of second order.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Seeds of second order in the tables.")
_TOLERANCES = flags.DEFINE_list("tolerances", ["0.004", "0.002", "0.001"], "For the 51-point grid.")
_JSON = flags.DEFINE_string("json", "out/estimates.json", "Where the numbers go.")

TABLE_LAYERS = (0, 3, 6, 9, 12, 15, 18, 21, 24, 27, 29)
GRID_LAYERS = (0, 5, 11, 17, 23, 29)
RATIOS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
GRID = tuple(round(0.01 * i, 2) for i in range(51))
BASELINE, QUERIES, CLOSE = 0.05, 512, 0.002

Point = tuple[int, int, float]  # layer, KV head, ratio


class Setting:
    """The model, the context with keys ordered by its last queries, and an engine on it."""

    def __init__(self, topic: str) -> None:
        checkpoint = convert.resolve("smollm2-135m-instruct")
        self.model, self.config = checkpoint.restore(), checkpoint.config
        document = next(d for d in read_documents("pydoc") if d.name == topic)
        tokenizer = load_tokenizer(checkpoint.tokenizer_dir or checkpoint.path)
        self.case = plain_case(
            document, tokenizer, article_tokens=1024, scored_tokens=256, protect=4, bos="never"
        )
        self.base = num_kept(BASELINE, self.case.article_tokens)
        self.compaction_seconds, context = _seconds(lambda: _compact(self.model, self.case))
        problem = influence.influence_problem(context, self.case, self.base)
        self.engine = Sweep(self.model, problem)

    def count(self, ratio: float) -> int:
        return num_kept(ratio, self.case.article_tokens)

    def configurations(self, points: Sequence[Point]) -> list[edits.Configuration]:
        return [
            influence.head_configuration((layer, head), self.count(ratio), self.base)
            for layer, head, ratio in points
        ]

    def exact(self, configurations: Sequence[edits.Configuration]) -> np.ndarray:
        """Δ of the mean NLL per token, exactly."""
        nll = np.float64(self.engine.run(configurations)) - self.engine.baseline_nll
        return nll.mean(axis=1)

    def estimated(self, configurations, estimator: str, seed: int = 0) -> np.ndarray:
        found = estimate(self.engine, configurations, estimator, _DRAWS.value, seed)
        return found.changes[:, 0] / len(self.engine.baseline_nll)


def _compact(model, case: Case) -> influence.CompactedContext:
    """As `influence.compact_context`, with the article's last queries as reference."""
    start, stop = case.article_range
    counts = sorted({num_kept(ratio, case.article_tokens) for ratio in GRID})
    keys, values = [], []
    heads: dict[tuple[int, int, int], compaction.CompactedHead] = {}
    for layer, cache in enumerate(prefill(model, case.context_ids)):
        kv_heads, size = cache.k.shape[1:]
        queries = cache.q[stop - QUERIES : stop].reshape(QUERIES, kv_heads, -1, size)
        fit = compaction.fit_heads(
            np.moveaxis(queries, 0, 2).reshape(kv_heads, -1, size),
            np.moveaxis(cache.k[start:stop], 1, 0),
            np.moveaxis(cache.v[start:stop], 1, 0),
            counts,
            method="select",
        )
        heads |= {(layer, head, count): kept for (head, count), kept in fit.heads.items()}
        keys.append(cache.k)
        values.append(cache.v)
    return influence.CompactedContext(keys, values, case.article_range, heads)


class ThroughBlock(first_order.Gradients):
    """δ of kept keys after the rest of the edited block, computed exactly, for comparison."""

    def _layer(self, layer, rows, g, edits):
        back, scores = super()._layer(layer, rows, g, edits)
        engine, chosen = self._engine, list(edits)
        block, x = engine.model.block(layer), engine.trunk[layer]
        attended = steps.attention_step(block, x, engine.rope, engine.prefix(layer))
        for start in range(0, len(chosen), 8):
            some = chosen[start : start + 8]
            swapped = engine.problem.swapped(layer, [edits[key] for key in some])
            heads = jnp.asarray([[edits[key].kept_keys[0][0]] for key in some], jnp.int32)
            out = steps.edited_step(
                block, x, attended, steps.Edits(heads, swapped), children=len(some), mlp=True
            )
            found = jnp.einsum("cbtd,fsbtd->cfb", out - engine.trunk[layer + 1], g)
            scores |= zip(some, np.asarray(found)[..., None])
        return back, scores


def agreement(name: str, found: np.ndarray, exact: np.ndarray, rising: np.ndarray) -> dict:
    """One line of a table; `rising` marks what the second correlation is over."""
    error = np.abs(found - exact)
    line = {
        "estimate": name,
        "spearman": scoring.spearman(found, exact, permutations=100).rho,
        "spearman_some": scoring.spearman(found[rising], exact[rising], permutations=100).rho,
        "within": float(np.mean(error <= CLOSE)),
        "rms": float(np.sqrt(np.mean(np.square(error)))),
        "worst": float(error.max()),
    }
    print(
        f"  {name:44s} Spearman {line['spearman']:.3f} ({line['spearman_some']:.3f})  "
        f"within {CLOSE}: {line['within']:6.1%}  rms {line['rms']:.5f}  worst {line['worst']:.4f}",
        flush=True,
    )
    return line


class Seconds(NamedTuple):
    """Of the clock, and of all processors together, which others on the machine disturb less."""

    clock: float
    processors: float

    def __str__(self) -> str:
        return f"{self.clock:.2f} s ({self.processors:.2f} of processors)"


def _seconds(function: Callable[[], Any]) -> tuple[Seconds, Any]:
    clock, processors = time.perf_counter(), time.process_time()
    result = function()
    return Seconds(time.perf_counter() - clock, time.process_time() - processors), result


def heads(setting: Setting) -> dict:
    """All heads at eight ratios: speeds; and the table of the points of 11 layers."""
    shape = range(setting.config.num_layers), range(setting.config.num_kv_heads)
    points = [(i, j, ratio) for i in shape[0] for j in shape[1] for ratio in RATIOS]
    chosen = setting.configurations(points)
    runs = {
        "first_order": lambda: setting.estimated(chosen, "first_order"),
        "second_order": lambda: setting.estimated(chosen, "second_order"),
    }
    setting.engine.run(chosen[:: len(RATIOS) // 2])  # compiles
    first_call = {name: _seconds(run)[0] for name, run in runs.items()}
    times: dict[str, list[Seconds]] = {name: [] for name in runs}
    for repeat in range(3):
        for name, run in runs.items():
            times[name].append(_seconds(run)[0])
        if repeat == 0:
            exact_time, exact = _seconds(lambda: setting.exact(chosen))
    medians = {
        name: Seconds(*(statistics.median(part) for part in zip(*found)))
        for name, found in times.items()
    }
    print(f"{len(points)} points: exact {exact_time}", flush=True)
    for name, seconds in medians.items():
        faster = [a / b for a, b in zip(exact_time, seconds)]
        print(
            f"  {name}: {seconds}, first call {first_call[name]}: "
            f"{faster[0]:.0f} times faster than exact ({faster[1]:.0f} by processors)"
        )
    print(f"  beside all of them: compaction to 51 sizes {setting.compaction_seconds}")
    ratio = np.asarray([point[2] for point in points])
    inside = np.isin([point[0] for point in points], TABLE_LAYERS) & (ratio != BASELINE)
    table = []
    for label, where in (("11 layers", inside), ("all layers", ratio != BASELINE)):
        print(f"{label}: {where.sum()} points; in brackets: those of ratio > 0")
        index = np.flatnonzero(where)
        some = [chosen[i] for i in index]

        def line(name, found, label=label, index=index):
            rising = ratio[index] > 0
            table.append(agreement(name, found, exact[index], rising) | {"points": label})

        line("first order", setting.estimated(some, "first_order"))
        tokens = len(setting.engine.baseline_nll)
        through = ThroughBlock(setting.engine, _DRAWS.value)
        scores = through.run(some)
        line("first order, δ after the exact block", scores.loss[:, 0] / tokens)
        line(
            f"second order, {_DRAWS.value} draws, δ after the exact block",
            (scores.loss + scores.pooled_fisher)[:, 0] / tokens,
        )
        plain = first_order.Gradients(setting.engine, _DRAWS.value).run(some)
        line(
            f"second order, {_DRAWS.value} draws, unbiased",
            (plain.loss + plain.fisher)[:, 0] / tokens,
        )
        for seed in range(_SEEDS.value):
            name = f"second order, {_DRAWS.value} draws, seed {seed}"
            line(name, setting.estimated(some, "second_order", seed))
    speeds = {"exact": exact_time, **medians, "compaction": setting.compaction_seconds}
    return {"seconds": speeds, "first_call": first_call, "table": table}


def removals(setting: Setting) -> dict:
    """Whole layers, their attention, their MLP, and every query head."""
    config = setting.config
    layers = range(config.num_layers)
    kinds = {
        "layer removed": [edits.remove_blocks([i]) for i in layers],
        "attention removed": [edits.remove_attention([i]) for i in layers],
        "MLP removed": [edits.remove_mlps([i]) for i in layers],
        "query head silenced": [
            edits.silence_heads([(i, j)], config.num_heads)
            for i in layers
            for j in range(config.num_heads)
        ],
    }
    table = []
    for kind, chosen in kinds.items():
        exact = setting.exact(chosen)
        print(f"{kind}: {len(chosen)}, median effect {np.median(np.abs(exact)):.4f}; in brackets: "
              "the smaller half")  # fmt: skip
        small = np.abs(exact) <= np.median(np.abs(exact))
        for estimator in ("first_order", "second_order"):
            found = setting.estimated(chosen, estimator)
            table.append(agreement(estimator, found, exact, small) | {"kind": kind})
    return {"table": table}


def tolerance(setting: Setting) -> dict:
    """Refined curves on a 51-point grid of six layers, checked against all points."""
    points = [(i, j, ratio) for i in GRID_LAYERS for j in range(setting.config.num_kv_heads)
              for ratio in GRID]  # fmt: skip
    chosen = setting.configurations(points)
    exact = setting.exact(chosen)
    estimates = estimate(setting.engine, chosen, "second_order", _DRAWS.value)
    counts = np.asarray([setting.count(ratio) for *_, ratio in points])
    rows = []
    for text in _TOLERANCES.value:
        wanted = float(text)
        # A layer at a time, as the experiment does.
        values, kinds, bounds = [], [], []
        for layer in GRID_LAYERS:
            index = np.flatnonzero([point[0] == layer for point in points])
            refined = refine_curves(
                setting.engine,
                [chosen[i] for i in index],
                np.asarray([points[i][1] for i in index]),
                counts[index],
                Estimates(estimates.changes[index], estimates.errors[index]),
                wanted,
            )
            values.append(refined.changes[:, 0] / len(setting.engine.baseline_nll))
            kinds += refined.estimators
            bounds.append(refined.bounds)
        error = np.abs(np.concatenate(values) - exact)
        free = sum(point[2] == BASELINE for point in points)
        evaluated = kinds.count("exact") - free
        row = {
            "tolerance": wanted,
            "exact": evaluated,
            "points": len(points),
            "within": float(np.mean(error <= wanted)),
            "worst": float(error.max()),
            "bounds_hold": float(np.mean(error <= np.concatenate(bounds) + 1e-6)),
        }
        rows.append(row)
        print(
            f"tolerance {wanted}: {evaluated} exact evaluations for {len(points)} points "
            f"({evaluated / len(points):.1%}); within {row['within']:.2%}, worst "
            f"{row['worst']:.4f}; bounds hold for {row['bounds_hold']:.2%}",
            flush=True,
        )
    return {"rows": rows}


PARTS = {"heads": heads, "removals": removals, "tolerance": tolerance}


def main(argv: list[str]) -> None:
    del argv
    logging.set_verbosity(logging.ERROR)
    setting = Setting(_TOPIC.value)
    print(f"baseline: {setting.engine.baseline_nll.mean():.4f} nats per token", flush=True)
    found = {name: PARTS[name](setting) for name in _ONLY.value}
    path = Path(_JSON.value)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    app.run(main)
