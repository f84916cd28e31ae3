"""Documents: texts with a name, a digest and, in QuALITY's case, questions.

A source of documents is named by one string (`--text`):

- ``pydoc``: the Python language reference that ships with Python (`pydoc_data.topics`), longest
  topic first; ``pydoc:types`` is that topic alone. It differs between Python versions, so the
  digest belongs in every result.
- a text file; a folder of ``.txt`` files, in the order of their names;
- JSON lines, either ``{"text": ...}`` or QuALITY's, whatever the file is called.
"""

import codecs
import dataclasses
import hashlib
import mmap
import pathlib
from collections.abc import Iterator, Sequence

from jaxablate import quality
from jaxablate.errors import UserError
from jaxablate.quality import Question

PYDOC = "pydoc"
# How the text of a document was changed before its digest was taken; a part of every result.
NEWLINES = "utf-8, no byte-order mark, newlines as \\n"
STRIPPED = "stripped of outer whitespace"
_TEXT_SUFFIXES = (".txt", ".text", ".md")
_BOM = codecs.BOM_UTF8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
    """One text. `digest` is the sha256 of its UTF-8 bytes; `normaliser` says how it was cleaned."""

    name: str
    text: str
    digest: str
    questions: tuple[Question, ...] = ()
    normaliser: str = NEWLINES


def make_document(
    name: str, text: str, questions: Sequence[Question] = (), normaliser: str = NEWLINES
) -> Document:
    """Returns a Document with its digest.

    Raises:
      UserError: the text is empty, or holds half of a surrogate pair (possible in JSON only).
    """
    if not text.strip():
        raise UserError(f"{name}: the text is empty")
    try:
        digest = hashlib.sha256(text.encode()).hexdigest()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{name}: character {error.start} is half of a surrogate pair "
            f"({text[error.start]!a}), which no UTF-8 text can hold"
        ) from None
    return Document(
        name=name, text=text, digest=digest, questions=tuple(questions), normaliser=normaliser
    )


def read_documents(
    spec: str, *, names: Sequence[str] | None = None, limit: int | None = None
) -> tuple[Document, ...]:
    """Reads the documents that `spec` names (see the module's docstring), in a fixed order.

    Args:
      spec: ``pydoc``, ``pydoc:TOPIC``, or the path of a file or folder.
      names: keep these documents only, in this order.
      limit: keep the first so many.

    Raises:
      UserError: one line that names the file, and the line or byte at fault.
    """
    if limit is not None and limit < 1:
        raise UserError(f"the number of documents must be at least 1, got {limit}")
    # Without names, reading may stop at the limit: the file can be far larger than what is used.
    documents = list(_iterate(spec, limit if names is None else None))
    if not documents:
        raise UserError(f"{spec}: holds no documents (an empty file?)")
    if names is not None:
        by_name = {document.name: document for document in documents}
        absent = [name for name in names if name not in by_name]
        if absent:
            raise UserError(
                f"{spec}: no document named {', '.join(absent)}; "
                f"there are {_abbreviate(list(by_name))}"
            )
        documents = [by_name[name] for name in names]
    return tuple(documents[:limit])


def _iterate(spec: str, limit: int | None) -> Iterator[Document]:
    if spec == PYDOC or spec.startswith(PYDOC + ":"):
        yield from _pydoc_topics(spec, limit)
        return
    if "\0" in spec:
        raise UserError(f"--text: {spec!a} is no path: it holds a NUL character")
    if not spec.strip():  # pathlib takes it for the working directory
        raise UserError(f"--text is empty; name a text file, a folder of them, or {PYDOC}")
    path = pathlib.Path(spec).expanduser()
    try:
        if path.is_dir():
            yield from _read_folder(path, limit)
        elif _holds_json_lines(path):
            yield from _read_json_lines(path, limit)
        else:
            yield make_document(path.name, read_text(path))
    except FileNotFoundError:
        raise UserError(
            f"{spec}: no such file or folder; --text takes a text file, a folder of .txt files, "
            f"a .jsonl or QuALITY file, or {PYDOC}"
        ) from None
    except OSError as error:
        raise UserError(f"{spec}: cannot be read: {error.strerror or error}") from None


