"""A tiny Llama as a Hugging Face directory, made with numpy and the safetensors package alone."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 30,
}


def tensors(dtype: Any = np.float32, layers: int = 2) -> dict[str, np.ndarray]:
    """Every tensor of CONFIG, random."""
    shapes = {"model.embed_tokens.weight": (30, 12), "model.norm.weight": (12,)}
    shapes["lm_head.weight"] = (30, 12)
    for layer in range(layers):
        block = f"model.layers.{layer}"
        shapes |= {
            f"{block}.input_layernorm.weight": (12,),
            f"{block}.self_attn.q_proj.weight": (24, 12),
            f"{block}.self_attn.k_proj.weight": (8, 12),
            f"{block}.self_attn.v_proj.weight": (8, 12),
            f"{block}.self_attn.o_proj.weight": (12, 24),
            f"{block}.post_attention_layernorm.weight": (12,),
            f"{block}.mlp.gate_proj.weight": (20, 12),
            f"{block}.mlp.up_proj.weight": (20, 12),
            f"{block}.mlp.down_proj.weight": (12, 20),
        }
    rng = np.random.default_rng(5)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def write(
    directory: Path, weights: Mapping[str, np.ndarray], config: Mapping[str, Any] | None = None
) -> Path:
    """config.json and model.safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | dict(config or {})))
    save_file(dict(weights), directory / "model.safetensors", {"format": "pt"})
    return directory


def write_sharded(directory: Path, weights: Mapping[str, np.ndarray]) -> Path:
    """config.json, two shards, and their index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    names = sorted(weights)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, directory / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory
