"""One transformer for the Llama and GPT-NeoX families, as stateless Flax NNX modules.

The modules are pytrees and go through plain `jax.jit`, `jax.vmap` and `jax.grad`. Activations
carry a leading axis S of states, i.e. of versions of the model that are evaluated side by side
on the same documents: x is [S, B, T, D].

Letters: S states, B documents, T query positions, R prefix keys, D model, F mlp, N query heads,
K KV heads, G = N / K, H head size, V vocabulary, L layers.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxablate.attention import LayerPrefix, attend
from jaxablate.config import TransformerConfig
from jaxablate.rope import rope_tables, rotate
from jaxablate.tiles import in_tiles

# Tokens whose hidden MLP activations (F floats each) stay in a processor's cache.
_MLP_TILE = 1024

Params = Mapping[str, Any]
RopeTables = tuple[Float[Array, "B T Z"], Float[Array, "B T Z"]]


class QKV(NamedTuple):
    """Queries [S, B, T, N, H], keys and values [S, B, T, K, H], after the rotation."""

    q: Array
    k: Array
    v: Array


class Norm(nnx.Module):
    """RMS norm (arXiv 1910.07467) or layer norm over the last axis, in float32."""

    def __init__(self, kind: str, eps: float, params: Params):
        self.kind = kind
        self.eps = eps
        self.scale = nnx.Param(params["scale"])
        self.bias = nnx.Param(params["bias"]) if "bias" in params else None

    def __call__(self, x: Float[Array, "*A D"]) -> Float[Array, "*A D"]:
        y = x.astype(jnp.float32)
        if self.kind == "layer":
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        y = y * _last(self.scale[...].astype(jnp.float32), y.shape)
        if self.bias is not None:
            y = y + _last(self.bias[...].astype(jnp.float32), y.shape)
        return y.astype(x.dtype)


class Projection(nnx.Module):
    """A kernel and an optional bias; the owner contracts them by einsum.

    Attributes:
      sum_over: the mesh axis that the contracted dimension is split over, within `jax.shard_map`.
    """

    def __init__(self, params: Params):
        self.sum_over: str | None = None
        self.kernel = nnx.Param(params["kernel"])
        self.bias = nnx.Param(params["bias"]) if "bias" in params else None

    def __call__(
        self, equation: str, x: Array, kernel_shape: tuple[int, ...] | None = None
    ) -> Array:
        kernel = self.kernel[...].astype(x.dtype)
        y = jnp.einsum(
            equation, x, kernel if kernel_shape is None else kernel.reshape(kernel_shape)
        )
        if self.sum_over is not None:
            y = jax.lax.psum(y, self.sum_over)
        if self.bias is not None:
            y = y + _last(self.bias[...].astype(y.dtype), y.shape)
        return y


class Attention(nnx.Module):
    """Grouped-query attention; query head j reads KV head j // G."""

    def __init__(self, config: TransformerConfig, params: Params):
        self.q = Projection(params["q"])
        self.k = Projection(params["k"])
        self.v = Projection(params["v"])
        self.o = Projection(params["o"])
        names = ("q_norm", "k_norm")
        norms = [
            Norm("rms", config.norm_eps, params[name]) if config.qk_norm else None for name in names
        ]
        # Once each: NNX settles at the first assignment whether an attribute holds a module.
        self.q_norm, self.k_norm = norms

    def qkv(self, x: Float[Array, "S B T D"], rope: RopeTables) -> QKV:
        q = self.q("sbtd,dnh->sbtnh", x)
        k = self.k("sbtd,dkh->sbtkh", x)
        v = self.v("sbtd,dkh->sbtkh", x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return QKV(rotate(q, rope), rotate(k, rope), v)

    def heads(self, qkv: QKV, prefix: LayerPrefix | None) -> Float[Array, "S B T N H"]:
        """The output of every query head before W_O."""
        return attend(qkv.q, qkv.k, qkv.v, prefix)

    def project(self, heads: Float[Array, "S B T N H"]) -> Float[Array, "S B T D"]:
        # Over one axis N x H: XLA's CPU product over two contracted axes takes a third longer.
        merged = heads.reshape(*heads.shape[:3], -1)
        return self.o("sbtf,fd->sbtd", merged, (merged.shape[-1], -1))


class Mlp(nnx.Module):
    """Gated SiLU (arXiv 2002.05202) or GELU feed-forward layer."""

    def __init__(self, config: TransformerConfig, params: Params):
        self.kind = config.mlp
        self.gate = Projection(params["gate"]) if config.is_gated else None
        self.up = Projection(params["up"])
        self.down = Projection(params["down"])

    def __call__(self, x: Float[Array, "S B T D"]) -> Float[Array, "S B T D"]:
        tokens = x.reshape(-1, x.shape[-1])
        return in_tiles(self._tokens, tokens, _MLP_TILE).reshape(x.shape)

    def _tokens(self, x: Float[Array, "M D"]) -> Float[Array, "M D"]:
        hidden = self.up("md,df->mf", x)
        if self.gate is not None:
            hidden = jax.nn.silu(self.gate("md,df->mf", x)) * hidden
        else:
            # NeoX's GELU is exact; JAX's default is the tanh approximation.
            hidden = jax.nn.gelu(hidden, approximate=self.kind == "gelu_tanh")
        return self.down("mf,fd->md", hidden)


class Block(nnx.Module):
    """Attention and MLP with their norms, one after the other or in parallel."""

    def __init__(self, config: TransformerConfig, params: Params):
        self.parallel_residual = config.parallel_residual
        self.attn_norm = Norm(config.norm, config.norm_eps, params["attn_norm"])
        self.attn = Attention(config, params["attn"])
        self.mlp_norm = Norm(config.norm, config.norm_eps, params["mlp_norm"])
        self.mlp = Mlp(config, params["mlp"])

    def __call__(
        self,
        x: Float[Array, "S B T D"],
        rope: RopeTables,
        prefix: LayerPrefix | None = None,
    ) -> Float[Array, "S B T D"]:
        attended = self.attn.project(self.attn.heads(self.qkv(x, rope), prefix))
        return self.finish(x, attended)

    def qkv(self, x: Float[Array, "S B T D"], rope: RopeTables) -> QKV:
        return self.attn.qkv(self.attn_norm(x), rope)

    def finish(
        self,
        x: Float[Array, "S B T D"],
        attended: Float[Array, "C B T D"] | None,
        mlp: bool = True,
    ) -> Float[Array, "E B T D"]:
        """The block's output from its input and its attention's, either of which may be shared.

        Args:
          x: the residual stream before the block, S states; 1 is shared by all.
          attended: the projected attention output, or None where the attention is removed.
          mlp: False where the MLP is removed.
        """
        before_mlp = x
        if attended is not None:
            x = x + attended
        if not mlp:
            return x
        return x + self.mlp(self.mlp_norm(before_mlp if self.parallel_residual else x))


class Unembedding(nnx.Module):
    """Final norm and unembedding; logits are float32 whatever the weights' dtype."""

    def __init__(self, norm: Norm, kernel: Any, transposed: bool):
        self.norm = norm
        self.kernel = nnx.Param(kernel)
        self.transposed = transposed  # tied: the embedding itself, [V, D]

    def __call__(self, x: Float[Array, "M D"]) -> Float[Array, "M V"]:
        return self.logits(self.norm(x), self.kernel[...])

    @property
    def vocab_axis(self) -> int:
        return 0 if self.transposed else 1

    def logits(self, normed: Float[Array, "M D"], kernel: Array) -> Float[Array, "M V"]:
        """Logits of all tokens of the vocabulary, or of those that `kernel` is a slice for."""
        equation = "md,vd->mv" if self.transposed else "md,dv->mv"
        # bfloat16 logits quantise the loss by more than a head's effect (google-deepmind/gemma
        # #367): products of the stored dtype, accumulated and kept in float32.
        return jnp.einsum(
            equation,
            normed,
            kernel.astype(normed.dtype),
            preferred_element_type=jnp.float32,
        )


class Transformer(nnx.Module):
    """The whole model. The engine uses `embed_tokens`, `block`, `head` and `config` alone."""

    def __init__(self, config: TransformerConfig, params: Params):
        self.config = config
        self.embedding = nnx.Param(params["embed"]["embedding"])
        self.blocks = nnx.List(
            [Block(config, params["blocks"][str(layer)]) for layer in range(config.num_layers)]
        )
        self.final_norm = Norm(config.norm, config.norm_eps, params["final_norm"])
        kernel = None if config.tie_embeddings else params["unembed"]["kernel"]
        self.unembed = None if kernel is None else nnx.Param(kernel)

    @classmethod
    def from_params(cls, config: TransformerConfig, params: Params) -> "Transformer":
        """Build from the nested dict that `config.param_shapes` describes."""
        return cls(config, params)

    def to_params(self) -> dict[str, Any]:
        """The nested dict of arrays that `from_params` takes."""
        params: dict[str, Any] = {
            "embed": {"embedding": self.embedding[...]},
            "blocks": {str(i): _arrays(block) for i, block in enumerate(self.blocks)},
            "final_norm": _arrays(self.final_norm),
        }
        if self.unembed is not None:
            params["unembed"] = {"kernel": self.unembed[...]}
        return params

    def block(self, layer: int) -> Block:
        return self.blocks[layer]

    @property
    def head(self) -> Unembedding:
        if self.unembed is None:
            return Unembedding(self.final_norm, self.embedding[...], transposed=True)
        return Unembedding(self.final_norm, self.unembed[...], transposed=False)

    def embed_tokens(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return jnp.take(self.embedding[...], tokens, axis=0)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Logits of a plain forward pass, float32: the reference path, nothing shared."""
        batch, length = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
        rope = rope_tables(self.config, positions)
        x = jnp.expand_dims(self.embed_tokens(tokens), 0)
        for block in self.blocks:
            x = block(x, rope)
        return self.head(x.reshape(batch * length, -1)).reshape(batch, length, -1)


def _last(vector: Array, shape: tuple[int, ...]) -> Array:
    """Broadcast over leading axes, said explicitly: rank promotion is an error in the tests."""
    return jnp.broadcast_to(vector, shape)


def _arrays(module: nnx.Module) -> dict[str, Any]:
    """A module's parameters as a nested dict of plain arrays, absent ones left out."""
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        if isinstance(value, nnx.Param):
            found[name] = value[...]
        elif isinstance(value, nnx.Module):
            found[name] = _arrays(value)
    return found
