"""The pruning experiment as a library: sets of layers over windows, to rows and tables."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from jaxablate import hosts, pruning, removals, results, rounding, spectra
from jaxablate.config import TransformerConfig
from jaxablate.edits import Configuration
from jaxablate.errors import UserError
from jaxablate.estimates import estimate
from jaxablate.plan import Plan, plan_sweep
from jaxablate.problem import Problem
from jaxablate.pruning import LayerSet
from jaxablate.removal_scores import (
    RemovalScores,
    advantage_table,
    format_layers,
    single_table,
    strategy_table,
)
from jaxablate.removals import Removal, StrategySettings, WindowBatch
from jaxablate.sweep import Model, Sweep, SweepOptions

# (number of sets, plan of one batch of windows, floating-point operations to do)
Announce = Callable[[int, Plan, float], None]

COLUMNS: dict[str, type] = {
    "component": str,
    "k": int,
    "layers": str,
    "strategies": str,
    "first_window": int,
    "seq_len": int,
    "stride": int,
    "bos": str,
    "normaliser": str,
    "text_tokens": int,
    "alpha_matrix": str,
    "alpha_estimator": str,
    "alpha_fraction": float,
    "order": str,
    "boundary": int,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """One experiment: the model's α, the text's windows, and what to remove.

    Attributes:
      config, digest: of the model.
      dtype: of weights and activations.
      batches: windows of the text.
      alphas: α of each layer.
      null: α of a Gaussian matrix of the same shape.
      strategy: see StrategySettings.
      component: "block", "attention" or "mlp".
      exhaustive: evaluate every set of up to kmax layers.
      estimator: "exact", or of `estimates.ESTIMATORS` one that ranks the sets by gradients.
      label_draws: backward passes with drawn labels of the estimator "second_order".
      constants: settings that every row carries: window, stride, α's estimator, ….
    """

    config: TransformerConfig
    digest: str
    dtype: str
    batches: Sequence[WindowBatch]
    alphas: Sequence[float]
    null: float
    strategy: StrategySettings
    component: str = "block"
    exhaustive: bool = False
    estimator: str = "exact"
    label_draws: int = 16
    constants: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    @property
    def exhaustive_kmax(self) -> int | None:
        return self.strategy.kmax if self.exhaustive else None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a finished run says."""

    scores: RemovalScores
    chosen: list[Removal]
    singles: pd.DataFrame
    strategies: pd.DataFrame
    advantage: pd.DataFrame
    noise_floor: float = float("nan")


