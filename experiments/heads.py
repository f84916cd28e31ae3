"""Query heads: Δ log-perplexity of silencing each, or of any masks over all heads.

    python experiments/heads.py
    python experiments/heads.py --model=DIR --text=FILE.txt --null=mean --max_tokens=8192
    python experiments/heads.py --masks=masks.npy        # [C, L, N], 1 keeps a head, 0 silences it
    python experiments/heads.py --estimator=second_order # all heads from 17 backward passes

Plain text by windows, each token scored once. A silenced head's output before W_O is zero, or with
--null=mean its mean output over the same text. Writes rows.parquet, rows.csv, heads.csv, run.json
and a layer x head map to --out. All 270 heads of the embedded model on 2,048 tokens take about
four minutes on 2 CPU cores.
"""

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pandas as pd
from absl import flags

from experiments import command_line, estimation
from experiments.command_line import say
from jaxablate import results
from jaxablate.curves import BLOCK_TOKENS
from jaxablate.errors import UserError

BASELINE = "baseline"
COLUMNS = {"layer": int, "head": int, "null": str, "mask": int}
FLAGS = flags.FLAGS


def define_flags() -> None:
    command_line.define_model_flags(out="out/heads")
    command_line.define_text_flags()
    flags.DEFINE_enum("null", "zero", ("zero", "mean"), "What a silenced head leaves.")
    flags.DEFINE_string("masks", None, "A .npy file of gates [C, L, N] instead of single heads.")
    estimation.define_flags(tolerance=False)
    flags.DEFINE_integer("part_size", 128, "Configurations written at a time.", lower_bound=1)


def main() -> None:
    device = command_line.find_device()
    loaded = command_line.LoadedModel(FLAGS.model)
    masks = _masks(loaded.config)
    names = _names(loaded.config, masks)
    batches = command_line.text_batches(loaded)
    settings = command_line.text_settings() | {"null": FLAGS.null, "dtype": FLAGS.dtype}
    settings |= {"block_tokens": BLOCK_TOKENS, "masks": _digest(masks)} | estimation.settings()
    with command_line.open_run("heads", loaded, device, settings, COLUMNS, "null") as run:
        parts = _plan(batches, names, loaded.config.num_layers)
        run.plan([part.spec for part in parts])
        if run.complete():
            say(f"the result is there already: {run.out / 'rows.parquet'}; drawing it again")
        else:
            _announce(loaded.config, masks, batches)
            _compute(run, parts, loaded, masks, names, batches, device.kind)
        if run.finish() is not None:
            report(run.out, run.read(), masks)


def _announce(config, masks: np.ndarray, batches) -> None:
    if estimation.estimator() == "exact":
        batches = [batch for _, batch in batches]
        command_line.announce_plan(config, _configurations(masks), batches)
    else:
        say(estimation.plan(len(masks), len(batches)))


def _masks(config) -> np.ndarray:
    """Gates [C, L, N]: of --masks, or one head silenced at a time."""
    shape = (config.num_layers, config.num_heads)
    if FLAGS.masks is None:
        count = shape[0] * shape[1]
        return (1 - np.eye(count, dtype=np.float32)).reshape(count, *shape)
    try:
        masks = np.load(Path(FLAGS.masks).expanduser(), allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"--masks={FLAGS.masks} cannot be read as a .npy array: {error}") from None
    numeric = isinstance(masks, np.ndarray) and masks.dtype.kind in "biuf"
    if not numeric or masks.ndim != 3 or masks.shape[1:] != shape or not len(masks):
        found = f"{masks.dtype} {masks.shape}" if isinstance(masks, np.ndarray) else "several"
        raise UserError(
            f"--masks={FLAGS.masks} holds {found}; this model needs numbers of shape [C, "
            f"{shape[0]}, {shape[1]}]: a gate per layer and query head (not KV head)"
        )
    if not np.isfinite(masks).all():
        raise UserError(f"--masks={FLAGS.masks} holds values that are not finite")
    return masks.astype(np.float32)


