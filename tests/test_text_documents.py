"""Documents from every source, and what happens to damaged ones: one line that names the place."""

import hashlib
import json
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxablate.errors import UserError
from jaxablate.text import read_documents

QUESTION = {
    "question": "What?",
    "question_unique_id": "q1",
    "options": ["a", "b", "c", "d"],
    "gold_label": 2,
}
LINE = {"article_id": "7", "article": "  Some text.\n", "questions": [QUESTION]}


def _write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


def _question(**changes):
    return {**LINE, "questions": [{**QUESTION, **changes}]}


def test_text_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree \n Gr\xc3\xb6\xc3\x9fe\n")
    (document,) = read_documents(str(path))
    assert document.text == "one\ntwo\nthree \n Größe\n"
    assert document.name == "a.txt"
    assert document.digest == hashlib.sha256(document.text.encode()).hexdigest()
    assert "newlines" in document.normaliser
    assert document.questions == ()


def test_folder_in_order_of_names(tmp_path):
    for name in ("b.txt", "a.txt", "sub/c.txt", ".hidden.txt", ".git/d.txt", "notes.pdf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    documents = read_documents(str(tmp_path))
    assert [d.name for d in documents] == ["a.txt", "b.txt", "sub/c.txt"]
    assert [d.name for d in read_documents(str(tmp_path), limit=2)] == ["a.txt", "b.txt"]
    chosen = read_documents(str(tmp_path), names=["sub/c.txt", "a.txt"])
    assert [d.name for d in chosen] == ["sub/c.txt", "a.txt"]
    chosen = read_documents(str(tmp_path), names=["sub/c.txt", "a.txt"], limit=1)
    assert [d.name for d in chosen] == ["sub/c.txt"]
    with pytest.raises(UserError, match=r"no document named x.txt; there are 'a.txt'"):
        read_documents(str(tmp_path), names=["x.txt"])


def test_json_lines_of_texts(tmp_path):
    path = _write(tmp_path / "t.jsonl", {"text": "one"}, {"text": "two\r\n"}, {"text": "three"})
    documents = read_documents(path, limit=2)
    assert [(d.name, d.text) for d in documents] == [("t.jsonl:1", "one"), ("t.jsonl:2", "two\r\n")]


def test_python_reference():
    documents = read_documents("pydoc")
    lengths = [len(d.text) for d in documents]
    assert lengths == sorted(lengths, reverse=True)
    assert len(documents) > 20
    assert len({d.digest for d in documents}) == len(documents)
    for document in documents[1:]:
        assert document.text.strip() not in documents[0].text
    (types,) = read_documents("pydoc:types")
    assert types.text.startswith("The standard type hierarchy")
    with pytest.raises(UserError, match="no such topic"):
        read_documents("pydoc:absent")


def test_quality_lines_of_equal_text_are_merged(tmp_path):
    second = {**QUESTION, "question_unique_id": "q2"}
    path = _write(
        tmp_path / "QuALITY.v1.0.1.htmlstripped.dev",
        LINE,
        {**LINE, "article_id": "8"},
        {**LINE, "article": "Some text.", "questions": [QUESTION, second]},
        {**LINE, "article": "Another text.", "questions": []},
    )
    first, other, changed = read_documents(path)
    assert (first.name, first.text) == ("quality_7", "Some text.")
    assert [q.id for q in first.questions] == ["q1", "q2"]
    assert first.questions[0].options == ("a", "b", "c", "d")
    assert first.questions[0].gold_label == 2
    assert (other.name, len(other.questions)) == ("quality_8", 1)
    assert (changed.name, changed.text) == ("quality_7#2", "Another text.")
    # A limit keeps the merging: line 3 belongs to the first article.
    assert len(read_documents(path, limit=1)[0].questions) == 2


def test_quality_test_split_has_no_gold_labels(tmp_path):
    question = {k: v for k, v in QUESTION.items() if k != "gold_label"}
    path = _write(tmp_path / "x.test", {**LINE, "questions": [question]})
    assert read_documents(path)[0].questions[0].gold_label is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"article": "x", "questions": []}, "article_id is missing"),
        ({**LINE, "article_id": True}, "article_id must be .* got True"),
        ({**LINE, "article_id": "a\nb"}, "article_id must be a printable string"),
        ({**LINE, "article_id": "x" * 300}, "article_id must be a printable string"),
        ({"article_id": "7", "questions": []}, "article is missing"),
        ({**LINE, "article": " \n"}, "article must be a non-empty string"),
        ({**LINE, "article": "a\ud800b"}, "article must be .* without lone surrogates"),
        ({"article_id": "7", "article": "x"}, "questions is missing"),
        ({**LINE, "questions": {"a": 1}}, "questions must be a list, got an object of 1"),
        ({**LINE, "questions": [QUESTION, 3]}, "question 2: must be an object, got 3"),
        (_question(question=None), "question 1: question must be .* got None"),
        (_question(question_unique_id=""), "question_unique_id must be"),
        (_question(options=["a", "b", "c"]), "options must be 4 non-empty strings"),
        (_question(options=["a", "b", "c", 4]), "options must be 4 non-empty strings"),
        (_question(gold_label=0), "gold_label must be an integer from 1 to 4, got 0"),
        (_question(gold_label=5), "gold_label must be an integer from 1 to 4, got 5"),
        (_question(gold_label=2.0), "gold_label must be .* got 2.0"),
        (_question(gold_label=True), "gold_label must be .* got True"),
        (_question(question="Another?"), "question_unique_id 'q1' .* already taken"),
        ([1, 2], "must be a JSON object, got list"),
        ("text", "must be a JSON object, got str 'text'"),
        ({"text": "x"}, "article_id is missing"),
    ],
)
def test_quality_errors_name_line_and_field(tmp_path, line, message):
    path = _write(tmp_path / "x.jsonl", LINE, line)
    with pytest.raises(UserError, match=message) as caught:
        read_documents(path)
    assert f"{path}:2: " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b" \n\n", "empty"),
        (b"\xef\xbb\xbf", "empty"),
        (b'{"text": "a"}\n{"text": \n', r":2: not a JSON line: .* character"),
        (b'{"text": "a"}\n{"text": "\xe9"}\n', "not UTF-8: byte 0xe9 at offset 24"),
        (b'{"text": "a"}\n{"txt": "b"}\n', ":2: no text: .* its keys are 'txt'"),
        (b'{"text": "a"}\n{"text": 5}\n', ":2: no text"),
        (b'{"text": "a"}\n{"text": ""}\n', ":2: the text is empty"),
        (b'{"text": "\\udc00"}\n', "half of a surrogate pair"),
        (b'{"text":' * 200_000, ":1: not a JSON line"),
        (b"[" * 200_000, ":1: not a JSON line: nested too deeply"),
        (b"9" * 5000, ":1: not a JSON line: a number with too many digits"),
        (b"NaN\n", ":1: a line must be a JSON object, got float nan"),
        (b"null", "a line must be a JSON object, got NoneType"),
    ],
)
def test_damaged_json_lines(tmp_path, content, message):
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read_documents(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b" \r\n\t", "the text is empty"),
        (b"abc\xff", "not UTF-8: byte 0xff at offset 3"),
        (b"abc\xe2\x82", "not UTF-8: byte 0xe2 at offset 3"),
        ("Größe".encode("utf-16"), "not UTF-8: byte 0xff at offset 0"),
    ],
)
def test_damaged_text(tmp_path, content, message):
    path = tmp_path / "x.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read_documents(str(path))
    assert "x.txt" in str(caught.value)


