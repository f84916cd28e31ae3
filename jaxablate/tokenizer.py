"""A model's tokenizer: text to token ids and back, the policy on BOS, and its chat template.

`tokenizer.json` is read by the `tokenizers` package alone, and chat templates are rendered by
jinja2: importing transformers takes seconds, and is only done where `tokenizer.json` is absent.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxablate.errors import UserError

BOS_POLICIES = ("auto", "always", "never")
# Templates may print today's date (Llama 3.2's does). A fixed one keeps prompts equal from day to
# day; it is the date that Llama 3.1's template itself falls back on.
TEMPLATE_DATE = "26 Jul 2024"
Message = Mapping[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """Wraps a fast tokenizer; made by `load_tokenizer`.

    Attributes:
      backend: the `tokenizers.Tokenizer`.
      bos_id, eos_id: None where the tokenizer has none.
      stop_ids: the tokens that end a generated text: eos_id and those of generation_config.json.
      adds_bos: whether the model's own tokenizer puts a BOS before a plain text.
      chat_template: a jinja2 template, or None for a base model.
      special_tokens: names such as "bos_token" and their strings, for the template.
    """

    backend: Any
    bos_id: int | None = None
    eos_id: int | None = None
    stop_ids: tuple[int, ...] = ()
    adds_bos: bool = False
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id; the model's vocabulary may be larger."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def leading_bos(self, policy: str = "auto") -> int | None:
        """The BOS that goes before a plain text, or None.

        Args:
          policy: `auto` does what the model's own tokenizer does; `always` puts one; `never` none.

        Raises:
          UserError: an unknown policy, or `always` where the tokenizer has no BOS.
        """
        if policy not in BOS_POLICIES:
            raise UserError(f"BOS policy must be one of {', '.join(BOS_POLICIES)}; got {policy!a}")
        if policy == "always" and self.bos_id is None:
            raise UserError("BOS policy is always, but this tokenizer has no BOS token; use auto")
        if policy == "never" or (policy == "auto" and not self.adds_bos):
            return None
        return self.bos_id

    def encode(self, text: str, bos: str = "never") -> Int[np.ndarray, " T"]:
        """Token ids of `text`, after exactly one BOS where the policy `bos` asks for it.

        Special tokens spelled out in the text become those tokens, as in Hugging Face's.
        """
        ids = self.backend.encode(text, add_special_tokens=False).ids
        lead = self.leading_bos(bos)
        if lead is not None and ids[:1] != [lead]:
            ids = [lead, *ids]
        return np.asarray(ids, np.int32)

    def encode_start(self, text: str, num_tokens: int) -> Int[np.ndarray, " T"]:
        """The first `num_tokens` ids of `text` (fewer where it ends), no BOS, at a cost that does
        not grow with the rest of the text.

        Tokenizers split a text into words first, so a cut far behind the last token wanted changes
        nothing, unless words are longer than the margin of 2,000 characters.
        """
        characters = 6 * num_tokens
        while True:
            ids = self.encode(text[: characters + 2000])
            in_front = len(self.encode(text[:characters])) if characters < len(text) else len(ids)
            if in_front >= num_tokens or characters >= len(text):
                return ids[:num_tokens]
            characters *= 2

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids (no BOS added) and the characters [start, end) that each stands for."""
        encoding = self.backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Sequence[int] | Int[np.ndarray, " _"], skip_special: bool = False) -> str:
        """The text of `ids`."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def render_chat(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """The messages ({"role", "content"}) in the model's chat template, as text.

        Raises:
          UserError: no template, or one that refuses these messages.
        """
        if self.chat_template is None:
            raise UserError(
                "this tokenizer has no chat template (a base model?); use the raw prompt forms, "
                "or a plain text"
            )
        return _render(
            self.chat_template, messages, add_generation_prompt, dict(self.special_tokens)
        )


def check_token_ids(ids: Int[np.ndarray, "..."], vocab_size: int) -> None:
    """Raises UserError where an id lies outside the model's vocabulary.

    A tokenizer smaller than the vocabulary is fine (Pythia: 50,277 of 50,304 rows).
    """
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if wrong.size:
        raise UserError(
            f"token id {int(wrong[0])} lies outside the model's vocabulary of {vocab_size} "
            f"({wrong.size} such tokens): the tokenizer belongs to another model"
        )


def load_tokenizer(directory: str | pathlib.Path) -> Tokenizer:
    """Reads the tokenizer in `directory` (tokenizer.json, tokenizer_config.json, ...), offline.

    Raises:
      UserError: no tokenizer there, or one that cannot be read.
    """
    directory = pathlib.Path(directory)
    if not directory.is_dir():
        raise UserError(f"{directory}: no such folder; it should hold tokenizer.json")
    config = _read_json(directory / "tokenizer_config.json")
    older = _read_json(directory / "special_tokens_map.json")
    path = directory / "tokenizer.json"
    backend = _read_backend(path) if path.is_file() else _convert_slow(directory)
    special = _special_tokens({**older, **config})
    bos_id, eos_id = (
        backend.token_to_id(special[name]) if name in special else None
        for name in ("bos_token", "eos_token")
    )
    adds_bos = config.get("add_bos_token")
    if not isinstance(adds_bos, bool):
        adds_bos = bos_id is not None and backend.encode("a").ids[:1] == [bos_id]
    return Tokenizer(
        backend=backend,
        bos_id=bos_id,
        eos_id=eos_id,
        stop_ids=_stop_ids(directory, eos_id),
        adds_bos=adds_bos and bos_id is not None,
        chat_template=_chat_template(directory, config),
        special_tokens=special,
    )


def _read_backend(path: pathlib.Path) -> Any:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # the Rust side raises bare Exception, and panics
        raise UserError(f"{path}: not a tokenizer: {_one_line(error)}") from None


def _convert_slow(directory: pathlib.Path) -> Any:
    """The fast form of an older tokenizer (tokenizer.model, vocab.json and merges.txt)."""
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
        return tokenizer.backend_tokenizer
    except Exception as error:  # whatever third-party readers raise on damaged files
        raise UserError(
            f"{directory}: no tokenizer.json, and no other tokenizer could be read: "
            f"{_one_line(error)}"
        ) from None


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise UserError(f"{path}: not a JSON file: {_one_line(error)}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """{"bos_token": "<s>", ...}; the values may be strings or {"content": string, ...}."""
    tokens = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def _stop_ids(directory: pathlib.Path, eos_id: int | None) -> tuple[int, ...]:
    listed = _read_json(directory / "generation_config.json").get("eos_token_id")
    ids = listed if isinstance(listed, list) else [listed]
    found = {i for i in [eos_id, *ids] if isinstance(i, int) and not isinstance(i, bool)}
    return tuple(sorted(found))


def _chat_template(directory: pathlib.Path, config: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (ValueError, OSError) as error:
            raise UserError(f"{path}: cannot be read: {_one_line(error)}") from None
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


@functools.lru_cache(maxsize=8)
def _compile_template(template: str) -> Any:
    import jinja2.ext
    import jinja2.sandbox

    # Templates are other people's code: the sandbox keeps them from anything but their arguments.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(
        value, ensure_ascii=False, **options
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda _format: TEMPLATE_DATE
    return environment.from_string(template)


def _refuse(message: str) -> None:
    raise UserError(f"the model's chat template refuses these messages: {_one_line(message)}")


def _render(
    template: str,
    messages: Sequence[Message],
    add_generation_prompt: bool,
    special_tokens: dict[str, str],
) -> str:
    try:
        return _compile_template(template).render(
            messages=list(messages), add_generation_prompt=add_generation_prompt, **special_tokens
        )
    except UserError:
        raise
    except Exception as error:  # a template is a program: anything can come out of it
        raise UserError(f"the model's chat template fails: {_one_line(error)}") from None


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:200]
