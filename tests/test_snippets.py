"""Every Python block on the pages runs, or says in its first line what it needs that a test does not have.

The blocks run in one directory, where a reader has followed docs/library.md and so has checkpoints/corridor/first.
"""

import ast
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import acrlpd
from acrlpd.envs import registry
from acrlpd.experts import expert

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
# These have tests of their own, which run their commands, too.
TESTED_APART = {"extending.md", "from_the_seeds.md"}
EXAMPLE = "# train_in_python.py\n"
# What a block needs that no test has. Everything else is run.
MISSING = re.compile(r"# needs (your dataset|a dataset with cameras|openpi's released weights|a server|a robot)\b.*\n")

LIBRARY = ROOT / "docs" / "library.md"
PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if page != LIBRARY and page.name not in TESTED_APART and BLOCK.search(page.read_text())
]


def blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text())


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory where a reader has followed docs/library.md."""
    directory = tmp_path_factory.mktemp("snippets")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        run_blocks(LIBRARY)
    return directory


def given() -> dict[str, Any]:
    """The names that pages speak of and leave to the reader."""
    step = (np.zeros(14, np.float32), np.zeros(14, np.float32), np.zeros((480, 640, 3), np.uint8), True)
    return {"__name__": "__main__", "config": acrlpd.get_config("corridor"), "steps": [step, step]}


def run_blocks(page: Path) -> None:
    for body in blocks(page):
        if body.startswith(EXAMPLE):  # test_library runs the file
            code = (ROOT / "examples" / "train_in_python.py").read_text().partition('"""\n\n')[2]
            assert body.removeprefix(EXAMPLE) == code
        elif body.startswith("# needs "):
            assert MISSING.match(body), f"{page.name}: a block that begins with {body.splitlines()[0]!r} could be run"
            imports = [node for node in ast.parse(body).body if isinstance(node, ast.ImportFrom)]
            exec(compile(ast.Module([i for i in imports if str(i.module).startswith("acrlpd")], []), page.name, "exec"))
        else:
            exec(compile(body, page.name, "exec"), given())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_blocks_of_the_page_run(page: Path, sandbox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(sandbox)
    for module, table in ((registry, "_REGISTERED"), (expert, "_EXPERTS")):  # what pages register is theirs alone
        monkeypatch.setattr(module, table, dict(getattr(module, table)))
    run_blocks(page)
