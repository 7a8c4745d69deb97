"""HTML pages: one file that needs nothing else, in light and dark, with all it shows escaped."""

import re
import struct
from html.parser import HTMLParser

import numpy as np
import pytest

from carryover.page_style import COLOURS
from carryover.pages import Card, Page, add_legend, format_number, new_figure, series

VOID = {"meta", "br", "img", "link", "hr", "input"}


class Checker(HTMLParser):
    """Collects ids, references and tags, and fails on a tag closed out of order."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.ids, self.references, self.tags, self.text = [], [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            elif name in ("src", "href", "xlink:href", "action", "data"):
                self.references.append(value)
            elif name == "aria-labelledby":
                self.references += [f"#{part}" for part in value.split()]
            self.references += re.findall(r"url\(([^)]*)\)", value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def parse(html):
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    return checker


def drawing():
    figure, axes = new_figure()
    for index in range(3):
        axes.plot([0, 1, 2], [index, 2, 1], label=f"arm {index}", **series(index))
    axes.fill_between([0, 1, 2], [0, 0, 0], [1, 1, 1], alpha=0.2)
    axes.set_xlabel("minutes")
    add_legend(axes)
    return figure


@pytest.fixture(scope="module")
def page():
    page = Page("A <title>", lead="lead & more", footer="made by a test")
    page.section("First")
    page.cards([Card("label", "better", "why <b>", tone="good"), Card("other", "inconclusive")])
    page.paragraph("text with <script>alert(1)</script>")
    page.figure(drawing(), title="Same", description="three lines", caption="small")
    page.figure(drawing(), title="Same", description="three lines again")
    page.section("Second")
    page.table("Arms", ["arm", "n", "note"], [["a", 1234, None], ["b", float("nan"), "x<y"]])
    page.details("Configuration", "a: 1\nb: <2>")
    return page


def test_a_page_needs_nothing_outside_itself(page):
    html = page.html()
    found = parse(html)
    assert found.references, "figures refer to their own markers and clip paths"
    assert {reference[0] for reference in found.references} == {"#"}
    assert {reference[1:] for reference in found.references} <= set(found.ids)
    assert "script" not in found.tags and "link" not in found.tags and "img" not in found.tags
    assert not re.search(r"https?:|//[a-z]|@import|<!ENTITY|<\?xml", html)


def test_ids_of_several_figures_do_not_clash(page):
    ids = parse(page.html()).ids
    assert len(ids) == len(set(ids)) > 20


def test_what_is_shown_is_escaped(page):
    text = "".join(parse(page.html()).text)
    for piece in ("A <title>", "<script>alert(1)</script>", "why <b>", "x<y", "b: <2>"):
        assert piece in text


def test_figures_follow_light_and_dark_and_have_titles(page):
    html = page.html()
    drawings = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
    assert len(drawings) == 2
    for svg in drawings:
        assert not re.search(r"#[0-9a-fA-F]{6}", svg)
        assert "<title" in svg and "<desc" in svg and 'role="img"' in svg
        assert "width=" not in svg[: svg.index(">")]
        assert ">minutes</text>" in svg, "letters stay letters"
    used = set(re.findall(r"var\(--(\w+)\)", html))
    assert used <= set(COLOURS)
    assert "prefers-color-scheme: dark" in html


def test_tables_align_numbers_and_show_what_is_missing(page):
    html = page.html()
    assert '<td class="number">1,234</td>' in html
    assert '<td class="number">–</td>' in html
    assert '<th scope="row">a</th>' in html


def test_a_row_of_the_wrong_length_and_an_unknown_tone_are_refused():
    page = Page("x")
    with pytest.raises(ValueError, match="2 columns, but a row of 1"):
        page.table("t", ["a", "b"], [["only"]])
    with pytest.raises(ValueError, match="tone must be one of"):
        page.cards([Card("a", "b", tone="great")])


def test_writing_saves_the_page_and_every_figure(page, tmp_path):
    path = page.write(tmp_path / "new" / "report.html", figures=tmp_path / "figures")
    assert path.read_text(encoding="utf-8") == page.html()
    assert [entry.name for entry in path.parent.iterdir()] == ["report.html"]
    images = sorted((tmp_path / "figures").iterdir())
    assert [image.name for image in images] == ["same-2.png", "same.png"]
    for image in images:
        data = image.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        assert struct.unpack(">I", data[16:20])[0] == 800


def test_the_same_page_is_the_same_text(page):
    assert page.html() == page.html()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (12345, "12,345"), (4.333, "4.33"), (0.0123, "0.0123"), (0.00001234, "1.23e-05"),
        (float("nan"), "–"), (float("inf"), "∞"), (float("-inf"), "−∞"), (71234.5, "71,234"),
        (0, "0"), (100.0, "100"), (99.96, "100"), (-0.5, "-0.500"),
    ],
)  # fmt: skip
def test_numbers_for_people(value, text):
    assert format_number(value) == text


def test_numbers_of_numpy_are_numbers():
    page = Page("x")
    page.table("t", ["n"], [[np.float32(2.5)], [np.int64(3)]])
    assert '<td class="number">2.50</td>' in page.html()
    assert '<td class="number">3</td>' in page.html()
