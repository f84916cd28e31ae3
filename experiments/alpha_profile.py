"""α of weight matrices over layers, and over training: one bar chart, one layer x step map.

    python experiments/alpha_profile.py --model=smollm2-135m-instruct --out=out/alpha
    python experiments/alpha_profile.py --model=out/tiny/hf/step000512 --matrices=q,k,v,o,mlp
    python experiments/alpha_profile.py --model=EleutherAI/pythia-160m \\
        --revisions=step1000,step16000,step143000
    python experiments/alpha_profile.py --model=out/tiny/hf   (every step in it)

α is a power-law exponent of a matrix's singular values: by rank_slope (over the top half of the
ranks), hill or ml (of the density of σ², on which scale high and low are swapped). Every table and
figure names its estimator and shows α of a Gaussian matrix of the same shape. Reads only the
matrices it needs; the 30 W_Q of SmolLM2 take a second. Rows: OUT/rows.csv, OUT/rows.parquet.
"""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

import convert
from convert.parameters import Parameters, open_parameters
from jaxablate import profiles, pruning, results, spectra, spectra_figures
from jaxablate.errors import UserError
from jaxablate.spectra import AlphaFit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What α depends on, apart from the weights."""

    matrices: str = "q"
    per_head: bool = False
    estimators: tuple[str, ...] = ("rank_slope",)
    fraction: float = 0.5
    svd_dtype: str = "float64"
    boundary: int = 2
    null_draws: int = 3
    seed: int = 0


class AlphaFitter:
    """α of matrices and of their Gaussian nulls, singular values cached in `cache_dir`."""

    def __init__(self, settings: Settings, cache_dir: Path | None):
        self.settings, self.cache_dir = settings, cache_dir
        self._nulls: dict[tuple[tuple[int, ...], str], AlphaFit] = {}

    def rows(self, parameters: Parameters, layer: int, matrix: str) -> list[dict[str, Any]]:
        """Rows of one layer's matrix: one per head (or one), and per estimator."""
        settings, found = self.settings, []
        zone = spectra.zones(parameters.config.num_layers, settings.boundary)[layer]
        for which in profiles.layer_matrices(parameters.read, layer, matrix, settings.per_head):
            sigma = spectra.cached_singular_values(
                which.values, self.cache_dir, dtype=settings.svd_dtype
            )
            digest = hashlib.sha256(np.ascontiguousarray(which.values).tobytes()).hexdigest()
            for estimator in settings.estimators:
                fit = spectra.fit_alpha(sigma, estimator, fraction=settings.fraction)
                null = self.null(which.values.shape, estimator)
                found.append(profiles.fit_row(fit, null, which, layer, zone, digest))
        return found

    def site_rows(self, parameters: Parameters, site: tuple[int, str]) -> list[dict[str, Any]]:
        """`rows` of a (layer, matrix)."""
        return self.rows(parameters, *site)

    def null(self, shape: tuple[int, ...], estimator: str) -> AlphaFit:
        """The Gaussian null of a shape: the mean α of `null_draws` matrices."""
        key = (shape, estimator)
        if key not in self._nulls:
            fits = [
                spectra.fit_alpha(
                    spectra.gaussian_singular_values(
                        (shape[0], shape[1]),
                        seed=self.settings.seed + draw,
                        cache_dir=self.cache_dir,
                        dtype=self.settings.svd_dtype,
                    ),
                    estimator,
                    fraction=self.settings.fraction,
                )
                for draw in range(self.settings.null_draws)
            ]
            mean = float(np.mean([fit.alpha for fit in fits]))
            self._nulls[key] = dataclasses.replace(fits[0], alpha=mean)
        return self._nulls[key]


def run(
    out: Path,
    specs: Sequence[tuple[str, str | None]],
    settings: Settings,
    *,
    cache_dir: Path | None = None,
    resolved_flags: dict[str, Any] | None = None,
) -> Any:
    """α of every checkpoint's matrices as rows in `out`; returns them as a DataFrame.

    Args:
      out: directory of the results.
      specs: (model, revision or None) of each checkpoint, in the order of the map.
      settings: see Settings.
      cache_dir: where singular values are kept; None keeps none.
      resolved_flags: for run.json.

    Raises:
      UserError: a model that is not there, models of different shapes, a matrix or estimator that
        does not exist.
    """
    opened = [open_parameters(spec, revision) for spec, revision in specs]
    names = _distinct_names(specs, opened)
    matrices = profiles.parse_matrices(settings.matrices, opened[0].config, settings.per_head)
    for estimator in settings.estimators:
        if estimator not in spectra.ESTIMATORS:
            raise UserError(
                f"estimator is {estimator!r}; choose from {', '.join(spectra.ESTIMATORS)}"
            )
    if len({(one.config.family, one.config.num_layers) for one in opened}) > 1:
        shapes = [
            f"{name}: {one.config.family} of {one.config.num_layers} layers"
            for name, one in zip(names, opened)
        ]
        raise UserError(f"a map needs one model, these are different models ({', '.join(shapes)})")
    fitter = AlphaFitter(settings, cache_dir)
    digest = hashlib.sha256("".join(one.digest for one in opened).encode()).hexdigest()
    with results.Run(
        out,
        experiment="alpha_profile",
        settings={**dataclasses.asdict(settings), "matrices": matrices},
        flags=resolved_flags or {},
        model_digest=digest,
        columns=profiles.COLUMNS,
        constants={"dtype": settings.svd_dtype, "seed": settings.seed, "method": "lapack"},
        device="host",
        scored=False,
        label="alpha",
        unit="matrices",
    ) as record:
        layers = range(opened[0].config.num_layers)
        sites = [(layer, matrix) for layer in layers for matrix in matrices]
        parts = [_part(name, one, sites, settings.per_head) for name, one in zip(names, opened)]
        record.plan(parts)
        places = dict(zip(names, opened))
        for part in record.pending():
            found: list[dict[str, Any]] = []
            rows = functools.partial(fitter.site_rows, places[part.document])
            for done, of_site in enumerate(spectra.in_threads(rows, sites), 1):
                found += of_site
                record.progress.advance(part.cost / len(sites) if done < len(sites) else 0)
            record.write(part, found)
        record.finish()
        return record.read()


def draw(out: Path, frame: Any, settings: Settings, k: int | None, order: str) -> list[Path]:
    """Every figure of the rows: a chart per matrix and estimator, and a map over checkpoints."""
    checkpoints = list(dict.fromkeys(frame["document"]))
    paths: list[Path] = []
    for (matrix, estimator), chosen in frame.groupby(["matrix", "estimator"], sort=False):
        words = f"{profiles.LABELS[matrix]} α ({estimator.replace('_', ' ')})"
        last = chosen[chosen["document"] == checkpoints[-1]].sort_values(["layer", "head"])
        if settings.per_head:
            table = last.pivot(index="layer", columns="head", values="alpha").to_numpy()
            figure = spectra_figures.head_map(table, f"{checkpoints[-1]}: α per head", words)
            paths += spectra_figures.save(figure, out / "figures", f"heads_{matrix}_{estimator}")
            continue
        bars = profile_bars(last["alpha"].tolist(), float(last["null_alpha"].iloc[0]),
                            settings.boundary, k, order, words)  # fmt: skip
        figure = spectra_figures.alpha_profile(bars, f"α profile, {checkpoints[-1]}")
        paths += spectra_figures.save(figure, out / "figures", f"profile_{matrix}_{estimator}")
        if len(checkpoints) > 1:
            table = chosen.pivot(index="layer", columns="document", values="alpha")[checkpoints]
            figure = spectra_figures.alpha_map(
                table.to_numpy(), checkpoints, "α over training", words
            )
            paths += spectra_figures.save(figure, out / "figures", f"map_{matrix}_{estimator}")
    return [path for path in paths if path.suffix == ".png"]


def profile_bars(
    alphas: list[float], null: float, boundary: int, k: int | None, order: str, ylabel: str
) -> spectra_figures.ProfileBars:
    """Bars with the k layers that zone-aware removal would take marked as pruned.

    k None: 4, or all interior layers where they are fewer.
    """
    num_layers = len(alphas)
    if k is None:
        k = min(4, len(pruning.interior_layers(num_layers, boundary)))
    ranked = pruning.removal_order(order, num_layers, alphas=alphas)
    pruned = pruning.zone_aware(ranked, k, boundary=boundary)
    classes = [
        spectra_figures.PRUNED if layer in pruned else zone
        for layer, zone in enumerate(spectra.zones(num_layers, boundary))
    ]
    return spectra_figures.ProfileBars(alphas=alphas, null=null, classes=classes, ylabel=ylabel)


def print_table(frame: Any) -> None:
    """One line per matrix of the last checkpoint, its estimator and range beside it."""
    last = frame[frame["document"] == frame["document"].iloc[-1]]
    print(f"\nα of {last['document'].iloc[0]}")
    print("matrix    estimator   layer head  zone      α       null    fit          ranks")
    for _, row in last.sort_values(["matrix", "estimator", "layer", "head"]).iterrows():
        head = "" if np.isnan(float(row["head"] or 0)) or row["head"] is None else row["head"]
        goodness = f"{row['goodness_name'].upper()} {row['goodness']:.3f}"
        print(
            f"{row['matrix']:<9} {row['estimator']:<11} {row['layer']:>5} {head!s:>4}  "
            f"{row['zone']:<9} {row['alpha']:<7.4f} {row['null_alpha']:<7.4f} {goodness:<12} "
            f"{row['first_rank']}-{row['last_rank']} of {row['num_values']}"
        )


