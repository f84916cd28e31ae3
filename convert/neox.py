"""GPT-NeoX and Pythia: names of the weights, and the attributes of config.json."""

from collections.abc import Mapping
from typing import Any

from convert.config_json import ConfigReader, read_rope
from convert.layouts import Rule, as_is, head_major_kernel, linear, linear_from_heads
from jaxablate.config import TransformerConfig
from jaxablate.errors import UserError

MODEL_TYPES = ("gpt_neox",)
EMBEDDING = "gpt_neox.embed_in.weight"
UNEMBEDDING = "embed_out.weight"
ALIASES = {"lm_head.weight": UNEMBEDDING}  # the name since transformers 5
# Causal masks, the value they used for minus infinity, and rotary frequencies of old files.
KNOWN_EXTRAS = (
    r"gpt_neox\.(layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"
    r"|rotary_emb\.inv_freq)"
)
_ACTIVATIONS = {
    "gelu": "gelu",
    # Three names of the tanh approximation.
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def rules(config: TransformerConfig) -> list[Rule]:
    """The conversion table, in the order in which a checkpoint is written."""
    table = [Rule(EMBEDDING, ("embed/embedding",), as_is)]
    for layer in range(config.num_layers):
        table += _block_rules(config, f"gpt_neox.layers.{layer}.", f"blocks/{layer}/")
    for theirs, ours in (("weight", "scale"), ("bias", "bias")):
        table.append(Rule(f"gpt_neox.final_layer_norm.{theirs}", (f"final_norm/{ours}",), as_is))
    if not config.tie_embeddings:
        table.append(Rule(UNEMBEDDING, ("unembed/kernel",), linear))
    return table


def _block_rules(config: TransformerConfig, theirs: str, ours: str) -> list[Rule]:
    # Fused and head-major: [N, 3, H, D]. A split in flat thirds runs and gives fluent nonsense.
    kernels = tuple(f"{ours}attn/{x}/kernel" for x in "qkv")
    biases = tuple(f"{ours}attn/{x}/bias" for x in "qkv")
    table = [Rule(f"{theirs}attention.query_key_value.weight", kernels, head_major_kernel)]
    if config.qkv_bias:
        table.append(Rule(f"{theirs}attention.query_key_value.bias", biases, as_is))
    lines = [
        ("input_layernorm.weight", "attn_norm/scale", as_is),
        ("input_layernorm.bias", "attn_norm/bias", as_is),
        ("attention.dense.weight", "attn/o/kernel", linear_from_heads),
        ("post_attention_layernorm.weight", "mlp_norm/scale", as_is),
        ("post_attention_layernorm.bias", "mlp_norm/bias", as_is),
        ("mlp.dense_h_to_4h.weight", "mlp/up/kernel", linear),
        ("mlp.dense_h_to_4h.bias", "mlp/up/bias", as_is),
        ("mlp.dense_4h_to_h.weight", "mlp/down/kernel", linear),
        ("mlp.dense_4h_to_h.bias", "mlp/down/bias", as_is),
    ]
    if config.out_bias:
        lines.append(("attention.dense.bias", "attn/o/bias", as_is))
    return table + [Rule(theirs + source, (ours + to,), layout) for source, to, layout in lines]


def read_config(raw: Mapping[str, Any]) -> TransformerConfig:
    """config.json of a GPT-NeoX model, in either spelling.

    Raises:
      UserError: an attribute is missing, malformed, unknown, or asks for what is not implemented.
    """
    reader = ConfigReader(raw)
    model_dim = reader.take("hidden_size", int)
    num_heads = reader.take("num_attention_heads", int)
    if num_heads < 1 or model_dim % num_heads:
        raise UserError(
            f"config.json (gpt_neox) has hidden_size = {model_dim}, which is no "
            f"multiple of num_attention_heads = {num_heads}"
        )
    head_dim = model_dim // num_heads
    reader.require("head_dim", int, (head_dim,), head_dim)
    reader.require("num_key_value_heads", int, (num_heads,), num_heads)
    activation = reader.require("hidden_act", str, tuple(_ACTIVATIONS), None)
    theta, partial, scaling = read_rope(
        reader,
        ("rotary_emb_base", "rope_theta"),
        ("rotary_pct", "partial_rotary_factor"),
        10000.0,
        0.25,
    )
    if scaling is not None:
        raise UserError(
            "config.json (gpt_neox) has rope type 'llama3'; only 'default' is "
            "implemented for this family"
        )
    attention_bias = reader.take("attention_bias", bool, True)
    config = TransformerConfig(
        family="gpt_neox",
        num_layers=reader.take("num_hidden_layers", int),
        model_dim=model_dim,
        mlp_dim=reader.take("intermediate_size", int),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        vocab_size=reader.take("vocab_size", int),
        norm="layer",
        norm_eps=reader.take("layer_norm_eps", float),
        mlp=_ACTIVATIONS[activation],
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=True,
        qk_norm=False,
        parallel_residual=reader.take("use_parallel_residual", bool, True),
        rotary_dim=int(head_dim * partial),
        rope_theta=theta,
        rope_scaling=None,
        tie_embeddings=reader.take("tie_word_embeddings", bool, False),
        max_positions=reader.take("max_position_embeddings", int),
    )
    reader.finish()
    return config


def write_config(config: TransformerConfig) -> dict[str, Any]:
    """The config.json of a model, in the spelling that old and new readers understand."""
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "hidden_act": "gelu" if config.mlp == "gelu" else "gelu_new",
        "max_position_embeddings": config.max_positions,
        "layer_norm_eps": config.norm_eps,
        "rotary_emb_base": config.rope_theta,
        "rotary_pct": config.rotary_dim / config.head_dim,
        "use_parallel_residual": config.parallel_residual,
        "attention_bias": config.qkv_bias,
        "tie_word_embeddings": config.tie_embeddings,
    }
