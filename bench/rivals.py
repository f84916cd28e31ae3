"""The same tasks in PyTorch, written as well as a good engineer would.

transformers' models, inference_mode, configurations batched, logits of the scored positions only,
float32; batch 1 gives the loop that people really run.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.cache_utils import DynamicCache


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A Hugging Face directory as a model for inference."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="sdpa"
    )
    return model.eval()


def token_nll(model: Any, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """NLL [C, n] of hidden states [C, n, D], the vocabulary of one configuration at a time."""
    head = model.get_output_embeddings()
    return torch.stack(
        [
            torch.nn.functional.cross_entropy(head(states).float(), targets, reduction="none")
            for states in hidden
        ]
    )


class InfluenceRival:
    """Prefix keys kept per head: a cache padded to the longest kept head and a mask per head.

    Args:
      keys, values: per layer [P, K, H] (numpy), the full context's.
      outside: positions never compacted.
      orders: (layer, kv_head) -> article positions by falling score.
    """

    def __init__(self, model, keys, values, outside, orders, base: int, tokens, positions):
        self.model, self.base, self.orders = model, base, orders
        self.keys = [torch.from_numpy(np.ascontiguousarray(k)) for k in keys]
        self.values = [torch.from_numpy(np.ascontiguousarray(v)) for v in values]
        self.outside = np.asarray(outside)
        self.tokens = torch.from_numpy(np.asarray(tokens, np.int64))
        self.positions = torch.from_numpy(np.asarray(positions, np.int64))

    @torch.inference_mode()
    def run(self, points: Sequence[tuple[tuple[int, int], int]], targets, batch: int) -> np.ndarray:
        """NLL [C, T] of ((layer, kv_head), count) configurations, in batches of equal padding."""
        order = sorted(range(len(points)), key=lambda i: points[i][1])
        targets = torch.from_numpy(np.asarray(targets, np.int64))
        found: dict[int, np.ndarray] = {}
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            nll = self._batch([points[i] for i in chosen], targets).numpy()
            found.update(zip(chosen, nll))
        return np.stack([found[i] for i in range(len(points))])

    def _batch(self, points, targets) -> torch.Tensor:
        count, length = len(points), len(self.tokens)
        kept = max(self.base, max(n for _, n in points))
        width = len(self.outside) + kept
        cache = DynamicCache()
        kv_heads = self.keys[0].shape[1]
        group = self.model.config.num_attention_heads // kv_heads
        masks = []
        causal = torch.full((length, length), -torch.inf).triu(1)
        for layer, (keys, values) in enumerate(zip(self.keys, self.values)):
            rows = np.stack(
                [np.r_[self.outside, self.orders[layer, h][:kept]] for h in range(kv_heads)]
            )
            index = torch.from_numpy(rows)  # [K, R]
            heads = torch.arange(kv_heads)[:, None]
            layer_keys, layer_values = keys[index, heads], values[index, heads]
            cache.update(
                layer_keys.expand(count, -1, -1, -1), layer_values.expand(count, -1, -1, -1), layer
            )
            seen = torch.full((count, kv_heads), len(self.outside) + self.base)
            for c, ((at, head), n) in enumerate(points):
                if at == layer:
                    seen[c, head] = len(self.outside) + n
            masks.append(torch.where(torch.arange(width) < seen[..., None], 0.0, -torch.inf))
        hidden = self._layers(cache, masks, causal, group, count)
        return token_nll(self.model, hidden, targets)

    def _layers(self, cache, masks, causal, group, count) -> torch.Tensor:
        """The decoder's layers one by one, since each needs a mask of its own."""
        body = self.model.model
        x = body.embed_tokens(self.tokens)[None].expand(count, -1, -1)
        position_ids = self.positions[None].expand(count, -1)
        rotation = body.rotary_emb(x, position_ids=position_ids)
        length = len(self.tokens)
        for layer, block in enumerate(body.layers):
            prefix = masks[layer].repeat_interleave(group, dim=1)[:, :, None, :]
            mask = torch.cat(
                [prefix.expand(-1, -1, length, -1), causal.expand(count, prefix.shape[1], -1, -1)],
                dim=-1,
            )
            x = block(
                x,
                attention_mask=mask,
                position_ids=position_ids,
                cache=cache,
                position_embeddings=rotation,
            )
            x = x[0] if isinstance(x, tuple) else x
        return body.norm(x)


class TextRival:
    """Plain text without a prefix: layers removed, or query heads gated, configurations batched."""

    def __init__(self, model: Any, inputs, targets):
        self.model = model
        self.inputs = torch.from_numpy(np.asarray(inputs, np.int64))
        self.targets = torch.from_numpy(np.asarray(targets, np.int64)).reshape(-1)
        body = getattr(model, "model", None) or model.gpt_neox
        self.body = body
        self.is_neox = hasattr(model, "gpt_neox")

    @torch.inference_mode()
    def removal_sets(self, sets: Sequence[Sequence[int]]) -> np.ndarray:
        """Total NLL of each set of removed layers: the layer list is swapped, as people do."""
        layers, totals = self.body.layers, []
        for removed in sets:
            kept = [block for i, block in enumerate(layers) if i not in set(removed)]
            self.body.layers = torch.nn.ModuleList(kept)
            depth, self.model.config.num_hidden_layers = len(layers), len(kept)
            hidden = self.body(self.inputs, use_cache=False).last_hidden_state
            self.model.config.num_hidden_layers = depth
            hidden = hidden.reshape(1, -1, hidden.shape[-1])
            totals.append(float(token_nll(self.model, hidden, self.targets).sum()))
        self.body.layers = layers
        return np.asarray(totals)

    @torch.inference_mode()
    def gates(self, gates: np.ndarray, batch: int) -> np.ndarray:
        """Total NLL of gates [C, L, N] on every query head's output, `batch` at a time."""
        size = self.model.config.hidden_size // self.model.config.num_attention_heads
        current: dict[str, torch.Tensor] = {}
        handles = []
        for layer, block in enumerate(self.body.layers):
            dense = block.attention.dense if self.is_neox else block.self_attn.o_proj

            def hook(module, arguments, layer=layer):
                heads = arguments[0].unflatten(-1, (-1, size))
                factor = current["gates"][:, layer, None, :, None]
                return (heads.mul(factor.repeat_interleave(len(self.inputs), 0)).flatten(-2),)

            handles.append(dense.register_forward_pre_hook(hook))
        totals = []
        for start in range(0, len(gates), batch):
            part = torch.from_numpy(gates[start : start + batch])
            current["gates"] = part
            inputs = self.inputs.repeat(len(part), 1)
            hidden = self.body(inputs, use_cache=False).last_hidden_state
            hidden = hidden.reshape(len(part), -1, hidden.shape[-1])
            totals += token_nll(self.model, hidden, self.targets).sum(dim=1).tolist()
        for handle in handles:
            handle.remove()
        return np.asarray(totals)
