"""Continuing prompts token by token, with a key-value cache, batched over prompts.

All prompts of a call follow one context, which is prefilled once and shared. Prompts of different
lengths stand side by side, padded on the right; padding is never attended to, so a prompt's
tokens do not depend on its neighbours. One block is compiled per shape, whatever the depth.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from jaxablate.attention import LayerPrefix
from jaxablate.errors import UserError
from jaxablate.model import Block, RopeTables
from jaxablate.rope import rope_tables
from jaxablate.sweep import Model, NonFiniteError
from jaxablate.tokenizer import check_token_ids

# Lengths are rounded up to these, so that articles and questions of many lengths share compiled
# code.
_CONTEXT_ROUNDING, _PROMPT_ROUNDING = 256, 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """How the next token is chosen.

    Attributes:
      max_new_tokens: the most tokens of a continuation.
      temperature: 0 takes the most likely token (greedy); else logits are divided by it.
      top_p: sample from the smallest set of most likely tokens whose probability reaches this.
      seed: a prompt's draws depend on it and on the prompt's index alone.
      batch_tokens: prompts are taken side by side up to this many tokens, new ones included (but
        one at least).
      dtype: of the activations; None takes the embedding's.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    batch_tokens: int = 4096
    dtype: Any = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.batch_tokens < 1:
            raise UserError(
                f"max_new_tokens and batch_tokens must be at least 1, got {self.max_new_tokens} "
                f"and {self.batch_tokens}"
            )
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature must be 0 (greedy) or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be in (0, 1], got {self.top_p}")


@dataclasses.dataclass(frozen=True, eq=False)
class _Layer:
    """One layer's keys and values: the context's, and every prompt's own [B, M, K, H]."""

    prefix: LayerPrefix
    keys: Array
    values: Array


