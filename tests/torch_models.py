"""PyTorch's own models with random weights, and ablations of them made with PyTorch's means alone.

They are the oracle: nothing here uses jaxablate but the last function, which converts the weights.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

# An attention's output projection sees its heads' outputs [B, T, N * H] just before W_O.
_OUTPUT_PROJECTION = {"llama": "o_proj", "gpt_neox": "dense"}
_ATTENTION = {"llama": "self_attn", "gpt_neox": "attention"}


def random_llama(seed: int = 0, **changes: Any) -> transformers.PreTrainedModel:
    """LlamaForCausalLM whose every parameter is perturbed, norms and biases included."""
    fields: dict[str, Any] = {
        "vocab_size": 53,
        "hidden_size": 36,
        "intermediate_size": 40,
        "num_hidden_layers": 4,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
        "max_position_embeddings": 128,
        "attn_implementation": "eager",
    }
    config = transformers.LlamaConfig(**(fields | changes))
    return _perturbed(transformers.LlamaForCausalLM(config), seed)


def random_neox(seed: int = 0, **changes: Any) -> transformers.PreTrainedModel:
    """GPTNeoXForCausalLM whose every parameter is perturbed, norms and biases included."""
    fields: dict[str, Any] = {
        "vocab_size": 53,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "rotary_pct": 0.25,
        "layer_norm_eps": 1e-5,
        "use_parallel_residual": True,
        "tie_word_embeddings": False,
        "max_position_embeddings": 128,
        "attn_implementation": "eager",
    }
    config = transformers.GPTNeoXConfig(**(fields | changes))
    return _perturbed(transformers.GPTNeoXForCausalLM(config), seed)


def _perturbed(model: transformers.PreTrainedModel, seed: int) -> transformers.PreTrainedModel:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_embedding = "embed_in" in name or "embed_tokens" in name
            tied = model.config.tie_word_embeddings
            scale = 1.0 if is_embedding and not tied else 0.2
            values = scale * torch.randn(parameter.shape, generator=generator)
            is_norm = "norm" in name and name.endswith("weight")
            parameter.copy_(values + 1 if is_norm else values)
    return model.eval()


def layers_of(model: transformers.PreTrainedModel) -> torch.nn.ModuleList:
    return model.base_model.layers


def attention_of(model: transformers.PreTrainedModel, layer: int) -> torch.nn.Module:
    return getattr(layers_of(model)[layer], _ATTENTION[model.config.model_type])


def head_size(model: transformers.PreTrainedModel) -> int:
    found = getattr(model.config, "head_dim", None)
    return found or model.config.hidden_size // model.config.num_attention_heads


def logits(model: transformers.PreTrainedModel, tokens: np.ndarray, bias=None) -> torch.Tensor:
    """[B, T, V]; `bias` [B, N, T, T] is added to the scores of every layer (causal if None)."""
    if bias is None:
        bias = causal_bias(model, tokens)
    with torch.no_grad():
        ids = torch.from_numpy(tokens.astype(np.int64))
        return model(ids, attention_mask=bias, use_cache=False).logits


def token_nll(model: transformers.PreTrainedModel, tokens: np.ndarray, bias=None) -> np.ndarray:
    """NLL [B, T - 1] of every token but the first."""
    log_probabilities = torch.log_softmax(logits(model, tokens, bias)[:, :-1].double(), dim=-1)
    targets = torch.from_numpy(tokens[:, 1:].astype(np.int64))
    return -log_probabilities.gather(-1, targets[..., None])[..., 0].numpy()


def causal_bias(model: transformers.PreTrainedModel, tokens: np.ndarray) -> torch.Tensor:
    """[B, N, T, T]: 0 where a query sees a key, the most negative float where it does not."""
    batch, length = tokens.shape
    lowest = torch.finfo(torch.float32).min
    bias = torch.full((length, length), lowest).triu(1)
    return bias.expand(batch, model.config.num_attention_heads, length, length).clone()


@contextlib.contextmanager
def without_layers(model: transformers.PreTrainedModel, removed: set[int]) -> Iterator[None]:
    """Deletes layers from the ModuleList."""
    whole = layers_of(model)
    kept = [layer for i, layer in enumerate(whole) if i not in removed]
    model.base_model.layers = torch.nn.ModuleList(kept)
    try:
        yield
    finally:
        model.base_model.layers = whole


@contextlib.contextmanager
def _hooks(handles: list[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def without_attention(model: transformers.PreTrainedModel, layers: set[int]):
    """Hooks that make the attention's output zero, biases included."""

    def zero(module, inputs, output):
        return (torch.zeros_like(output[0]), *output[1:])

    return _hooks([attention_of(model, i).register_forward_hook(zero) for i in layers])


def without_mlp(model: transformers.PreTrainedModel, layers: set[int]):
    """Hooks that make the MLP's output zero, biases included."""

    def zero(module, inputs, output):
        return torch.zeros_like(output)

    return _hooks([layers_of(model)[i].mlp.register_forward_hook(zero) for i in layers])


def with_gates(
    model: transformers.PreTrainedModel,
    gates: Mapping[int, np.ndarray],
    null: Callable[[int], np.ndarray] | None = None,
):
    """Pre-hooks before W_O: head n's output times gates[layer][n], plus the rest of the null."""

    def hook(layer: int):
        gate = torch.from_numpy(np.asarray(gates[layer], np.float32))[:, None]

        def gated(module, inputs):
            heads = inputs[0].unflatten(-1, (-1, head_size(model)))
            out = heads * gate
            if null is not None:
                out = out + (1 - gate) * torch.from_numpy(null(layer))
            return (out.flatten(-2),)

        return gated

    return _hooks([_projection(model, i).register_forward_pre_hook(hook(i)) for i in gates])


def with_bias(model: transformers.PreTrainedModel, biases: Mapping[int, torch.Tensor]):
    """Pre-hooks that replace the 4-D attention mask [B, N, T, T] of single layers."""

    def hook(layer: int):
        def replaced(module, arguments, keywords):
            return arguments, keywords | {"attention_mask": biases[layer]}

        return replaced

    handles = [
        attention_of(model, i).register_forward_pre_hook(hook(i), with_kwargs=True) for i in biases
    ]
    return _hooks(handles)


def mean_head_outputs(model: transformers.PreTrainedModel, tokens: np.ndarray) -> list[np.ndarray]:
    """Per layer [N, H]: the mean over all tokens of what W_O reads."""
    found: dict[int, np.ndarray] = {}

    def hook(layer: int):
        def look(module, inputs):
            heads = inputs[0].unflatten(-1, (-1, head_size(model)))
            found[layer] = heads.double().mean(dim=(0, 1)).float().numpy()

        return look

    layers = range(len(layers_of(model)))
    with _hooks([_projection(model, i).register_forward_pre_hook(hook(i)) for i in layers]):
        logits(model, tokens)
    return [found[layer] for layer in layers]


def _projection(model: transformers.PreTrainedModel, layer: int) -> torch.nn.Module:
    return getattr(attention_of(model, layer), _OUTPUT_PROJECTION[model.config.model_type])


def converted(model: transformers.PreTrainedModel, directory: Path):
    """Our Transformer of the same weights, by way of the files that users have."""
    import convert

    model.save_pretrained(directory / "hf")
    return convert.convert(convert.open_source(str(directory / "hf")), directory / "ours").restore()
