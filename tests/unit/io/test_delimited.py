"""Delimited text: layouts that occur, and errors that name the line and the column."""

import gzip

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import partsong
from partsong.errors import FeatureError, FileError, FormatError, ParameterError
from partsong.io import delimited
from partsong.io.delimited import detect_layout, read_with_diagnostics
from partsong.io.opening import ReadOptions
from partsong.io.read import read


@pytest.fixture
def write(tmp_path):
    def write_file(text, name="t.csv"):
        path = tmp_path / name
        raw = text if isinstance(text, bytes) else text.encode()
        path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
        return path

    return write_file


VALUES = [[1.0, 2.0], [3.0, 4.5]]


@pytest.mark.parametrize(
    ("text", "features", "samples"),
    [
        pytest.param("1,2\n3,4.5\n", None, None, id="numbers only"),
        pytest.param("a,b\n1,2\n3,4.5\n", ("a", "b"), None, id="header"),
        pytest.param("id,a,b\nr,1,2\ns,3,4.5\n", ("a", "b"), ("r", "s"), id="header and names"),
        pytest.param("r,1,2\ns,3,4.5\n", None, ("r", "s"), id="names without header"),
        pytest.param(",a,b\n0,1,2\n1,3,4.5\n", ("a", "b"), ("0", "1"), id="pandas index"),
        pytest.param(",0,1\n0,1,2\n1,3,4.5\n", ("0", "1"), ("0", "1"), id="pandas without names"),
        pytest.param('"a","b"\n"r",1,2\n"s",3,4.5\n', ("a", "b"), ("r", "s"), id="as R writes it"),
        pytest.param('id,a,b\n"r, x",1,2\n"s ""y""",3,4.5\n', ("a", "b"), ("r, x", 's "y"'), id="quotes"),
        pytest.param('id,a,b\n"r\nx",1,2\ns,3,4.5\n', ("a", "b"), ("r\nx", "s"), id="line break in a name"),
        pytest.param('"a\nb",c\n1,2\n3,4.5\n', ("a\nb", "c"), None, id="line break in the header"),
        pytest.param("\ufeffa,b\r\n1,2\r\n3,4.5\r\n", ("a", "b"), None, id="Excel: mark and line ends"),
        pytest.param("a,b\r1,2\r3,4.5", ("a", "b"), None, id="old Mac line ends"),
        pytest.param("\na,b\n\n1, 2\n  \n 3 ,4.5\n\n", ("a", "b"), None, id="blank lines and blanks"),
        pytest.param('a,b\n"1","2"\n"3","4.5"\n', ("a", "b"), None, id="quoted numbers"),
        pytest.param("größe,µ\n1e0,2\n3,45e-1\n", ("größe", "µ"), None, id="not only ASCII"),
    ],
)
@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "T.CSV.gz", "t.tsv.gz"])
def test_layouts(write, text, features, samples, name):
    if "tsv" in name:
        samples = samples and tuple(sample.replace(",", "\t") for sample in samples)
        text = text.replace(",", "\t")
    table = read(write(text, name))
    np.testing.assert_array_equal(table.X, VALUES)
    assert table.X.dtype == np.float64
    assert (table.feature_names, table.sample_names, table.labels) == (features, samples, None)


def test_counted_columns_are_a_header(write):
    table = read(write("id,1,2,3,4\nr,5,6,7,8\n"))
    assert (table.feature_names, table.sample_names, table.X.shape) == (("1", "2", "3", "4"), ("r",), (1, 4))


def test_one_row_and_one_column(write):
    assert read(write("1,2,3")).X.shape == (1, 3)
    assert read(write("a\n1\n2\n")).X.tolist() == [[1.0], [2.0]]


@pytest.mark.parametrize(
    ("labels", "expected"), [("x,y", ["x", "y"]), ("1,0", [1, 0]), ("0.5,2", [0.5, 2.0]), ("1,", ["1", ""])]
)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_labels_are_taken_out(write, labels, expected, at):
    rows = [["a", "b"], ["1", "2"], ["3", "4.5"]]
    for row, label in zip(rows, ["kind", *labels.split(",")], strict=True):
        row.insert(at, label)
    table = read(write("\n".join(",".join(row) for row in rows)), label="kind")
    np.testing.assert_array_equal(table.X, VALUES)
    assert table.feature_names == ("a", "b")
    assert table.labels.tolist() == expected
    assert table.labels.dtype.kind == {str: "U", int: "i", float: "f"}[type(expected[0])]


