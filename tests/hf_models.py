"""Tiny random PyTorch models of every family, saved as Hugging Face directories."""

import copy
from pathlib import Path
from typing import Any

import torch
import transformers

_SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "max_position_embeddings": 96,
}
_GQA: dict[str, Any] = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# name -> config class, attributes. Query heads per KV head never equal the number of KV heads.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _GQA | {"rms_norm_eps": 1e-5}),
    "llama biases tied": (
        "Llama",
        _GQA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama 3 rope scaling": (
        "Llama",
        _GQA | {"rope_theta": 5e5, "head_dim": 16, "rope_scaling": LLAMA3_SCALING},
    ),
    "llama one head per head": ("Llama", {"num_attention_heads": 4, "hidden_size": 32}),
    "llama multi-query": (
        "Llama",
        {"num_attention_heads": 4, "num_key_value_heads": 1, "hidden_size": 32},
    ),
    "mistral": ("Mistral", _GQA | {"sliding_window": None, "rope_theta": 1e6}),
    "qwen2 14/2 tied": (
        "Qwen2",
        {
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "hidden_size": 56,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": ("Qwen3", _GQA | {"head_dim": 16, "rms_norm_eps": 1e-4}),
    "neox parallel rotary 0.25": (
        "GPTNeoX",
        {"num_attention_heads": 4, "hidden_size": 32, "rotary_pct": 0.25},
    ),
    "neox parallel rotary 1.0": (
        "GPTNeoX",
        {"num_attention_heads": 4, "hidden_size": 32, "rotary_pct": 1.0, "layer_norm_eps": 1e-3},
    ),
    "neox sequential rotary 0.25": (
        "GPTNeoX",
        {
            "num_attention_heads": 4,
            "hidden_size": 32,
            "rotary_pct": 0.25,
            "use_parallel_residual": False,
            "hidden_act": "gelu_new",
        },
    ),
    "neox sequential rotary 1.0": (
        "GPTNeoX",
        {
            "num_attention_heads": 4,
            "hidden_size": 32,
            "rotary_pct": 1.0,
            "use_parallel_residual": False,
            "attention_bias": False,
            "rotary_emb_base": 500,
        },
    ),
}


def random_model(name: str, **changes: Any) -> transformers.PreTrainedModel:
    """A model of MODELS in float32, every parameter perturbed: norms and biases included."""
    family, fields = MODELS[name]
    config_class = getattr(transformers, f"{family}Config")
    config = config_class(**(_SIZES | fields | changes), attn_implementation="eager")
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Logits of order one, so that 1e-5 is a hundred roundings of float32, not ten.
            untied = not config.tie_word_embeddings
            scale = 0.5 if "embed" in parameter_name and untied else 0.15
            values = scale * torch.randn(parameter.shape, generator=generator)
            is_norm = "norm" in parameter_name and parameter_name.endswith("weight")
            parameter.copy_(values + 1 if is_norm else values)
    return model.eval()


def rounded(model: transformers.PreTrainedModel, dtype: torch.dtype):
    """The same model in float32 with weights that `dtype` holds exactly.

    Not model.to(dtype).float(): that would round the rotary frequencies as well.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    return model


def in_dtype(model: transformers.PreTrainedModel, dtype: torch.dtype):
    """A copy whose weights are stored in another dtype."""
    return copy.deepcopy(model).to(dtype)


def save(model: transformers.PreTrainedModel, directory: Path, **options: Any) -> Path:
    """The model as a Hugging Face directory, written by transformers itself."""
    model.save_pretrained(directory, **options)
    return directory


def logits(model: transformers.PreTrainedModel, tokens: Any) -> Any:
    """[B, T, V] as numpy."""
    with torch.no_grad():
        return model(torch.as_tensor(tokens, dtype=torch.int64)).logits.float().numpy()