def test_paths_that_hold_nothing(tmp_path):
    with pytest.raises(UserError, match="no such file or folder"):
        read_documents(str(tmp_path / "absent.txt"))
    with pytest.raises(UserError, match=r"holds no \.txt file"):
        read_documents(str(tmp_path))
    with pytest.raises(UserError, match="NUL"):
        read_documents("a\0b")
    with pytest.raises(UserError, match="cannot be read"):
        read_documents("x" * 5000)
    with pytest.raises(UserError, match="at least 1, got 0"):
        read_documents("pydoc", limit=0)


def test_million_lines_take_seconds_and_little_memory(tmp_path):
    path = tmp_path / "long.jsonl"
    with path.open("w") as file:
        file.writelines(f'{{"text": "line {i}"}}\n' for i in range(1_000_000))
    start = time.monotonic()
    assert len(read_documents(str(path), limit=3)) == 3
    assert time.monotonic() - start < 1  # reading stops at the limit
    path.rename(tmp_path / "long.txt")
    path = tmp_path / "long.txt"
    tracemalloc.start()
    (document,) = read_documents(str(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    size = path.stat().st_size
    assert len(document.text) == size
    # One decoded copy and, for the digest, its bytes.
    assert peak < 2.2 * size
    assert time.monotonic() - start < 20


def test_quality_articles_beyond_the_limit_cost_no_memory(tmp_path):
    path = tmp_path / "many.dev"
    with path.open("w") as file:
        for i in range(3000):
            text = f"{i} " * 2000
            file.write(f'{{"article_id": "{i}", "article": "{text}", "questions": []}}\n')
    tracemalloc.start()
    assert len(read_documents(str(path), limit=2)) == 2
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.stat().st_size > 25e6
    assert peak < 2e6


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
_ARTICLE_FIELDS = ["article_id", "article", "questions", "text"]
_QUESTION_FIELDS = ["question", "question_unique_id", "options", "gold_label"]
_field = st.sampled_from(_ARTICLE_FIELDS + _QUESTION_FIELDS)


def _mutate(edits):
    """QuALITY's line with some fields of the article or of its question replaced or dropped."""
    question, line = dict(QUESTION), dict(LINE)
    line["questions"] = [question]
    for field, drop, new in edits:
        place = question if field in _QUESTION_FIELDS else line
        if drop:
            place.pop(field, None)
        else:
            place[field] = new
    return line


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.lists(st.tuples(_field, st.booleans(), _json), max_size=3), min_size=1, max_size=4),
    st.sampled_from(["x.jsonl", "x.dev", "x"]),
)
def test_any_mutated_quality_line_gives_documents_or_one_line(tmp_path_factory, lines, name):
    path = tmp_path_factory.mktemp("fuzz") / name
    _write(path, *map(_mutate, lines))
    _gives_documents_or_one_line(path)


@settings(max_examples=400, deadline=None)
@given(
    st.binary(max_size=80) | st.text(max_size=40).map(lambda t: t.encode("utf-8", "surrogatepass")),
    st.integers(0, 200),
    st.sampled_from(["x.jsonl", "x.dev", "x.txt", "x"]),
)
def test_any_bytes_give_documents_or_one_line(tmp_path_factory, content, place, name):
    path = tmp_path_factory.mktemp("fuzz") / name
    whole = (json.dumps(LINE) + "\n").encode() * 2
    path.write_bytes(content if place == 0 else whole[:place] + content + whole[place:])
    _gives_documents_or_one_line(path)


def _gives_documents_or_one_line(path):
    try:
        documents = read_documents(str(path))
    except UserError as error:
        message = str(error)
    else:
        assert documents
        for document in documents:
            assert document.text.strip()
            assert document.digest == hashlib.sha256(document.text.encode()).hexdigest()
        return
    assert path.name in message
    assert len(message.splitlines()) == 1
