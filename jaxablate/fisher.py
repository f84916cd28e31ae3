"""Where a backward pass starts: the gradient of the loss, and of drawn labels' log-likelihood.

The curvature of the softmax loss in a direction δz of its logits is Var_p(δz) per scored token:
its Fisher information, which is also the Gauss-Newton term of the whole network (Martens,
arXiv 1412.1193). With labels y drawn from the model's own p, ĝ_y = ∂ Σ log p(y) / ∂x has
E⟨ĝ_y, δ⟩² = Σ Var_p(δz), because tokens' labels are independent and the score has mean zero.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxablate.model import Unembedding

# Bytes of one chunk's logits; three arrays of this size are alive at a time.
_CHUNK_BYTES = 64 * 2**20


def stratified_uniforms(draws: int, tokens: int, seed: int) -> Float[np.ndarray, "E M"]:
    """Uniform numbers for `draws` labels of every token: one in each of `draws` equal strata.

    Each draw alone is uniform and independent between tokens, so estimates stay unbiased; the
    draws of one token together spread over its distribution, which removes most of the variance
    that a token's own label brings.
    """
    rng = np.random.default_rng((seed, draws, tokens))
    strata = rng.permuted(np.tile(np.arange(draws), (tokens, 1)), axis=1).T
    return ((strata + rng.random((draws, tokens))) / max(draws, 1)).astype(np.float32)


def loss_cotangents(
    head: Unembedding,
    x: Float[Array, "M D"],
    targets: Int[Array, "M"],
    uniforms: Float[Array, "E M"],
) -> Float[Array, "F M D"]:
    """Gradients at the residual stream after the last block, float32; F = 1 + E.

    Args:
      x: the stream at the scored positions.
      uniforms: E draws of a number in [0, 1) per token, that choose its label by inversion.

    Returns: first ∂ Σ NLL / ∂x, then ∂ Σ log p(y) / ∂x of each draw's labels y.
    """
    size = max(1, _CHUNK_BYTES // (4 * head.kernel[...].shape[head.vocab_axis]))
    size = min(size, x.shape[0])
    parts = [
        _chunk_cotangents(head, x[i : i + size], targets[i : i + size], uniforms[:, i : i + size])
        for i in range(0, x.shape[0], size)
    ]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


@jax.jit
def _chunk_cotangents(
    head: Unembedding,
    x: Float[Array, "M D"],
    targets: Int[Array, "M"],
    uniforms: Float[Array, "E M"],
) -> Float[Array, "F M D"]:
    normed, norm_backward = jax.vjp(head.norm, x)
    kernel, axis = head.kernel[...].astype(normed.dtype), head.vocab_axis
    p = jax.nn.softmax(head.logits(normed, kernel), axis=-1)
    expected = jnp.einsum(
        "mv,vd->md" if axis == 0 else "mv,dv->md",
        p.astype(kernel.dtype),
        kernel,
        preferred_element_type=jnp.float32,
    )
    labels = jnp.expand_dims(targets, 0)
    if uniforms.shape[0]:
        labels = jnp.concatenate([labels, _invert(p, uniforms)])
    chosen = jnp.moveaxis(jnp.take(kernel, labels, axis=axis), 0 if axis else -1, -1)
    scores = chosen.astype(jnp.float32) - jnp.expand_dims(expected, 0)
    signs = jnp.where(jnp.arange(scores.shape[0]) == 0, -1.0, 1.0)  # NLL falls as log p rises
    scores = scores * jnp.expand_dims(signs, (1, 2)).astype(jnp.float32)
    return jax.lax.map(lambda g: norm_backward(g.astype(normed.dtype))[0], scores).astype(
        jnp.float32
    )


def _invert(p: Float[Array, "M V"], uniforms: Float[Array, "E M"]) -> Int[Array, "E M"]:
    """Labels by inversion of each token's distribution function."""
    cumulative = jnp.cumsum(p, axis=-1)
    # A sum of rounded probabilities ends beside 1; relative to its end no label is out of reach.
    thresholds = uniforms.T * cumulative[:, -1:]
    labels = jax.vmap(lambda c, u: jnp.searchsorted(c, u, side="right"))(cumulative, thresholds)
    return jnp.minimum(labels, p.shape[1] - 1).astype(jnp.int32).T
