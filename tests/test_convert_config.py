"""config.json: both spellings, and the refusal of whatever is not known, by its name."""

import json

import pytest

from convert.conversion import family_of
from jaxablate.config import RopeScaling
from jaxablate.errors import UserError

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 100,
}
NEOX = {
    "model_type": "gpt_neox",
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "hidden_act": "gelu",
    "max_position_embeddings": 128,
    "layer_norm_eps": 1e-5,
    "rotary_pct": 0.25,
    "rotary_emb_base": 10000,
    "use_parallel_residual": True,
    "tie_word_embeddings": False,
    "vocab_size": 100,
}
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FAMILIES = {
    "llama": LLAMA,
    "mistral": LLAMA | {"model_type": "mistral"},
    "qwen2": LLAMA | {"model_type": "qwen2"},
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 16},
    "gpt_neox": NEOX,
}


def read(raw):
    # Through JSON, as it comes from a file.
    raw = json.loads(json.dumps(raw))
    return family_of(raw.get("model_type")).read_config(raw)


def without(raw, *names):
    return {key: value for key, value in raw.items() if key not in names}


def test_llama_in_both_spellings():
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": SCALING}
    new = without(LLAMA, "rope_theta") | {"rope_parameters": SCALING | {"rope_theta": 5e5}}
    assert read(old) == read(new)
    assert read(new).rope_theta == 5e5
    assert read(new).rope_scaling == RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
    )


def test_neox_in_both_spellings():
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    old = NEOX | {"rotary_pct": 0.5, "rotary_emb_base": 500}
    new = without(NEOX, "rotary_pct", "rotary_emb_base") | {"rope_parameters": rope}
    assert read(old) == read(new)
    assert read(old).rotary_dim == 4
    assert read(old).rope_theta == 500.0


def test_spellings_that_disagree_are_refused():
    raw = LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    with pytest.raises(UserError, match="disagrees with itself"):
        read(raw)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_exports_what_it_reads(family):
    config = read(FAMILIES[family])
    assert config.family == family
    assert read(family_of(family).write_config(config)) == config


def test_head_dim_is_read_when_present():
    assert read(LLAMA).head_dim == 8
    assert read(LLAMA | {"head_dim": 32}).head_dim == 32


def test_llama_1_has_as_many_kv_heads_as_heads():
    assert read(without(LLAMA, "num_key_value_heads")).num_kv_heads == 8


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"attention_bias": True}, {"qkv_bias": True, "out_bias": True}),
        ({"mlp_bias": True}, {"mlp_bias": True}),
        ({"model_type": "qwen2"}, {"qkv_bias": True, "out_bias": False}),
        ({"model_type": "qwen3", "head_dim": 8}, {"qk_norm": True, "qkv_bias": False}),
        ({"tie_word_embeddings": True}, {"tie_embeddings": True}),
    ],
)
def test_attributes_become_fields(changes, fields):
    config = read(LLAMA | changes)
    assert {name: getattr(config, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("hidden_act", "mlp"),
    [("gelu", "gelu"), ("gelu_new", "gelu_tanh"), ("gelu_fast", "gelu_tanh")],
)
def test_gelu_is_exact_or_approximate_as_named(hidden_act, mlp):
    assert read(NEOX | {"hidden_act": hidden_act}).mlp == mlp


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({}, "model_type"),
        (LLAMA | {"model_type": "mixtral"}, "mixtral"),
        (LLAMA | {"model_type": ["llama"]}, "model_type"),
        (LLAMA | {"hidden_act": "relu"}, "hidden_act"),
        (NEOX | {"hidden_act": "relu"}, "hidden_act"),
        (LLAMA | {"num_local_experts": 8}, "num_local_experts"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        (LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        (LLAMA | {"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        (LLAMA | {"rope_scaling": SCALING | {"beta_fast": 32}}, "beta_fast"),
        (LLAMA | {"rope_scaling": without(SCALING, "factor")}, "factor"),
        (LLAMA | {"rope_scaling": "llama3"}, "rope_scaling"),
        (LLAMA | {"rope_scaling": {"type": "linear", "rope_type": "llama3"}}, "rope_type"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA | {"rope_interleaved": True}, "rope_interleaved"),
        (NEOX | {"rope_scaling": SCALING}, "llama3"),
        (FAMILIES["mistral"] | {"sliding_window": 64}, "sliding_window"),
        (
            FAMILIES["qwen2"]
            | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            "sliding_window",
        ),
        (FAMILIES["qwen3"] | {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
        (LLAMA | {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        (LLAMA | {"auto_map": {"AutoModel": "modeling_x.X"}}, "auto_map"),
        (LLAMA | {"logit_scale": 0.5}, "logit_scale"),
        (LLAMA | {"hidden_size": "64"}, "hidden_size"),
        (LLAMA | {"hidden_size": True}, "hidden_size"),
        (LLAMA | {"hidden_size": 64.5}, "hidden_size"),
        (LLAMA | {"hidden_size": -64}, "model_dim"),
        (LLAMA | {"hidden_size": 10**40}, "hidden_size"),
        (LLAMA | {"num_attention_heads": 0}, "num_attention_heads"),
        (LLAMA | {"num_attention_heads": 7}, "num_attention_heads"),
        (LLAMA | {"num_key_value_heads": 3}, "num_kv_heads"),
        (LLAMA | {"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        (without(LLAMA, "rms_norm_eps"), "rms_norm_eps"),
        (without(NEOX, "layer_norm_eps"), "layer_norm_eps"),
        (without(FAMILIES["mistral"], "num_key_value_heads"), "num_key_value_heads"),
        (without(FAMILIES["qwen3"], "head_dim"), "head_dim"),
        (FAMILIES["mistral"] | {"attention_bias": True}, "attention_bias"),
        (NEOX | {"head_dim": 16}, "head_dim"),
        (NEOX | {"num_attention_heads": 7}, "num_attention_heads"),
        (NEOX | {"rotary_pct": 0.0}, "rotary_dim"),
    ],
)
def test_refused_by_name(raw, named):
    with pytest.raises(UserError, match=named) as caught:
        read(raw)
    assert "\n" not in str(caught.value)


def test_windows_that_hide_nothing_are_not_in_use():
    """Qwen2.5 states a window that its switch turns off; others one as long as the text."""
    off = {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 1}
    assert read(FAMILIES["qwen2"] | off) == read(FAMILIES["qwen2"])
    assert read(FAMILIES["mistral"] | {"sliding_window": 128}) == read(FAMILIES["mistral"])
    above = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}
    assert read(FAMILIES["qwen2"] | above) == read(FAMILIES["qwen2"])


def test_unknown_attributes_that_are_null_say_nothing():
    assert read(LLAMA | {"some_new_switch": None}) == read(LLAMA)


@pytest.mark.parametrize("name", ["SmolLM2", "Pythia", "Qwen2.5"])
def test_published_files(name):
    """The attributes of published config.json files, abridged in their values only."""
    config = read(PUBLISHED[name])
    assert config.num_layers == PUBLISHED[name]["num_hidden_layers"]


PUBLISHED = {
    "SmolLM2": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 576,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": 1536,
        "is_llama_config": True,
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "pad_token_id": 2,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        "transformers_version": "4.42.3",
        "use_cache": True,
        "vocab_size": 49152,
    },
    "Pythia": {
        "architectures": ["GPTNeoXForCausalLM"],
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_act": "gelu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 8192,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048,
        "model_type": "gpt_neox",
        "num_attention_heads": 8,
        "num_hidden_layers": 16,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.24.0",
        "use_cache": True,
        "use_parallel_residual": True,
        "vocab_size": 50304,
    },
    "Qwen2.5": {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "hidden_size": 896,
        "initializer_range": 0.02,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 21,
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.1",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
}
