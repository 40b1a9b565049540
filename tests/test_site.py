"""The pages as a site: built strictly, without a network, and without dead links."""

import html.parser
import os
import subprocess
import sys
import urllib.parse
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


class Links(html.parser.HTMLParser):
    """The targets of links, what the page loads, and the anchors of a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attrs if value}
        if tag in ("script", "img", "link") and found.get("rel") != "canonical":
            self.loaded |= {found[name] for name in ("src", "href") if name in found}
        if tag == "a" and "href" in found:
            self.links.add(found["href"])
        self.anchors |= {found[name] for name in ("id", "name") if name in found}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Links]:
    """All pages of the site, which is built as `make docs` builds it."""
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(directory)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return {page: Links(page) for page in directory.rglob("*.html") if page.name != "404.html"}


def test_every_link_leads_somewhere(site: dict[Path, Links]) -> None:
    dead = []
    for page, found in site.items():
        for link in found.links | found.loaded:
            target = urllib.parse.urlsplit(link)
            if target.scheme or target.netloc:
                continue
            path = (page.parent / urllib.parse.unquote(target.path)).resolve() if target.path else page
            anchor = urllib.parse.unquote(target.fragment)
            if not path.is_file() or (path in site and anchor and anchor not in site[path].anchors):
                dead.append(f"{page.name}: {link}")
    assert dead == []


def test_every_page_is_there_and_none_loads_from_a_network(site: dict[Path, Links]) -> None:
    names = {page.stem for page in site}
    assert {page.stem for page in (ROOT / "docs").glob("*.md")} | {"index", "CONTRIBUTING", "CHANGELOG"} <= names
    assert {link for found in site.values() for link in found.loaded if "//" in link} == set()
    [api] = [page for page in site if page.name == "api.html"]
    assert "acrlpd.library.update_agent" in site[api].anchors