def _part(
    name: str, parameters: Parameters, sites: list[tuple[int, str]], per_head: bool
) -> results.PartSpec:
    keys = []
    for layer, matrix in sites:
        config = parameters.config
        count = config.num_kv_heads if matrix in ("k", "v") else config.num_heads
        heads: Sequence[int | None] = range(count) if per_head else [None]
        keys += [profiles.matrix_key(layer, matrix, head) for head in heads]
    return results.PartSpec(name, parameters.digest, tuple(keys), cost=float(len(keys)))


def _distinct_names(
    specs: Sequence[tuple[str, str | None]], opened: Sequence[Parameters]
) -> list[str]:
    """Short names of the checkpoints; the whole specification where two would be the same."""
    names = [one.name for one in opened]
    if len(set(names)) < len(names):
        names = [revision or spec for spec, revision in specs]
    if len(set(names)) < len(names):
        raise UserError(f"a checkpoint is listed twice: {', '.join(names)}")
    return names


def parse_specs(models: str, revisions: str | None) -> list[tuple[str, str | None]]:
    """--model and --revisions as (model, revision) pairs.

    Raises:
      UserError: no model, or revisions of several models.
    """
    listed = [
        model for item in re.split(r"[,\s]+", models.strip()) if item for model in _expand(item)
    ]
    if not listed:
        raise UserError("--model is empty; name a model, or several separated by commas")
    if not revisions:
        return [(item, None) for item in listed]
    if len(listed) > 1:
        raise UserError(f"--revisions are of one hub name, but --model lists {len(listed)}")
    return [(listed[0], item) for item in re.split(r"[,\s]+", revisions.strip()) if item]


def _expand(item: str) -> list[str]:
    """The models in a directory of models, by name; anything else as it is."""
    path, marks = Path(item).expanduser(), ("config.json", "checkpoint.json")
    if not path.is_dir() or any((path / mark).is_file() for mark in marks):
        return [item]
    inside = sorted(child for child in path.iterdir() if not child.name.startswith("."))
    return [str(c) for c in inside if any((c / m).is_file() for m in marks)] or [item]


def define_flags() -> None:
    """The flags; called by the program only, so that a notebook may import this module."""
    default = Settings()
    flags.DEFINE_string(
        "model",
        "smollm2-135m-instruct",
        "Model, or several separated by commas for a map over training: a registered name, a "
        "Hugging Face directory, a hub name, a .gguf file, a checkpoint, or a directory of models.",
    )
    flags.DEFINE_string(
        "revisions", None, "Revisions of a hub name, such as step1000,step143000, for a map."
    )
    flags.DEFINE_string("matrices", default.matrices, "From q, k, v, o, mlp, up, down, gate.")
    flags.DEFINE_bool("per_head", default.per_head, "Fit every head's slice on its own.")
    flags.DEFINE_list(
        "estimators", list(default.estimators), f"From {', '.join(spectra.ESTIMATORS)}."
    )
    flags.DEFINE_float(
        "fraction", default.fraction, "rank_slope: share of the ranks, from the top."
    )
    flags.DEFINE_enum("svd_dtype", default.svd_dtype, ["float64", "float32"], "Of the SVD.")
    flags.DEFINE_integer("boundary", default.boundary, "Layers at either end kept out of pruning.")
    flags.DEFINE_integer("k", None, "Layers shown as pruned (default: 4, or all the interior).")
    flags.DEFINE_enum(
        "order", "highest_alpha", ["highest_alpha", "lowest_alpha"], "Which are pruned first."
    )
    flags.DEFINE_integer("null_draws", default.null_draws, "Gaussian matrices in the null's mean.")
    flags.DEFINE_integer("seed", default.seed, "Of the null.")
    flags.DEFINE_string("out", "out/alpha_profile", "Directory of the results; made if absent.")


def main() -> None:
    given = flags.FLAGS
    settings = Settings(
        matrices=given.matrices,
        per_head=given.per_head,
        estimators=tuple(given.estimators),
        fraction=given.fraction,
        svd_dtype=given.svd_dtype,
        boundary=given.boundary,
        null_draws=given.null_draws,
        seed=given.seed,
    )
    if settings.null_draws < 1:
        raise UserError(f"--null_draws is {settings.null_draws}; at least 1 is needed")
    print("device      host CPU: SVD by LAPACK, no accelerator is used", flush=True)
    out = Path(given.out).expanduser().resolve()
    frame = run(
        out,
        parse_specs(given.model, given.revisions),
        settings,
        cache_dir=convert.cache_directory() / "spectra",
        resolved_flags=command_line.resolved_flags(),
    )
    print_table(frame)
    paths = draw(out, frame, settings, given.k, given.order)
    print(f"\nrows     {out / 'rows.csv'}")
    for path in paths:
        print(f"figure   {path}")


if __name__ == "__main__":
    from experiments import command_line

    define_flags()
    command_line.run(main)
