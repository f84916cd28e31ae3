"""One full-cache pass over a context: what compaction and edited heads need of every layer."""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxablate.errors import NonFiniteError
from jaxablate.model import QKV, Block, RopeTables
from jaxablate.placement import to_host
from jaxablate.rope import rope_tables

_LENGTH_STEP = 256  # contexts are padded to a multiple of this: fewer shapes to compile


class LayerCache(NamedTuple):
    """Queries [T, N, H], keys and values [T, K, H] of one layer after the rotation, on the host."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


def prefill(model, tokens: Int[np.ndarray, "T"], dtype=None) -> Iterator[LayerCache]:
    """Run a context through the model with its full cache, layer after layer.

    A layer's arrays are handed out as soon as they exist, so that a caller who compacts them
    never holds all layers' queries.

    Args:
      model: as `sweep.Model`.
      tokens: the context; positions are 0 to T-1.
      dtype: of the activations; None takes the embedding's.

    Raises:
      NonFiniteError: queries, keys or values that are not finite, with the layer.
    """
    length = len(tokens)
    padded = -(-length // _LENGTH_STEP) * _LENGTH_STEP
    inputs = np.zeros((1, padded), np.int32)
    inputs[0, :length] = tokens
    rope = rope_tables(model.config, jnp.arange(padded, dtype=jnp.int32).reshape(1, padded))
    x = jnp.expand_dims(model.embed_tokens(jnp.asarray(inputs)), 0)
    x = x.astype(dtype or x.dtype)
    for layer in range(model.config.num_layers):
        x, qkv = _prefill_step(model.block(layer), x, rope)
        cache = LayerCache(*(to_host(array[0, 0, :length]) for array in qkv))
        if not all(np.isfinite(array).all() for array in cache):
            raise NonFiniteError(f"the context is not finite in the attention of layer {layer}")
        yield cache


@jax.jit
def _prefill_step(
    block: Block, x: Float[Array, "1 1 T D"], rope: RopeTables
) -> tuple[Float[Array, "1 1 T D"], QKV]:
    qkv = block.qkv(x, rope)
    return block.finish(x, block.attn.project(block.attn.heads(qkv, None))), qkv
