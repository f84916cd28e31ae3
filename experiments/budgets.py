"""Head budgets from influence curves, and what they are really worth.

    python experiments/influence.py --text=FILE --documents=3 --heads=all --out=out/map
    python experiments/budgets.py --curves=out/map --text=FILE --articles=3,4,5
    python experiments/budgets.py --curves=out/map --budget_files=published.json --ratios=0.05

Makes budgets from the curves of an influence run (swap and greedy on the separable surrogate),
takes uniform and PyramidKV as rivals and any published JSON beside them, and then compacts the
model under each budget and scores it: predicted beside true. Give documents that the curves were
not fitted on. Writes budget JSON files, rows, budgets.csv and figures to --out. Some seconds per
document, budget and ratio of the embedded model on 2 CPU cores.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from absl import flags

from experiments import article_cases, command_line
from experiments.command_line import say
from jaxablate import budgets, results
from jaxablate.errors import UserError

FULL_CACHE, REFERENCE = "full cache", "uniform"
COLUMNS = {"budget": str, "ratio": float, "kept_ratio": float, "padded_ratio": float,
           "article_tokens": int}  # fmt: skip
FLAGS = flags.FLAGS


def define_flags() -> None:
    command_line.define_model_flags(out="out/budgets")
    article_cases.define_flags()
    flags.DEFINE_string(
        "curves", None, "Directory of an influence run of all heads.", required=True
    )
    flags.DEFINE_string("ratios", "0.01,0.02,0.05,0.1", "Overall shares of keys kept.")
    flags.DEFINE_list("budget_files", [], 'More budgets: JSON files {"L0H0": share, …}, sum 1.')
    flags.DEFINE_float("pyramid_beta", 20.0, "β of PyramidKV: how much less the last layer gets.")
    flags.DEFINE_float("step", budgets.STEP, "Share of the whole moved at a time.")


def main() -> None:
    ratios = command_line.parse_ratios(FLAGS.ratios, "ratios")
    if not ratios:
        raise UserError("--ratios is empty; give overall shares such as 0.01,0.05")
    rows = results.read_rows(FLAGS.curves)
    device = command_line.find_device()
    loaded = command_line.LoadedModel(FLAGS.model)
    curves = fitted_curves(rows, loaded)
    shares = make_shares(curves, loaded.config, ratios)
    cases = article_cases.read(loaded)
    _say_overlap(rows, cases)
    settings = article_cases.settings() | {"baseline": 0.0}
    with command_line.open_run(
        "budgets", loaded, device, settings, COLUMNS, "method", unit="budgets and ratios"
    ) as run:
        run.plan(_plan(cases, shares, ratios))
        if run.complete():
            say(f"the result is there already: {run.out / 'rows.parquet'}; drawing it again")
        else:
            say(
                f"plan        {len(shares)} budgets x {len(ratios)} ratios x {len(cases)} "
                f"documents, and the full cache"
            )
            _compute(run, loaded, cases, shares, ratios, device.kind)
        for name, share in shares.items():
            budgets.write_shares(run.out / f"{name}.json", share)
        if run.finish() is not None:
            report(run.out, run.read(), curves, shares)


def fitted_curves(rows: pd.DataFrame, loaded) -> budgets.Curves:
    """Curves [L, K, P] of an influence run's rows, of this very model.

    Raises:
      UserError: rows of another model, or heads without a curve.
    """
    from jaxablate.curves import influence_curves

    needed = {"kv_head", "keys_kept", "model_digest"}
    if not needed <= set(rows.columns):
        raise UserError(f"{FLAGS.curves} holds no influence rows (no {sorted(needed)})")
    if set(rows.model_digest) != {loaded.digest}:
        raise UserError(f"{FLAGS.curves} was computed with other weights than {loaded.name}")
    table = influence_curves(rows, seed=FLAGS.seed)
    wide = table.pivot(index=["layer", "kv_head"], columns="ratio", values="delta_log_ppl")
    wide = wide.dropna(axis=1)  # ratios that every head has
    shape = (loaded.config.num_layers, loaded.config.num_kv_heads)
    if len(wide) != shape[0] * shape[1] or wide.shape[1] < 2:
        raise UserError(
            f"{FLAGS.curves} has curves of {len(wide)} heads at {wide.shape[1]} common ratios; "
            f"all {shape[0] * shape[1]} heads at 2 or more are needed (--heads=all)"
        )
    return budgets.Curves(
        ratios=wide.columns.to_numpy(float), deltas=wide.to_numpy(float).reshape(*shape, -1)
    )


def make_shares(curves, config, ratios: Sequence[float]) -> dict[str, np.ndarray]:
    """Name -> shares [L, K] of every budget."""
    shape = (config.num_layers, config.num_kv_heads)
    positive = [ratio for ratio in ratios if ratio > 0]
    shares = {
        REFERENCE: budgets.uniform_shares(*shape),
        "pyramid": budgets.pyramid_shares(*shape, FLAGS.pyramid_beta),
        "swap": budgets.swap_shares(curves, FLAGS.step, positive),
        "greedy": budgets.greedy_shares(curves, FLAGS.step, positive),
    }
    for file in FLAGS.budget_files:
        name = Path(file).stem
        if name in shares:
            raise UserError(
                f"--budget_files: there is a budget named {name} already; rename {file}"
            )
        shares[name] = budgets.read_shares(file, *shape)
    return shares


def _say_overlap(rows: pd.DataFrame, cases: Sequence) -> None:
    """A budget always looks good on the texts it was made from."""
    fitted = set(rows.document_digest)
    shared = [case.document for case in cases if case.digest in fitted]
    if shared:
        say(f"note        the curves were fitted on {', '.join(shared)}, too: no honest test")


def _key(name: str, ratio: float) -> str:
    return f"{name}@{ratio:g}"


def _plan(cases: Sequence, shares: Mapping[str, np.ndarray], ratios: Sequence[float]) -> list:
    """A part per document and ratio, and one for its full cache."""
    from jaxablate import rounding

    parts = []
    for case in cases:
        inputs = {"tokens": article_cases.digest(case)}
        common = (case.document, case.digest)
        references = (FULL_CACHE, *rounding.configuration_names(FLAGS.dtype))
        parts.append(results.PartSpec(*common, references, 1, inputs))
        for ratio in ratios:
            keys = tuple(_key(name, ratio) for name in shares)
            made = {name: np.round(share, 12).tolist() for name, share in shares.items()}
            parts.append(results.PartSpec(*common, keys, len(keys), inputs | {"shares": made}))
    return parts


def _compute(run, loaded, cases, shares, ratios, device_kind: str) -> None:
    from jaxablate.progress import Progress

    by_document = {case.document: case for case in cases}
    options = loaded.sweep_options(device_kind)
    of_ratio = {_key(next(iter(shares)), ratio): ratio for ratio in ratios}
    done: str | None = None
    contexts: Any = None
    for part in run.pending():
        case = by_document[part.document]
        if done != case.document:
            contexts = None  # frees the one before
            counts = _all_counts(case, shares, ratios)
            article_cases.note_few_queries(
                loaded.config, max(count for found in counts.values() for count in found)
            )
            layers = loaded.config.num_layers
            label = f"compacting {case.document}"
            with Progress(layers, layers, label=label, unit="layers") as bar:
                contexts = _compact(loaded.model(), case, counts, bar)
            done = case.document
        if part.configurations[0] == FULL_CACHE:
            prefix, about = contexts.full_prefix(), {"configuration": FULL_CACHE, "ratio": 1.0}
            about |= {"budget": FULL_CACHE, "kept_ratio": 1.0, "padded_ratio": 1.0}
            again = part.configurations[1:]
            run.write(part, _rows(loaded.model(), case, prefix, options, about, again))
            continue
        ratio, found = of_ratio[part.configurations[0]], []
        for name, share in shares.items():
            kept = budgets.keys_per_head(share, ratio, case.article_tokens)
            prefix = contexts.prefix(lambda layer, head, kept=kept: int(kept[layer, head]))
            about = {
                "configuration": _key(name, ratio),
                "budget": name,
                "ratio": ratio,
                "kept_ratio": budgets.kept_ratio(kept, case.article_tokens),
                # What memory really holds: a layer's heads are as long as its longest.
                "padded_ratio": float(kept.max(axis=1).mean() / case.article_tokens),
            }
            found += _rows(loaded.model(), case, prefix, options, about)
        run.write(part, found)


def _all_counts(case, shares, ratios) -> dict[tuple[int, int], list[int]]:
    counts: dict[tuple[int, int], set[int]] = {}
    for ratio in ratios:
        for share in shares.values():
            kept = budgets.keys_per_head(share, ratio, case.article_tokens)
            for head, count in np.ndenumerate(kept):
                counts.setdefault((head[0], head[1]), set()).add(int(count))
    return {head: sorted(found) for head, found in counts.items()}


def _compact(model, case, counts, bar):
    from jaxablate import influence

    settings = article_cases.compaction_settings()
    return influence.compact_context(
        model, case, counts, settings, on_layer=lambda layer: bar.advance(1, 1)
    )


def _rows(model, case, prefix, options, about: dict, again: Sequence[str] = ()) -> list[dict]:
    """Rows of one prefix, and of its repeats that are rounded otherwise."""
    from jaxablate import rounding
    from jaxablate.problem import Problem
    from jaxablate.sweep import Sweep

    engine = Sweep(model, Problem(case.batch(), prefix), options)
    found = article_cases.question_rows(case, engine.baseline_nll, about)
    if again:
        for name, nll in zip(again, rounding.repeats(engine, seed=FLAGS.seed)):
            found += article_cases.question_rows(case, nll, about | {"configuration": name})
    return found


def report(out: Path, rows: pd.DataFrame, curves, shares: Mapping[str, np.ndarray]) -> None:
    """Table and figures: log-perplexity over ratio, predicted beside true, and the maps."""
    from jaxablate import budget_figures, figures, rounding
    from jaxablate.budget_scores import budget_table

    floor = rounding.noise_floor(rows, FULL_CACHE)
    rows = rounding.without_repeats(rows)
    table = budget_table(rows, reference=REFERENCE, seed=FLAGS.seed)
    predicted = [
        budgets.predicted_delta(curves, shares[row.budget], row.ratio)
        - budgets.predicted_delta(curves, shares[REFERENCE], row.ratio)
        if row.budget in shares
        else np.nan
        for row in table.itertuples()
    ]
    table["predicted_delta"] = predicted
    if FLAGS.dtype != "float32":
        table["noise_floor"] = floor
        say(rounding.describe(floor, FLAGS.dtype))
    table.to_csv(out / "budgets.csv", index=False)
    say(table.to_string(index=False, float_format=lambda x: f"{x:.5g}"))
    title = f"Head budgets ({Path(FLAGS.model).name}; {Path(FLAGS.text).name})"
    paths = figures.save(budget_figures.budget_figure(table, title), out / "figures", "budgets")
    maps = [(name, share * share.size) for name, share in shares.items()]
    figure = budget_figures.share_maps(maps, title)
    paths += figures.save(figure, out / "figures", "budget_maps")
    for path in [out / "rows.parquet", out / "budgets.csv", *paths]:
        say(f"wrote       {path}")


if __name__ == "__main__":
    define_flags()
    command_line.run(main)
