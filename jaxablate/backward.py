"""The compiled steps of a backward pass through one block, and of edits against its gradients.

F gradients go back side by side (of the loss, and of drawn labels); the forward pass of the block
is done once for all. Scores ⟨g, δ⟩ are summed within P spans of consecutive positions.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxablate.attention import LayerPrefix, for_each
from jaxablate.model import Block, RopeTables
from jaxablate.nested_attention import KeyBlocks, head_outputs
from jaxablate.steps import Attended


class Backward(NamedTuple):
    """Gradients at a block's input [F, 1, B, T, D] and at its heads' outputs [F, 1, B, T, N, H]."""

    stream: Array
    heads: Array
    attended: Attended


@jax.jit
def block_backward(
    block: Block,
    x: Float[Array, "1 B T D"],
    rope: RopeTables,
    prefix: LayerPrefix | None,
    g: Float[Array, "F 1 B T D"],
) -> Backward:
    """F gradients from a block's output to its input and to its query heads' outputs.

    Args:
      x: the baseline's stream before the block.
      g: gradients after the block.
    """

    def attend(x):
        qkv = block.qkv(x, rope)
        return block.attn.heads(qkv, prefix), qkv

    def rest(x, heads):
        return block.finish(x, block.attn.project(heads))

    heads, attention_backward, qkv = jax.vjp(attend, x, has_aux=True)
    _, rest_backward = jax.vjp(rest, x, heads)

    def back(g):
        past_attention, at_heads = rest_backward(g.astype(x.dtype))
        through_attention = attention_backward(at_heads)[0]
        return (past_attention + through_attention).astype(g.dtype), at_heads

    stream, at_heads = for_each(back, g)
    return Backward(stream, at_heads, Attended(qkv, heads))


@functools.partial(jax.jit, static_argnames=("nested", "num_slots", "spans"))
def kept_key_scores(
    backward: Backward,
    kv_head: Int[Array, ""],
    blocks: KeyBlocks,
    nested: bool,
    num_slots: int,
    spans: int,
) -> Float[Array, "C F B P"]:
    """⟨g, δ⟩ of one KV head on each of C sets of prefix keys; cost: one head's attention."""
    qkv, heads = backward.attended
    group = heads.shape[3] // qkv.k.shape[3]

    def of_head(array: Array, size: int, axis: int) -> Array:
        return jax.lax.dynamic_slice_in_dim(array, kv_head * size, size, axis)

    def one_sequence(arrays):
        q, k, v, old, g = arrays
        new = head_outputs(q, k[:, 0], v[:, 0], blocks, nested, num_slots)
        delta = new - jnp.expand_dims(old.astype(jnp.float32), 0)
        return _by_span(delta, g.astype(jnp.float32), spans)

    g = jnp.moveaxis(of_head(backward.heads[:, 0], group, 3), 1, 0)
    q, old = of_head(qkv.q[0], group, 2), of_head(heads[0], group, 2)
    k, v = of_head(qkv.k[0], 1, 2), of_head(qkv.v[0], 1, 2)
    return jnp.moveaxis(for_each(one_sequence, (q, k, v, old, g)), 0, 2)


@functools.partial(jax.jit, static_argnames=("spans",))
def head_scores(
    backward: Backward, null_output: Float[Array, "N H"], spans: int
) -> Float[Array, "N F B P"]:
    """⟨g, δ⟩ of every query head's output falling to its null."""
    heads = backward.attended.heads[0].astype(jnp.float32)
    delta = jnp.expand_dims(null_output.astype(jnp.float32), (0, 1)) - heads

    def one_sequence(arrays):
        delta, g = arrays
        delta = jnp.expand_dims(jnp.moveaxis(delta, 1, 0), 3)  # [N, T, H, 1]
        g = jnp.expand_dims(jnp.moveaxis(g.astype(jnp.float32), 2, 1), 4)
        return jnp.stack([_by_span(d[None], g[:, n], spans)[0] for n, d in enumerate(delta)])

    g = jnp.moveaxis(backward.heads[:, 0], 1, 0)
    return jnp.moveaxis(for_each(one_sequence, (delta, g)), 0, 2)


@functools.partial(jax.jit, static_argnames=("removed", "spans"))
def removal_scores(
    block: Block,
    x: Float[Array, "1 B T D"],
    attended: Attended,
    out: Float[Array, "1 B T D"],
    g: Float[Array, "F 1 B T D"],
    removed: str,
    spans: int,
) -> Float[Array, "F B P"]:
    """⟨g, δ⟩ of a block without its attention, its MLP, or both; the block itself exactly.

    Args:
      x, out: the baseline's stream before and after the block.
      g: gradients after the block.
      removed: "attn", "mlp" or "block".
    """
    if removed == "block":
        edited = x
    elif removed == "attn":
        edited = block.finish(x, None)
    else:
        edited = block.finish(x, block.attn.project(attended.heads), mlp=False)
    delta = (edited - out).astype(jnp.float32)[0]

    def one_sequence(arrays):
        delta, g = (jnp.expand_dims(a, -1) for a in arrays)
        return _by_span(delta[None], g.astype(jnp.float32), spans)[0]

    return jnp.moveaxis(for_each(one_sequence, (delta, jnp.moveaxis(g[:, 0], 1, 0))), 0, 1)


def _by_span(
    delta: Float[Array, "C T A Z"], g: Float[Array, "F T A Z"], spans: int
) -> Float[Array, "C F P"]:
    """Inner products over all but the leading axes, summed within each span of positions."""
    length = delta.shape[1]
    missing = -length % spans

    def cut(a: Array) -> Array:
        padded = jnp.pad(a, ((0, 0), (0, missing), (0, 0), (0, 0)))
        return padded.reshape(a.shape[0], spans, -1)

    return jnp.einsum("cpz,fpz->cfp", cut(delta), cut(g))