def _names(config, masks: np.ndarray) -> list[str]:
    """A configuration's name in the rows: L3Q5, or mask 17."""
    if FLAGS.masks is None:
        return [f"L{i}Q{j}" for i in range(config.num_layers) for j in range(config.num_heads)]
    return [f"mask {i}" for i in range(len(masks))]


def _digest(masks: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(masks, "<f4").tobytes()).hexdigest()


def _configurations(masks: np.ndarray) -> list:
    from jaxablate.edits import head_mask

    return [head_mask(mask, null=FLAGS.null) for mask in masks]


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the plan: masks (none: the baseline) on one batch of windows."""

    spec: results.PartSpec
    batch: int
    masks: range | None


def _plan(batches, names: list[str], num_layers: int) -> list[Part]:
    from jaxablate import rounding

    parts = []
    size = FLAGS.part_size
    for index, (document, batch) in enumerate(batches):
        inputs = {"rows": command_line.batch_digest(batch), "batch": index}
        common = (document.name, document.digest)
        references = (BASELINE, *rounding.configuration_names(FLAGS.dtype))
        baseline = results.PartSpec(*common, references, num_layers, inputs)
        parts.append(Part(baseline, index, None))
        for start in range(0, len(names), size):
            members = range(start, min(start + size, len(names)))
            keys = tuple(names[i] for i in members)
            cost = num_layers * len(keys)
            parts.append(Part(results.PartSpec(*common, keys, cost, inputs), index, members))
    return parts


def _compute(run, parts, loaded, masks, names, batches, device_kind) -> None:
    from jaxablate import rounding
    from jaxablate.head_outputs import mean_head_outputs
    from jaxablate.problem import Problem
    from jaxablate.sweep import Sweep

    configurations = _configurations(masks)
    model = loaded.model()
    mean = None
    if FLAGS.null == "mean" and run.missing():
        means = mean_head_outputs(model, [batch for _, batch in batches], FLAGS.dtype)
        mean = means.__getitem__
    progress = command_line.PartProgress(run)
    options = loaded.sweep_options(device_kind, on_progress=progress)
    engine: Sweep | None = None
    engine_index = -1
    estimated: np.ndarray | None = None
    by_spec = {(part.batch, part.spec.configurations): part for part in parts}
    for spec in run.pending():
        part = by_spec[spec.inputs["batch"], spec.configurations]
        index, members = part.batch, part.masks
        if engine is None or index != engine_index:
            engine = None  # frees the one before
            problem = Problem(batches[index][1], mean_output=mean)
            engine = Sweep(model, problem, options)
            engine_index, estimated = index, None
        progress.start(spec)
        if members is None:
            found = [_row(BASELINE, None, engine.baseline_nll, index, loaded.config)]
            if again := spec.configurations[1:]:
                repeats = rounding.repeats(engine, seed=FLAGS.seed)
                found += [_row(n, None, r, index, loaded.config) for n, r in zip(again, repeats)]
        elif estimation.estimator() == "exact":
            nll = engine.run([configurations[i] for i in members])
            found = [_row(names[i], i, line, index, loaded.config) for i, line in zip(members, nll)]
        else:
            if estimated is None:  # of all masks at once, so that parts do not depend on what
                estimated = _estimated_sums(engine, configurations)  # is there already
            found = [
                _row(names[i], i, engine.baseline_nll, index, loaded.config, estimated[i])
                for i in members
            ]
        run.write(spec, found)


def _estimated_sums(engine, configurations: list) -> np.ndarray:
    """NLL sum of every configuration, nats, from gradients at the baseline."""
    from jaxablate.estimates import estimate

    kind = estimation.estimator()
    found = estimate(engine, configurations, kind, draws=FLAGS.draws, seed=FLAGS.seed)
    return found.changes.sum(axis=1) + engine.baseline_nll.sum(dtype=np.float64)


def _row(
    name: str,
    mask: int | None,
    nll: np.ndarray,
    index: int,
    config,
    estimated_sum: float | None = None,
) -> dict:
    """A row from the NLL of all tokens, or from an estimated sum, which has no blocks."""
    from jaxablate.curves import block_sums

    blocks = block_sums(nll)
    single = mask is not None and FLAGS.masks is None
    return {
        "configuration": name,
        "question": f"batch {index}",
        "layer": mask // config.num_heads if single and mask is not None else None,
        "head": mask % config.num_heads if single and mask is not None else None,
        "mask": mask if not single else None,
        "scored_tokens": len(nll),
        "estimator": "exact" if estimated_sum is None else estimation.estimator(),
        "nll_sum": sum(blocks) if estimated_sum is None else float(estimated_sum),
        "block_nll": blocks if estimated_sum is None else [],
    }


def report(out: Path, rows: pd.DataFrame, masks: np.ndarray) -> None:
    """Ranked table and map, all from the rows."""
    from jaxablate import figures, rounding, scoring
    from jaxablate.table import comparison_table, sums_table, units_of_rows

    floor = rounding.noise_floor(rows, BASELINE)
    rows = rounding.without_repeats(rows)
    if (rows.estimator == "exact").all():
        units, keys = units_of_rows(rows, BASELINE)
        table = comparison_table(units, keys, seed=FLAGS.seed)
    else:
        table = sums_table(rows, BASELINE)
    about = rows.drop_duplicates("configuration").set_index("configuration")
    columns = ["layer", "head"] if FLAGS.masks is None else ["mask"]
    table = table.join(about[[*columns, "estimator"]], on="configuration")
    base = table.log_ppl[0]
    say(
        f"baseline    log-perplexity {base:.4f} (perplexity {scoring.format_perplexity(base)}) "
        f"on {table.scored_tokens[0]} tokens"
    )
    ranked = table[1:].sort_values("delta_log_ppl", ascending=False, ignore_index=True)
    if FLAGS.dtype != "float32":
        ranked["noise_floor"] = floor
        say(rounding.describe(floor, FLAGS.dtype))
    ranked.to_csv(out / "heads.csv", index=False)
    shown = ranked[["configuration", "log_ppl", "ppl", "delta_log_ppl", "low", "high"]]
    if estimation.estimator() != "exact":
        shown = shown.drop(columns=["low", "high"])
        say(f"Δ estimated by {estimation.estimator()}: without intervals, small ones best")
    say(shown.head(30).to_string(index=False, float_format=lambda x: f"{x:.5g}"))
    if len(shown) > 30:
        say(f"(30 largest of {len(shown)}; all in heads.csv)")
    values = table.delta_log_ppl.to_numpy()[1:]
    label = f"Δ log(perplexity), null {FLAGS.null}"
    if estimation.estimator() != "exact":
        label += f", estimated ({estimation.estimator().replace('_', ' ')})"
    if FLAGS.masks is None:
        values = values.reshape(masks.shape[1:])
    else:
        values = _marginal(values, masks)
        label = "mean Δ log(perplexity) of masks without the head minus with it"
    title = f"Query heads ({Path(FLAGS.model).name}; {Path(FLAGS.text).name})"
    figure = figures.head_map_figure([("", values)], "query head", title, label)
    paths = figures.save(figure, out / "figures", "heads")
    for path in [out / "rows.parquet", out / "rows.csv", out / "heads.csv", *paths]:
        say(f"wrote       {path}")


def _marginal(delta: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """Mean Δ over the masks that silence a head, minus over those that keep it; NaN if none."""
    off = (masks == 0).astype(float)
    on = 1 - off
    with np.errstate(invalid="ignore", divide="ignore"):
        without = np.einsum("c,cln->ln", delta, off) / off.sum(axis=0)
        return without - np.einsum("c,cln->ln", delta, on) / on.sum(axis=0)


if __name__ == "__main__":
    define_flags()
    command_line.run(main)
