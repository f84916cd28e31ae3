"""A small influence sweep of a model larger than memory: time, memory and how often it is read.

    python bench/stream_8b.py --size=8b --out=/tmp/stream-8b

Makes a random checkpoint of that shape in bfloat16 (8b: 16 GB of disk; tiny, 1b), sweeps it with
streamed weights in float32 arithmetic, prints a table and removes the checkpoint unless --keep.
"""

import math
import multiprocessing
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags, logging

from bench.make_random_checkpoint import BFLOAT16, PIECE, random_config
from jaxablate.checkpoint import group_of, groups_of, is_checkpoint, open_checkpoint
from jaxablate.checkpoint_writer import new_checkpoint, writing_lock
from jaxablate.config import param_shapes

FLAGS = flags.FLAGS
_HEADS = flags.DEFINE_integer("heads", 4, "KV heads swept, spread over the layers")
_RATIOS = flags.DEFINE_list("ratios", ["0", "0.1", "0.5"], "shares of the article's keys kept")
_ARTICLE = flags.DEFINE_integer("article_tokens", 192, "tokens of the article")
_SCORED = flags.DEFINE_integer("scored_tokens", 64, "tokens scored after it")
_BUDGET = flags.DEFINE_float("budget_gib", 4.0, "memory of the states")
_KEEP = flags.DEFINE_bool("keep", False, "leave the checkpoint there")


def main(arguments: list[str]) -> int:
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected argument {arguments[1]!r}")
    logging.set_verbosity(logging.ERROR)
    config, _ = random_config(FLAGS.size)
    out = Path(FLAGS.out).expanduser().resolve()
    size = 2 * sum(math.prod(shape) for shape in param_shapes(config).values())
    path = out / f"random-{FLAGS.size}"
    out.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out).free
    if not is_checkpoint(path) and free < 1.25 * size:
        print(f"skipped: {FLAGS.size} needs {1.25 * size / 1e9:.0f} GB of disk at {out}, "
              f"{free / 1e9:.0f} GB are free")  # fmt: skip
        return 0
    if not is_checkpoint(path):
        start = time.perf_counter()
        # In a process of its own, so that its memory is not counted as the sweep's.
        maker = multiprocessing.get_context("spawn").Process(target=make, args=(FLAGS.size, path))
        maker.start()
        maker.join()
        if maker.exitcode:
            return 1
        print(f"made        {size / 1e9:.2f} GB in {time.perf_counter() - start:.0f} s", flush=True)
    try:
        sweep(path)
    finally:
        if not _KEEP.value:
            shutil.rmtree(path, ignore_errors=True)
    return 0


def make(size: str, path: Path) -> None:
    """Write the checkpoint group by group, from a table of normal numbers at random offsets."""
    config, _ = random_config(size)
    rng = np.random.default_rng(0)
    table = (0.02 * rng.standard_normal(2 * PIECE, dtype=np.float32)).astype(BFLOAT16)
    shapes = param_shapes(config)
    with writing_lock(path), new_checkpoint(path, config, {"source": "random"}) as writer:
        for group in groups_of(config):
            arrays = {}
            for name, shape in shapes.items():
                if group_of(name) != group:
                    continue
                flat = np.ones(math.prod(shape), BFLOAT16)
                for start in range(0, len(flat) if not name.endswith("scale") else 0, PIECE):
                    part = flat[start : start + PIECE]
                    offset = rng.integers(0, len(table) - len(part) + 1)
                    part[:] = table[offset : offset + len(part)]
                arrays[name] = flat.reshape(shape)
            writer.write(arrays)


def sweep(path: Path) -> None:
    import jax

    from jaxablate import influence
    from jaxablate.compaction import num_kept
    from jaxablate.edits import keep_keys
    from jaxablate.prompts import Case, Continuation
    from jaxablate.streaming import StreamedTransformer
    from jaxablate.sweep import Sweep, SweepOptions

    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    reads = Reads(StreamedTransformer)
    total = _ARTICLE.value + _SCORED.value
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, total).astype(np.int32)
    context = tokens[: _ARTICLE.value]
    case = Case(
        document="random", digest="", context_ids=context, article_range=(4, len(context)),
        reference_ids=context[:0],
        continuations=(Continuation(
            question_id="", prompt_ids=context[-1:], answer_ids=tokens[len(context):]),),
    )  # fmt: skip
    base = num_kept(0.05, case.article_tokens)
    kept = [num_kept(float(ratio), case.article_tokens) for ratio in _RATIOS.value]
    layers = np.linspace(0, config.num_layers - 1, _HEADS.value).astype(int)
    swept = [(int(layer), i % config.num_kv_heads) for i, layer in enumerate(layers)]
    counts = {(i, j): [base] for i in range(config.num_layers) for j in range(config.num_kv_heads)}
    counts |= {head: [base, *kept] for head in swept}
    configurations = [keep_keys({head: n}) for head in swept for n in kept if n != base]

    clock = Clock(reads)
    model = checkpoint.stream("float32")
    clock.lap("embedding and unembedding")
    compacted = influence.compact_context(model, case, counts)
    clock.lap(f"prefill of {len(context)} tokens and compaction")
    problem = influence.influence_problem(compacted, case, base)
    options = SweepOptions(memory_budget=int(_BUDGET.value * 2**30))
    engine = Sweep(model, problem, options)
    clock.lap("baseline")
    nll = engine.run(configurations)
    plan = engine.plan(configurations)
    clock.lap(f"{len(configurations)} configurations in {plan.waves} wave(s)")
    delta = nll.mean(axis=1) - engine.baseline_nll.mean()
    print(f"loss        baseline {engine.baseline_nll.mean():.4f}, Δ {delta.min():+.4f} to "
          f"{delta.max():+.4f}")  # fmt: skip
    stored = checkpoint.num_bytes
    print(f"weights     {stored / 1e9:.2f} GB stored, {2 * stored / 1e9:.2f} GB in float32")
    print(
        f"memory      {peak_memory() / 1e9:.2f} GB at the peak; JAX {jax.__version__}", flush=True
    )


class Reads:
    """Counts how many blocks a streamed model reads."""

    def __init__(self, cls: Any):
        self.count = 0
        read = cls._read

        def counted(model, layer: int):
            self.count += 1
            return read(model, layer)

        cls._read = counted


class Clock:
    def __init__(self, reads: Reads):
        self._reads, self._then, self._count = reads, time.perf_counter(), 0

    def lap(self, what: str) -> None:
        now = time.perf_counter()
        print(f"{now - self._then:8.1f} s  {what}; {self._reads.count - self._count} blocks read",
              flush=True)  # fmt: skip
        self._then, self._count = now, self._reads.count


def peak_memory() -> int:
    """Bytes of resident memory of this process at its peak."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


if __name__ == "__main__":
    app.run(main)