class SetSweep:
    """Sets of layers over windows into one results directory, resumable batch by batch."""

    def __init__(
        self, study: Study, out: Path, sets: Sequence[LayerSet], names: dict[LayerSet, str]
    ):
        self.study, self.out, self.names = study, out, names
        self.sets = list(sets)
        self.configurations = [removals.removal(one, study.component) for one in self.sets]
        self.keys = tuple(one.key for one in self.configurations)
        self.repeats = tuple(rounding.configuration_names(study.dtype))

    def plan(self) -> Plan:
        """What one batch of windows costs with unlimited memory."""
        return plan_sweep(self.configurations, self.study.num_layers, 10**9)

    def run(
        self,
        model: Callable[[], Model],
        options: SweepOptions,
        *,
        flags_used: dict[str, Any] | None = None,
        device: str = "",
        shard: results.Shard | None = None,
        known: pd.DataFrame | None = None,
        announce: Announce | None = None,
    ) -> pd.DataFrame | None:
        """Compute what is missing; None where other shards' parts are.

        Args:
          model: returns the model; called only if something is to be computed.
          options: of the engine.
          flags_used, device: for run.json.
          shard: the share to compute.
          known: rows of some of the sets, which are not computed again.
          announce: called with (sets, plan of a batch, operations to do) before it computes.
        """
        study = self.study
        settings = {"strategy": dataclasses.asdict(study.strategy), "exhaustive": study.exhaustive}
        if study.estimator != "exact":
            settings |= {"estimator": study.estimator, "label_draws": study.label_draws}
        with hosts.open_run(
            self.out,
            experiment="pruning",
            settings=settings | {"alphas": list(study.alphas)},
            flags=flags_used or {},
            model_digest=study.digest,
            columns=COLUMNS,
            constants={
                **study.constants,
                "component": study.component,
                "order": study.strategy.order,
                "boundary": study.strategy.boundary,
                "dtype": study.dtype,
                "seed": study.strategy.seed,
                "method": "remove",
            },
            device=device,
            shard=shard,
            label="pruning",
            unit="sets",
        ) as record:
            plan = self.plan()
            parts = [self._part(batch, plan.block_evaluations) for batch in study.batches]
            record.plan(parts)
            missing = len(record.missing())
            if missing and announce is not None:
                operations = removals.sweep_operations(study.config, plan, study.batches)
                announce(len(self.sets), plan, operations * missing / len(parts))
            by_question = dict(zip((self._name(batch) for batch in study.batches), study.batches))
            for part in record.pending():
                batch = by_question[part.document, part.inputs["windows"]]
                record.write(part, self._compute(model(), batch, options, record, known))
            return None if record.finish() is None else record.read()

    def _name(self, batch: WindowBatch) -> tuple[str, str]:
        return batch.document.name, batch.question

    def _part(self, batch: WindowBatch, cost: int) -> results.PartSpec:
        document = batch.document
        digest = hashlib.sha256(batch.batch.inputs.tobytes() + batch.batch.scored.tobytes())
        inputs = {"windows": batch.question, "tokens": digest.hexdigest()}
        return results.PartSpec(
            document.name, document.digest, (*self.keys, *self.repeats), cost, inputs
        )

    def _compute(
        self,
        model: Model,
        batch: WindowBatch,
        options: SweepOptions,
        record: results.Run,
        known: pd.DataFrame | None,
    ) -> list[dict[str, Any]]:
        sums = _known_sums(known, batch)
        wanted = [i for i, key in enumerate(self.keys) if key not in sums]
        before = 0

        def moved(done: int, total: int) -> None:
            nonlocal before
            record.progress.advance(done - before)
            before = done

        engine = Sweep(model, Problem(batch.batch), dataclasses.replace(options, on_progress=moved))
        configurations = [self.configurations[i] for i in wanted]
        if self.study.estimator == "exact":
            computed = [
                removals.window_sums(nll, batch.token_counts) for nll in engine.run(configurations)
            ]
        else:
            computed = self._estimated(engine, configurations, batch)
        sums |= zip((self.keys[place] for place in wanted), computed)
        found = [
            self._row(layers, key, sums[key], batch) for layers, key in zip(self.sets, self.keys)
        ]
        if self.repeats:
            again = rounding.repeats(engine, seed=self.study.strategy.seed)
            for key, nll in zip(self.repeats, again):
                found.append(
                    self._row((), key, removals.window_sums(nll, batch.token_counts), batch)
                )
        return found

    def _estimated(
        self, engine: Sweep, configurations: Sequence[Configuration], batch: WindowBatch
    ) -> list[list[float]]:
        """NLL of every window, nats: the whole model's and the estimated change."""
        found = estimate(
            engine,
            configurations,
            self.study.estimator,
            draws=self.study.label_draws,
            seed=self.study.strategy.seed,
        )
        whole = removals.window_sums(engine.baseline_nll, batch.token_counts)
        # Rows of the batch beyond the document's last window are padding.
        return (np.asarray(whole) + found.changes[:, : len(whole)]).tolist()

    def _row(
        self, layers: LayerSet, key: str, blocks: list[float], batch: WindowBatch
    ) -> dict[str, Any]:
        return {
            "configuration": key,
            "question": batch.question,
            "k": len(layers),
            "layers": format_layers(layers),
            "strategies": self.names.get(layers, ""),
            "estimator": self.study.estimator if layers else "exact",
            "first_window": batch.first,
            "normaliser": batch.document.normaliser,
            "scored_tokens": sum(batch.token_counts),
            "nll_sum": sum(blocks),
            "block_nll": blocks,
        }


def _known_sums(known: pd.DataFrame | None, batch: WindowBatch) -> dict[str, list[float]]:
    if known is None:
        return {}
    rows = known[
        (known["document_digest"] == batch.document.digest) & (known["question"] == batch.question)
    ]
    return {row["configuration"]: list(row["block_nll"]) for row in rows.to_dict("records")}


