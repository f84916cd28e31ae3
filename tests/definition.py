"""A transformer with ablations by definition: numpy, float64, one head and one query at a time."""

import math

import numpy as np


def token_nll(config, params, problem, configuration) -> np.ndarray:
    """NLL of the problem's scored tokens, row by row, under one configuration."""
    batch = problem.batch
    params = _float64(params)
    found = []
    for row in range(len(batch.inputs)):
        x = params["embed"]["embedding"][batch.inputs[row]]
        for layer in range(config.num_layers):
            x = _block(config, params["blocks"][str(layer)], x, batch.positions[row], layer,
                       problem, configuration.by_layer.get(layer))  # fmt: skip
        normed = _norm(config, params["final_norm"], x)
        kernel = params["embed"]["embedding"].T if config.tie_embeddings else None
        logits = normed @ (params["unembed"]["kernel"] if kernel is None else kernel)
        top = logits.max(axis=1)
        log_mass = np.log(np.exp(logits - top[:, None]).sum(axis=1)) + top
        nll = log_mass - logits[np.arange(len(logits)), batch.targets[row]]
        found.append(nll[batch.scored[row]])
    return np.concatenate(found)


def _float64(tree):
    if isinstance(tree, dict):
        return {name: _float64(value) for name, value in tree.items()}
    return np.asarray(tree, np.float64)


def _block(config, params, x, positions, layer, problem, edit):
    removes_block = edit is not None and edit.remove_block
    removes_attention = removes_block or (edit is not None and edit.remove_attention)
    removes_mlp = removes_block or (edit is not None and edit.remove_mlp)
    attended = 0.0
    if not removes_attention:
        normed = _norm(config, params["attn_norm"], x)
        attended = _attention(config, params["attn"], normed, positions, layer, problem, edit)
    before_mlp = x if config.parallel_residual else x + attended
    fed_forward = 0.0
    if not removes_mlp:
        fed_forward = _mlp(config, params["mlp"], _norm(config, params["mlp_norm"], before_mlp))
    return x + attended + fed_forward


def _norm(config, params, x):
    if config.norm == "layer":
        x = x - x.mean(axis=-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + config.norm_eps)
    return x * params["scale"] + params.get("bias", 0.0)


def _mlp(config, params, x):
    def linear(name, y):
        return y @ params[name]["kernel"] + params[name].get("bias", 0.0)

    up = linear("up", x)
    if config.mlp == "gated_silu":
        gate = linear("gate", x)
        return linear("down", gate / (1 + np.exp(-gate)) * up)
    erf = np.vectorize(math.erf)
    return linear("down", 0.5 * up * (1 + erf(up / math.sqrt(2))))


def _attention(config, params, x, positions, layer, problem, edit):
    def heads_of(name):
        return np.einsum("td,dnh->tnh", x, params[name]["kernel"]) + params[name].get("bias", 0.0)

    q = _rotate(config, heads_of("q"), positions)
    k, v = _rotate(config, heads_of("k"), positions), heads_of("v")
    out = np.zeros_like(q)
    for head in range(config.num_heads):
        kv_head = head // (config.num_heads // config.num_kv_heads)
        prefix_keys, prefix_values, bias = _prefix_of(problem, layer, kv_head, edit, config)
        for t in range(len(x)):
            keys = np.concatenate([prefix_keys, k[: t + 1, kv_head]])
            values = np.concatenate([prefix_values, v[: t + 1, kv_head]])
            scores = keys @ q[t, head] / math.sqrt(config.head_dim)
            scores[: len(bias)] += bias
            weights = np.exp(scores - scores.max())
            out[t, head] = weights @ values / weights.sum()
    if edit is not None and edit.head_gates is not None:
        gates = np.asarray(edit.head_gates)[None, :, None]
        null = problem.mean_output(layer) if edit.null == "mean" else 0.0
        out = gates * out + (1 - gates) * null
    return np.einsum("tnh,nhd->td", out, params["o"]["kernel"]) + params["o"].get("bias", 0.0)


def _prefix_of(problem, layer, kv_head, edit, config):
    kept = dict(edit.kept_keys) if edit is not None else {}
    if kv_head in kept:
        found = problem.head_prefix(layer, kv_head, kept[kv_head])
    elif problem.prefix is not None:
        found = [array[kv_head] for array in problem.prefix[layer]]
    else:
        found = np.zeros((0, config.head_dim)), np.zeros((0, config.head_dim)), np.zeros(0)
    return [np.asarray(array, np.float64) for array in found]


def _rotate(config, heads, positions):
    pairs = config.rotary_dim // 2
    out = heads.copy()
    for i in range(pairs):
        angles = positions * config.rope_theta ** (-2 * i / config.rotary_dim)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b = heads[:, :, i], heads[:, :, i + pairs]
        out[:, :, i] = a * cos - b * sin
        out[:, :, i + pairs] = b * cos + a * sin
    return out
