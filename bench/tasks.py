"""What is benchmarked: each task prepares both sides, checks that they agree, and times them."""

import dataclasses
import functools
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import convert
from bench.measure import Row, Timing, interleaved, matmul_rate
from jaxablate import estimate, influence, steps
from jaxablate.attention import LayerPrefix
from jaxablate.compaction import num_kept
from jaxablate.config import TransformerConfig
from jaxablate.edits import head_mask, remove_blocks
from jaxablate.model import Transformer
from jaxablate.nodes import chunks
from jaxablate.placement import OneDevice
from jaxablate.plan import Plan, plan_sweep
from jaxablate.problem import Problem
from jaxablate.rope import rope_tables
from jaxablate.side_by_side import side_by_side
from jaxablate.sweep import Sweep, SweepOptions
from jaxablate.text import Batch, load_tokenizer, plain_case, read_documents
from jaxablate.windows import windows

OPTIONS = SweepOptions()
INFLUENCE_HEADS = [(0, 0), (3, 1), (7, 2), (10, 0), (13, 0), (16, 1), (22, 2), (28, 1)]
DRAWS = 16
RATIOS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)


@dataclasses.dataclass
class Bench:
    """What the tasks share."""

    quick: bool
    scratch: Path

    def __post_init__(self) -> None:
        self.repeats = 3 if self.quick else 5
        self.checkpoint = convert.resolve("smollm2-135m-instruct")
        self.model = self.checkpoint.restore()
        self.config = self.checkpoint.config
        self.tokenizer = load_tokenizer(self.checkpoint.tokenizer_dir)
        self.rate = matmul_rate()
        self._torch = None

    def torch_model(self):
        """SmolLM2 in PyTorch, from our own export: the same weights."""
        if self._torch is None:
            from bench import rivals

            directory = self.scratch / "smollm2"
            convert.export_hf(
                self.config, self.checkpoint, directory, self.checkpoint.tokenizer_dir
            )
            self._torch = rivals.load(directory)
        return self._torch


def agreement(
    what: str, tolerance: float, every: int = 1, rival: str = "rival"
) -> Callable[[dict[str, np.ndarray]], None]:
    """A check for `interleaved`: stop if ours, or every n-th of it, and the rival's differ."""

    def check(results: dict[str, np.ndarray]) -> None:
        worst = float(np.abs(results["ours"][::every] - results[rival]).max())
        if not worst <= tolerance:
            raise SystemExit(
                f"error: {what}: ours and PyTorch differ by {worst:.3g} > {tolerance:g}"
            )

    return check


