"""What removing layers costs: zone-aware removal by α against Last-N, random and the worst sets.

    python experiments/pruning.py --text=FILE.txt --tokens=20000
    python experiments/pruning.py --model=out/tiny/hf/step000512 --text=out/tiny/heldout.txt \\
        --tokens=8000 --seq_len=256 --exhaustive
    python experiments/pruning.py --flagfile=pythia.flags
    python experiments/pruning.py --estimator=second_order --tokens=4000   (a first look at ranks)

All sets of a run go through the engine together, so that shared prefixes are computed once:
793 sets of up to 4 of 12 layers cost 1,585 block evaluations instead of 6,732. Writes rows,
singles.csv, strategies.csv, advantage.csv, all of them as tables.md, run.json and figures to --out;
the same command goes on after an interruption, and redraws without computing when all is there.
"""

from pathlib import Path

import pandas as pd
from absl import flags

from experiments import alpha_profile, command_line
from experiments.command_line import say
from jaxablate.estimates import ESTIMATORS
from jaxablate.pruning import ORDERS
from jaxablate.removals import COMPONENTS, STRATEGIES

FLAGS = flags.FLAGS
BOS = ("auto", "always", "never")


def define_flags() -> None:
    """The flags; called by the program only, so that a notebook may import this module."""
    command_line.define_model_flags(out="out/pruning")
    flags.DEFINE_string("text", "pydoc", "pydoc, a .txt file, a folder of them, or a .jsonl file.")
    flags.DEFINE_integer(
        "tokens", 20000, "Tokens scored, from the start of the text.", lower_bound=1
    )
    flags.DEFINE_integer("seq_len", 512, "Tokens in a window.")
    flags.DEFINE_integer("stride", None, "Tokens from window to window (default: --seq_len).")
    flags.DEFINE_enum("bos", "auto", BOS, "BOS before every window: auto is the tokenizer's way.")
    flags.DEFINE_integer(
        "windows_per_part", 4, "Windows computed, and written, at a time.", lower_bound=1
    )
    flags.DEFINE_integer("kmax", 4, "Sets of 1 to kmax layers.")
    flags.DEFINE_enum("component", "block", COMPONENTS, "What is removed of a layer.")
    flags.DEFINE_list("strategies", list(STRATEGIES), f"From {', '.join(STRATEGIES)}.")
    flags.DEFINE_enum(
        "order",
        "highest_alpha",
        ORDERS,
        "Interior layers that zone_aware removes first; worst is the reverse over all layers. "
        "calibrated: smallest cost of the layer alone.",
    )
    flags.DEFINE_integer("boundary", 2, "Layers at either end that zone_aware never removes.")
    flags.DEFINE_integer("draws", 20, "Sets of each random strategy and k.")
    flags.DEFINE_enum("alpha_matrix", "q", ["q", "k", "v", "o"], "Whose spectrum gives α.")
    flags.DEFINE_enum("alpha_estimator", "rank_slope", ["rank_slope", "hill", "ml"], "Of α.")
    flags.DEFINE_float("alpha_fraction", 0.5, "rank_slope: share of the ranks, from the top.")
    flags.DEFINE_bool("exhaustive", False, "Every set up to kmax: the true best and worst.")
    flags.DEFINE_float("max_teraflop", 200.0, "Limit of an exhaustive sweep, in 10^12 operations.")
    flags.DEFINE_enum(
        "estimator",
        "exact",
        ESTIMATORS,
        "exact: run the model without every set. second_order: from gradients, for a first look; "
        "it ranks single layers, and does not measure what larger sets cost. first_order: poor "
        "even at ranks of layers.",
    )
    flags.DEFINE_integer("label_draws", 16, "Backward passes of second_order.", lower_bound=1)
    flags.DEFINE_string("save_pruned", None, "Directory for the pruned model (see --pruned_set).")
    flags.DEFINE_string("pruned_set", None, "2,5,7 or zone_aware:4 (default: that, at kmax).")
    flags.DEFINE_string("title", None, "Title of the figures.")


