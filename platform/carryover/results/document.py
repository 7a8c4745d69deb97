"""A page of Markdown with its pictures, on disk or to be."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from carryover.durable import write_whole
from carryover.results.figures import Picture


@dataclass
class ResultsPage:
    """The page while it is put together.

    Attributes:
        folder: of the pictures, as the page names it.
        blocks: of Markdown.
        pictures: that the page shows.
    """

    folder: str
    blocks: list[str] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The page's Markdown."""
        return "\n\n".join(block.strip() for block in self.blocks if block.strip()) + "\n"

    def add(self, *blocks: str) -> None:
        """Append Markdown; empty blocks add nothing."""
        self.blocks += blocks

    def show(self, picture: Picture | None) -> None:
        """Append a picture, if there is one."""
        if picture is not None:
            self.pictures.append(picture)
            self.add(f"![{picture.description}]({self.folder}/{picture.name}.png)")


def picture_folder(path: Path) -> Path:
    """Where the pictures of a page lie: `results` beside `RESULTS.md`."""
    return path.parent / path.stem.lower()


def write_page(page: ResultsPage, path: Path) -> None:
    """Write pictures, then the page, each whole or not at all."""
    folder = picture_folder(path)
    (folder if page.pictures else path.parent).mkdir(parents=True, exist_ok=True)
    for picture in page.pictures:
        write_whole(folder / f"{picture.name}.png", picture.png)
    write_whole(path, page.text)


def differences(page: ResultsPage, path: Path) -> list[str]:
    """What on disk is not as the page would be written, one sentence each."""
    said = []
    if not path.is_file():
        return [f"there is no {path}"]
    shown = path.read_text(encoding="utf-8")
    if shown != page.text:
        pairs = zip(shown.splitlines(), page.text.splitlines(), strict=False)
        same = next((n for n, (old, new) in enumerate(pairs) if old != new), None)
        place = "its length" if same is None else f"line {same + 1}"
        said.append(f"{path} differs, first in {place}")
    folder = picture_folder(path)
    for picture in page.pictures:
        file = folder / f"{picture.name}.png"
        if not file.is_file():
            said.append(f"there is no {file}")
        elif file.read_bytes() != picture.png:
            said.append(f"{file} differs")
    named = {f"{picture.name}.png" for picture in page.pictures}
    left = sorted(file.name for file in folder.glob("*.png") if file.name not in named)
    said += [f"{folder / name} is of no figure of the page" for name in left]
    return said
