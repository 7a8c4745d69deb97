"""Reports as one HTML file that needs nothing else: no network, no scripts, no fonts, no images.

    page = Page("Sweep", lead="24 settings, 3 arms")
    page.section("What to do")
    page.cards([Card("tokens/s", "+12%", "at 8 clients", tone="good")])
    page.table("Settings", ["name", "tokens/s"], [["b8", 71.3]])
    figure, axes = new_figure()
    axes.plot(x, y, **series(0), label="baseline")
    page.figure(figure, title="Throughput", description="Tokens/s rise from 6 to 71 ...")
    page.write("report.html", figures="figures")

A page reads on a desktop and on a phone (390 px), in light and in dark, and by a screen reader:
figures carry their title and description, tables their caption and header cells. Figures are
vector drawings by matplotlib; `write(figures=...)` saves each as PNG as well.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
from markupsafe import Markup, escape
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from carryover.page_style import COLOURS, DASHES, MARKERS, SERIES, STYLE, TEMPLATE

TONES = ("good", "bad", "neutral")
_LIGHT = {name: light for name, (light, _) in COLOURS.items()}
# Inches; 360 points: about the width of a phone, so letters keep their size there.
_WIDTH_INCHES = 5.0
_STYLE = {
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.edgecolor": _LIGHT["muted"],
    "axes.labelcolor": _LIGHT["ink"],
    "axes.prop_cycle": matplotlib.cycler(color=SERIES),
    "grid.color": _LIGHT["line"],
    "grid.linewidth": 0.7,
    "text.color": _LIGHT["ink"],
    "xtick.color": _LIGHT["muted"],
    "xtick.labelcolor": _LIGHT["ink"],
    "ytick.color": _LIGHT["muted"],
    "ytick.labelcolor": _LIGHT["ink"],
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "svg.fonttype": "none",
}


@dataclass(frozen=True)
class Card:
    """A headline: a label, a short value, a sentence; `tone` is one of "good", "bad", "neutral"."""

    label: str
    value: str
    text: str = ""
    tone: str = "neutral"


@dataclass(frozen=True)
class _Section:
    title: str
    blocks: list[dict[str, Any]] = field(default_factory=list)


def new_figure(
    rows: int = 1, columns: int = 1, *, height: float = 2.9, **subplots: Any
) -> tuple[Figure, Any]:
    """A figure in the pages' style, and its axes as `Figure.subplots` returns them.

    Args:
        rows: of axes, one above the other.
        columns: of axes; one reads best, as a phone shows the figure 358 px wide.
        height: in inches (the width is 5).
        subplots: further arguments of `Figure.subplots`, for example `sharex=True`.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained")
        return figure, figure.subplots(rows, columns, **subplots)


def colour(index: int) -> str:
    """Colour of the series with this index: the same arm has the same in every figure."""
    return SERIES[index % len(SERIES)]


def series(index: int, *, markers: bool = True) -> dict[str, Any]:
    """Arguments of `axes.plot` that tell series apart by colour, dashes and marker."""
    style = {"color": colour(index), "linestyle": DASHES[index % len(DASHES)]}
    return style | ({"marker": MARKERS[index % len(MARKERS)]} if markers else {})


def add_legend(axes: Any, *, columns: int = 3) -> None:
    """Put the legend above the axes, where it covers no data."""
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, frameon=False, fontsize=9.5,
        borderaxespad=0.2, handlelength=2.2, columnspacing=1.2, labelcolor=_LIGHT["ink"],
    )  # fmt: skip