def test_transpose_turns_names_too(write):
    table = read(write("gene,s1,s2,s3\ng1,1,2,3\ng2,4,5,6\n"), transpose=True)
    assert (table.feature_names, table.sample_names) == (("g1", "g2"), ("s1", "s2", "s3"))
    assert table.X.tolist() == [[1, 4], [2, 5], [3, 6]]


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("", FormatError, "empty"),
        ("\n \n", FormatError, "empty"),
        ("a,b\n", FormatError, "no rows"),
        ("a,b\n1,2\n3\n4,5,6\n", FormatError, r"2 line\(s\) do not have 2 fields.*line 3 has 1; line 4 has 3"),
        ("1,2\n1,2,3\n", FormatError, "line 2 has 3"),
        ("a,b\n1,2\n3,x\n", FormatError, "line 3, column 'b' reads 'x'"),
        ("1,2\n3,x\n", FormatError, "line 2, column 2 reads 'x'"),
        ("a,b\n1,2\n3,\n", FormatError, "line 3, column 'b' is empty.*missing values"),
        ("a,b\n1,NA\n3,2\n", FormatError, "line 2, column 'b' reads 'NA'.*missing values"),
        ("a,b\n" + "1,x\n1,1\n" * 9, FormatError, r"9 cell\(s\).*\(and 4 more\)"),
        ("a,b,c\n1,m,3\n4,f,6\n", FormatError, "Text columns: column 'b'.*as label"),
        ("5.1,3.5,setosa\n4.9,3.0,setosa\n", FormatError, "Text columns: column 3"),
        ("a,a,b,b\n1,2,3,4\n", FeatureError, r"more than once: names 'a' \(columns 0, 1\), 'b' \(columns 2, 3\)"),
        ("a,b,\n1,2,3\n", FeatureError, "without a name: column 2"),
        ("a;b\n1;2\n", FormatError, r"separated by semicolons.*read_csv\('t.csv.*', sep=';'\).to_csv\('t-commas.csv"),
        ("a\tb\n1\t2\n", FormatError, r"separated by tabs.*Rename it to t.tsv(\.gz)?\."),
        ("a;b\n1,5;2,5\n1,5;2,5\n", FormatError, r"semicolons.*sep=';', decimal=','"),
        ("1,5;2,5\n3,5;4,5\n", FormatError, r"semicolons.*sep=';', decimal=','"),
        ("a\tb\n1,5\t2,5\n", FormatError, r"tabs.*sep='\\t', decimal=','"),
        ("# mine\na,b\n1,2\n", FormatError, "first line is a comment .'# mine'.. Remove"),
        ("a|b\n1|2\n", FormatError, r"bars.*sep='\|'"),
        ('a,b\n"1,5","2,5"\n', FormatError, "decimal comma"),
        ("a,b\n1,1_0\n", FormatError, "1_0"),
        ('a,b\n1,2\n"3,4\n5,6\n', FormatError, "fields"),
        (b"a,b\n1,2\n\xe9,4\n", FormatError, r"byte 0xe9 at position 8 \(line 3\)"),
        ("a,b\n1,2\n".encode("utf-16"), FormatError, "UTF-16"),
    ],
)
@pytest.mark.parametrize("gz", ["", ".gz"])
def test_errors_say_what_and_where(write, text, error, says, gz):
    with pytest.raises(error, match=f"(?s){says}") as caught:
        read(write(text, f"t.csv{gz}"))
    assert "t.csv" in str(caught.value)


def test_labels_that_cannot_be_found(write):
    path = write("a,b\n1,2\n")
    with pytest.raises(FeatureError, match=r"label='z' is not a column.*'a', 'b'"):
        read(path, label="z")
    with pytest.raises(FeatureError, match="header"):
        read(write("1,2\n3,4\n"), label="z")
    with pytest.raises(ParameterError, match="transpose"):
        read(path, label="a", transpose=True)
    with pytest.raises(ParameterError, match="key"):
        read(path, key="a")


def test_a_file_that_is_not_gzipped_but_says_so(tmp_path):
    (tmp_path / "t.csv.gz").write_text("a,b\n1,2\n")
    with pytest.raises(FileError, match="gz"):
        read(tmp_path / "t.csv.gz")


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=6).map(
    lambda text: f"x{text.strip()}"
)


@given(
    X=hnp.arrays(np.float64, st.tuples(st.integers(1, 5), st.integers(1, 4)), elements=st.floats(allow_nan=False)),
    data=st.data(),
)
@settings(max_examples=80, deadline=None)
def test_quick_and_careful_reading_agree(tmp_path_factory, X, data):
    """On files that csv.writer wrote; the careful one reads every file, the quick one gives up on unusual ones."""
    import csv

    features = data.draw(st.lists(NAMES, min_size=X.shape[1], max_size=X.shape[1], unique_by=str.strip))
    samples = data.draw(st.lists(NAMES, min_size=len(X), max_size=len(X)))
    path = tmp_path_factory.mktemp("agree") / "t.csv"
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["name", *features])
        writer.writerows([sample, *row] for sample, row in zip(samples, X.tolist(), strict=True))
    table = read(path)
    np.testing.assert_array_equal(table.X, X)
    assert table.feature_names == tuple(name.strip() for name in features)
    assert table.sample_names == tuple(name.strip() for name in samples)
    layout = detect_layout(path, ",", ReadOptions())
    quick, careful = delimited._read_fast(path, layout), read_with_diagnostics(path, layout)
    if quick is not None:
        np.testing.assert_array_equal(quick[0], careful[0])
        assert quick[1] == careful[1]