def _pydoc_topics(spec: str, limit: int | None) -> Iterator[Document]:
    # Lazily, because only this source needs the module (half a megabyte of strings).
    from pydoc_data.topics import topics

    if spec != PYDOC:
        name = spec.partition(":")[2]
        if name not in topics:
            raise UserError(f"{spec}: Python has no such topic; there are {_abbreviate(topics)}")
        yield make_document(name, topics[name])
        return
    order = sorted(topics, key=lambda name: (-len(topics[name]), name))
    kept: list[str] = []
    for name in order:
        if limit is not None and len(kept) >= limit:
            return
        text = topics[name]
        # Sections of a longer topic are topics too ("typesmapping" stands in "types" in some
        # versions): leave them out, or documents would not be independent samples.
        if text.strip() and not any(_body(text) in topics[longer] for longer in kept):
            kept.append(name)
            yield make_document(name, text)


def _body(text: str) -> str:
    """The text without its title and the line under it, which differ where a topic is embedded."""
    parts = text.strip().split("\n\n", 1)
    return parts[-1].strip()


def _read_folder(path: pathlib.Path, limit: int | None) -> Iterator[Document]:
    files = sorted(
        file.relative_to(path).as_posix()
        for file in path.rglob("*.txt")
        if file.is_file()
        and not any(part.startswith(".") for part in file.parts[len(path.parts) :])
    )
    if not files:
        raise UserError(f"{path}: the folder holds no .txt file")
    for name in files[:limit]:
        try:
            text = read_text(path / name)
        except FileNotFoundError:
            raise UserError(f"{path / name}: vanished while the folder was read") from None
        yield make_document(name, text)


def read_text(path: pathlib.Path) -> str:
    """Reads a UTF-8 file; the byte-order mark goes and every newline becomes ``\\n``.

    Raises:
      UserError: empty, or not UTF-8 (with the offset of the first wrong byte).
      OSError: as from open().
    """
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            raise UserError(f"{path}: the file is empty")
        if path.is_file():
            # Decoding from the map keeps one copy of the text in memory instead of two.
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                text = _decode(data, path)
        else:  # a pipe
            text = _decode(file.read(), path)
    text = text.removeprefix("\ufeff")
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text


def _decode(data: bytes | mmap.mmap, path: pathlib.Path, offset: int = 0) -> str:
    try:
        return codecs.utf_8_decode(data, "strict", True)[0]
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise UserError(
            f"{path}: not UTF-8: byte 0x{byte:02x} at offset {offset + error.start}; "
            f"convert it, for example: iconv -f latin1 -t utf-8"
        ) from None


def _holds_json_lines(path: pathlib.Path) -> bool:
    """By name where that is clear, else by content: QuALITY's files end in `.dev` and the like."""
    suffix = path.suffix.lower()
    if suffix in (".jsonl", ".ndjson"):
        return True
    if suffix in _TEXT_SUFFIXES:
        return False
    with path.open("rb") as file:
        return file.read(4096).removeprefix(_BOM).lstrip().startswith(b"{")


def _read_json_lines(path: pathlib.Path, limit: int | None) -> Iterator[Document]:
    records = _json_records(path)
    first = next(records, None)
    if first is None:
        raise UserError(f"{path}: the file is empty")
    if "article" in first[1] or "questions" in first[1]:
        for article in quality.merge_articles(_chain(first, records), limit):
            yield make_document(article.name, article.text, article.questions, normaliser=STRIPPED)
        return
    for count, (where, record) in enumerate(_chain(first, records)):
        if count == limit:
            return
        text = record.get("text")
        if not isinstance(text, str):
            raise UserError(
                f'{where}: no text: a line is {{"text": "..."}} or one of QuALITY '
                f"(article_id, article, questions); its keys are {_abbreviate(list(record))}"
            )
        yield make_document(f"{path.name}:{where.rpartition(':')[2]}", text, normaliser="none")


def _chain(
    first: tuple[str, dict[str, object]], rest: Iterator[tuple[str, dict[str, object]]]
) -> Iterator[tuple[str, dict[str, object]]]:
    yield first
    yield from rest


def _json_records(path: pathlib.Path) -> Iterator[tuple[str, dict[str, object]]]:
    """Yields ("FILE:LINE", record) line by line, so that memory is bounded by the longest line."""
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            text = _decode(line, path, offset)
            offset += len(line)
            if number == 1:
                text = text.removeprefix("\ufeff")
            if text.strip():
                where = f"{path}:{number}"
                yield where, quality.parse_json_object(text, where)


def _abbreviate(names: Sequence[str] | dict[str, str], most: int = 8) -> str:
    listed = [name if len(name) <= 40 else name[:37] + "..." for name in list(names)[:most]]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(f"{name!a}" for name in listed) + more
