"""Generated answers to a document's questions, in the published file format.

    {"model_name", "article_id", "question_ids", ..., "generations": [{"question_id",
     "generated_text"}]}

One file per article. Ours also hold what the answers depend on; the published ones do not.
"""

import hashlib
import json
import pathlib
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxablate import durable, prompts
from jaxablate.documents import Document
from jaxablate.errors import UserError
from jaxablate.generation import GenerationOptions, generate
from jaxablate.prompts import PromptForms
from jaxablate.sweep import Model
from jaxablate.tokenizer import Tokenizer

_LONGEST_NAME = 150


def answers_path(folder: pathlib.Path, document: str) -> pathlib.Path:
    """Where a document's answers lie in `folder`; the name cannot lead out of it."""
    name = urllib.parse.quote(document, safe=" #")
    if len(name) > _LONGEST_NAME or name[:1] in ("", "."):
        name = name[:_LONGEST_NAME].lstrip(".") + hashlib.sha256(document.encode()).hexdigest()[:16]
    return folder / f"{name}.json"


def answer_questions(
    model: Model,
    tokenizer: Tokenizer,
    document: Document,
    options: GenerationOptions,
    forms: PromptForms | None = None,
    on_token: Callable[[int], None] | None = None,
) -> dict[str, str]:
    """The model's answers by question id, generated behind the whole article.

    Raises:
      UserError: no questions, or a document too long for the model.
    """
    if not document.questions:
        raise UserError(f"{document.name}: the document has no questions to answer")
    try:
        context, _ = prompts.context_ids(document.text, tokenizer, forms)
        questions = [
            prompts.question_ids(question, document.text, tokenizer, forms)
            for question in document.questions
        ]
        tokens = generate(model, context, questions, tokenizer.stop_ids, options, on_token)
    except UserError as error:
        raise UserError(f"{document.name}: {error}") from None
    return {
        question.id: tokenizer.decode(np.asarray(ids), skip_special=True).strip()
        for question, ids in zip(document.questions, tokens)
    }


def write_answers(
    path: pathlib.Path,
    document: Document,
    answers: Mapping[str, str],
    *,
    model_name: str,
    settings: Mapping[str, Any],
    owner: str,
) -> None:
    """Writes one article's file; it appears whole or not at all.

    Args:
      settings: what the answers depend on (model digest, prompt forms, sampling); stored flat.
      owner: see `durable.replacing`.
    """
    ids = [question.id for question in document.questions]
    content = {
        "model_name": model_name,
        "article_id": document.name,
        "question_ids": ids,
        "question_ids_hash": _hash_ids(ids),
        **settings,
        "document_digest": document.digest,
        "generations": [{"question_id": i, "generated_text": answers[i]} for i in ids],
    }
    data = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    durable.write_bytes(path, data.encode(), owner)


def read_answers(path: pathlib.Path | str, document: Document) -> dict[str, str]:
    """Answers to a document's questions by question id.

    Args:
      path: a file, or a folder of files as `answers_path` names them.

    Raises:
      UserError: no such file, a damaged one, one of another article or text, or one that lacks a
        question; one line that names the file.
    """
    path = pathlib.Path(path).expanduser()
    if path.is_dir():
        path = answers_path(path, document.name)
    content = _read_json(path)
    if content.get("article_id") != document.name:
        raise UserError(
            f"{path}: holds answers for article_id {_short(content.get('article_id'))}, "
            f"not for {document.name}"
        )
    digest = content.get("document_digest", document.digest)
    if digest != document.digest:
        raise UserError(
            f"{path}: the answers were made for another text of {document.name} (digest "
            f"{_short(digest)}, now {document.digest[:12]}...); make them again"
        )
    return _read_generations(path, content, document)


def stored_settings(path: pathlib.Path) -> dict[str, Any]:
    """The fields of a file other than its answers, to compare with the settings of a run."""
    content = _read_json(path)
    return {name: value for name, value in content.items() if name != "generations"}


def _read_generations(
    path: pathlib.Path, content: Mapping[str, Any], document: Document
) -> dict[str, str]:
    generations = content.get("generations")
    if not isinstance(generations, list):
        raise UserError(f"{path}: generations must be a list, got {_short(generations)}")
    found: dict[str, str] = {}
    for number, entry in enumerate(generations, start=1):
        values = entry if isinstance(entry, dict) else {}
        question, text = values.get("question_id"), values.get("generated_text")
        if not isinstance(question, str) or not isinstance(text, str):
            raise UserError(
                f"{path}: generation {number} must hold the strings question_id and "
                f"generated_text, got {_short(entry)}"
            )
        if found.get(question, text) != text:
            raise UserError(f"{path}: two different answers to question {_short(question)}")
        found[question] = text
    absent = [question.id for question in document.questions if question.id not in found]
    if absent:
        raise UserError(
            f"{path}: no answer to question {absent[0]} (and {len(absent) - 1} more of "
            f"{len(document.questions)}); make the answers again for this file"
        )
    return {question.id: found[question.id] for question in document.questions}


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such file of answers; experiments/answers.py makes them"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a JSON file: {_short(str(error))}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: must hold a JSON object, got {_short(content)}")
    return content


def _hash_ids(ids: list[str]) -> str:
    """As the published program names a set of questions."""
    return hashlib.md5("_".join(ids).encode(), usedforsecurity=False).hexdigest()[:16]


def _short(value: object) -> str:
    if isinstance(value, (list, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    shown = ascii(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