def generate(
    model: Model,
    context: Int[np.ndarray, " S"],
    prompts: Sequence[Int[np.ndarray, " _"]],
    stop_ids: Sequence[int],
    options: GenerationOptions | None = None,
    on_token: Callable[[int], None] | None = None,
) -> list[Int[np.ndarray, " _"]]:
    """Continues each of context + prompt until a stop token, which is not part of the result.

    Args:
      context: ids that all prompts follow; may be empty.
      prompts: ids, none empty.
      stop_ids: tokens that end a continuation.
      on_token: called with the number of tokens computed, after each step of a batch.

    Returns:
      The new tokens of each prompt, at most `max_new_tokens`.

    Raises:
      UserError: ids outside the vocabulary, an empty prompt, or more positions than the model has.
      NonFiniteError: logits that are not finite.
    """
    options = options or GenerationOptions()
    _check(model, context, prompts, options)
    prefixes = _prefill_context(model, context, options.dtype)
    # A key per prompt, so that neither batches nor neighbours change what is drawn.
    seed_key, indices = jax.random.key(options.seed), jnp.arange(len(prompts))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(seed_key, indices)
    found: list[Int[np.ndarray, " _"]] = []
    width = max(len(prompt) for prompt in prompts) + options.max_new_tokens
    rows = max(1, options.batch_tokens // width)
    for first in range(0, len(prompts), rows):
        batch = _Batch(model, len(context), prompts[first : first + rows], options)
        found += batch.run(prefixes, stop_ids, keys[first : first + rows], on_token)
    return found


def _check(
    model: Model,
    context: Int[np.ndarray, " S"],
    prompts: Sequence[Int[np.ndarray, " _"]],
    options: GenerationOptions,
) -> None:
    if not prompts or min(len(prompt) for prompt in prompts) == 0:
        raise UserError("at least one prompt is needed, and none may be empty")
    for ids in (context, *prompts):
        check_token_ids(ids, model.config.vocab_size)
    needed = len(context) + max(len(prompt) for prompt in prompts) + options.max_new_tokens
    if needed > model.config.max_positions:
        raise UserError(
            f"context, prompt and {options.max_new_tokens} new tokens take {needed} positions; "
            f"the model has {model.config.max_positions}: take a shorter text or fewer new tokens"
        )


def _prefill_context(
    model: Model, context: Int[np.ndarray, " S"], dtype: Any
) -> list[LayerPrefix | None]:
    """Every layer's keys and values of the context, padded; None where there is no context."""
    count = len(context)
    if count == 0:
        return [None] * model.config.num_layers
    length = _round_up(count, _CONTEXT_ROUNDING)
    tokens = np.zeros((1, length), np.int32)
    tokens[0, :count] = context
    padding = np.where(np.arange(length) < count, 0, -np.inf).astype(np.float32)
    bias = jnp.asarray(np.broadcast_to(padding, (model.config.num_kv_heads, length)))
    rope = rope_tables(model.config, jnp.arange(length, dtype=jnp.int32).reshape(1, -1))
    x = _embed(model, tokens, dtype)
    prefixes: list[LayerPrefix | None] = []
    for layer in range(model.config.num_layers):
        x, keys, values = _prefill_step(model.block(layer), x, rope, None)
        keys, values = (jnp.transpose(a[0], (1, 0, 2)) for a in (keys, values))
        prefixes.append(LayerPrefix(keys, values, bias))
    return prefixes


class _Batch:
    """Prompts side by side: slots 0..T-1 of a row's cache are its prompt, then the new tokens."""

    def __init__(
        self,
        model: Model,
        start: int,
        prompts: Sequence[Int[np.ndarray, " _"]],
        options: GenerationOptions,
    ):
        self.model, self.start, self.options = model, start, options
        self.lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
        self.width = _round_up(int(self.lengths.max()), _PROMPT_ROUNDING)
        self.tokens = np.zeros((len(prompts), self.width), np.int32)
        for row, prompt in enumerate(prompts):
            self.tokens[row, : len(prompt)] = prompt

    def run(
        self,
        prefixes: Sequence[LayerPrefix | None],
        stop_ids: Sequence[int],
        keys: Key[Array, " B"],
        on_token: Callable[[int], None] | None,
    ) -> list[Int[np.ndarray, " _"]]:
        last, layers = self._prefill(prefixes)
        rows = len(self.lengths)
        new = np.zeros((rows, self.options.max_new_tokens), np.int32)
        ended = np.full(rows, self.options.max_new_tokens)
        for step in range(self.options.max_new_tokens):
            new[:, step] = self._choose(last, keys, step)
            stopping = np.isin(new[:, step], stop_ids) & (ended > step)
            ended[stopping] = step
            if on_token is not None:
                on_token(int((ended > step).sum()))
            if (ended <= step).all() or step + 1 == self.options.max_new_tokens:
                break
            last = self._advance(new[:, step], step, layers)
        return [new[row, : ended[row]] for row in range(rows)]

    def _prefill(self, prefixes: Sequence[LayerPrefix | None]) -> tuple[Array, list[_Layer]]:
        """The last prompt token's residual stream [B, D], and the caches with room to grow."""
        config, rows = self.model.config, len(self.lengths)
        positions = self.start + np.arange(self.width, dtype=np.int32)
        rope = rope_tables(config, jnp.asarray(np.broadcast_to(positions, self.tokens.shape)))
        x = _embed(self.model, self.tokens, self.options.dtype)
        room = ((0, 0), (0, self.options.max_new_tokens), (0, 0), (0, 0))
        layers = []
        for layer, prefix in enumerate(prefixes):
            x, keys, values = _prefill_step(self.model.block(layer), x, rope, prefix)
            if prefix is None:
                prefix = _empty_prefix(keys)
            layers.append(_Layer(prefix, jnp.pad(keys, room), jnp.pad(values, room)))
        return x[0, np.arange(rows), self.lengths - 1], layers

    def _choose(self, last: Float[Array, "B D"], keys: Key[Array, " B"], step: int) -> np.ndarray:
        temperature = self.options.temperature
        chosen, finite = next_tokens(
            self.model.head,
            last,
            keys,
            np.int32(step),
            np.float32(temperature),
            np.float32(self.options.top_p),
            greedy=temperature == 0,
        )
        if not bool(finite):
            raise NonFiniteError(f"the logits of new token {step} are not finite")
        return np.asarray(chosen)

    def _advance(self, tokens: np.ndarray, step: int, layers: list[_Layer]) -> Array:
        """The new tokens through all blocks; their keys and values go into the caches."""
        config = self.model.config
        positions = (self.start + self.lengths + step).astype(np.int32)[:, None]
        rope = rope_tables(config, jnp.asarray(positions))
        slots = np.arange(self.width + self.options.max_new_tokens)[None]
        is_prompt = slots < self.lengths[:, None]
        is_new = (slots >= self.width) & (slots <= self.width + step)
        bias = jnp.asarray(np.where(is_prompt | is_new, 0, -np.inf).astype(np.float32))
        x = _embed(self.model, tokens[:, None], self.options.dtype)
        for index, layer in enumerate(layers):
            x, keys, values = _decode_step(
                self.model.block(index),
                x,
                rope,
                layer.prefix,
                layer.keys,
                layer.values,
                bias,
                np.int32(self.width + step),
            )
            layers[index] = _Layer(layer.prefix, keys, values)
        return x[0, :, 0]


def _embed(model: Model, tokens: Int[np.ndarray, "B T"], dtype: Any) -> Float[Array, "1 B T D"]:
    x = jnp.expand_dims(model.embed_tokens(jnp.asarray(tokens)), 0)
    return x.astype(dtype or x.dtype)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _empty_prefix(keys: Float[Array, "B T K H"]) -> LayerPrefix:
    """A prefix of one masked key, so that decoding has one form only."""
    _, _, heads, size = keys.shape
    nothing = jnp.zeros((heads, 1, size), keys.dtype)
    return LayerPrefix(nothing, nothing, jnp.full((heads, 1), -jnp.inf, jnp.float32))


@jax.jit
def _prefill_step(
    block: Block, x: Float[Array, "1 B T D"], rope: RopeTables, prefix: LayerPrefix | None
) -> tuple[Float[Array, "1 B T D"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
    """A block over whole sequences; also returns their keys (rotated) and values."""
    qkv = block.qkv(x, rope)
    attended = block.attn.project(block.attn.heads(qkv, prefix))
    return block.finish(x, attended), qkv.k[0], qkv.v[0]


@functools.partial(jax.jit, donate_argnames=("keys", "values"))
def _decode_step(
    block: Block,
    x: Float[Array, "1 B 1 D"],
    rope: RopeTables,
    prefix: LayerPrefix,
    keys: Float[Array, "B M K H"],
    values: Float[Array, "B M K H"],
    bias: Float[Array, "B M"],
    slot: Int[Array, ""],
) -> tuple[Float[Array, "1 B 1 D"], Float[Array, "B M K H"], Float[Array, "B M K H"]]:
    """A block for one new token of every row, written into `slot` of the cache."""
    qkv = block.qkv(x, rope)
    keys = jax.lax.dynamic_update_slice_in_dim(keys, qkv.k[0].astype(keys.dtype), slot, 1)
    values = jax.lax.dynamic_update_slice_in_dim(values, qkv.v[0].astype(values.dtype), slot, 1)
    heads = _attend_cache(qkv.q[0, :, 0], prefix, keys, values, bias)
    attended = block.attn.project(jnp.expand_dims(heads, (0, 2)))
    return block.finish(x, attended), keys, values


def _attend_cache(
    q: Float[Array, "B N H"],
    prefix: LayerPrefix,
    keys: Float[Array, "B M K H"],
    values: Float[Array, "B M K H"],
    bias: Float[Array, "B M"],
) -> Float[Array, "B N H"]:
    """Softmax attention of one query per row over the shared prefix and the row's own cache;
    scores and sums in float32."""
    batch, num_heads, size = q.shape
    kv_heads = keys.shape[2]
    queries = q.reshape(batch, kv_heads, num_heads // kv_heads, size)
    queries = queries * jnp.asarray(size**-0.5, q.dtype)
    einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    shared = einsum("bkgh,krh->bkgr", queries, prefix.keys.astype(q.dtype))
    own = einsum("bkgh,bmkh->bkgm", queries, keys.astype(q.dtype))
    shared = shared + jnp.expand_dims(prefix.bias, (0, 2))
    own = own + jnp.expand_dims(bias, (1, 2))
    weights = jax.nn.softmax(jnp.concatenate([shared, own], axis=-1), axis=-1)
    weights = weights.astype(q.dtype)
    count = prefix.keys.shape[1]
    mixed = einsum("bkgr,krh->bkgh", weights[..., :count], prefix.values.astype(q.dtype))
    mixed = mixed + einsum("bkgm,bmkh->bkgh", weights[..., count:], values.astype(q.dtype))
    return mixed.reshape(batch, num_heads, size).astype(q.dtype)


@functools.partial(jax.jit, static_argnames=("greedy",))
def next_tokens(
    head: Any,
    x: Float[Array, "B D"],
    keys: Key[Array, " B"],
    step: Int[Array, ""],
    temperature: Float[Array, ""],
    top_p: Float[Array, ""],
    *,
    greedy: bool,
) -> tuple[Int[Array, " B"], Array]:
    """The chosen token of every row, and whether all logits are finite.

    `keys` holds one random key per row, folded with `step`: draws do not depend on the batch.
    """
    logits = head(x)
    finite = jnp.isfinite(logits).all()
    if greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), finite
    kept = keep_top_p(logits / temperature, top_p)
    keys = jax.vmap(jax.random.fold_in, (0, None))(keys, step)
    return jax.vmap(jax.random.categorical)(keys, kept).astype(jnp.int32), finite


def keep_top_p(logits: Float[Array, "B V"], top_p: Float[Array, ""]) -> Float[Array, "B V"]:
    """Logits with -inf outside the smallest set of most likely tokens whose probability reaches
    `top_p` (nucleus sampling, arXiv 1904.09751); the most likely token always stays."""
    order = jnp.argsort(logits, axis=-1, descending=True)
    probabilities = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), order, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    rows = jnp.arange(logits.shape[0]).reshape(-1, 1)
    is_kept = jnp.zeros(logits.shape, bool).at[rows, order].set((before < top_p) | (top_p >= 1))
    return jnp.where(is_kept, logits, -jnp.inf)
