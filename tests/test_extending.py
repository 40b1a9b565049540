"""The examples of docs/extending.md, as a reader would try them: files written, commands run, in order."""

import os
import re
from pathlib import Path

import pytest

from acrlpd.cli.main import main

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
FENCE = re.compile(r"```(python|yaml|bash)\n(.*?)```", re.DOTALL)
SECTIONS = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)


def blocks(section: str, language: str) -> list[str]:
    return [body for kind, body in FENCE.findall(section) if kind == language]


def commands(section: str) -> list[list[str]]:
    joined = "\n".join(blocks(section, "bash")).replace("\\\n", " ")
    return [line.split() for line in joined.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every file of the page, under the name in its first line."""
    path = tmp_path_factory.mktemp("own")
    for section in SECTIONS:
        for body in blocks(section, "python") + blocks(section, "yaml"):
            name = body.partition("\n")[0].removeprefix("# ")
            assert re.fullmatch(r"\w+\.(py|yaml)", name), (
                f"a block of {PAGE.name} begins with {name!r}, not a file name"
            )
            (path / name).write_text(body)
    return path


def test_every_example_has_a_command_that_uses_it():
    used = " ".join(" ".join(line) for section in SECTIONS for line in commands(section))
    files = [body.partition("\n")[0].removeprefix("# ") for s in SECTIONS for body in blocks(s, "python")]
    assert len(files) >= 7
    for name in files:
        assert name.removesuffix(".py") in used, f"no command of {PAGE.name} uses {name}"


@pytest.mark.parametrize("section", [s for s in SECTIONS if commands(s)], ids=lambda s: s.partition("\n")[0])
def test_the_example_runs(
    section: str, directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Sections build on each other as on the page: a run that an earlier section made is there for a later one.

    The commands run in this process, which has imported and compiled much of what they need. `PYTHONPATH` is for the
    processes that they start.
    """
    monkeypatch.chdir(directory)
    monkeypatch.syspath_prepend(str(directory))
    monkeypatch.setenv("PYTHONPATH", ".", prepend=os.pathsep)
    for words in commands(section):
        assert words[:2] == ["PYTHONPATH=.", "acrlpd"], f"not a command of this page: {' '.join(words)}"
        assert main(words[2:]) == 0, capsys.readouterr().err[-3000:]
