"""How long a sweep will take, before it starts: its operations over a rate measured now."""

import time

import jax
import jax.numpy as jnp

from jaxablate.config import TransformerConfig
from jaxablate.plan import Plan


def block_flops(config: TransformerConfig, tokens: int, seen: int) -> float:
    """Floating-point operations of one block for `tokens` tokens that see `seen` keys each."""
    kernels = (config.num_heads + config.num_kv_heads) * 2 * config.head_dim * config.model_dim
    kernels += (3 if config.is_gated else 2) * config.model_dim * config.mlp_dim
    scores = 2 * config.num_heads * config.head_dim * seen
    return 2.0 * tokens * (kernels + scores)


def scoring_flops(config: TransformerConfig, tokens: int) -> float:
    return 2.0 * tokens * config.model_dim * config.vocab_size


def sweep_flops(
    config: TransformerConfig, plan: Plan, tokens: int, seen: int, scored: int
) -> float:
    """Operations of a planned sweep over one problem of `tokens` tokens."""
    blocks = plan.block_evaluations * block_flops(config, tokens, seen)
    return blocks + (plan.configurations + 1) * scoring_flops(config, scored)


def matmul_rate(dtype: str = "float32", seconds: float = 0.2) -> float:
    """Operations per second of a large matrix product on this device, now."""
    size = 1024 if jax.default_backend() == "cpu" else 8192
    a = jnp.ones((size, size), dtype)
    product = jax.jit(lambda a: a @ a)
    product(a).block_until_ready()
    start, done = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        product(a).block_until_ready()
        done += 1
    return 2.0 * size**3 * done / (time.perf_counter() - start)


def duration(seconds: float) -> str:
    """ "45 s", "12 min", "3.4 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
