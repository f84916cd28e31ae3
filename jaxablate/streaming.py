"""A model whose blocks are read from the disk as they are needed: models bigger than memory."""

import concurrent.futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxablate.checkpoint import Checkpoint, ShardingRule, nested
from jaxablate.errors import UserError
from jaxablate.model import Block, Norm, Unembedding
from jaxablate.rope import rope_tables
from jaxablate.stored_arrays import trim_memory


class StreamedTransformer:
    """Same interface as `Transformer`; one block in use and the next one being read.

    After the last block the next pass is expected to start where the last one did. Embedding and
    unembedding stay in memory in the stored dtype; blocks are cast to `dtype` while they are read.
    Not a pytree: pass what it gives (`block(l)`, `head`) to jitted functions.
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: Any = None, sharding: ShardingRule | None = None
    ):
        self.config = checkpoint.config
        self._checkpoint = checkpoint
        self._dtype = checkpoint.dtype if dtype is None else np.dtype(dtype)
        self._sharding = sharding
        stored = checkpoint.leaves["embed/embedding"].dtype
        self._embedding = checkpoint.load_group("embed", stored, sharding)["embed/embedding"]
        final = checkpoint.load_group("final", stored, sharding)
        kernel = final.pop("unembed/kernel", None)
        norm = nested(final)["final_norm"]
        self.final_norm = Norm(self.config.norm, self.config.norm_eps, norm)
        self._unembedding = kernel
        self._reader = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="next-block")
        self._current: tuple[int, Block] | None = None
        self._next: tuple[int, concurrent.futures.Future[Block]] | None = None
        self._last, self._first = -1, 0  # layer asked for last; where this pass started

    def block(self, layer: int) -> Block:
        """Block `layer`, from memory if it is there; starts reading the one that comes next."""
        if not 0 <= layer < self.config.num_layers:
            raise UserError(f"layer is {layer}; layers are 0 to {self.config.num_layers - 1}")
        if self._current is not None and self._current[0] == layer:
            return self._current[1]
        if layer < self._last:
            self._first = layer
        self._last = layer
        self._current = None  # freed before another one comes
        upcoming, self._next = self._next, None
        if upcoming is not None and upcoming[0] == layer:
            block = upcoming[1].result()
        else:
            if upcoming is not None:  # not needed: wait, so that two are in memory at most
                upcoming[1].exception()
                del upcoming
            block = self._read(layer)
        self._current = layer, block
        following = layer + 1 if layer + 1 < self.config.num_layers else self._first
        if following != layer:
            self._next = following, self._reader.submit(self._read, following)
        return block

    def _read(self, layer: int) -> Block:
        params = self._checkpoint.load_block(layer, self._dtype, self._sharding)
        block = Block(self.config, jax.block_until_ready(params))
        trim_memory(collect=False)
        return block

    @property
    def head(self) -> Unembedding:
        if self._unembedding is None:
            return Unembedding(self.final_norm, self._embedding, transposed=True)
        return Unembedding(self.final_norm, self._unembedding, transposed=False)

    def embed_tokens(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return jnp.take(self._embedding, tokens, axis=0).astype(self._dtype)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Logits of a plain forward pass, float32; the layers are read once."""
        batch, length = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
        rope = rope_tables(self.config, positions)
        x = jnp.expand_dims(self.embed_tokens(tokens), 0)
        for layer in range(self.config.num_layers):
            x = self.block(layer)(x, rope)
        return self.head(x.reshape(batch * length, -1)).reshape(batch, length, -1)