def run_study(
    study: Study,
    out: Path,
    model: Callable[[], Model],
    options: SweepOptions,
    *,
    max_teraflop: float | None = None,
    **run_options: Any,
) -> Outcome | None:
    """The whole experiment into `out`; None where other shards' parts are missing.

    Args:
      study: what to do.
      out: directory of the results.
      model: returns the model.
      options: of the engine.
      max_teraflop: refuse an exhaustive sweep that needs more operations; None: any.
      run_options: see `SetSweep.run`.

    Raises:
      UserError: k too large, an exhaustive sweep beyond the limit, or as the engine.
    """
    known: pd.DataFrame | None = None
    single_deltas: list[float] | None = None
    layers = study.num_layers
    if study.strategy.order == "calibrated":
        # The order needs the single layers' costs, so these are computed first, on their own.
        singles = SetSweep(study, out / "calibration", removals.sweep_sets(layers, [], None), {})
        unsharded = {k: v for k, v in run_options.items() if k != "shard"}
        known = singles.run(model, options, **unsharded)
        single_deltas = RemovalScores(rounding.without_repeats(known)).single_deltas(layers)
    chosen = removals.strategy_sets(study.strategy, layers, study.alphas, single_deltas)
    sets = removals.sweep_sets(layers, [one.layers for one in chosen], study.exhaustive_kmax)
    sweep = SetSweep(study, out, sets, _strategy_names(chosen))
    operations = removals.sweep_operations(study.config, sweep.plan(), study.batches)
    exact = study.estimator == "exact"
    if exact and study.exhaustive and max_teraflop is not None and operations > max_teraflop * 1e12:
        count = pruning.count_sets(layers, study.strategy.kmax)
        tokens = sum(sum(batch.token_counts) for batch in study.batches)
        raise UserError(
            f"--exhaustive: {count:,} sets of up to {study.strategy.kmax} of {layers} layers over "
            f"{tokens:,} tokens need {operations / 1e12:,.0f} TFLOP; the limit is "
            f"--max_teraflop={max_teraflop:g}: raise it, or lower --kmax or --tokens"
        )
    frame = sweep.run(model, options, known=known, **run_options)
    return None if frame is None else analyse(study, frame, chosen, out)


def analyse(study: Study, frame: pd.DataFrame, chosen: list[Removal], out: Path) -> Outcome:
    """Tables and figures from the rows."""
    floor = rounding.noise_floor(frame, removals.removal((), study.component).key)
    scores = RemovalScores(rounding.without_repeats(frame), seed=study.strategy.seed)
    zones = spectra.zones(study.num_layers, study.strategy.boundary)
    outcome = Outcome(
        scores=scores,
        chosen=chosen,
        singles=single_table(scores, study.alphas, zones),
        strategies=strategy_table(scores, chosen, study.exhaustive_kmax),
        advantage=advantage_table(scores, chosen),
        noise_floor=floor,
    )
    if study.estimator != "exact":
        outcome = _as_estimates(outcome, study.estimator)
    for name in ("singles", "strategies", "advantage"):
        table = getattr(outcome, name)
        if study.dtype != "float32":
            table["noise_floor"] = floor
        table.to_csv(out / f"{name}.csv", index=False)
    return outcome


def _as_estimates(outcome: Outcome, estimator: str) -> Outcome:
    """The tables of estimated costs: named so, without what holds for exact ones only.

    Intervals over windows are of the text, not of the estimate, which may be off by far more; a
    ratio of two estimates is no result; and the best of all sets is the best by the estimate.
    """
    tables = {}
    for name in ("singles", "strategies"):
        table = getattr(outcome, name).copy()
        table["estimator"] = estimator
        exact_only = [c for c in table.columns if c.endswith(("_low", "_high"))]
        if "strategy" in table:
            table["strategy"] = table.strategy.replace(
                {"best_true": "best_estimated", "worst_true": "worst_estimated"}
            )
            drawn = table.strategy.str.startswith("random_")  # their range over draws stays
            table.loc[~drawn, exact_only] = np.nan
            table.loc[~drawn, "range"] = f"none: {estimator}"
        else:
            table[exact_only] = np.nan
        tables[name] = table
    return dataclasses.replace(outcome, advantage=outcome.advantage[:0].copy(), **tables)


def _strategy_names(chosen: Sequence[Removal]) -> dict[LayerSet, str]:
    names: dict[LayerSet, list[str]] = {}
    for one in chosen:
        names.setdefault(one.layers, []).append(one.strategy)
    return {layers: " ".join(dict.fromkeys(found)) for layers, found in names.items()}
