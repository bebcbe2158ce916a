"""The report: pictures decode, nothing hostile or remote gets in, and odd findings still make a whole page."""

from __future__ import annotations

import base64
import math
import os
import re
import struct
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from partsong.errors import FileError, ShapeError
from partsong.evaluation.metrics import PartyResult, align_local_components
from partsong.reporting.charts import LARGEST_SIDE, Line, Quantity, axis, line_chart, picture, png
from partsong.reporting.html import VOID_ELEMENTS, Markup, element, format_bytes, format_number, format_percent
from partsong.reporting.run_report import (
    MOST_PARTIES,
    ArrayTraffic,
    Curve,
    MethodResult,
    PartyHoldings,
    Report,
    _over_bytes,
    render,
    write_report,
)

HOSTILE = "<script>alert('x')</script>\"><img src=https://evil.example/x onerror=alert(1)>"
PLAIN = Quantity("amount", format_number)


def curve(label: str, errors: tuple[float, ...]) -> Curve:
    sent = tuple(1024.0 * (i + 1) for i in range(len(errors)))
    return Curve(label, tuple(range(len(errors))), tuple(0.1 * i for i in range(len(errors))), errors, sent)


def method(name: str, error: float = 0.3, n_parts: int = 3, n_features: int = 12) -> MethodResult:
    rng = np.random.default_rng(len(name))
    return MethodResult(
        name=name,
        description=f"how {name} works",
        relative_error=error,
        bytes_up_per_party=20_480.0,
        bytes_down_per_party=40_960.0,
        rounds=20,
        seconds=1.5,
        outcome="converged",
        curve=curve(name, tuple(error + 0.5 * 0.7**i for i in range(20))),
        components=rng.random((n_parts, n_features)),
        shares=tuple([0.9 / n_parts] * n_parts),
        sent=(ArrayTraffic("gram", (3, 3), "float64", 72, 20, "products of the party's weights"),),
    )


def report(*methods: MethodResult, image_shape: tuple[int, int] | None = (3, 4)) -> Report:
    return Report(
        title="Parts of a song",
        lead="Three parties sing together.",
        parties=(PartyHoldings("north", 40, {"a": 30, "b": 10}), PartyHoldings("south", 25, {"b": 25})),
        methods=methods,
        image_shape=image_shape,
        feature_names=None,
        settings={"rank": "3"},
        versions={"python": "3.11"},
        never_sent="No row left its owner.",
    )


