"""Reading a Hugging Face config.json strictly: every attribute is used, known to be harmless, or
refused by its name. A silently ignored attribute (a rope type, a sliding window) gives fluent
nonsense, so nothing here is guessed.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxablate.config import RopeScaling
from jaxablate.errors import UserError

MAX_CONFIG_BYTES = 8_000_000

# Attributes that change no logit of a causal language model's forward pass: training, generation,
# bookkeeping, and how weights and outputs are stored.
_HARMLESS_NAMES = """
    _name_or_path _attn_implementation_autoset add_cross_attention architectures
    attention_dropout attn_implementation bad_words_ids begin_suppress_tokens bos_token_id
    classifier_dropout cross_attention_hidden_size decoder_start_token_id diversity_penalty
    do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    hidden_dropout id2label initializer_range is_composition is_encoder_decoder is_decoder
    is_llama_config keys_to_ignore_at_inference label2id length_penalty max_length
    max_sequence_length min_length model_type name_or_path no_repeat_ngram_size num_beam_groups
    num_beams num_return_sequences output_attentions output_hidden_states output_scores
    pad_token_id prefix pretraining_tp problem_type remove_invalid_values repetition_penalty
    resid_pdrop return_dict return_dict_in_generate sep_token_id suppress_tokens
    task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k
    top_p torch_dtype torchscript transformers.js_config transformers_version typical_p
    unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache
"""
HARMLESS = frozenset(_HARMLESS_NAMES.split())
# Refused with a reason of their own.
REFUSED = {
    "auto_map": "the model comes with custom code, which is never executed",
    "quantization_config": "quantised weights (GPTQ, AWQ, bitsandbytes, FP8 and the like) are not "
    "read; convert the unquantised model or a .gguf file",
    "compression_config": "compressed weights are not read; convert the uncompressed model",
}
_REQUIRED = object()


def parse_json_object(text: bytes, name: str) -> dict[str, Any]:
    """One JSON object; deep nesting, NaN constants and broken UTF-8 are errors, not tracebacks.

    Raises:
      UserError: `text` is not UTF-8, not JSON, or not an object. `name` says whose text it is.
    """
    try:
        value = json.loads(text.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise UserError(f"{name} is not valid JSON: {one_line(reason)}") from None
    if not isinstance(value, dict):
        raise UserError(f"{name} holds a JSON {type(value).__name__}; an object is required")
    return value


def read_json_file(path: Path) -> dict[str, Any]:
    """A small JSON file as a dict; see `parse_json_object`."""
    try:
        size = path.stat().st_size
        if size > MAX_CONFIG_BYTES:
            raise UserError(f"{path} has {size:,} bytes; at most {MAX_CONFIG_BYTES:,} are read")
        text = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    return parse_json_object(text, str(path))


def one_line(message: object, limit: int = 300) -> str:
    """A message without line breaks and of bounded length."""
    text = " ".join(str(message).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


class ConfigReader:
    """Takes attributes out of a config.json; what nobody took is refused at the end."""

    def __init__(self, raw: Mapping[str, Any]):
        self.raw = raw
        self.model_type = raw.get("model_type")
        self._taken: set[str] = set()

    def take(self, name: str, kind: type, default: Any = _REQUIRED) -> Any:
        """The attribute, checked to be of `kind` (int, float, bool, str); null counts as absent.

        Raises:
          UserError: it is absent without a default, of another type, or not a finite number.
        """
        self._taken.add(name)
        value = self.raw.get(name)
        if value is None:
            if default is _REQUIRED:
                raise UserError(f"config.json ({self.model_type}) lacks {name}")
            return default
        return checked(name, value, kind)

    def has(self, name: str) -> bool:
        self._taken.add(name)
        return self.raw.get(name) is not None

    def require(self, name: str, kind: type, allowed: tuple, default: Any) -> Any:
        """Take an attribute of which only some values are implemented."""
        value = self.take(name, kind, default)
        if value not in allowed:
            raise UserError(
                f"config.json ({self.model_type}) has {name} = {value!r}; "
                f"only {' or '.join(map(repr, allowed))} is implemented"
            )
        return value

    def finish(self) -> None:
        """Refuse whatever is left.

        Raises:
          UserError: an attribute that nobody knows, by its name.
        """
        for name, reason in REFUSED.items():
            if self.raw.get(name):
                raise UserError(f"config.json ({self.model_type}) has {name}: {reason}")
        unknown = sorted(
            name
            for name, value in self.raw.items()
            if value is not None and name not in self._taken | HARMLESS | REFUSED.keys()
        )
        if unknown:
            raise UserError(
                f"config.json ({self.model_type}) has attributes that are not known: "
                f"{one_line(', '.join(unknown))}; they may change the model's mathematics. "
                "Remove those that do not from config.json"
            )


def checked(name: str, value: Any, kind: type) -> Any:
    """`value` as `kind`, strictly: true is no integer, 3.0 is one, nan is no number."""
    if kind is bool or kind is str:
        good = isinstance(value, kind)
    else:
        good = isinstance(value, int | float) and not isinstance(value, bool)
        good = good and math.isfinite(value) if good and abs_below(value) else False
        if good and kind is int:
            good = value == int(value)
    if not good:
        raise UserError(
            f"config.json has {name} = {one_line(repr(value), 60)}; "
            f"a value of type {kind.__name__} is required"
        )
    return kind(value)


def abs_below(value: int | float, limit: float = 1e15) -> bool:
    """Numbers beyond any model constant (Python integers have no bound) are refused."""
    return -limit <= value <= limit


def read_rope(
    reader: ConfigReader,
    theta_names: tuple[str, ...],
    partial_names: tuple[str, ...],
    default_theta: float | None,
    default_partial: float,
) -> tuple[float, float, RopeScaling | None]:
    """Base, rotated fraction and scaling of the rotary embedding, from either spelling.

    The old spelling has rope_theta (NeoX: rotary_emb_base), rotary_pct and rope_scaling at the top
    level; since transformers 5 all of it is in rope_parameters. Where both are given they must
    agree.
    """
    nested: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):
        if reader.has(name):
            value = reader.raw[name]
            if not isinstance(value, Mapping):
                raise UserError(
                    f"config.json has {name} = {one_line(repr(value), 60)}; an object is required"
                )
            _merge_rope(nested, value)
    theta = _agreed(reader, nested, ("rope_theta",), theta_names, default_theta)
    partial = _agreed(reader, nested, ("partial_rotary_factor",), partial_names, default_partial)
    return theta, partial, _rope_scaling(nested)


def _merge_rope(into: dict[str, Any], value: Mapping[str, Any]) -> None:
    for key, item in value.items():
        key = "rope_type" if key == "type" else key
        if item is None:
            continue
        if key in into and into[key] != item:
            raise UserError(
                f"config.json gives two values for rope's {key}: "
                f"{one_line(repr(into[key]), 60)} and {one_line(repr(item), 60)}"
            )
        into[key] = item


def _agreed(
    reader: ConfigReader,
    nested: dict[str, Any],
    nested_names: tuple[str, ...],
    names: tuple[str, ...],
    default: float | None,
) -> float:
    found: dict[str, float] = {}
    for name in nested_names:
        if name in nested:
            found[f"rope_parameters.{name}"] = checked(name, nested.pop(name), float)
    for name in names:
        if reader.has(name):
            found[name] = reader.take(name, float)
    if len(set(found.values())) > 1:
        raise UserError(f"config.json ({reader.model_type}) disagrees with itself: {found}")
    if found:
        return next(iter(found.values()))
    if default is None:
        raise UserError(f"config.json ({reader.model_type}) lacks {names[0]}")
    return default


def _rope_scaling(nested: dict[str, Any]) -> RopeScaling | None:
    rope_type = nested.pop("rope_type", "default")
    if rope_type == "default":
        names: dict[str, str] = {}
    elif rope_type == "llama3":
        names = {
            "factor": "factor",
            "low_freq_factor": "low_freq_factor",
            "high_freq_factor": "high_freq_factor",
            "original_max_position_embeddings": "original_max_positions",
        }
    else:
        raise UserError(
            f"config.json has rope type {one_line(repr(rope_type), 60)}; "
            "only 'default' and 'llama3' are implemented"
        )
    unknown = sorted(set(nested) - set(names))
    if unknown:
        raise UserError(
            f"config.json's rope parameters ({rope_type}) have attributes that are "
            f"not known: {one_line(', '.join(unknown))}"
        )
    missing = sorted(set(names) - set(nested))
    if missing:
        raise UserError(f"config.json's rope parameters ({rope_type}) lack {', '.join(missing)}")
    if not names:
        return None
    kinds = {"original_max_position_embeddings": int}
    return RopeScaling(
        **{
            ours: checked(name, nested[name], kinds.get(name, float))
            for name, ours in names.items()
        }
    )


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
