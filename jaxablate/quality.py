"""QuALITY: JSON lines of articles with multiple-choice questions.

Schema (v1.0.1): article_id, article, questions[{question, question_unique_id, options[4],
gold_label counted from 1}]. Several lines may hold the same article with other questions.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence

from jaxablate.errors import UserError

NUM_OPTIONS = 4
MAX_ID = 200
Record = dict[str, object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A multiple-choice question. `gold_label` counts from 1; None in the test split."""

    id: str
    text: str
    options: tuple[str, ...]
    gold_label: int | None = None


@dataclasses.dataclass(kw_only=True)
class Article:
    """An article and the questions of all lines that hold it, in the file's order."""

    name: str
    text: str
    questions: list[Question]


def merge_articles(
    records: Iterable[tuple[str, Record]], limit: int | None = None
) -> list[Article]:
    """Merges lines of one article_id and equal stripped text, in order of first appearance.

    Args:
      records: pairs of (place for messages, parsed line).
      limit: articles beyond the first so many are checked but not kept in memory.

    Raises:
      UserError: a missing or wrong field, or two different questions with one id.
    """
    articles: dict[tuple[str, bytes], Article | None] = {}
    texts_of_id: dict[str, int] = {}
    for where, record in records:
        article_id, text, questions = _parse_record(record, where)
        # The digest stands for the text, so that articles beyond the limit cost no memory.
        key = (article_id, hashlib.sha256(text.encode()).digest())
        if key not in articles:
            texts_of_id[article_id] = texts_of_id.get(article_id, 0) + 1
            keep = limit is None or len(articles) < limit
            copy = texts_of_id[article_id]
            name = f"quality_{article_id}" + (f"#{copy}" if copy > 1 else "")
            articles[key] = Article(name=name, text=text, questions=[]) if keep else None
        article = articles[key]
        if article is not None:
            _extend(article, questions, where)
    return [article for article in articles.values() if article is not None]


def _extend(article: Article, questions: Sequence[Question], where: str) -> None:
    known = {question.id: question for question in article.questions}
    for question in questions:
        if question.id in known:
            if question != known[question.id]:
                raise UserError(
                    f"{where}: question_unique_id {_short(question.id)} of {article.name} is "
                    f"already taken by another question"
                )
            continue
        known[question.id] = question
        article.questions.append(question)


def parse_json_object(text: str, where: str) -> Record:
    """Parses one line. Raises UserError that starts with `where` for anything but an object."""
    try:
        record = json.loads(text)
    except RecursionError:
        raise UserError(f"{where}: not a JSON line: nested too deeply") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not a JSON line: {error.msg} at character {error.pos}") from None
    except ValueError:  # an integer beyond Python's limit of digits
        raise UserError(f"{where}: not a JSON line: a number with too many digits") from None
    if not isinstance(record, dict):
        raise UserError(
            f"{where}: a line must be a JSON object, got {type(record).__name__} {_short(record)}"
        )
    return record


def _parse_record(record: Record, where: str) -> tuple[str, str, list[Question]]:
    article_id = record.get("article_id")
    if isinstance(article_id, int) and not isinstance(article_id, bool):
        article_id = str(article_id)
    if not _is_identifier(article_id):
        raise UserError(f"{where}: {_wrong('article_id', record, _IDENTIFIER)}")
    if not _is_text(record.get("article")):
        raise UserError(f"{where}: {_wrong('article', record, _TEXT)}")
    questions = record.get("questions")
    if not isinstance(questions, list):
        raise UserError(f"{where}: {_wrong('questions', record, 'a list')}")
    parsed = [
        _parse_question(question, f"{where}: question {number}")
        for number, question in enumerate(questions, start=1)
    ]
    return str(article_id), str(record["article"]).strip(), parsed


def _parse_question(record: object, where: str) -> Question:
    if not isinstance(record, dict):
        raise UserError(f"{where}: must be an object, got {_short(record)}")
    if not _is_text(record.get("question")):
        raise UserError(f"{where}: {_wrong('question', record, _TEXT)}")
    if not _is_identifier(record.get("question_unique_id")):
        raise UserError(f"{where}: {_wrong('question_unique_id', record, _IDENTIFIER)}")
    options = record.get("options")
    if (
        not isinstance(options, list)
        or len(options) != NUM_OPTIONS
        or not all(_is_text(option) for option in options)
    ):
        raise UserError(f"{where}: {_wrong('options', record, f'{NUM_OPTIONS} non-empty strings')}")
    return Question(
        id=record["question_unique_id"],
        text=record["question"],
        options=tuple(options),
        gold_label=_parse_gold_label(record, where),
    )


def _parse_gold_label(record: Record, where: str) -> int | None:
    label = record.get("gold_label")
    if label is None:
        return None
    if isinstance(label, bool) or not isinstance(label, int) or not 1 <= label <= NUM_OPTIONS:
        raise UserError(
            f"{where}: {_wrong('gold_label', record, f'an integer from 1 to {NUM_OPTIONS}')}"
        )
    return label


_IDENTIFIER = f"a printable string of 1 to {MAX_ID} characters"
_TEXT = "a non-empty string without lone surrogates"


def _is_identifier(value: object) -> bool:
    # Identifiers become columns of tables, lines of messages and names of files.
    return isinstance(value, str) and value.isprintable() and 0 < len(value.strip()) <= MAX_ID


def _is_text(value: object) -> bool:
    """JSON's escapes can spell halves of surrogate pairs, which no UTF-8 text can hold."""
    return (
        isinstance(value, str)
        and bool(value.strip())
        and (value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value))
    )


def _wrong(field: str, record: Record, allowed: str) -> str:
    if field not in record:
        return f"{field} is missing; it must be {allowed}"
    return f"{field} must be {allowed}, got {_short(record[field])}"


def _short(value: object, most: int = 60) -> str:
    """One printable line for any value, however large or deep."""
    if isinstance(value, (list, dict)):
        kind = "a list" if isinstance(value, list) else "an object"
        return f"{kind} of {len(value)}"
    shown = ascii(value[: most + 1] if isinstance(value, str) else value)
    return shown if len(shown) <= most else shown[: most - 3] + "..."
