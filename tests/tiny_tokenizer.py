"""A byte-pair tokenizer made on the spot, in the files that Hugging Face models come with."""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

# In the manner of Llama 3's: BOS first, a system block even when none is asked for, contents
# stripped. Its text is our own.
LLAMA_LIKE_TEMPLATE = (
    "{{- bos_token }}"
    "{%- if messages[0]['role'] == 'system' %}"
    "{%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}"
    "{%- else %}{%- set system = '' %}{%- endif %}"
    "{{- '<|head|>system<|/head|>\\n\\nDate: ' + strftime_now('%d %b %Y') + '\\n\\n' }}"
    "{{- system + '<|turn|>' }}"
    "{%- for message in messages %}"
    "{{- '<|head|>' + message['role'] + '<|/head|>\\n\\n' + message['content'] | trim }}"
    "{{- '<|turn|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>\\n\\n' }}{%- endif %}"
)
# In the manner of Gemma's: no system role, turns must alternate.
STRICT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n  "
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate,\\nstarting with user') }}{% endif %}\n"
    "<|head|>{{ message['role'] }}\n{{ message['content'] }}<|turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|head|>model\n{% endif %}"
)
SPECIAL = ["<|begin|>", "<|end|>", "<|head|>", "<|/head|>", "<|turn|>"]
_CORPUS = [
    "The keys of a head are kept where the queries look. Repeat the previous context verbatim.",
    "A question about the text, with four options: one of them is right, the others are not.",
] * 5


def write_tokenizer(
    directory: Path,
    *,
    template: str | None = LLAMA_LIKE_TEMPLATE,
    adds_bos: bool = True,
    bos: str | None = "<|begin|>",
    vocab_size: int = 320,
) -> Path:
    """Writes tokenizer.json, tokenizer_config.json and the template; returns `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    if adds_bos and bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": {"__type": "AddedToken", "content": "<|turn|>", "special": True},
    }
    if bos:
        config["bos_token"] = bos
    if template is not None:
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory
