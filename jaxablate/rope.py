"""Rotary position embedding (arXiv 2104.09864), half-split pairs, always in float32."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxablate.config import RopeScaling, TransformerConfig


def inverse_frequencies(config: TransformerConfig) -> np.ndarray:
    """Radians per position of each rotated pair, float32 [rotary_dim / 2]."""
    exponents = np.arange(0, config.rotary_dim, 2, dtype=np.float64) / config.rotary_dim
    frequencies = config.rope_theta**-exponents
    if config.rope_scaling is not None:
        frequencies = _scale_llama3(frequencies, config.rope_scaling)
    return frequencies.astype(np.float32)


def _scale_llama3(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (scaling.original_max_positions / wavelengths - low) / (high - low)
    smooth = np.clip(smooth, 0, 1)  # 1: short wavelengths, kept; 0: long ones, stretched
    return frequencies * (smooth + (1 - smooth) / scaling.factor)


def rope_tables(
    config: TransformerConfig, positions: Int[Array, "B T"]
) -> tuple[Float[Array, "B T Z"], Float[Array, "B T Z"]]:
    """Cosines and sines of every position and pair, float32 [B, T, rotary_dim / 2]."""
    # Angles in half precision lose whole positions (EleutherAI/gpt-neox #873).
    angles = jnp.einsum("bt,p->btp", positions.astype(jnp.float32), inverse_frequencies(config))
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "S B T N H"],
    tables: tuple[Float[Array, "B T Z"], Float[Array, "B T Z"]],
) -> Float[Array, "S B T N H"]:
    """Rotate the first 2 P of the H dimensions: dimension i is paired with i + P."""
    cos, sin = (jnp.expand_dims(table, (0, 3)) for table in tables)
    pairs = cos.shape[-1]
    head = x[..., : 2 * pairs].astype(jnp.float32)
    first, second = head[..., :pairs], head[..., pairs:]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([rotated.astype(x.dtype), x[..., 2 * pairs :]], axis=-1)
