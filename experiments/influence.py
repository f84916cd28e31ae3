"""Head influence curves: Δ log-perplexity over how many of an article's keys one KV head keeps.

    python experiments/influence.py --flagfile=demo.flags
    python experiments/influence.py --model=DIR --text=FILE --heads=L0H0,L3H1 --ratios=0:0.5:0.05
    python experiments/influence.py --flagfile=llama.flags --shard=0/4 --out=out/llama-0
    python experiments/influence.py --estimator=second_order --ratios=0:0.5:0.01
    python experiments/influence.py --tolerance=0.002 --ratios=0:0.5:0.01

Baseline: every KV head keeps the same share of the article's keys. One head at a time is re-fitted
to another share and the loss of what follows the article is compared on the same tokens
(arXiv 2602.16284). Writes rows.parquet, rows.csv, curves.csv, run.json and figures to --out; the
same command goes on after an interruption, and redraws without computing when all is there.
About a minute per hundred configurations of the embedded model on 2 CPU cores.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from absl import flags

from experiments import article_cases, command_line, estimation
from experiments.command_line import say
from jaxablate import results
from jaxablate.curves import BASELINE, FULL_CACHE, influence_curves, point_key
from jaxablate.errors import UserError

command_line.define_model_flags(out="out/influence")
article_cases.define_flags()
flags.DEFINE_string("heads", "all", "KV heads: all, or L0H0,L3H1, or L5 for all of layer 5.")
flags.DEFINE_string(
    "ratios", "0,0.01,0.02,0.05,0.1,0.2,0.3,0.5", "Shares of keys kept: a list, or 0:0.5:0.01."
)
flags.DEFINE_string("map_ratios", "", "Ratios that all heads of the model are computed at, too.")
estimation.define_flags()
flags.DEFINE_integer("part_size", 64, "Configurations that are written at a time.", lower_bound=1)
flags.DEFINE_string("title", None, "Title of the figures.")
flags.DEFINE_enum("band", "interval", ("interval", "standard_error"), "Band of the curves.")
FLAGS = flags.FLAGS

COLUMNS = {"layer": int, "kv_head": int, "ratio": float, "keys_kept": int, "article_tokens": int,
           "bound": float}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Point:
    """One configuration: a KV head at a ratio."""

    head: tuple[int, int]
    ratio: float

    @property
    def key(self) -> str:
        return point_key(*self.head, self.ratio)


def main() -> None:
    device = command_line.find_device()
    loaded = command_line.LoadedModel(FLAGS.model)
    settings = article_cases.settings() | estimation.settings()
    points = _points(loaded.config)
    cases = article_cases.read(loaded)
    plan = _plan(cases, points, loaded.config.num_layers)
    with command_line.open_run("influence", loaded, device, settings, COLUMNS, "method") as run:
        run.plan([part for parts in plan.values() for part in parts])
        if run.complete():
            say(f"the result is there already: {run.out / 'rows.parquet'}; drawing it again")
        else:
            _announce(loaded, cases, points, run)
            _compute(run, loaded, cases, points, plan, device.kind)
        if run.finish() is not None:
            report(run.out, run.read())


def _points(config) -> list[Point]:
    from jaxablate.edits import parse_heads

    if not 0 <= FLAGS.baseline <= 1:
        raise UserError(f"--baseline is {FLAGS.baseline:g}; it must be from 0 to 1")
    shape = config.num_layers, config.num_kv_heads
    heads = parse_heads(FLAGS.heads, *shape) if FLAGS.heads else []
    ratios = command_line.parse_ratios(FLAGS.ratios, "ratios")
    pairs = {(head, ratio) for head in heads for ratio in ratios}
    mapped = command_line.parse_ratios(FLAGS.map_ratios, "map_ratios")
    pairs |= {(head, ratio) for head in parse_heads("all", *shape) for ratio in mapped}
    if not pairs:
        raise UserError("nothing to compute: give --heads and --ratios, or --map_ratios")
    return [Point(*pair) for pair in sorted(pairs)]


def _references() -> tuple[str, ...]:
    """Baseline and full cache, and in a coarse dtype repeats that tell the noise floor."""
    from jaxablate import rounding

    return (BASELINE, FULL_CACHE, *rounding.configuration_names(FLAGS.dtype))


def _plan(cases: Sequence, points: Sequence[Point], num_layers: int) -> dict[str, list]:
    """Parts of each document: its references first, then groups of points that share layers."""
    groups = estimation.groups(points)
    plan = {}
    for case in cases:
        inputs = {"tokens": article_cases.digest(case)}
        parts = [
            results.PartSpec(case.document, case.digest, _references(), 2 * num_layers, inputs)
        ]
        for group in groups:
            cost = sum(num_layers - point.head[0] for point in group)
            keys = tuple(point.key for point in group)
            parts.append(results.PartSpec(case.document, case.digest, keys, cost, inputs))
        plan[case.document] = parts
    if len(plan) < len(cases):
        raise UserError("two documents have the same name; rename one of them")
    return plan


def _announce(loaded, cases: Sequence, points: Sequence[Point], run: results.Run) -> None:
    """The plan in numbers, and how long it should take on this machine now."""
    from jaxablate import estimate
    from jaxablate.edits import keep_keys
    from jaxablate.plan import plan_sweep

    if estimation.estimator() != "exact":
        say(estimation.plan(len(points), len(cases)))
        return
    config = loaded.config
    unique = [keep_keys({point.head: 1 + i}) for i, point in enumerate(points)]
    plan = plan_sweep(unique, config.num_layers, 10**9)
    flops = 0.0
    for case in cases:
        batch = case.batch()
        seen = batch.inputs.shape[1] + int(FLAGS.baseline * case.article_tokens)
        scored = int(batch.scored.sum())
        flops += estimate.sweep_flops(config, plan, batch.inputs.size, seen, scored)
    share = sum(part.cost for part in run.missing()) / max(1, sum(
        part.cost for parts in _plan(cases, points, config.num_layers).values() for part in parts
    ))  # fmt: skip
    seconds = share * flops / (0.6 * estimate.matmul_rate(FLAGS.dtype))
    say(
        f"plan        {len(points)} configurations x {len(cases)} documents; "
        f"{plan.block_evaluations * len(cases)} block evaluations "
        f"({plan.naive_block_evaluations * len(cases)} if each ran alone); "
        f"about {estimate.duration(seconds)}"
    )


def _compute(run, loaded, cases, points, plan, device_kind: str) -> None:
    by_key = {point.key: point for point in points}
    by_document = {case.document: case for case in cases}
    document_sweep: DocumentSweep | None = None
    for part in run.pending():
        document = part.document
        if document_sweep is None or document_sweep.document != document:
            document_sweep = None  # frees the one before
            todo = {key for spec in run.missing() if spec.document == document
                    for key in spec.configurations}  # fmt: skip
            # A head is fitted at all its ratios or at none: what is fitted beside it must not
            # depend on where an earlier run stopped.
            heads = {by_key[key].head for key in todo if key in by_key}
            wanted = [point for point in points if point.head in heads]
            if estimation.estimator() != "exact":
                wanted = list(points)  # estimates share what they learn of the draws
            case = by_document[document]
            document_sweep = DocumentSweep(loaded, case, wanted, device_kind, run)
        run.write(part, document_sweep.rows(part, by_key))


class DocumentSweep:
    """One document: compacted once, then parts of the sweep as they are asked for."""

    def __init__(self, loaded, case, points: Sequence[Point], device_kind: str, run) -> None:
        from jaxablate import influence
        from jaxablate.progress import Progress
        from jaxablate.sweep import Sweep

        config = loaded.config
        self.document = case.document
        self._case, self._run = case, run
        self._base = self._count(FLAGS.baseline)
        self._progress = command_line.PartProgress(run)
        follow = None if FLAGS.tolerance else self._progress  # rounds of unknown number
        self._options = loaded.sweep_options(device_kind, on_progress=follow)
        heads = [(i, j) for i in range(config.num_layers) for j in range(config.num_kv_heads)]
        counts: dict = {head: [self._base] for head in heads}
        for point in points:
            counts[point.head].append(self._count(point.ratio))
        settings = article_cases.compaction_settings()
        article_cases.note_few_queries(config, max(max(found) for found in counts.values()))
        self._model = loaded.model()
        layers = config.num_layers
        with Progress(layers, layers, label=f"compacting {case.document}", unit="layers") as bar:
            self._context = influence.compact_context(
                self._model, case, counts, settings, on_layer=lambda layer: bar.advance(1, 1)
            )
        self._problem = influence.influence_problem(self._context, case, self._base)
        self._sweep = Sweep(self._model, self._problem, self._options)
        self._estimated = None
        if estimation.estimator() != "exact":
            configurations = {point.key: self._configuration(point) for point in points}
            self._estimated = estimation.EstimatedPoints(self._sweep, configurations)

    def _configuration(self, point: Point):
        from jaxablate.influence import head_configuration

        return head_configuration(point.head, self._count(point.ratio), self._base)

    def _count(self, ratio: float) -> int:
        from jaxablate.compaction import num_kept

        return num_kept(ratio, self._case.article_tokens)

    def rows(self, part, by_key: dict[str, Point]) -> list[dict]:
        if part.configurations[0] == BASELINE:
            return self._reference_rows()
        self._progress.start(part)
        points = [by_key[key] for key in part.configurations]
        if self._estimated is not None:
            return self._estimated_rows(self._estimated, points)
        configurations = [self._configuration(point) for point in points]
        found = []
        for point, nll in zip(points, self._sweep.run(configurations)):
            found += article_cases.question_rows(self._case, nll, self._about(point))
        return found

    def _about(self, point: Point, estimator: str = "exact", bound: float | None = 0.0) -> dict:
        layer, head = point.head
        return {
            "configuration": point.key,
            "layer": layer,
            "kv_head": head,
            "ratio": point.ratio,
            "keys_kept": self._count(point.ratio),
            "estimator": estimator,
            "bound": bound,
        }

    def _estimated_rows(self, estimated, points: Sequence[Point]) -> list[dict]:
        places = {point.key: (point.head, self._count(point.ratio)) for point in points}
        found = []
        for point, value in zip(points, estimated.values(places)):
            about = self._about(point, value.estimator, value.bound)
            if value.nll is not None:
                found += article_cases.question_rows(self._case, value.nll, about)
            else:
                found += self._changed_rows(value.changes, about)
        return found

    def _changed_rows(self, changes: np.ndarray, about: dict) -> list[dict]:
        """One row per question from the change of its NLL sum; there are no sums of blocks."""
        rows = article_cases.question_rows(self._case, self._sweep.baseline_nll, about)
        for row, change in zip(rows, changes):
            row["nll_sum"] += float(change)
            row["block_nll"] = []
        return rows

    def _reference_rows(self) -> list[dict]:
        from jaxablate import rounding
        from jaxablate.sweep import Sweep

        full = dataclasses.replace(self._problem, prefix=self._context.full_prefix())
        full_nll = Sweep(self._model, full, self._options).baseline_nll
        base = {"configuration": BASELINE, "ratio": FLAGS.baseline, "keys_kept": self._base}
        tokens = self._case.article_tokens
        everything = {"configuration": FULL_CACHE, "ratio": 1.0, "keys_kept": tokens}
        base["bound"] = everything["bound"] = 0.0
        found = [
            *article_cases.question_rows(self._case, self._sweep.baseline_nll, base),
            *article_cases.question_rows(self._case, full_nll, everything),
        ]
        if names := _references()[2:]:
            for name, nll in zip(names, rounding.repeats(self._sweep, seed=FLAGS.seed)):
                about = base | {"configuration": name}
                found += article_cases.question_rows(self._case, nll, about)
        return found


def report(out: Path, rows: pd.DataFrame) -> None:
    """The table and the figures, all from the rows."""
    from jaxablate import figures, rounding
    from jaxablate.curves import reference_log_ppl

    floor = rounding.noise_floor(rows, BASELINE)
    rows = rounding.without_repeats(rows)
    curves = influence_curves(rows, seed=FLAGS.seed)
    if FLAGS.dtype != "float32":
        curves["noise_floor"] = floor
    curves.to_csv(out / "curves.csv", index=False)
    documents = rows.document.nunique()
    base, full = (reference_log_ppl(rows, name) for name in (BASELINE, FULL_CACHE))
    say(
        f"baseline    log-perplexity {base:.4f} (perplexity {np.exp(base):.3f}) at ratio "
        f"{FLAGS.baseline:g}; full cache {full:.4f} (perplexity {np.exp(full):.3f})"
    )
    if FLAGS.dtype != "float32":
        say(rounding.describe(floor, FLAGS.dtype))
    say(_table(curves))
    if (curves.estimator != "exact").any():
        kinds = curves.estimator.value_counts()
        say("points      " + ", ".join(f"{kinds[kind]} {kind}" for kind in kinds.index))
    model = Path(FLAGS.model).name
    title = FLAGS.title or f"Head Influence Curves ({model}; {Path(FLAGS.text).name})"
    unit = f"{documents} documents" if documents > 1 else "1 document, blocks of tokens"
    paths = []
    drawn = _curves_to_draw(curves)
    if len(drawn):
        figure = figures.influence_figure(drawn, FLAGS.baseline, title, FLAGS.band)
        paths += figures.save(figure, out / "figures", "influence")
    maps = _maps(curves, rows)
    if maps:
        figure = figures.head_map_figure(
            maps, "KV head", f"{model}; {Path(FLAGS.text).name}; {unit}",
            "Δ log(perplexity) from baseline",
        )  # fmt: skip
        paths += figures.save(figure, out / "figures", "influence_map")
    for path in [out / "rows.parquet", out / "rows.csv", out / "curves.csv", *paths]:
        say(f"wrote       {path}")


def _curves_to_draw(curves: pd.DataFrame) -> pd.DataFrame:
    """Curves of at least two ratios; of more than 40, the 12 that reach furthest from zero."""
    groups = curves.groupby(["layer", "kv_head"])
    several = curves[groups.ratio.transform("count") > 1]
    reach = several.groupby(["layer", "kv_head"]).delta_log_ppl.agg(lambda d: d.abs().max())
    if len(reach) <= 40:
        return several
    chosen = reach.sort_values(ascending=False).index[:12]
    return several.set_index(["layer", "kv_head"]).loc[chosen].reset_index()


def _maps(curves: pd.DataFrame, rows: pd.DataFrame) -> list[tuple[str, np.ndarray]]:
    """Layer x head maps at --map_ratios, or at up to four of the ratios, of many heads."""
    heads = curves[["layer", "kv_head"]].drop_duplicates()
    if len(heads) < 8:
        return []
    counts = curves.groupby("ratio").size()
    candidates = list(counts[counts == counts.max()].index)
    chosen = command_line.parse_ratios(FLAGS.map_ratios, "map_ratios") or [
        candidates[i] for i in sorted({round(x) for x in np.linspace(0, len(candidates) - 1, 4)})
    ]
    maps = []
    for ratio in chosen:
        values = np.full((curves.layer.max() + 1, curves.kv_head.max() + 1), np.nan)
        part = curves[curves.ratio == ratio]
        values[part.layer, part.kv_head] = part.delta_log_ppl
        maps.append((f"ratio {ratio:g}", values))
    return maps


def _table(curves: pd.DataFrame, most: int = 48) -> str:
    columns = ["layer", "kv_head", "ratio", "keys_kept", "delta_log_ppl", "low", "high"]
    if (curves.estimator != "exact").any():
        columns += ["estimator", "bound"]
    shown = curves[columns]
    note = ""
    if len(shown) > most:
        largest = shown.delta_log_ppl.abs().sort_values(ascending=False).index[:most]
        shown = shown.loc[largest]
        note = f"\n({most} largest of {len(curves)}; all in curves.csv)"
    return shown.to_string(index=False, float_format=lambda x: f"{x:.5g}") + note


if __name__ == "__main__":
    command_line.run(main)