def test_counted_and_sample_headers_are_headers(tmp_path):
    for text, names in (
        ("0,1,2,3\n0.5,1.5,2.5,1\n3,4,5,6\n", ("0", "1", "2", "3")),
        ("sample,0,7,9\ns0,1,2,3\ns1,4,5,7\n", ("0", "7", "9")),
    ):
        (tmp_path / "x.csv").write_text(text)
        table = partsong.read(tmp_path / "x.csv")
        assert table.feature_names == names
        assert table.X.shape == (2, len(names))
    (tmp_path / "x.csv").write_text("0,1,2,3\n4,5,6,7\n8,9,10,11\n")
    assert partsong.read(tmp_path / "x.csv").X.shape == (3, 4), "numbers that go on are data"


@pytest.mark.parametrize("text", ["a;b\n1;2\n3;4\n", "a;b\n1,5;2\n3;4,25\n", "a|b\n1|2\n", "1,5;2,5\n3,5;4,5\n"])
def test_the_advice_on_delimiters_works(write, text, monkeypatch):
    """What the message says to do is done, and the file it makes can be read."""
    pandas = pytest.importorskip("pandas")
    path = write(text)
    monkeypatch.chdir(path.parent)
    with pytest.raises(FormatError) as caught:
        read(path)
    advice = str(caught.value)
    eval(advice[advice.index("pandas.") : advice.rindex(".")], {"pandas": pandas})
    assert read("t-commas.csv").X.shape[1] == 2


def test_the_advice_on_endings_works(write):
    for text, name, better in (("a\tb\n1\t2\n", "t.csv", "t.tsv"), ("a,b\n1,2\n", "t.tsv.gz", "t.csv.gz")):
        path = write(text, name)
        with pytest.raises(FormatError, match=f"Rename it to {better}\\."):
            read(path)
        assert read(path.rename(path.with_name(better))).feature_names == ("a", "b")


YEARS = "1990,1991,1992\n5,6,7\n8,9,9\n"


@pytest.mark.parametrize(
    ("text", "header", "features", "samples", "rows"),
    [
        pytest.param(YEARS, None, None, None, 3, id="numbers are data unless told otherwise"),
        pytest.param(YEARS, True, ("1990", "1991", "1992"), None, 2, id="years"),
        pytest.param(YEARS, False, None, None, 3, id="no years"),
        pytest.param("0,1,2,3\n5,6,7,8\n", None, ("0", "1", "2", "3"), None, 1, id="counted"),
        pytest.param("0,1,2,3\n5,6,7,8\n", False, None, None, 2, id="counted, and data"),
        pytest.param("x,1990,1991\nr,1,2\ns,3,4\n", True, ("1990", "1991"), ("r", "s"), 2, id="years and names"),
        pytest.param("x,1990,1991\nr,1,2\ns,3,4\n", False, None, ("x", "r", "s"), 3, id="names and data"),
        pytest.param("1990,1991\nr,1,2\ns,3,4\n", True, ("1990", "1991"), ("r", "s"), 2, id="years as R writes them"),
        pytest.param("a,b\n1,2\n", True, ("a", "b"), None, 1, id="text"),
    ],
)
def test_a_header_is_what_the_caller_says(write, text, header, features, samples, rows):
    table = read(write(text), header=header)
    assert (table.feature_names, table.sample_names, table.X.shape[0]) == (features, samples, rows)


def test_headers_that_cannot_be(write):
    with pytest.raises(FormatError, match=r"line 1, column 1 reads 'a'.*set header to true"):
        read(write("a,b\n1,2\n3,4\n"), header=False)
    with pytest.raises(FormatError, match="no rows"):
        read(write("1,2,3\n"), header=True)
    with pytest.raises(FeatureError, match="more than once"):
        read(write("1990,1990\n1,2\n"), header=True)
    with pytest.raises(ParameterError, match="header is False"):
        read(write("a,b\n1,2\n"), header=False, label="a")


@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("name", ["x.npy", "x.npz", "x.mtx", "x.parquet", "x.h5ad"])
def test_only_text_has_a_header(tmp_path, name, header):
    (tmp_path / name).write_bytes(b"whatever")
    with pytest.raises(ParameterError, match=f"header={header} does not apply.*it is for .csv"):
        read(tmp_path / name, header=header)
