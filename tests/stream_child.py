"""Sweeps a checkpoint with streamed weights, measures its memory, then sweeps it resident.

    python tests/stream_child.py SMALL BIG     # checkpoints whose blocks have the same shapes

Prints JSON: bytes of resident memory gained over the small model's streamed sweep at the peak of
the big one's, how often each block was read, and the largest differences from the resident sweep.
"""

import collections
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxablate import influence
from jaxablate.checkpoint import open_checkpoint
from jaxablate.edits import keep_keys, remove_attention, silence_heads
from jaxablate.head_outputs import mean_head_outputs
from jaxablate.problem import Problem
from jaxablate.prompts import Case, Continuation
from jaxablate.streaming import StreamedTransformer
from jaxablate.sweep import Sweep, SweepOptions

jax.config.update("jax_numpy_dtype_promotion", "strict")
READ: collections.Counter = collections.Counter()


def main() -> None:
    small, big = (open_checkpoint(Path(path)) for path in sys.argv[1:])
    read = StreamedTransformer._read

    def counted(self, layer: int):
        READ[layer] += 1
        return read(self, layer)

    StreamedTransformer._read = counted
    run(small.stream(jnp.float32))  # compiles everything
    before = peak_memory(reset=True)
    READ.clear()
    streamed = run(big.stream(jnp.float32))
    gained = peak_memory() - before
    reads = dict(READ)
    resident = run(big.restore(jnp.float32, progress=False))
    differences = [float(np.abs(a - b).max()) for a, b in zip(streamed, resident)]
    print(json.dumps({"gained": gained, "reads": reads, "differences": differences}))


def run(model) -> tuple[np.ndarray, ...]:
    """What the influence and heads experiments do: prefill, compaction, means, two sweeps."""
    config = model.config
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, 80).astype(np.int32)
    case = Case(
        document="random", digest="", context_ids=tokens[:48], article_range=(4, 48),
        reference_ids=tokens[:0],
        continuations=(Continuation(
            question_id="", prompt_ids=tokens[47:48], answer_ids=tokens[48:]),),
    )  # fmt: skip
    heads = [(i, j) for i in range(config.num_layers) for j in range(config.num_kv_heads)]
    counts = {head: [4, 20] for head in heads}
    context = influence.compact_context(model, case, counts)
    problem = influence.influence_problem(context, case, 4)
    # Two waves: fewer states than configurations fit.
    options = SweepOptions(chunk_tokens=64, memory_budget=1)
    engine = Sweep(model, problem, options)
    last = config.num_layers - 1
    chosen = [keep_keys({(0, 0): 20}), keep_keys({(last, 1): 20}), remove_attention([last // 2])]
    engine.options = SweepOptions(chunk_tokens=64, memory_budget=budget_of(engine, 2))
    moved = engine.run(chosen)
    plain = Problem(problem.batch)
    means = mean_head_outputs(model, [plain.batch, plain.batch])
    gated = Sweep(model, Problem(plain.batch, mean_output=means.__getitem__), options)
    silenced = silence_heads([(1, 1)], config.num_heads, null="mean")
    return engine.baseline_nll, moved, means, gated.run([silenced])


def budget_of(engine: Sweep, states: int) -> int:
    """A memory budget that leaves room for so many states beside the baseline's stream."""
    state = engine.trunk[0].nbytes
    return state * (len(engine.trunk) + states) + engine._workspace(engine.chunk_tokens)


def peak_memory(reset: bool = False) -> int:
    """Bytes of resident memory at the peak so far, or now if the peak is reset (Linux)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


if __name__ == "__main__":
    main()