def main() -> None:
    from jaxablate import removal_figures, removal_report, removal_study, results

    device = command_line.find_device()
    loaded = command_line.LoadedModel(FLAGS.model)
    study = _study(loaded)
    out = Path(FLAGS.out).expanduser().resolve()
    outcome = removal_study.run_study(
        study,
        out,
        loaded.model,
        loaded.sweep_options(device.kind),
        max_teraflop=FLAGS.max_teraflop,
        announce=_announce,
        flags_used=command_line.resolved_flags(),
        device=device.description,
        shard=results.parse_shard(FLAGS.shard, _environment()),
    )
    if outcome is None:
        return
    report(study, outcome)
    title = FLAGS.title or f"{Path(FLAGS.model).name}, {Path(FLAGS.text).name}"
    paths = removal_figures.draw(study, outcome, out, title)
    tables = [out / f"{name}.csv" for name in ("rows", "singles", "strategies", "advantage")]
    tables.append(out / "tables.md")
    tables[-1].write_text(removal_report.markdown(study, outcome))
    for path in [*tables, *paths]:
        say(f"wrote       {path}")
    if FLAGS.save_pruned:
        _save(loaded, outcome)


def _environment():
    import os

    return os.environ


def _study(loaded):
    """α, windows and strategies from the flags."""
    import convert
    from convert.parameters import open_parameters
    from jaxablate import removal_study, removals
    from jaxablate.text import read_documents

    strategy = removals.StrategySettings(
        kmax=FLAGS.kmax,
        strategies=tuple(FLAGS.strategies),
        order=FLAGS.order,
        boundary=FLAGS.boundary,
        draws=FLAGS.draws,
        seed=FLAGS.seed,
    )
    stride = FLAGS.seq_len if FLAGS.stride is None else FLAGS.stride
    batches = removals.window_batches(
        read_documents(FLAGS.text),
        loaded.tokenizer(),
        max_tokens=FLAGS.tokens,
        seq_len=FLAGS.seq_len,
        stride=stride,
        bos=FLAGS.bos,
        windows_per_batch=FLAGS.windows_per_part,
        vocab_size=loaded.config.vocab_size,
    )
    profile = alpha_profile.Settings(
        matrices=FLAGS.alpha_matrix,
        estimators=(FLAGS.alpha_estimator,),
        fraction=FLAGS.alpha_fraction,
        boundary=FLAGS.boundary,
        seed=FLAGS.seed,
    )
    fitter = alpha_profile.AlphaFitter(profile, convert.cache_directory() / "spectra")
    parameters = open_parameters(str(loaded.checkpoint.path))
    rows = [
        row
        for layer in range(loaded.config.num_layers)
        for row in fitter.rows(parameters, layer, FLAGS.alpha_matrix)
    ]
    return removal_study.Study(
        config=loaded.config,
        digest=loaded.digest,
        dtype=FLAGS.dtype,
        batches=batches,
        alphas=[row["alpha"] for row in rows],
        null=rows[0]["null_alpha"],
        strategy=strategy,
        component=FLAGS.component,
        exhaustive=FLAGS.exhaustive,
        estimator=FLAGS.estimator,
        label_draws=FLAGS.label_draws,
        constants={
            "seq_len": FLAGS.seq_len,
            "stride": stride,
            "bos": FLAGS.bos,
            "text_tokens": FLAGS.tokens,
            "alpha_matrix": FLAGS.alpha_matrix,
            "alpha_estimator": FLAGS.alpha_estimator,
            "alpha_fraction": FLAGS.alpha_fraction,
        },
    )