def block_rates(bench: Bench) -> list[Row]:
    """One block for chunk after chunk of states, as in a sweep, against the rate at that moment.

    As many chunks as take about 0.1 s, as long as the matrix product beside them runs.
    """
    rows = []
    block, config, place = bench.model.block(10), bench.config, OneDevice()
    shapes = [(8, 128), (32, 128), (8, 256), (32, 256), (8, 512), (16, 512)]
    shape = (config.num_kv_heads, 128, config.head_dim)
    prefix = LayerPrefix(jnp.ones(shape), jnp.ones(shape), jnp.zeros(shape[:2]))
    for states, length in shapes[:: 2 if bench.quick else 1]:
        positions = jnp.arange(1500, 1500 + length, dtype=jnp.int32).reshape(1, length)
        rope = rope_tables(config, positions)
        x = jax.random.normal(jax.random.key(0), (states, 1, length, config.model_dim))
        step = functools.partial(place.plain_step, block, rope=rope, prefix=prefix)
        flops = estimate.block_flops(config, states * length, (length + 1) // 2 + 128)
        inside = OPTIONS.chunk_tokens // length

        def through(times: int, x=x, step=step, inside=inside) -> float:
            live = list(range(len(x))) * times
            parts = [x[jnp.asarray(c)] for c in chunks(live, inside, 1, place.at_once)]
            jax.block_until_ready(parts)
            start = time.perf_counter()
            for result in side_by_side(step, parts, place.at_once):
                result.block_until_ready()
            return (time.perf_counter() - start) / times

        passes = max(1, round(0.1 * bench.rate() / flops))
        first = through(passes)
        ratios, times = [], []
        for _ in range(4 * bench.repeats):
            before = bench.rate()
            times.append(through(passes))
            rate = (before + bench.rate()) / 2
            ratios.append(flops / rate / times[-1])
        share = float(np.median(ratios))
        timing = Timing(float(np.median(times)), min(times), max(times), first)
        bar = 0.75 if length == 512 else 0.8
        rows.append(
            Row(
                f"block, {states} states x {length} tokens",
                timing,
                floor=share * timing.median,
                note=f"bar {bar} of the floor; {flops / timing.median / 1e9:.0f} GFLOP/s",
            )
        )
    return rows


def influence_sweep(bench: Bench) -> list[Row]:
    """8 heads x 8 ratios behind an article of 1,500 tokens, 256 scored; all heads by estimates."""
    from bench import rivals
    from jaxablate.estimates import estimate as estimated

    article = 600 if bench.quick else 1500
    heads = INFLUENCE_HEADS[::2] if bench.quick else INFLUENCE_HEADS
    document = read_documents("pydoc", limit=1)[0]
    case = plain_case(document, bench.tokenizer, article_tokens=article, scored_tokens=256)
    base = num_kept(0.05, case.article_tokens)
    grid = [num_kept(ratio, case.article_tokens) for ratio in RATIOS]
    points = [(head, count) for head in heads for count in grid]
    full = max(grid)
    every = [
        (i, j) for i in range(bench.config.num_layers) for j in range(bench.config.num_kv_heads)
    ]
    context = influence.compact_context(
        bench.model, case, influence.influence_counts(every, every, base, grid)
    )
    problem = influence.influence_problem(context, case, base)
    configurations = [influence.head_configuration(h, count, base) for h, count in points]

    def ours() -> np.ndarray:
        return Sweep(bench.model, problem, OPTIONS).run(configurations)

    start, _ = context.article
    orders = {
        (layer, head): start + context.heads[layer, head, full].indices
        for layer in range(bench.config.num_layers)
        for head in range(bench.config.num_kv_heads)
    }
    batch = case.batch()
    rival = rivals.InfluenceRival(
        bench.torch_model(), context.keys, context.values, range(start), orders, base,
        batch.inputs[0], batch.positions[0],
    )  # fmt: skip
    targets = batch.targets[0]
    loop_points = points[:: len(points) // 4]
    whole_map = [influence.head_configuration(h, n, base) for h in every for n in grid]
    baseline = Sweep(bench.model, problem, OPTIONS)
    timings = interleaved(
        {
            "ours": ours,
            "batched": lambda: rival.run(points, targets, 16),
            "loop": lambda: rival.run(loop_points, targets, 1),
            "first order": lambda: estimated(baseline, whole_map, "first_order"),
            "second order": lambda: estimated(baseline, whole_map, "second_order", draws=DRAWS),
        },
        1 if bench.quick else 2,
        agreement("influence", 1e-3, rival="batched"),
    )
    plan = baseline.plan(configurations)
    # Every state is scored once, and blocks take most of the time: exact is scaled by them.
    times = baseline.plan(whole_map).block_evaluations / plan.block_evaluations
    ours_scaled = _times(timings["ours"], times)
    floor = sweep_floor(bench, plan, 256, 128 + base)
    # One forward pass, then a backward pass of the activations each, of as many operations.
    once = sweep_floor(bench, baseline.plan([]), 256, 128 + base)
    passes = {"first order": 2, "second order": 2 + DRAWS}
    loop = _times(timings["loop"], len(points) / len(loop_points))
    name = f"exact influence sweep, {len(points)} configurations, article {article}, 256 scored"
    state = problem.batch.inputs.size * bench.config.model_dim * 4
    return [
        Row(name, timings["ours"], timings["batched"], "PyTorch, batches of 16", 2.5, floor,
            f"bar 0.70 of the floor; {plan.block_evaluations} of "
            f"{plan.naive_block_evaluations} block evaluations; {state / 2**20:.2f} MiB per state"),
        Row(name, timings["ours"], loop, f"PyTorch, one at a time ({len(loop_points)} timed)", 4.0),
        *[
            Row(f"{kind}, all {len(every)} heads x {len(grid)} ratios", timings[kind], ours_scaled,
                f"ours, exact (x {times:.1f} by block evaluations)", bar, passes[kind] * once)
            for kind, bar in (("first order", 50.0), ("second order", 8.0))
        ],
    ]  # fmt: skip


def _times(timing: Timing, factor: float) -> Timing:
    return Timing(
        timing.median * factor, timing.low * factor, timing.high * factor, timing.first * factor
    )


def sweep_floor(
    bench: Bench, plan: Plan, tokens: int, seen: int, config: TransformerConfig | None = None
) -> float:
    """Seconds of a sweep's operations at the matrix-product rate of this moment."""
    flops = estimate.sweep_flops(config or bench.config, plan, tokens, seen, tokens)
    return flops / float(np.mean([bench.rate() for _ in range(5)]))


def text_problem(bench: Bench, tokens: int, seq_len: int) -> tuple[Batch, Problem]:
    ids = bench.tokenizer.encode_start(read_documents("pydoc", limit=1)[0].text, tokens)[:tokens]
    batch = windows(ids, seq_len, seq_len, None)
    return batch, Problem(batch)


def head_gates(bench: Bench) -> list[Row]:
    """Every query head silenced, one at a time, on 256 tokens."""
    from bench import rivals

    layers, heads = bench.config.num_layers, bench.config.num_heads
    batch, problem = text_problem(bench, 257, 256)
    gates = (1 - np.eye(layers * heads, dtype=np.float32)).reshape(-1, layers, heads)
    gates = gates[:: 6 if bench.quick else 1]
    configurations = [head_mask(gate) for gate in gates]
    rival = rivals.TextRival(bench.torch_model(), batch.inputs, batch.targets)
    every = max(1, len(gates) // 27)
    sample = gates[::every]

    def ours() -> np.ndarray:
        return Sweep(bench.model, problem, OPTIONS).run(configurations).sum(axis=1)

    timings = interleaved(
        {"ours": ours, "rival": lambda: rival.gates(sample, 16)},
        1,
        agreement("gates", 0.05, every),
    )
    theirs = _times(timings["rival"], len(gates) / len(sample))
    plan = plan_sweep(configurations, layers, 10**9)
    floor = sweep_floor(bench, plan, 256, 128)
    name = f"silence each of {len(gates)} query heads, 256 tokens"
    rival_name = f"PyTorch, batches of 16 ({len(sample)} timed)"
    return [Row(name, timings["ours"], theirs, rival_name, None, floor)]


def tiny_neox() -> TransformerConfig:
    return TransformerConfig(
        family="gpt_neox", num_layers=12, model_dim=128, mlp_dim=512, num_heads=4,
        num_kv_heads=4, head_dim=32, vocab_size=1024, norm="layer", norm_eps=1e-5, mlp="gelu",
        qkv_bias=True, out_bias=True, mlp_bias=True, parallel_residual=True, rotary_dim=8,
        rope_theta=10000.0, tie_embeddings=False, max_positions=512,
    )  # fmt: skip


def random_params(config: TransformerConfig) -> dict:
    from jaxablate.checkpoint import nested
    from jaxablate.config import param_shapes

    rng = np.random.default_rng(0)
    flat = {}
    for path, shape in param_shapes(config).items():
        scale = 1.0 if path.endswith("scale") else 0.0
        flat[path] = (scale + 0.05 * rng.standard_normal(shape)).astype(np.float32)
    return nested(flat)


def removal_task(num_windows: int, most: int) -> tuple[dict, Transformer, Batch, list[tuple]]:
    """Random parameters of the small GPT-NeoX and the model, windows of 256, sets of layers."""
    config = tiny_neox()
    params = random_params(config)
    model = Transformer.from_params(config, jax.tree.map(jnp.asarray, params))
    ids = np.random.default_rng(0).integers(0, config.vocab_size, num_windows * 256 + 1)
    batch = windows(ids.astype(np.int32), 256, 256, None)
    sets = [s for k in range(1, most + 1) for s in itertools.combinations(range(12), k)]
    return params, model, batch, sets


class Unscored(Sweep):
    """A sweep that scores only its baseline: the time of the blocks alone."""

    def _nll(self, x: jax.Array) -> jax.Array:
        if x is self.trunk[-1]:
            return super()._nll(x)
        return jnp.zeros((x.shape[0], len(self._scored)))


def removal_sets(bench: Bench) -> list[Row]:
    """All 793 sets of up to 4 of 12 layers of a small GPT-NeoX; each set alone in our blocks."""
    from bench import rivals

    most = 2 if bench.quick else 4
    params, model, batch, sets = removal_task(4, most)
    directory = bench.scratch / "neox"
    convert.export_hf(model.config, params, directory)
    torch_model = rivals.load(directory)
    problem = Problem(batch)
    configurations = [remove_blocks(s) for s in sets]
    rival = rivals.TextRival(torch_model, batch.inputs, batch.targets)
    scoring: list[float] = []

    def ours() -> np.ndarray:
        return Sweep(model, problem, OPTIONS).run(configurations).sum(axis=1)

    def alone() -> np.ndarray:
        engine = Sweep(model, problem, OPTIONS)
        seconds, found = 0.0, []
        for removed in sets:
            x = engine.trunk[0]
            for layer in sorted(set(range(12)) - set(removed)):
                x = steps.plain_step(model.block(layer), x, engine.rope, None)
            x.block_until_ready()
            start = time.perf_counter()
            found.append(engine.score(x)[0])
            seconds += time.perf_counter() - start
        scoring.append(seconds)
        return np.stack(found).sum(axis=1)

    timings = interleaved(
        {
            "ours": ours,
            "rival": lambda: rival.removal_sets(sets),
            "alone": alone,
            "blocks": lambda: Unscored(model, problem, OPTIONS).run(configurations),
        },
        1 if bench.quick else 2,
        agreement("removal sets", 0.5),
    )
    rest = timings["alone"].median - float(np.median(scoring[1:]))

    plan = plan_sweep(configurations, 12, 10**9)
    name = f"all {len(sets)} sets of up to {most} of 12 layers, small GPT-NeoX, 1,024 tokens"
    note = f"{plan.block_evaluations} of {plan.naive_block_evaluations} block evaluations"
    lone = "each set alone, same compiled block"
    blocks = timings["blocks"], Timing(rest, rest, rest, rest)
    floor = sweep_floor(bench, plan, 1024, 128, model.config)
    return [
        Row(name, timings["ours"], timings["rival"], "PyTorch, windows batched", 3.0, floor, note),
        Row(name, timings["ours"], timings["alone"], lone, 2.5),
        Row(f"{name}: blocks alone", *blocks, lone, 3.5, None, "the time without scoring"),
    ]


def single_removals(bench: Bench) -> list[Row]:
    """Each of SmolLM2's layers removed, on 512 tokens."""
    from bench import rivals

    batch, problem = text_problem(bench, 513, 256)
    sets = [(layer,) for layer in range(0, bench.config.num_layers, 5 if bench.quick else 1)]
    configurations = [remove_blocks(s) for s in sets]
    rival = rivals.TextRival(bench.torch_model(), batch.inputs, batch.targets)

    def ours() -> np.ndarray:
        return Sweep(bench.model, problem, OPTIONS).run(configurations).sum(axis=1)

    timings = interleaved(
        {"ours": ours, "rival": lambda: rival.removal_sets(sets)},
        1,
        agreement("single removals", 0.5),
    )
    plan = plan_sweep(configurations, bench.config.num_layers, 10**9)
    floor = sweep_floor(bench, plan, 512, 128)
    name = f"each of {len(sets)} layers of SmolLM2 removed, 512 tokens"
    return [Row(name, timings["ours"], timings["rival"], "PyTorch, windows batched", None, floor)]


def alpha(bench: Bench) -> list[Row]:
    """α of every W_Q of SmolLM2: maximum likelihood, as WeightWatcher computes it."""
    from jaxablate import spectra

    layers = range(0, bench.config.num_layers, 5 if bench.quick else 1)
    matrices = [
        np.asarray(bench.checkpoint.read(f"blocks/{i}/attn/q/kernel"), np.float32).reshape(
            bench.config.model_dim, -1
        )
        for i in layers
    ]

    def one(matrix: np.ndarray) -> float:
        return spectra.fit_alpha(spectra.singular_values(matrix), "ml").alpha

    def ours() -> list[float]:
        return list(spectra.in_threads(one, matrices))

    def lapack() -> list[np.ndarray]:
        return list(spectra.in_threads(lambda m: np.linalg.eigvalsh(m @ m.T), wide))

    wide = [matrix.astype(np.float64) for matrix in matrices]

    name = f"α (maximum likelihood) of {len(matrices)} W_Q of SmolLM2"
    try:
        import torch
        import weightwatcher
    except ImportError as error:
        timing = interleaved({"ours": ours}, 3)["ours"]
        return [Row(name, timing, rival_name="WeightWatcher absent", note=str(error)[:60])]

    module = torch.nn.Sequential(
        *[torch.nn.Linear(*matrix.shape, bias=False) for matrix in matrices]
    )
    for linear, matrix in zip(module, matrices):
        linear.weight.data = torch.from_numpy(np.ascontiguousarray(matrix.T))

    def theirs() -> list[float]:
        watcher = weightwatcher.WeightWatcher(model=module)
        return list(watcher.analyze(min_evals=10).alpha)

    sides = {"ours": ours, "theirs": theirs, "lapack": lapack}
    # One side's threads may wait spinning for a while: let them sleep before the next begins.
    timings = interleaved(sides, 3, before=lambda: time.sleep(0.3))
    worst = np.abs(np.asarray(ours()) - np.asarray(theirs())).max()
    return [
        Row(name, timings["ours"], timings["theirs"], "WeightWatcher", 5.0,
            timings["lapack"].median, f"largest difference of an α {worst:.2g}",
            "Gram matrices and LAPACK's eigenvalues")
    ]  # fmt: skip


def conversion(bench: Bench) -> list[Row]:
    """Hugging Face directory to checkpoint, against transformers' loading and saving."""
    rows = [_conversion_row(bench, "SmolLM2 (float32, 0.54 GB)", _smollm2_directory(bench))]
    free = shutil.disk_usage(bench.scratch).free
    if not bench.quick and free > 12e9:
        directory = bench.scratch / "random-1b"
        run_python(["bench/make_random_checkpoint.py", "--size=1b", f"--out={directory}"])
        rows.append(
            _conversion_row(bench, "random 1.1-billion Llama (bfloat16, 2.2 GB)", directory)
        )
        shutil.rmtree(directory)
    return rows


def _smollm2_directory(bench: Bench) -> Path:
    bench.torch_model()
    return bench.scratch / "smollm2"


_TRANSFORMERS = """
import sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
model.save_pretrained(sys.argv[2])
"""


def _conversion_row(bench: Bench, what: str, source: Path) -> Row:
    target = bench.scratch / "converted"
    programs = {
        "ours": ["-m", "convert", str(source), str(target)],
        "theirs": ["-c", _TRANSFORMERS, str(source), str(target)],
    }
    peaks: dict[str, float] = {}

    def run(name: str) -> None:
        peaks[name] = max(peaks.get(name, 0.0), run_python(programs[name]))

    sides = {name: functools.partial(run, name) for name in programs}
    copy = functools.partial(shutil.copytree, source, target)
    timings = interleaved(
        sides | {"copy": copy},
        1 if bench.quick else 3,
        before=lambda: shutil.rmtree(target, ignore_errors=True),
    )
    note = f"peak memory {peaks['ours'] / 1e9:.2f} GB, transformers {peaks['theirs'] / 1e9:.2f} GB"
    return Row(
        f"convert {what}", timings["ours"], timings["theirs"], "transformers load + save", None,
        timings["copy"].median, note, "a copy of the files",
    )  # fmt: skip


def run_python(arguments: list[str], environment: dict[str, str] | None = None) -> float:
    """Run Python to its end; returns its peak resident memory in bytes.

    Raises SystemExit with the end of its output if it fails.
    """
    program = (
        "import resource, subprocess, sys\n"
        "code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)\n"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, sys.executable, *arguments],
        capture_output=True,
        text=True,
        env=dict(os.environ) | (environment or {}),
        cwd=Path(__file__).parents[1],
    )
    if done.returncode:
        raise SystemExit(f"error: {' '.join(arguments[:3])} failed: {done.stderr[-2000:]}")
    return float(done.stdout.split()[-1])


_COMPILE = """
import sys, time
import jax, numpy as np
from jaxablate.config import TransformerConfig
from jaxablate.edits import head_mask, remove_blocks
from jaxablate.model import Transformer
from jaxablate.problem import Problem
from jaxablate.sweep import Sweep
from jaxablate.windows import windows
from bench.tasks import random_params, tiny_neox
from jaxablate import steps
import jaxablate.loss
config = tiny_neox().replace(num_layers=int(sys.argv[1]))
model = Transformer.from_params(config, jax.tree.map(jax.numpy.asarray, random_params(config)))
ids = np.random.default_rng(0).integers(0, 1024, 257).astype(np.int32)
seconds = 0.0
def add(event, duration, **_):
    global seconds
    if "backend_compile" in event or "jaxpr" in event or "cache_retrieval" in event:
        seconds += duration
jax.monitoring.register_event_duration_secs_listener(add)
masks = 1 - np.eye(config.num_layers * 4, dtype=np.float32).reshape(-1, config.num_layers, 4)
sweep = Sweep(model, Problem(windows(ids, 256, 256, None)))
sweep.run([head_mask(m) for m in masks[:48]] + [remove_blocks([i]) for i in range(12)])
counts = steps.plain_step._cache_size() + steps.edited_step._cache_size()
counts += steps.attention_step._cache_size() + jaxablate.loss.states_nll._cache_size()
print(seconds, counts, file=open(sys.argv[2], "w"))
"""


def compilation(bench: Bench) -> list[Row]:
    """Compile time of a sweep, cold and from JAX's persistent cache, for 12 and 48 layers."""
    cache, rows = bench.scratch / "jax-cache", []
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }
    for layers in (12, 48):
        shutil.rmtree(cache, ignore_errors=True)
        found = []
        for _ in range(2):
            file = bench.scratch / "compile.txt"
            run_python(["-c", _COMPILE, str(layers), str(file)], environment)
            found.append(file.read_text().split())
        cold, warm = (float(one[0]) for one in found)
        rows.append(
            Row(f"compiling a sweep, {layers} layers", Timing(cold, cold, cold, cold),
                note=f"bar 8 s cold; {warm:.2f} s from the persistent cache (bar 2 s); "
                f"{found[0][1]} compilations")
        )  # fmt: skip
    return rows


def start_up(bench: Bench) -> list[Row]:
    """Import of the package beyond JAX and Flax, and the time of the whole demo."""

    def seconds(code: str) -> float:
        times = []
        for _ in range(3):
            start = time.perf_counter()
            run_python(["-c", code])
            times.append(time.perf_counter() - start)
        return min(times)

    bare = seconds("import jax, flax.nnx")
    rows = []
    for what, modules in (
        ("the package", "jaxablate"),
        ("engine, model, edits, compaction", "jaxablate.sweep, jaxablate.influence"),
        ("the same and tables (pandas)", "jaxablate.influence, jaxablate.table"),
    ):
        extra = max(0.0, seconds(f"import jax, flax.nnx, {modules}") - bare)
        timing = Timing(extra, extra, extra, extra)
        rows.append(Row(f"import beyond jax and flax: {what}", timing, note="bar 0.3 s"))
    if not bench.quick:
        start = time.perf_counter()
        out = bench.scratch / "demo"
        peak = run_python(
            ["experiments/influence.py", "--flagfile=demo.flags", f"--out={out}"],
            {"JAXABLATE_CACHE": str(bench.scratch / "cache")},
        )
        total = time.perf_counter() - start
        rows.append(Row("make demo, conversion included", Timing(total, total, total, total),
                        note=f"bar 240 s; peak memory {peak / 2**30:.2f} GiB (bar 6)"))  # fmt: skip
    return rows


def memory(bench: Bench) -> list[Row]:
    """All removal sets of the small GPT-NeoX on 4,096 tokens within 1 GiB and within 4."""
    _, model, batch, sets = removal_task(16, 3 if bench.quick else 4)
    problem, configurations = Problem(batch), [remove_blocks(s) for s in sets]
    plans: dict[str, Plan] = {}

    def run(name: str, budget: int) -> Callable[[], np.ndarray]:
        engine = Sweep(model, problem, dataclasses.replace(OPTIONS, memory_budget=budget))
        plans[name] = engine.plan(configurations)
        return lambda: engine.run(configurations)

    sides = {"4 GiB": run("4 GiB", 4 << 30), "1 GiB": run("1 GiB", 1 << 30)}
    timings = interleaved(sides, 1 if bench.quick else 2)
    slower = timings["1 GiB"].median / timings["4 GiB"].median - 1
    return [
        Row(
            f"{len(sets)} removal sets, 4,096 tokens, within 1 GiB ({plans['1 GiB'].waves} waves)",
            timings["1 GiB"],
            timings["4 GiB"],
            f"ours, 4 GiB ({plans['4 GiB'].waves} waves)",
            floor=sweep_floor(bench, plans["1 GiB"], 4096, 128, model.config),
            note=f"{100 * slower:+.0f} % (bar +20 %)",
        )
    ]


TASKS: dict[str, Callable[[Bench], list[Row]]] = {
    "block": block_rates,
    "influence": influence_sweep,
    "gates": head_gates,
    "removals": removal_sets,
    "single": single_removals,
    "memory": memory,
    "alpha": alpha,
    "conversion": conversion,
    "compile": compilation,
    "start": start_up,
}


def scratch_directory() -> Path:
    return Path(tempfile.mkdtemp(prefix="jaxablate-bench-"))