class Page:
    """Collects blocks in order; `write` makes the file."""

    def __init__(self, title: str, *, lead: str = "", footer: str = "") -> None:
        self._title, self._lead, self._footer = title, lead, footer
        self._sections = [_Section("")]
        self._figures: dict[str, Figure] = {}
        self._tables = 0

    def section(self, title: str) -> None:
        """Begin a section; what follows belongs to it."""
        self._sections.append(_Section(title))

    def paragraph(self, text: str) -> None:
        """Plain text."""
        self._add(kind="paragraph", text=text, quiet=False)

    def note(self, text: str) -> None:
        """Plain text in a smaller, quieter type: how something was measured, what is missing."""
        self._add(kind="paragraph", text=text, quiet=True)

    def cards(self, cards: Sequence[Card]) -> None:
        """Headlines side by side.

        Raises:
            ValueError: a tone that does not exist.
        """
        for card in cards:
            if card.tone not in TONES:
                raise ValueError(f"tone must be one of {', '.join(TONES)}, got {card.tone!r}")
        self._add(kind="cards", cards=list(cards))

    def table(
        self,
        caption: str,
        columns: Sequence[str],
        rows: Iterable[Sequence[Any]],
        *,
        digits: int = 3,
    ) -> None:
        """A table; numbers align right, `digits` significant ones; None and NaN show as a dash.

        Raises:
            ValueError: a row with more or fewer cells than columns.
        """
        rows = [list(row) for row in rows]
        for row in rows:
            if len(row) != len(columns):
                raise ValueError(f"{len(columns)} columns, but a row of {len(row)}: {row}")
        shown = [[_cell(value, digits) for value in row] for row in rows]
        numeric = [
            any(row[index]["number"] for row in shown)
            and all(row[index]["number"] or row[index]["text"] == "–" for row in shown)
            for index in range(len(columns))
        ]
        for row in shown:
            for cell, number in zip(row, numeric, strict=True):
                cell["number"] = number
        named = [
            {"name": name, "number": number} for name, number in zip(columns, numeric, strict=True)
        ]
        self._tables += 1
        self._add(
            kind="table", caption=caption, number=self._tables, columns=named, rows=shown
        )

    def figure(
        self, figure: Figure, *, title: str, description: str, caption: str = "", name: str = ""
    ) -> None:
        """A drawing; consecutive ones stand side by side where there is room.

        Args:
            figure: from `new_figure`.
            title: shown above it.
            description: what it shows, in a sentence or two, for readers who cannot see it.
            caption: shown below the title, smaller.
            name: of its PNG file, without the ending; by default made of the title.
        """
        name = name or re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "figure"
        stem, number = name, 2
        while name in self._figures:
            name, number = f"{stem}-{number}", number + 1
        self._figures[name] = figure
        svg = Markup(_svg(figure, name, title, description))
        shown = {"title": title, "caption": caption, "svg": svg}
        blocks = self._sections[-1].blocks
        if blocks and blocks[-1]["kind"] == "figures":
            blocks[-1]["figures"].append(shown)
        else:
            self._add(kind="figures", figures=[shown])

    def details(self, summary: str, text: str) -> None:
        """Preformatted text that opens on a click: a configuration, a log."""
        self._add(kind="details", summary=summary, text=text)

    def html(self) -> str:
        """The page."""
        environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        return environment.from_string(TEMPLATE).render(
            title=self._title, lead=self._lead, footer=self._footer, style=Markup(STYLE),
            sections=[section for section in self._sections if section.title or section.blocks],
        )  # fmt: skip

    def write(self, path: str | Path, *, figures: str | Path | None = None) -> Path:
        """Write the page (whole or not at all), and each figure as PNG into the folder `figures`.

        Returns:
            The page's path.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        partial.write_text(self.html(), encoding="utf-8")
        partial.replace(path)
        if figures is not None:
            folder = Path(figures)
            folder.mkdir(parents=True, exist_ok=True)
            for name, figure in self._figures.items():
                FigureCanvasAgg(figure)
                figure.savefig(folder / f"{name}.png", dpi=160, facecolor=_LIGHT["page"])
        return path

    def _add(self, **block: Any) -> None:
        self._sections[-1].blocks.append(block)


def format_number(value: float, digits: int = 3) -> str:
    """A number for people: 12,345, 4.33, 0.0123, 1.2e-05; a dash for NaN."""
    if not isfinite(value):
        return "–" if value != value else ("∞" if value > 0 else "−∞")
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 10**digits:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}" if abs(value) < 1e-4 else f"{value:#.{digits}g}".rstrip(".")


def _cell(value: Any, digits: int) -> dict[str, Any]:
    if value is None:
        return {"text": "–", "number": False}
    if isinstance(value, bool) or not isinstance(value, int | float):
        # numpy's numbers know `item`
        item = getattr(value, "item", None)
        if item is not None and isinstance(item(), int | float):
            return _cell(item(), digits)
        return {"text": str(value), "number": False, "long": len(str(value)) > 28}
    return {"text": format_number(value, digits), "number": True}


def _svg(figure: Figure, name: str, title: str, description: str) -> str:
    """The figure as an inline SVG element: own ids, page colours and fonts, title, description."""
    buffer = io.StringIO()
    FigureCanvasSVG(figure)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    body = text[text.index(">") + 1 :]
    view = re.search(r'viewBox="([^"]+)"', text).group(1)
    # Ids are per document, and a page holds several drawings.
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r'href="#', f'href="#{name}-', body)
    body = body.replace("url(#", f"url(#{name}-")
    for key, light in _LIGHT.items():
        body = re.sub(light, f"var(--{key})", body, flags=re.IGNORECASE)
    body = body.replace("#000000", "var(--ink)")
    body = re.sub(r"font-family: [^;\"]*", "font-family: inherit", body)
    body = re.sub(r"(font: (?:\w+ )*[\d.]+px )[^;\"]*", r"\1system-ui, sans-serif", body)
    return (
        f'<svg viewBox="{view}" role="img" aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{escape(title)}</title>'
        f'<desc id="{name}-desc">{escape(description)}</desc>{body}'
    )
