"""Tiny random models for the tests, every parameter perturbed away from 0 and 1."""

import jax.numpy as jnp
import numpy as np

from jaxablate.config import TransformerConfig, param_shapes
from jaxablate.model import Transformer


def llama_config(**changes) -> TransformerConfig:
    fields: dict = {
        "family": "llama",
        "num_layers": 4,
        "model_dim": 24,
        "mlp_dim": 40,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": 61,
        "norm": "rms",
        "norm_eps": 1e-5,
        "mlp": "gated_silu",
        "rotary_dim": 8,
        "rope_theta": 1e4,
        "tie_embeddings": False,
        "max_positions": 256,
    }
    return TransformerConfig(**(fields | changes))


def neox_config(**changes) -> TransformerConfig:
    fields: dict = {
        "family": "gpt_neox",
        "num_kv_heads": 6,
        "norm": "layer",
        "mlp": "gelu",
        "rotary_dim": 2,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "parallel_residual": True,
    }
    return llama_config(**(fields | changes))


def random_params(config: TransformerConfig, seed: int = 0, scale: float = 0.3) -> dict:
    rng = np.random.default_rng(seed)
    params: dict = {}
    for path, shape in param_shapes(config).items():
        values = rng.normal(size=shape) * scale
        if path.endswith("scale"):
            values = values + 1
        node = params
        *parents, leaf = path.split("/")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = jnp.asarray(values.astype(np.float32))
    return params


def random_model(config: TransformerConfig, seed: int = 0) -> Transformer:
    return Transformer.from_params(config, random_params(config, seed))
