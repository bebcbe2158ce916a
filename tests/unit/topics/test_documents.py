"""Documents come in as they are, and no error tells a word of them."""

import gzip
import traceback

import numpy as np
import pytest

from partsong.errors import DataError, DataTypeError, FileError, FormatError, ParameterError, PartsongError
from partsong.topics.documents import as_documents, read_documents

SECRET = "geheimwort"
TEXTS = ["a first text", "", 'with "quotes", commas\nand a line break', "zoë at the café"]


def told(error):
    """Everything that a log would show of an error, and of those that it hangs on to."""
    shown = "".join(traceback.format_exception(error)) + repr(error) + str(getattr(error, "__notes__", ""))
    for other in (error.__cause__, error.__context__):
        shown += told(other) if other is not None else ""
    return shown


def refused(kind, read, *needed):
    with pytest.raises(kind) as caught:
        read()
    assert isinstance(caught.value, PartsongError)
    assert SECRET not in told(caught.value)
    assert caught.value.__context__ is None or not vars(caught.value.__context__)
    for part in needed:
        assert part in str(caught.value)


def write(path, text, encoding="utf-8"):
    path.write_bytes(text.encode(encoding) if isinstance(text, str) else text)
    return path


def as_csv(texts, delimiter=","):
    cells = ['"' + text.replace('"', '""') + '"' for text in texts]
    return "".join(f"{line}\r\n" for line in [f"label{delimiter}text", *(f"x{delimiter}{cell}" for cell in cells)])


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ","), ("a.tsv", "\t"), ("A.CSV", ",")])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_column_of_a_table(tmp_path, name, delimiter, encoding):
    assert read_documents(write(tmp_path / name, as_csv(TEXTS, delimiter), encoding)) == TEXTS


@pytest.mark.parametrize(("name", "end"), [("a.csv", "\n"), ("a.csv", "\r\n"), ("a.tsv", "\n")])
def test_a_blank_line_of_one_column_is_a_text_unless_nothing_follows(tmp_path, name, end):
    lines = ["text", "", "cats", "", "", "dogs", '""', "", "", ""]
    assert read_documents(write(tmp_path / name, end.join(lines))) == ["", "cats", "", "", "dogs", ""]
    refused(DataError, lambda: read_documents(write(tmp_path / name, end.join(("text", "", "", "")))), "no documents")


def test_a_blank_line_of_several_columns_is_no_row_and_places_stay_right(tmp_path):
    assert read_documents(write(tmp_path / "a.csv", "id,text\n1,cats\n\n2,\n\n3,dogs\n\n")) == ["cats", "", "dogs"]
    broken = f"text\n\n\ncats\n\n{SECRET},y\n"
    refused(FormatError, lambda: read_documents(write(tmp_path / "a.csv", broken)), "line 6", "2 fields")


@pytest.mark.parametrize("titles", ["Text", "TEXT ", "id,Text", "label,text ,tExt"])
def test_a_column_that_differs_in_case_alone_is_told_as_such(tmp_path, titles):
    asked = "TexT"
    path = write(tmp_path / "a.csv", f"{titles}\n{','.join(SECRET for _ in titles.split(','))}\n")
    refused(FormatError, lambda: read_documents(path, column=asked), f"'{asked}'", "differs only in case")
    with pytest.raises(FormatError) as caught:
        read_documents(path, column=asked)
    assert "commas" not in str(caught.value)
    assert not any(title.strip() in str(caught.value).split() for title in titles.split(","))
    path = write(tmp_path / "a.jsonl", '{"Text": "' + SECRET + '"}\n')
    refused(FormatError, lambda: read_documents(path, column=asked), "line 1", "differs only in case")


def test_packed_files_and_other_encodings(tmp_path):
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(as_csv(TEXTS).encode()))
    assert read_documents(tmp_path / "a.csv.gz") == TEXTS
    for encoding in ("latin-1", "utf-16", "cp1252"):
        assert read_documents(write(tmp_path / "b.csv", as_csv(TEXTS), encoding), encoding=encoding) == TEXTS


def test_lines_of_json_and_of_text_and_files_of_a_folder(tmp_path):
    lines = '{"body": "one", "n": 1}\n\n{"body": null}\n{"body": "caf\\u00e9"}\n'
    assert read_documents(write(tmp_path / "a.jsonl", lines), column="body") == ["one", "", "café"]
    assert read_documents(write(tmp_path / "a.txt", "one\r\n\ntwo")) == ["one", "", "two"]
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, text in (("b.txt", "second\nline"), ("a.txt", "first"), ("c.txt", ""), ("notes.md", "no")):
        write(folder / name, text)
    assert read_documents(folder) == ["first", "second\nline", ""]