class Page(HTMLParser):
    """Walks a page; fails on tags that do not balance, and collects text, tags and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID_ELEMENTS:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data if self.open[-1:] != ["style"] else ""

    def values(self, name: str) -> list[str]:
        return [value for _, found, value in self.attributes if found == name]


def decode(encoded: bytes) -> npt.NDArray[np.uint8]:
    """Read back an 8-bit grayscale PNG without filters, checking every checksum."""
    assert encoded[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(encoded):
        (length,) = struct.unpack(">I", encoded[at : at + 4])
        kind, data = encoded[at + 4 : at + 8], encoded[at + 8 : at + 8 + length]
        assert struct.unpack(">I", encoded[at + 8 + length : at + 12 + length]) == (zlib.crc32(kind + data),)
        chunks[kind], at = data, at + 12 + length
    width, height, depth, color, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (depth, color, rest) == (8, 0, [0, 0, 0])
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, width + 1)
    assert not lines[:, 0].any()
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    return lines[:, 1:]


@pytest.mark.parametrize("shape", [(1, 1), (8, 8), (3, 17), (40, 5)])
def test_png_decodes_to_the_same_pixels(shape: tuple[int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    np.testing.assert_array_equal(decode(png(pixels)), pixels)


def test_large_pictures_become_thumbnails() -> None:
    sides = dict(re.findall(r'(width|height)="(\d+)"', picture(np.ones((1000, 400)), "big")))
    assert max(map(int, sides.values())) <= LARGEST_SIDE
    assert int(sides["height"]) > 2 * int(sides["width"])


def test_elements_escape_text_and_attributes_but_not_markup() -> None:
    made = element("p", HOSTILE, Markup("<b>kept</b>"), title=HOSTILE)
    page = Page(made)
    assert page.tags == ["p", "b"]
    assert page.text == HOSTILE + "kept"
    assert page.values("title") == [HOSTILE]


def test_hostile_names_stay_text() -> None:
    evil = replace(
        method(HOSTILE),
        description=HOSTILE,
        outcome=HOSTILE,
        curve=curve(HOSTILE, (0.5, 0.3)),
        sent=(ArrayTraffic(HOSTILE, (2,), HOSTILE, 16, 1, HOSTILE),),
    )
    for image_shape, names in (((3, 4), None), (None, (HOSTILE,) * 12)):
        harm = replace(
            report(evil, image_shape=image_shape),
            title=HOSTILE,
            lead=HOSTILE,
            parties=(PartyHoldings(HOSTILE, 3, {HOSTILE: 3}),),
            feature_names=names,
            settings={HOSTILE: HOSTILE},
            versions={HOSTILE: HOSTILE},
            never_sent=HOSTILE,
        )
        page = Page(render(harm))
        assert "script" not in page.tags
        assert not [name for _, name, _ in page.attributes if name.startswith("on")]
        assert page.text.count(HOSTILE) >= 12
        assert all(value.startswith("data:image/png;base64,") for value in page.values("src"))


def test_every_method_and_party_is_there() -> None:
    page = Page(render(report(method("Alpha"), method("Beta", 0.2), replace(method("Gamma"), is_oracle=True))))
    for word in ("Alpha", "Beta", "Gamma", "how Beta works", "north", "south", "gram", "No row left", "rank", "3.11"):
        assert word in page.text
    assert page.text.count("best") == 1


def test_the_best_method_that_does_not_pool_is_marked() -> None:
    page = render(report(method("Alpha", 0.3), method("Beta", 0.2), replace(method("Pool", 0.1), is_oracle=True)))
    marked = re.findall(r'<tr class="best">(.*?)</tr>', page)
    assert len(marked) == 1
    assert "Beta" in marked[0]
    assert "+10.00" in marked[0]


def test_the_page_loads_nothing() -> None:
    for image_shape in ((3, 4), None):
        text = render(report(method("Alpha"), image_shape=image_shape))
        page = Page(text)
        assert "url(" not in text
        assert "@import" not in text
        assert not {"script", "link", "iframe", "object", "embed", "base"} & set(page.tags)
        assert all(value.startswith("data:image/png;base64,") for value in page.values("src"))
        assert all(value.startswith("#") for value in page.values("href"))
        assert {value[1:] for value in page.values("href")} <= set(page.values("id"))
        assert any(value.startswith("default-src 'none'") for value in page.values("content"))


def test_pictures_have_alternative_texts_and_tables_have_headers() -> None:
    page = Page(render(report(method("Alpha"))))
    assert len([value for value in page.values("alt") if value]) == page.tags.count("img") == 3
    assert page.tags.count("figcaption") >= page.tags.count("table") > 0
    assert set(page.values("scope")) == {"col", "row", "rowgroup"}


ZERO_PART = np.vstack([np.zeros(12), np.ones((2, 12))])
ODD_METHODS = {
    "one point": replace(method("Odd"), curve=curve("Odd", (0.4,))),
    "no points": replace(method("Odd"), curve=curve("Odd", ())),
    "all errors zero": replace(method("Odd", 0.0), curve=curve("Odd", (0.0, 0.0, 0.0))),
    "falls to zero": replace(method("Odd", 0.0), curve=curve("Odd", (1.0, 1e-3, 1e-9, 0.0))),
    "diverged": replace(
        method("Odd"),
        relative_error=math.nan,
        curve=curve("Odd", (0.5, math.inf, math.nan)),
    ),
    "zero part": replace(method("Odd"), components=ZERO_PART),
    "broken part": replace(method("Odd"), components=ZERO_PART * math.nan),
    "no parts": replace(method("Odd"), components=np.zeros((0, 12)), shares=()),
    "sends nothing": replace(
        method("Odd"),
        bytes_up_per_party=0.0,
        bytes_down_per_party=0.0,
        rounds=0,
        sent=(),
        curve=replace(curve("Odd", (0.4, 0.3)), bytes_up=()),
    ),
    "sends empty messages": replace(method("Odd"), curve=replace(curve("Odd", (0.4, 0.3)), bytes_up=(0.0, 0.0))),
    "only the oracle": replace(method("Odd"), is_oracle=True),
}


@pytest.mark.parametrize("image_shape", [(3, 4), None])
@pytest.mark.parametrize("others", [(), (method("Alpha"), replace(method("Pool", 0.1), is_oracle=True))])
@pytest.mark.parametrize("odd", ODD_METHODS.values(), ids=ODD_METHODS.keys())
def test_odd_findings_still_make_a_whole_page(
    odd: MethodResult, others: tuple[MethodResult, ...], image_shape: tuple[int, int] | None
) -> None:
    page = Page(render(report(odd, *others, image_shape=image_shape)))
    shown = page.text + " ".join(value for name in ("d", "cx", "cy", "x", "y", "style") for value in page.values(name))
    assert not re.search(r"\b(nan|inf|-0%)\b", shown)
    assert "Odd" in page.text


@pytest.mark.parametrize(
    "parties",
    [
        (),
        (PartyHoldings("alone", 5, {}),),
        (PartyHoldings("empty", 0, {}),),
        (PartyHoldings("many", 60, {str(i): 3 for i in range(20)}),),
    ],
    ids=["nobody", "one party", "no rows", "many labels"],
)
def test_any_set_of_parties_makes_a_whole_page(parties: tuple[PartyHoldings, ...]) -> None:
    page = Page(render(replace(report(method("Alpha")), parties=parties)))
    assert all(party.name in page.text for party in parties)


def test_errors_stand_over_the_bytes_that_were_sent_by_then() -> None:
    """A first round that sends ten times as much as all others: its point lies where it lies, not at a tenth."""
    uneven = replace(
        method("Alpha"), curve=Curve("Alpha", (1, 2, 3), (0.1, 0.2, 0.3), (0.5, 0.4, 0.3), (1e4, 1.1e4, 1.2e4))
    )
    silent = replace(method("Beta"), curve=Curve("Beta", (1, 2), (0.1, 0.2), (0.5, 0.4)))
    lines = _over_bytes(
        [uneven, silent], [Line("Alpha", "s0", (1, 2, 3), (0.5, 0.4, 0.3)), Line("Beta", "s1", (1, 2), (0.5, 0.4))]
    )
    assert lines[0].x == (1e4, 1.1e4, 1.2e4)
    assert (lines[1].x, lines[1].y) == ((0.0, 1.2e4), (0.3, 0.3)), "level, over all that others send"
    assert "evenly" not in render(report(uneven, silent))
    assert _over_bytes([silent], lines[1:]) == []


def test_feature_lists_are_sorted_from_strongest_to_weakest() -> None:
    single = replace(method("Alpha"), components=np.arange(12.0)[None], shares=(0.5,))
    page = render(report(single, image_shape=None))
    assert re.findall(r">column (\d+)<", page) == [str(i) for i in range(11, 1, -1)]


def test_the_file_is_small() -> None:
    errors = tuple(0.3 + 0.5 * 0.95**i for i in range(100))
    large = [replace(method(name, 0.3, 20, 64), curve=curve(name, errors)) for name in ("One", "Two", "Three", "Four")]
    assert len(render(report(*large, image_shape=(8, 8))).encode()) < 400_000
    long = replace(large[0], curve=curve("One", tuple(np.geomspace(1, 0.1, 50_000).tolist())))
    assert len(render(report(long, image_shape=(8, 8))).encode()) < 200_000


def test_charts_place_every_point_inside_their_frame() -> None:
    lines = [Line("up", "s0", (0.0, 1.0, 1000.0), (1e-9, 0.5, 3.0)), Line("level", "s1", (0.0, 10.0), (0.0, 0.0))]
    page = Page(line_chart(PLAIN, PLAIN, lines))
    assert all(0 <= float(value) <= 380 for value in page.values("cx"))
    assert all(0 <= float(value) <= 270 for value in page.values("cy"))


@pytest.mark.parametrize("largest", [1, 3, 7, 10, 60, 12_345])
def test_whole_quantities_have_whole_ticks(largest: int) -> None:
    rounds = Quantity("rounds", str, start=0.0, smallest_step=1.0)
    ticks = axis(rounds, [float(largest)], [float(largest)]).ticks
    assert all(tick == int(tick) for tick in ticks)
    assert 2 <= len(ticks) <= 8
    assert ticks[-1] >= largest


def test_numbers_have_three_digits_and_units() -> None:
    assert [format_number(value) for value in (0.0, 0.012345, 2.0, 99.96, 12345.6)] == [
        "0",
        "0.0123",
        "2.00",
        "100",
        "12,346",
    ]
    assert [format_percent(value) for value in (0.28712, 1.0, 0.0)] == ["28.7%", "100%", "0%"]
    sizes = [format_bytes(value).replace("\N{NO-BREAK SPACE}", " ") for value in (0, 12, 20_480, 999_999, 5e6)]
    assert sizes == ["0 B", "12 B", "20.5 kB", "1.00 MB", "5.00 MB"]


def test_writing_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    target.write_text("old")
    assert write_report(target, report(method("Alpha \udc80"))) == target
    assert target.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert os.listdir(tmp_path) == ["report.html"]


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="missing"):
        write_report(tmp_path / "missing" / "report.html", report(method("Alpha")))


def test_findings_that_do_not_fit_each_other_are_refused() -> None:
    with pytest.raises(ShapeError, match="one share per component"):
        replace(method("Alpha"), shares=(0.1,))
    with pytest.raises(ShapeError, match="recorded round"):
        Curve("Alpha", (1, 2), (0.1,), (0.5, 0.4))
    with pytest.raises(ShapeError, match="entries of bytes_up"):
        Curve("Alpha", (1, 2), (0.1, 0.2), (0.5, 0.4), (8.0,))
    with pytest.raises(ShapeError, match="image_shape"):
        report(method("Alpha"), image_shape=(5, 5))
    with pytest.raises(ShapeError, match="one name per column"):
        replace(report(method("Alpha")), feature_names=("a",))


def with_parties(names: list[str], has_partner: bool = True) -> MethodResult:
    base = method("Alpha")
    H = base.components
    parties = []
    for i, name in enumerate(names):
        order = np.roll(np.arange(3), i)
        own = align_local_components(H[order], H)
        own = own if has_partner else replace(own, has_partner=(True, False, True))
        parties.append(PartyResult(name, 10 + i, 1.0, 0.3, (0.2, 0.3, 0.5), 0.25, 0.5, 0.1, own))
    return replace(base, parties=tuple(parties), after_first_round={party.name: party.own for party in parties})


def test_every_party_is_shown_with_its_parts_in_the_shared_order() -> None:
    names = ["north", "south", "east"]
    text = render(report(with_parties(names)))
    block = re.search(r"<details.*?</details>", text, re.DOTALL)
    assert block is not None
    tables = re.findall(r"<table.*?</table>", block[0], re.DOTALL)
    assert len(tables) == 2
    for shown in tables:
        lines = re.findall(r"<tr.*?</tr>", shown, re.DOTALL)[1:]
        assert all(Page(line).text.startswith(name) for line, name in zip(lines, ["shared", *names], strict=True))
        pictures = [re.findall(r"base64,([^\"]*)", line) for line in lines]
        decoded = [[decode(base64.b64decode(code)) for code in line] for line in pictures]
        for line in decoded[1:]:
            np.testing.assert_array_equal(line, decoded[0])
    for word in ("25.0%", "30.0%", "0.500", "0.100", "20.0%", "50.0%"):
        assert word in block[0]


def test_components_without_a_match_are_marked() -> None:
    marked, plain = render(report(with_parties(["p"], False))), render(report(with_parties(["p"])))
    assert marked.count('class="part unmatched"') == 2
    assert "without a match" in marked
    assert 'class="part unmatched"' not in plain
    assert "(2)" in marked


def test_odd_parties_still_make_a_whole_page() -> None:
    nothing = PartyResult(HOSTILE, 0, 0.0, math.nan, (math.nan,) * 3, drift=math.inf)
    alone = replace(method("Local"), components=np.zeros((0, 12)), shares=(), rounds=0, parties=(nothing,))
    crowd = with_parties([f"party {i}" for i in range(MOST_PARTIES + 7)])
    for shape in ((3, 4), None):
        for methods in ((replace(method("Odd"), parties=(nothing,)), alone), (alone,), (crowd,)):
            text = render(report(*methods, image_shape=shape))
            page = Page(text)
            assert not re.search(r"\b(nan|inf)\b", page.text)
            assert "script" not in page.tags
    assert "Not shown: 7 more parties" in text


def test_a_method_that_shares_nothing_is_never_the_best() -> None:
    alone = replace(method("Local", 0.01), components=np.zeros((0, 12)), shares=())
    text = render(report(alone, method("Beta", 0.2), method("Gamma", 0.4)))
    assert re.findall(r'<tr class="best">.*?</svg>(\w+)', text)[0] == "Beta"
    assert "lowest of 2 methods" in text
