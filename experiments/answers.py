"""A model's own answers to QuALITY's questions, which the influence experiment scores.

    python experiments/answers.py --text=QuALITY.v1.0.1.htmlstripped.dev --documents=10
    python experiments/influence.py --text=QuALITY.v1.0.1.htmlstripped.dev --answers=out/answers ...

Each article is read once with the full cache and all its questions are answered side by side:
greedily, or sampled with --temperature, --top_p and --seed. Writes OUT/ARTICLE.json per article, in
the file format of arXiv 2602.16284's code. An article whose file is there is not done again, so the
same command goes on after an interruption; other settings need another --out. About 5 seconds per
article of 2,000 tokens and six questions with the embedded model on 2 CPU cores.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from experiments import command_line
from experiments.command_line import say
from jaxablate import durable, interrupt, prompts
from jaxablate.errors import UserError
from jaxablate.lock import DirectoryLock
from jaxablate.progress import Progress
from jaxablate.shards import parse_shard

FLAGS = flags.FLAGS


def define_flags() -> None:
    command_line.define_model_flags(out="out/answers")
    flags.DEFINE_string("text", None, "A QuALITY file, whatever its name.", required=True)
    flags.DEFINE_integer(
        "documents", None, "The first so many articles; all by default.", lower_bound=1
    )
    flags.DEFINE_enum(
        "context_form",
        "chat",
        prompts.CONTEXT_FORMS,
        "chat: a system message and the article, as published. chat_no_system: for templates "
        "without a system role. raw: the article alone, for base models.",
    )
    flags.DEFINE_enum(
        "question_form",
        "new_chat",
        prompts.QUESTION_FORMS,
        "new_chat: a chat of its own, as published (with Llama's template, a second BOS and "
        "system block). same_chat: the next turn of the chat. raw: the text alone.",
    )
    flags.DEFINE_integer("max_new_tokens", 64, "The most tokens of an answer.", lower_bound=1)
    flags.DEFINE_float("temperature", 0.0, "0: the most likely token each time (greedy).")
    flags.DEFINE_float("top_p", 1.0, "Sample from the most likely tokens of this probability.")


def main() -> None:
    from jaxablate.generation import GenerationOptions
    from jaxablate.text import PromptForms, read_documents

    forms = PromptForms(context=FLAGS.context_form, question=FLAGS.question_form)
    options = GenerationOptions(
        max_new_tokens=FLAGS.max_new_tokens,
        temperature=FLAGS.temperature,
        top_p=FLAGS.top_p,
        seed=FLAGS.seed,
    )
    documents = read_documents(FLAGS.text, limit=FLAGS.documents)
    device = command_line.find_device()
    loaded = command_line.LoadedModel(FLAGS.model)
    sweep = loaded.sweep_options(device.kind)
    if FLAGS.distributed:
        raise UserError("--distributed is not for answers; use --shard=i/n, or --mesh on one host")
    row_bytes = 8 * loaded.config.num_layers * loaded.config.num_kv_heads * loaded.config.head_dim
    room = sweep.memory_budget // row_bytes  # keys and values of a token, in float32
    options = dataclasses.replace(options, batch_tokens=max(1, min(room, sweep.chunk_tokens)))
    shard = parse_shard(FLAGS.shard, os.environ)
    if shard is not None:
        documents = documents[shard.index :: shard.count]
    run(FLAGS.out, loaded, documents, options, forms, FLAGS.dtype, shard.tag if shard else None)


def run(
    out: str | Path,
    loaded: Any,
    documents: Sequence[Any],
    options: Any,
    forms: Any,
    dtype: str,
    shard: str | None = None,
) -> list[Path]:
    """Answers what has no file in `out` yet; returns the paths of all files.

    Args:
      loaded: with .name, .digest, .tokenizer() and .model(), which is called only if needed.

    Raises:
      UserError: a document without questions, or a file that was made with other settings.
    """
    from jaxablate.reference_answers import answers_path

    for document in documents:
        if not document.questions:
            raise UserError(f"{document.name}: no questions; --text must be a QuALITY file")
    settings = _settings(loaded, options, forms, dtype)
    folder = durable.prepare_directory(out)
    lock = DirectoryLock(folder, shard)
    lock.acquire()
    try:
        missing = [d for d in documents if not is_answered(folder, d, settings)]
        say(f"plan        {len(missing)} of {len(documents)} articles to answer")
        if missing:
            with interrupt.guard("finishing and writing this article first"):
                _answer(folder, loaded, missing, options, forms, settings)
    finally:
        lock.release()
    say(f"wrote       {folder} ({len(documents)} files)")
    return [answers_path(folder, document.name) for document in documents]


def _settings(loaded: Any, options: Any, forms: Any, dtype: str) -> dict[str, Any]:
    """What the answers depend on besides the document; stored with them."""
    return {
        "model_digest": loaded.digest,
        "dtype": dtype,
        "context_form": forms.context,
        "question_form": forms.question,
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        # Greedy answers depend on neither.
        "top_p": options.top_p if options.temperature else 1.0,
        "seed": options.seed if options.temperature else 0,
    }


def is_answered(folder: Path, document: Any, settings: Mapping[str, Any]) -> bool:
    """Whether the document's file is there, made with these settings from this text.

    Raises:
      UserError: it is there, but made otherwise.
    """
    from jaxablate.reference_answers import answers_path, read_answers, stored_settings

    path = answers_path(folder, document.name)
    if not path.exists():
        return False
    found = stored_settings(path)
    changed = [
        f"{name} {found[name]!r} then, {value!r} now" if name in found else f"{name} unknown"
        for name, value in settings.items()
        if name not in found or found[name] != value
    ]
    if changed:
        raise UserError(
            f"{path} holds answers made with other settings ({'; '.join(changed)}); choose "
            "another --out"
        )
    read_answers(path, document)
    return True


def _answer(
    folder: Path,
    loaded: Any,
    documents: Sequence[Any],
    options: Any,
    forms: Any,
    settings: Mapping[str, Any],
) -> None:
    from jaxablate.reference_answers import answer_questions, answers_path, write_answers

    model, tokenizer = loaded.model(), loaded.tokenizer()
    questions = [len(document.questions) for document in documents]
    total = sum(questions) * options.max_new_tokens
    progress = Progress(total, len(documents), label="answers", unit="articles")
    done = 0
    with progress:
        for index, document in enumerate(documents):
            answers = answer_questions(
                model, tokenizer, document, options, forms, on_token=progress.advance
            )
            path = answers_path(folder, document.name)
            write_answers(
                path,
                document,
                answers,
                model_name=loaded.name,
                settings=settings,
                owner="answers",
            )
            done += questions[index] * options.max_new_tokens
            progress.reach(done, index + 1)
            interrupt.check()


if __name__ == "__main__":
    define_flags()
    command_line.run(main)
