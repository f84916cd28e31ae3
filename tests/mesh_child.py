"""Sweeps tiny models on meshes of forced CPU devices, for test_mesh; prints JSON.

    python tests/mesh_child.py llama config:4,model:2 config:8

Answers with the baseline's and every configuration's token NLL, and estimates: on one device
without a mesh, then on each mesh.
"""

import json
import os
import sys

os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)

import conftest  # noqa: F401  (the settings that every test runs under)
import jax
import jax.numpy as jnp
import numpy as np
import tiny

from jaxablate import edits, first_order
from jaxablate.attention import LayerPrefix
from jaxablate.checkpoint import flattened, nested
from jaxablate.mesh import make_mesh, param_sharding, parse_mesh
from jaxablate.model import Transformer
from jaxablate.prefill import prefill
from jaxablate.problem import Problem
from jaxablate.sweep import Sweep, SweepOptions, sweep
from jaxablate.windows import Batch

ROWS, LENGTH, KEYS = 2, 7, 5
CONFIGS = {
    "llama": tiny.llama_config(num_layers=2, vocab_size=64),
    "neox": tiny.neox_config(num_layers=2),  # 61 tokens: a vocabulary that does not divide
}


def main() -> None:
    config = CONFIGS[sys.argv[1]]
    model = tiny.random_model(config)
    answers = {"": measure(model, config, None)}
    for shape in sys.argv[2:]:
        mesh = make_mesh(parse_mesh(shape), config)
        rule = param_sharding(mesh)
        params = {
            path: jax.device_put(array, rule(path, array.shape))
            for path, array in flattened(model.to_params()).items()
        }
        answers[shape] = measure(Transformer.from_params(config, nested(params)), config, mesh)
    print(json.dumps(answers))


def measure(model, config, mesh) -> dict:
    problem = problem_of(config)
    size = problem.batch.inputs.size
    budget = 1 << 20  # several waves
    options = SweepOptions(chunk_tokens=2 * size, score_tokens=8, memory_budget=budget, mesh=mesh)
    base, nll = sweep(model, problem, configurations(config), options)
    estimated = [c for c in configurations(config) if len(c.edits) == 1]
    scores = first_order.Gradients(Sweep(model, problem, options), draws=3).run(estimated)
    caches = list(prefill(model, np.arange(9, dtype=np.int32)))
    return {
        "baseline": base.tolist(),
        "nll": nll.tolist(),
        "first_order": scores.loss.tolist(),
        "fisher": scores.fisher.tolist(),
        "keys": [cache.k.tolist() for cache in caches],
    }


def configurations(config) -> list:
    """Every kind of edit, seven of one kind: chunks that do not divide by 2, 4 or 8 lanes."""
    last = config.num_kv_heads - 1
    return [
        *[edits.silence_heads([(0, head % config.num_heads), (1, 1)], config.num_heads)
          for head in range(3)],
        *[edits.keep_keys({(0, head % (last + 1)): 1 + head}) for head in range(7)],
        edits.keep_keys({(0, 0): 2, (1, last): 3}),
        edits.silence_heads([(1, 2)], config.num_heads, null="mean"),
        edits.remove_blocks([0]),
        edits.remove_blocks([0, 1]),
        edits.remove_attention([1]),
        edits.remove_mlps([0]),
    ]  # fmt: skip


def problem_of(config) -> Problem:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    tokens = rng.integers(0, config.vocab_size, (ROWS, LENGTH + 1)).astype(np.int32)
    positions = np.broadcast_to(np.arange(KEYS, KEYS + LENGTH, dtype=np.int32), (ROWS, LENGTH))
    scored = np.ones((ROWS, LENGTH), bool)
    scored[:, :2] = False
    heads, size = config.num_kv_heads, config.head_dim
    prefix = [
        LayerPrefix(*map(jnp.asarray, (normal(heads, KEYS, size), normal(heads, KEYS, size),
                                       normal(heads, KEYS))))
        for _ in range(config.num_layers)
    ]  # fmt: skip
    kept = normal(config.num_layers, heads, 2, 9, size), normal(config.num_layers, heads, 9)
    means = normal(config.num_layers, config.num_heads, size)
    return Problem(
        batch=Batch(
            inputs=tokens[:, :-1], positions=positions, targets=tokens[:, 1:], scored=scored,
            lengths=np.full(ROWS, LENGTH),
        ),
        prefix=prefix,
        head_prefix=lambda layer, head, count: (
            kept[0][layer, head, 0, :count], kept[0][layer, head, 1, :count],
            kept[1][layer, head, :count],
        ),
        mean_output=means.__getitem__,
    )  # fmt: skip


if __name__ == "__main__":
    main()
