"""What a transformer is: one frozen description for every family, in the field's terms."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxablate.errors import UserError

NORMS = ("rms", "layer")
MLPS = ("gated_silu", "gelu", "gelu_tanh")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's frequency-dependent scaling of the rotary embedding.

    Wavelengths shorter than `original_max_positions / high_freq_factor` are kept, those longer
    than `original_max_positions / low_freq_factor` are stretched by `factor`, those between are
    blended linearly in the inverse wavelength (Llama 3.1 model card and reference code).
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def __post_init__(self) -> None:
        _require(self.factor >= 1, f"rope scaling factor is {self.factor}; it must be at least 1")
        _require(
            0 < self.low_freq_factor < self.high_freq_factor,
            f"rope scaling has low_freq_factor {self.low_freq_factor} and high_freq_factor "
            f"{self.high_freq_factor}; 0 < low < high is required",
        )
        _require(
            self.original_max_positions > 0,
            f"rope scaling has original_max_positions {self.original_max_positions}; "
            "it must be positive",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """A decoder-only transformer of the Llama or GPT-NeoX kind.

    Attributes:
      family: the architecture's name at its origin; used for export only, never in the maths.
      num_layers, model_dim, mlp_dim, vocab_size: L, D, F, V.
      num_heads, num_kv_heads, head_dim: N, K, H; query head j reads KV head j // (N // K).
      norm, norm_eps: "rms" or "layer", and the epsilon of every norm.
      mlp: "gated_silu" (three matrices), "gelu" (exact) or "gelu_tanh" (two matrices).
      qkv_bias, out_bias, mlp_bias: which projections have a bias.
      qk_norm: RMS norm over H of every query and key head before the rotation (Qwen3).
      parallel_residual: x + attention(norm1 x) + mlp(norm2 x) instead of one after the other.
      rotary_dim: how many of the H dimensions are rotated (half-split pairs).
      rope_theta, rope_scaling: base of the rotary frequencies, and their scaling or None.
      tie_embeddings: the unembedding is the transposed embedding.
      max_positions: positions the model was trained for.
    """

    family: str
    num_layers: int
    model_dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm: str
    norm_eps: float
    mlp: str
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    parallel_residual: bool = False
    rotary_dim: int
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool
    max_positions: int

    def __post_init__(self) -> None:
        sizes = (
            "num_layers model_dim mlp_dim num_heads num_kv_heads head_dim vocab_size max_positions"
        )
        for name in sizes.split():
            value = getattr(self, name)
            _require(
                isinstance(value, int) and value > 0,
                f"{name} is {value!r}; it must be a positive integer",
            )
        _require(self.norm in NORMS, f"norm is {self.norm!r}; it must be one of {NORMS}")
        _require(self.mlp in MLPS, f"mlp is {self.mlp!r}; it must be one of {MLPS}")
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads is {self.num_heads} and num_kv_heads {self.num_kv_heads}; "
            "the first must be a multiple of the second",
        )
        _require(
            0 < self.rotary_dim <= self.head_dim and self.rotary_dim % 2 == 0,
            f"rotary_dim is {self.rotary_dim}; it must be even, positive and at most "
            f"head_dim {self.head_dim}",
        )
        _require(self.norm_eps > 0, f"norm_eps is {self.norm_eps}; it must be positive")
        _require(self.rope_theta > 0, f"rope_theta is {self.rope_theta}; it must be positive")

    @property
    def group_size(self) -> int:
        """G: query heads that read one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def is_gated(self) -> bool:
        return self.mlp == "gated_silu"

    def replace(self, **changes: Any) -> "TransformerConfig":
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict that `from_dict` reads back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "TransformerConfig":
        """The inverse of `to_dict`.

        Raises:
          UserError: a field is unknown, missing or out of its range.
        """
        fields = dict(data)
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(fields) - known)
        _require(not unknown, f"unknown fields in the model's configuration: {unknown}")
        try:
            if fields.get("rope_scaling") is not None:
                fields["rope_scaling"] = RopeScaling(**fields["rope_scaling"])
            return cls(**fields)
        except TypeError as error:
            raise UserError(f"the model's configuration cannot be read: {error}") from error


def param_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Path (joined by "/") -> shape of every parameter, in order from embedding to unembedding."""
    shapes: dict[str, tuple[int, ...]] = {"embed/embedding": (config.vocab_size, config.model_dim)}
    for layer in range(config.num_layers):
        for path, shape in block_param_shapes(config).items():
            shapes[f"blocks/{layer}/{path}"] = shape
    shapes |= _norm_shapes("final_norm", config)
    if not config.tie_embeddings:
        shapes["unembed/kernel"] = (config.model_dim, config.vocab_size)
    return shapes


def block_param_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Path within one block -> shape; every block has the same."""
    d, f, h = config.model_dim, config.mlp_dim, config.head_dim
    n, k = config.num_heads, config.num_kv_heads
    shapes = _norm_shapes("attn_norm", config)
    for name, heads in (("q", n), ("k", k), ("v", k)):
        shapes[f"attn/{name}/kernel"] = (d, heads, h)
        if config.qkv_bias:
            shapes[f"attn/{name}/bias"] = (heads, h)
    if config.qk_norm:
        shapes["attn/q_norm/scale"] = (h,)
        shapes["attn/k_norm/scale"] = (h,)
    shapes["attn/o/kernel"] = (n, h, d)
    if config.out_bias:
        shapes["attn/o/bias"] = (d,)
    shapes |= _norm_shapes("mlp_norm", config)
    projections = [("up", d, f), ("down", f, d)]
    if config.is_gated:
        projections.insert(0, ("gate", d, f))
    for name, rows, columns in projections:
        shapes[f"mlp/{name}/kernel"] = (rows, columns)
        if config.mlp_bias:
            shapes[f"mlp/{name}/bias"] = (columns,)
    return shapes


def _norm_shapes(name: str, config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}/scale": (config.model_dim,)}
    if config.norm == "layer":
        shapes[f"{name}/bias"] = (config.model_dim,)
    return shapes
