"""The built site is what any viewer of Markdown shows, and its search works from the disk."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.docs.commands import ROOT
from tests.support.browser import needs_browser, shown

pytest.importorskip("mkdocs", reason="comes with the extra docs, which make setup installs")
from markdown_it import MarkdownIt

from pdstore import __version__
from scripts.site_pages import OUTSIDE

pytestmark = pytest.mark.slow

SOURCES = {place: ROOT / path for path, place in OUTSIDE.items()}
SOURCES |= {path.name: path for path in (ROOT / "docs").glob("*.md")}
DRAWN_FROM_CODE = {"api.md"}

CONTAINERS = {"ul", "ol", "li", "table", "tr", "th", "td", "pre", "blockquote"}
CONTAINERS |= {f"h{level}" for level in range(1, 7)}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", place],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        check=True,
    )
    return place


class Blocks(HTMLParser):
    """Collects each paragraph's text, with the lists and tables that it stands in."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []
        self._path: list[str] = []
        self._text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in CONTAINERS | {"p"}:
            self._end_block()
        if tag in CONTAINERS:
            self._path.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in CONTAINERS | {"p"}:
            self._end_block()
        if tag in CONTAINERS:
            self._path.pop()

    def handle_data(self, data: str) -> None:
        self._text += data

    def _end_block(self) -> None:
        text = " ".join(self._text.split()).removesuffix("¶")  # a heading's link to itself
        if text:
            self.found.append((" ".join(self._path), text))
        self._text = ""


@pytest.mark.parametrize("place", sorted(SOURCES.keys() - DRAWN_FROM_CODE))
def test_lists_tables_and_paragraphs_are_those_of_commonmark(site: Path, place: str) -> None:
    html = (site / place).with_suffix(".html").read_text()
    [article] = re.findall(r"<article.*?</article>", html, re.DOTALL)
    viewer = MarkdownIt("commonmark").enable("table")
    assert Blocks(article).found == Blocks(viewer.render(SOURCES[place].read_text())).found


@needs_browser
def test_the_search_finds_a_word_on_a_page_that_was_opened_from_the_disk(
    site: Path, tmp_path: Path
) -> None:
    page = shown(f"file://{site}/index.html?q=sizing", tmp_path)
    results = re.findall(r'<a href="([^"]+)" class="md-search-result__link"', page)
    assert f"file://{site}/sizing.html" in {result.partition("?")[0] for result in results}


def test_a_page_links_the_repository_and_shows_the_version(site: Path) -> None:
    page = (site / "stores.html").read_text()
    [link] = re.findall(r'<a href="?([^" >]+)"?[^>]*class="?md-source\b', page)[:1]
    assert link.startswith("https://")
    assert f">pdstore {__version__}<" in re.sub(r"\s*([<>])\s*", r"\1", page)
    assert "data-md-component=source" not in page.replace('"', ""), "it would ask the host"


def test_a_page_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in site.glob("*.html"):
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"?([^\" >]+)", page.read_text())
        assert loaded
        assert not [target for target in loaded if "//" in target], page.name


@needs_browser
def test_its_colors_are_those_that_the_system_has_now(site: Path, tmp_path: Path) -> None:
    """The browser keeps what the page chose, so both visits are of one profile."""
    for number, scheme in ((1, "default"), (0, "slate")):
        setting = f"--blink-settings=preferredColorScheme={number}"
        page = shown((site / "index.html").as_uri(), tmp_path, setting)
        [shown_as] = re.findall(r'<body .*?data-md-color-scheme="(\w+)"', page)
        assert shown_as == scheme
