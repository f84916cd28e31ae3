"""Mean outputs of query heads over a text: what a silenced head may be replaced by."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxablate.model import Block, RopeTables
from jaxablate.placement import to_host
from jaxablate.rope import rope_tables
from jaxablate.windows import Batch


def mean_head_outputs(model, batches: Sequence[Batch], dtype=None) -> Float[np.ndarray, "L N H"]:
    """Mean over all positions that are not padding of each head's output before W_O.

    Args:
      model: as `sweep.Model`; batches: the text, without a prefix.
    """
    config = model.config
    sums = np.zeros((config.num_layers, config.num_heads, config.head_dim))
    streams, about, count = [], [], 0
    for batch in batches:
        inside = np.arange(batch.inputs.shape[1])[None, :] < batch.lengths[:, None]
        count += int(inside.sum())
        rope = rope_tables(config, jnp.asarray(batch.positions))
        about.append((rope, jnp.asarray(inside.astype(np.float32))))
        x = jnp.expand_dims(model.embed_tokens(jnp.asarray(batch.inputs)), 0)
        streams.append(x.astype(dtype or x.dtype))
    for layer in range(config.num_layers):  # outside: a streamed model reads each block once
        block = model.block(layer)
        for i, (rope, weights) in enumerate(about):
            streams[i], total = _summing_step(block, streams[i], rope, weights)
            sums[layer] += to_host(total).astype(np.float64)
    return (sums / count).astype(np.float32)


@jax.jit
def _summing_step(
    block: Block, x: Float[Array, "1 B T D"], rope: RopeTables, weights: Float[Array, "B T"]
) -> tuple[Float[Array, "1 B T D"], Float[Array, "N H"]]:
    heads = block.attn.heads(block.qkv(x, rope), None)
    total = jnp.einsum("sbtnh,bt->nh", heads.astype(jnp.float32), weights)
    return block.finish(x, block.attn.project(heads)), total
