"""A hook of MkDocs: files outside docs/ become part of the site, and links keep working on both.

On a plain repository view a page of docs/ links to ../benchmarks/x.md. On the site docs/ is the root, so the file is
benchmarks/x.md. The hook adds the files that pages link to, and turns each link into the link between the two places on
the site. A link to a file that does not exist stays as it is, and MkDocs refuses it.
"""

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# Pages outside docs/ that the site has, whether a page links to them or not.
MORE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/*.md")
# What stands between the parts of a page that have no links: fenced blocks and code within a line.
CODE = re.compile(r"(^ *```.*?^ *```|`[^`\n]*`)", re.DOTALL | re.MULTILINE)
# A link or an image to a file: its target, and the anchor.
LINK = re.compile(r"(\]\()([^()\s:#]+)(#[^()\s]*)?(\))")
# Benchmarks are found after the pages that explain: they repeat the same words many times.
BENCHMARKS_IN_SEARCH = {"boost": 0.2}


def place_on_site(path: Path) -> str:
    """Where a file of the repository lies on the site."""
    if path == ROOT / "README.md":
        return "index.md"
    return path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT).as_posix()


def linked_files(path: Path) -> set[Path]:
    """The files of the repository that a page links to."""
    if path.suffix != ".md":
        return set()
    targets = {match[2] for part in CODE.split(path.read_text())[::2] for match in LINK.finditer(part)}
    found = {(path.parent / target).resolve() for target in targets}
    return {other for other in found if other.is_file() and other.is_relative_to(ROOT)}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what pages link to, and what those pages link to."""
    known: set[Path] = set()
    new = {path for pattern in (*MORE, "docs/*.md") for path in ROOT.glob(pattern)}
    while new:
        known |= new
        new = {other for path in new for other in linked_files(path)} - known
    for path in sorted(known):
        if not path.is_relative_to(DOCS):
            files.append(File.generated(config, place_on_site(path), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns the links of the repository into links of the site."""
    place = page.file.src_uri
    source = Path(page.file.abs_src_path)
    if place.startswith("benchmarks/"):
        page.meta["search"] = BENCHMARKS_IN_SEARCH

    def on_site(match: re.Match[str]) -> str:
        before, target, anchor, after = match.groups()
        path = (source.parent / target).resolve()
        if not path.is_file() or not path.is_relative_to(ROOT):
            return match[0]
        return before + os.path.relpath(place_on_site(path), Path(place).parent) + (anchor or "") + after

    parts = CODE.split(markdown)
    parts[::2] = [LINK.sub(on_site, part) for part in parts[::2]]
    return "".join(parts)