@pytest.mark.parametrize("bad_at", [0, 5000, (1 << 20) - 1, 1 << 20, (1 << 20) + 7])
def test_an_unknown_encoding_is_named_by_its_byte(tmp_path, bad_at):
    body = ("text\n" + f"{SECRET} café\n" * 100_000).encode()
    body = body[:bad_at] + b"\xff" + body[bad_at:]
    decodes_until = len(body)
    try:
        body.decode()
    except UnicodeDecodeError as error:
        decodes_until = error.start
    path = write(tmp_path / "a.csv", body)
    refused(FormatError, lambda: read_documents(path), f"byte position {decodes_until}", "pass its encoding")


def test_a_text_that_ends_within_a_letter(tmp_path):
    path = write(tmp_path / "a.txt", f"{SECRET} é".encode()[:-1])
    refused(FormatError, lambda: read_documents(path), f"byte position {len(SECRET) + 1}")


@pytest.mark.parametrize(
    ("name", "text", "needed"),
    [
        ("a.csv", f"{SECRET},label\nx,y\n", ("'text'", "2 titles")),
        ("a.csv", f"text,text\n{SECRET},y\n", ("more than once",)),
        ("a.csv", f"text,label\n{SECRET}\n", ("line 2", "1 fields")),
        ("a.csv", f'text,label\nx,y\n"{SECRET},y\n', ("line 3", "quotes")),
        ("a.csv", "text\n" + SECRET * 20_000 + "\n", ("line 2", "131072")),
        ("a.jsonl", '{"text": "' + SECRET + '"\n', ("line 1", "JSON")),
        ("a.jsonl", '{"text": "x"}\n{"other": "' + SECRET + '"}\n', ("line 2", "'text'")),
        ("a.jsonl", '{"text": ["' + SECRET + '"]}\n', ("line 1", "list")),
        ("a.jsonl", '["' + SECRET + '"]\n', ("line 1", "'text'")),
        ("a.csv", "", ("empty",)),
        ("a.docx", SECRET, (".csv",)),
        ("a.txt.gz", SECRET, ("compression",)),
    ],
)
def test_what_cannot_be_read_is_named_by_its_place(tmp_path, name, text, needed):
    path = write(tmp_path / name, text)
    refused(FileError, lambda: read_documents(path), *needed)


def test_no_documents(tmp_path):
    (tmp_path / "empty").mkdir()
    for source in (tmp_path / "empty", write(tmp_path / "a.csv", "text\n"), write(tmp_path / "a.txt", "")):
        refused(DataError, lambda source=source: read_documents(source), "no documents")
    refused(DataError, lambda: as_documents([]), "no documents")


def test_no_such_file_and_no_such_encoding(tmp_path):
    refused(FileError, lambda: read_documents(tmp_path / "none.csv"), "no such file")
    path = write(tmp_path / "a.txt", SECRET)
    for encoding in ("klingon", "rot13", "a\0b", 3):
        refused(ParameterError, lambda encoding=encoding: read_documents(path, encoding=encoding), "encoding")
    refused(FormatError, lambda: read_documents(path, encoding="undefined"), "byte position 0")


def test_lists_of_texts():
    assert as_documents(["a", None, float("nan"), np.str_("b")]) == ["a", "", "", "b"]
    assert as_documents(np.array(["a", "b"])) == ["a", "b"]
    refused(DataTypeError, lambda: as_documents(SECRET), "list")
    refused(DataTypeError, lambda: as_documents(["a", SECRET.encode()]), "Document 1", "bytes")
    refused(DataTypeError, lambda: as_documents(3), "list")


class NAType:
    """As pandas names it."""


class Table:
    """A table of texts iterates over the titles of its columns."""

    shape = (2, 1)

    def __iter__(self):
        return iter([SECRET])


def test_missing_texts_of_tables_are_empty_and_tables_are_no_lists_of_texts():
    assert as_documents(["a", NAType()]) == ["a", ""]
    for bad in ({SECRET: ["a"]}, {SECRET, "b"}, Table(), np.array([[SECRET]]), np.array(SECRET)):
        refused(DataTypeError, lambda bad=bad: as_documents(bad), "list of texts", "one column")


def test_lines_of_json_may_lack_a_text_as_tables_do(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": NaN}\n{"text": null}\n{"text": "cat"}\n')
    assert read_documents(path) == ["", "", "cat"]


def test_a_link_to_nowhere_is_not_a_text_that_is_left_out(tmp_path):
    write(tmp_path / "b.txt", SECRET)
    (tmp_path / "a.txt").symlink_to(tmp_path / "gone")
    (tmp_path / "c.txt").mkdir()
    refused(FileError, lambda: read_documents(tmp_path), "a.txt", "no such file")


def test_a_table_with_another_delimiter_is_told_which_one_counts(tmp_path):
    refused(FormatError, lambda: read_documents(write(tmp_path / "a.csv", f"id;text\n1;{SECRET}\n")), "by commas")
    refused(FormatError, lambda: read_documents(write(tmp_path / "a.tsv", f"id,text\n1,{SECRET}\n")), "by tabs")
