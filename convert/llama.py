"""Llama, Mistral, Qwen2 and Qwen3: names of the weights, and the attributes of config.json."""

from collections.abc import Mapping
from typing import Any

from convert.config_json import ConfigReader, read_rope
from convert.layouts import Rule, as_is, flat, linear, linear_from_heads
from jaxablate.config import TransformerConfig
from jaxablate.errors import UserError

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
EMBEDDING = "model.embed_tokens.weight"
UNEMBEDDING = "lm_head.weight"
ALIASES: dict[str, str] = {}
# Buffers that old files carry; they are computed from the configuration here.
KNOWN_EXTRAS = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"


def rules(config: TransformerConfig) -> list[Rule]:
    """The conversion table, in the order in which a checkpoint is written."""
    table = [Rule(EMBEDDING, ("embed/embedding",), as_is)]
    for layer in range(config.num_layers):
        table += _block_rules(config, f"model.layers.{layer}.", f"blocks/{layer}/")
    table.append(Rule("model.norm.weight", ("final_norm/scale",), as_is))
    if not config.tie_embeddings:
        table.append(Rule(UNEMBEDDING, ("unembed/kernel",), linear))
    return table


def _block_rules(config: TransformerConfig, theirs: str, ours: str) -> list[Rule]:
    lines = [
        ("input_layernorm.weight", "attn_norm/scale", as_is),
        ("self_attn.q_proj.weight", "attn/q/kernel", linear),
        ("self_attn.k_proj.weight", "attn/k/kernel", linear),
        ("self_attn.v_proj.weight", "attn/v/kernel", linear),
        ("self_attn.o_proj.weight", "attn/o/kernel", linear_from_heads),
        ("post_attention_layernorm.weight", "mlp_norm/scale", as_is),
        ("mlp.gate_proj.weight", "mlp/gate/kernel", linear),
        ("mlp.up_proj.weight", "mlp/up/kernel", linear),
        ("mlp.down_proj.weight", "mlp/down/kernel", linear),
    ]
    if config.qkv_bias:
        lines += [(f"self_attn.{x}_proj.bias", f"attn/{x}/bias", flat) for x in "qkv"]
    if config.out_bias:
        lines.append(("self_attn.o_proj.bias", "attn/o/bias", as_is))
    if config.qk_norm:
        lines += [(f"self_attn.{x}_norm.weight", f"attn/{x}_norm/scale", as_is) for x in "qk"]
    if config.mlp_bias:
        names = ("gate", "up", "down")
        lines += [(f"mlp.{x}_proj.bias", f"mlp/{x}/bias", as_is) for x in names]
    return [Rule(theirs + source, (ours + target,), layout) for source, target, layout in lines]


def read_config(raw: Mapping[str, Any]) -> TransformerConfig:
    """config.json of one of MODEL_TYPES, in either spelling.

    Raises:
      UserError: an attribute is missing, malformed, unknown, or asks for what is not implemented.
    """
    reader = ConfigReader(raw)
    family = str(reader.model_type)
    model_dim = reader.take("hidden_size", int)
    num_heads = reader.take("num_attention_heads", int)
    # Llama 1 files have no KV heads: one per query head. The other families always say it.
    kv_default = {"default": num_heads} if family == "llama" else {}
    reader.require("hidden_act", str, ("silu",), "silu")
    reader.require("rope_interleaved", bool, (False,), False)
    theta, partial, scaling = read_rope(
        reader, ("rope_theta",), ("partial_rotary_factor",), 10000.0, 1.0
    )
    if partial != 1.0:
        raise UserError(
            f"config.json ({family}) has partial_rotary_factor = {partial}; "
            "only 1.0 is implemented for this family"
        )
    num_layers = reader.take("num_hidden_layers", int)
    max_positions = reader.take("max_position_embeddings", int)
    _refuse_sliding_window(reader, num_layers, max_positions)
    attention_bias = _attention_bias(reader)
    head_dim = _head_dim(reader, model_dim, num_heads)
    mlp_bias_values = (False, True) if family == "llama" else (False,)
    config = TransformerConfig(
        family=family,
        num_layers=num_layers,
        model_dim=model_dim,
        mlp_dim=reader.take("intermediate_size", int),
        num_heads=num_heads,
        num_kv_heads=reader.take("num_key_value_heads", int, **kv_default),
        head_dim=head_dim,
        vocab_size=reader.take("vocab_size", int),
        norm="rms",
        norm_eps=reader.take("rms_norm_eps", float),
        mlp="gated_silu",
        qkv_bias=attention_bias or family == "qwen2",
        out_bias=attention_bias,
        mlp_bias=reader.require("mlp_bias", bool, mlp_bias_values, False),
        qk_norm=family == "qwen3",
        parallel_residual=False,
        rotary_dim=head_dim,
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=reader.take("tie_word_embeddings", bool, False),
        max_positions=max_positions,
    )
    reader.finish()
    return config


def _attention_bias(reader: ConfigReader) -> bool:
    """Biases of q, k, v and o; Qwen2's always has those of q, k, v and never that of o."""
    if reader.model_type == "qwen2":
        return not reader.require("attention_bias", bool, (True,), True)
    allowed = (False,) if reader.model_type == "mistral" else (False, True)
    return reader.require("attention_bias", bool, allowed, False)


def _head_dim(reader: ConfigReader, model_dim: int, num_heads: int) -> int:
    """head_dim when present: it need not be model_dim / num_heads (Qwen3, Mistral-Nemo)."""
    stated = reader.take("head_dim", int, None)
    if stated is not None:
        return stated
    if reader.model_type == "qwen3":
        raise UserError("config.json (qwen3) lacks head_dim")
    if num_heads < 1 or model_dim % num_heads:
        raise UserError(
            f"config.json ({reader.model_type}) has hidden_size = {model_dim}, which "
            f"is no multiple of num_attention_heads = {num_heads}"
        )
    return model_dim // num_heads


def _refuse_sliding_window(reader: ConfigReader, num_layers: int, max_positions: int) -> None:
    """Windows that can hide a position are refused; ones that never bite are not in use."""
    window = reader.take("sliding_window", int, None)
    uses = reader.take("use_sliding_window", bool, reader.model_type in ("llama", "mistral"))
    first = reader.take("max_window_layers", int, 0)
    types = reader.raw.get("layer_types") if reader.has("layer_types") else []
    if not isinstance(types, list) or any(kind != "full_attention" for kind in types):
        raise UserError(
            f"config.json ({reader.model_type}) has layer_types other than "
            "'full_attention'; sliding windows are not implemented"
        )
    if uses and window is not None and window < max_positions and first < num_layers:
        raise UserError(
            f"config.json ({reader.model_type}) has sliding_window = {window} with "
            f"max_position_embeddings = {max_positions}; "
            "sliding windows are not implemented"
        )


def write_config(config: TransformerConfig) -> dict[str, Any]:
    """The config.json of a model, in the spelling that old and new readers understand."""
    raw: dict[str, Any] = {
        "architectures": [ARCHITECTURES[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
    }
    if config.family in ("llama", "qwen3"):
        raw["attention_bias"] = config.out_bias
    if config.family == "llama":
        raw["mlp_bias"] = config.mlp_bias
    if config.family == "mistral":
        raw["sliding_window"] = None
    if config.family in ("qwen2", "qwen3"):
        raw["use_sliding_window"] = False
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        raw["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        }
    return raw
