"""The compiled steps of a sweep: one block for a chunk of states, plain or edited.

Each is compiled once per shape, whatever the number of layers: the layer's weights are arguments.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxablate.attention import LayerPrefix, attend_one, for_each
from jaxablate.model import QKV, Block, RopeTables
from jaxablate.tiles import in_groups

# Tokens whose activations throughout a block stay in a processor's cache: chunks of 4,096 tokens
# run a tenth to a quarter faster in groups of this size.
_GROUP_TOKENS = 1024


class Attended(NamedTuple):
    """What a parent's attention computed, shared by all its edited children: P parents."""

    qkv: QKV
    heads: Array  # [P, B, T, N, H], every head's output before W_O


class Edits(NamedTuple):
    """The edits of C children as arrays; None where no child of the chunk has that edit.

    swap_heads: [C, M] KV heads whose prefix is replaced.
    swap: their keys and values [C, M, R, H] and bias [C, M, R].
    gates: [C, N] factors of the query heads.
    null_output: [N, H], what a gate of 0 leaves instead of zero.
    """

    swap_heads: Array | None = None
    swap: LayerPrefix | None = None
    gates: Array | None = None
    null_output: Array | None = None


@jax.jit
def plain_step(
    block: Block,
    x: Float[Array, "S B T D"],
    rope: RopeTables,
    prefix: LayerPrefix | None,
) -> Float[Array, "S B T D"]:
    """An unedited block for a chunk of states."""
    return in_groups(lambda group: block(group, rope, prefix), x, _GROUP_TOKENS)


@jax.jit
def attention_step(
    block: Block,
    x: Float[Array, "P B T D"],
    rope: RopeTables,
    prefix: LayerPrefix | None,
) -> Attended:
    """Queries, keys, values and head outputs of the parents of edited states."""
    qkv = block.qkv(x, rope)
    return Attended(qkv, block.attn.heads(qkv, prefix))


@functools.partial(jax.jit, static_argnames=("children", "mlp"))
def edited_step(
    block: Block,
    x: Float[Array, "P B T D"],
    attended: Attended | None,
    edits: Edits,
    children: int,
    mlp: bool,
    first_kv_head: Int[Array, ""] | None = None,
) -> Float[Array, "C B T D"]:
    """An edited block for C children of P parents, where P is 1 (shared) or C (one each).

    Args:
      attended: the parents' attention, or None where the edit removes it.
      mlp: False where the edit removes the MLP.
      first_kv_head: where the heads are split over devices, the first one here.
    """
    x = jnp.broadcast_to(x, (children, *x.shape[1:])) if not block.parallel_residual else x
    projected = None
    if attended is not None:
        heads = attended.heads
        if edits.swap is not None:
            heads = _swap_heads(attended, edits.swap_heads, edits.swap, first_kv_head)
        if edits.gates is not None:
            heads = _gate_heads(heads, edits.gates, edits.null_output)
        projected = block.attn.project(heads)
    out = block.finish(x, projected, mlp=mlp)
    return jnp.broadcast_to(out, (children, *out.shape[1:]))


def _swap_heads(
    attended: Attended,
    swap_heads: Int[Array, "C M"] | None,
    swap: LayerPrefix,
    first_kv_head: Int[Array, ""] | None,
) -> Float[Array, "C B T N H"]:
    """Recompute the query heads of the swapped KV heads alone; keep the parents' others."""
    parents, num_heads = attended.heads.shape[0], attended.heads.shape[3]
    kv_heads_here = attended.qkv.k.shape[3]
    group = num_heads // kv_heads_here

    def one_child(child: tuple[Array, Array, LayerPrefix]) -> Float[Array, "B T N H"]:
        index, kv_heads, prefixes = child
        parent = jax.tree.map(lambda a: a[index if parents > 1 else 0], attended)
        heads = parent.heads
        for m in range(kv_heads.shape[0]):
            prefix = LayerPrefix(*(jnp.expand_dims(a[m], 0) for a in prefixes))
            kv_head = kv_heads[m]
            if first_kv_head is not None:
                kv_head = jnp.clip(kv_head - first_kv_head, 0, kv_heads_here - 1)
            qkv = _group_of(parent.qkv, kv_head, group)
            new = for_each(functools.partial(_attend_group, prefix=prefix), qkv)
            new = new.astype(heads.dtype)
            if first_kv_head is not None:  # another device's head: leave what is here
                old = jax.lax.dynamic_slice_in_dim(heads, kv_head * group, group, axis=2)
                new = jnp.where(kv_head + first_kv_head == kv_heads[m], new, old)
            heads = jax.lax.dynamic_update_slice_in_dim(heads, new, kv_head * group, axis=2)
        return heads

    children = swap.keys.shape[0]
    return for_each(one_child, (jnp.arange(children), swap_heads, swap))


def _attend_group(qkv: tuple[Array, Array, Array], prefix: LayerPrefix) -> Array:
    return attend_one(*qkv, prefix)


def _group_of(qkv: QKV, kv_head: Int[Array, ""], group: int) -> tuple[Array, Array, Array]:
    """Queries [B, T, G, H], keys and values [B, T, 1, H] of one KV head."""
    return (
        jax.lax.dynamic_slice_in_dim(qkv.q, kv_head * group, group, axis=2),
        jax.lax.dynamic_slice_in_dim(qkv.k, kv_head, 1, axis=2),
        jax.lax.dynamic_slice_in_dim(qkv.v, kv_head, 1, axis=2),
    )


def _gate_heads(
    heads: Float[Array, "P B T N H"],
    gates: Float[Array, "C N"],
    null_output: Float[Array, "N H"] | None,
) -> Float[Array, "C B T N H"]:
    gates = jnp.expand_dims(gates, (1, 2, 4)).astype(heads.dtype)
    gated = heads * gates
    if null_output is not None:
        null = jnp.expand_dims(null_output.astype(heads.dtype), (0, 1, 2))
        gated = gated + (1 - gates) * null
    return gated