def _announce(num_sets: int, plan, operations: float) -> None:
    from jaxablate import estimate

    if FLAGS.estimator != "exact":
        passes = 1 + (FLAGS.label_draws if FLAGS.estimator == "second_order" else 0)
        say(
            f"plan        {num_sets} sets by {FLAGS.estimator}: {passes} backward passes for every "
            f"{FLAGS.windows_per_part} windows"
        )
        return
    seconds = operations / (0.5 * estimate.matmul_rate(FLAGS.dtype))
    say(
        f"plan        {num_sets} sets; {plan.block_evaluations} block evaluations "
        f"({plan.naive_block_evaluations} if each ran alone) for every {FLAGS.windows_per_part} "
        f"windows; about {estimate.duration(seconds)} in all"
    )


def report(study, outcome) -> None:
    """The tables on the terminal; every number is recomputed from the rows."""
    from jaxablate import rounding
    from jaxablate.scoring import format_perplexity

    scores = outcome.scores
    say(
        f"\nwhole model: perplexity {format_perplexity(scores.log_ppl, 4)} over {scores.tokens} "
        f"tokens in {len(scores.units.weights)} windows"
    )
    if FLAGS.dtype != "float32":
        say(rounding.describe(outcome.noise_floor, FLAGS.dtype))
    if FLAGS.estimator != "exact":
        say(
            f"all but the whole model by {FLAGS.estimator}: read the ranks, not the sizes"
            + ("; of whole layers this order's are poor" * (FLAGS.estimator == "first_order"))
        )
    say(f"\nα by {FLAGS.alpha_estimator} of {FLAGS.alpha_matrix}; each layer removed alone")
    say(_table(outcome.singles, ["layer", "zone", "alpha"]))
    rho = scores.rank_correlation(study.alphas, study.strategy.seed)
    say(
        f"Spearman ρ(α, ΔPPL of the single layer) = {rho.rho:.3f}, permutation p = "
        f"{rho.p_value:.4f}, {rho.num_points} layers"
    )
    say(
        f"\nstrategies; zone-aware order {study.strategy.order}, boundary {study.strategy.boundary}"
    )
    say(_table(outcome.strategies.sort_values(["k", "strategy"]), ["k", "strategy", "layers"]))
    for row in outcome.advantage.to_dict("records"):
        words = row["note"]
        if row["value"] == row["value"]:
            words = f"{row['value']:.2f}x [{row['low']:.2f}, {row['high']:.2f}] {row['note']}"
        say(f"Last-N / zone-aware, k = {row['k']}: {words}")


def _table(frame: pd.DataFrame, leading: list[str]) -> str:
    """ΔPPL and Δ log PPL with their ranges, beside the leading columns."""
    shown = frame[leading].copy()
    if "alpha" in shown:
        shown["alpha"] = shown["alpha"].map("{:.3f}".format)
    for name, words in (("delta", "ΔPPL"), ("delta_log", "Δ log PPL")):
        shown[words] = frame[name].map("{:.4g}".format)
        ends = zip(frame[f"{name}_low"], frame[f"{name}_high"])
        shown[f"{words} range"] = [
            f"[{low:.4g}, {high:.4g}]" if low == low else _no_interval() for low, high in ends
        ]
    if "range" in frame:
        shown["range is"] = frame["range"]
    return shown.to_string(index=False)


def _no_interval() -> str:
    return "too few windows" if FLAGS.estimator == "exact" else "estimated"


def _save(loaded, outcome) -> None:
    from convert.pruned import save_pruned
    from jaxablate.removals import parse_set

    sets = {(one.strategy, one.k): one.layers for one in outcome.chosen if one.draw == 0
            and not one.strategy.startswith("random")}  # fmt: skip
    wanted = FLAGS.pruned_set or f"zone_aware:{FLAGS.kmax}"
    layers = parse_set(wanted, loaded.config.num_layers, sets)
    paths = save_pruned(loaded.checkpoint, layers, FLAGS.component, Path(FLAGS.save_pruned))
    for path in paths:
        say(f"wrote       {path} (without {FLAGS.component} {', '.join(map(str, layers))})")


if __name__ == "__main__":
    define_flags()
    command_line.run(main)
