"""The site's pages from outside docs/, and links between files as links between pages.

MkDocs calls the functions (`hooks:` in mkdocs.yml). Documents link to each other as files of the
checkout, so that they read well there; a link to a file that is no page leads to a copy of it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
OUTSIDE = {
    "README.md": "index.md",
    "DESIGN.md": "design.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "deploy/README.md": "deploy.md",
    "deploy/mooncake.md": "mooncake.md",
}
"""Documents that stay where people look for them, and their places on the site."""

_LINK = re.compile(r"(!?)\[([^]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    text = (ROOT / "pdstore" / "__init__.py").read_text()
    [version] = re.findall(r'^__version__ = "(.+)"', text, re.MULTILINE)
    config.repo_name = f"pdstore {version}"  # beside the link to the repository
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, place in OUTSIDE.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    places = {place: path for path, place in OUTSIDE.items()}
    source = Path(places.get(page.file.src_uri, f"docs/{page.file.src_uri}"))

    def replaced(link: re.Match[str]) -> str:
        mark, text, target, anchor = link.groups("")
        if "://" in target or target.startswith("mailto:"):
            return link[0]
        path = os.path.normpath(source.parent / target)
        place = _place_of(path, config, files)
        if place is None:
            return text if text.startswith("`") else f"`{text}`"
        place = os.path.relpath(place, Path(page.file.src_uri).parent)
        return f"{mark}[{text}]({place}{anchor})"

    return _LINK.sub(replaced, markdown)


def _place_of(path: str, config: MkDocsConfig, files: Files) -> str | None:
    """Returns where a file of the checkout is on the site; None for a folder."""
    if path in OUTSIDE or path.startswith("docs/"):
        return OUTSIDE.get(path, path.removeprefix("docs/"))
    if (ROOT / path).is_dir():
        return None
    place = f"source/{path}"
    if files.get_file_from_path(place) is None:
        files.append(File.generated(config, place, content=(ROOT / path).read_bytes()))
    return place
