"""The `acrlpd` commands of README and pages: which there are, and which need more than a laptop."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
# Tests of their own run the commands of these pages, with the files that the pages show.
TESTED_APART = {"extending.md", "from_the_seeds.md", "my_env/README.md"}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`(acrlpd [^`]+)`")
SEPARATORS = {"&&", "||", "|", ";", "&", ">"}

# A line such as `# needs a GPU and your dataset` is a mark: it holds for the rest of its block, which no test runs.
MARK = re.compile(r"# (needs|takes) .*")
_MISSING = "|".join(
    (
        *("a GPU", "several GPUs", "several hosts", "a robot", "a server", "EGL"),
        *("your dataset", "your environment", "openpi's released weights", "LIBERO's dataset", "OGBench's files"),
        *("an account at the hub", "a trained policy"),
    )
)
VOCABULARY = re.compile(rf"# (needs ({_MISSING})(, ({_MISSING}))*( and ({_MISSING}))?|takes (minutes|an hour|hours))")
# `acrlpd train ...` and `acrlpd watch RUN` are what they look like: not yet a command.
EXCERPT = re.compile(r"\.\.\.|\b(DIR|RUN\d?)\b|\[--")


def name(page: Path) -> str:
    return page.name if page.name != "README.md" or page.parent == ROOT else f"{page.parent.name}/README.md"


def blocks(page: Path, *languages: str) -> list[str]:
    return [body for language, body in FENCE.findall(page.read_text()) if language in languages]


def command_lines(page: Path) -> Iterator[tuple[str | None, str]]:
    """The lines with commands, each with the mark that holds for the line."""
    for body in blocks(page, "bash", ""):
        mark = None
        variables: dict[str, str] = {}
        for line in body.replace("\\\n", " ").splitlines():
            mark = line if MARK.fullmatch(line) else mark
            if given := re.match(r'(\w+)="(.*?)"', line):
                variables[given[1]] = given[2]
            line = re.sub(r"\$(\w+)", lambda match, known=variables: known.get(match[1], match[0]), line)
            if re.search(r"\bacrlpd ", line):
                yield mark, line


def commands(page: Path) -> list[str]:
    """What a user would copy from the blocks of a page: the arguments of each `acrlpd`."""
    return [command for _, line in command_lines(page) for command in simple_commands(line)]


def runnable(page: Path) -> list[str]:
    """The commands of a page that need nothing but what a laptop has."""
    lines = (line for mark, line in command_lines(page) if mark is None and not EXCERPT.search(line))
    return [command for line in lines for command in simple_commands(line)]


def mentions(page: Path) -> list[str]:
    """Commands within a text. They may leave out what the command cannot do without."""
    return [command for line in INLINE.findall(FENCE.sub("", page.read_text())) for command in simple_commands(line)]


def simple_commands(line: str) -> Iterator[str]:
    line = re.sub(r"\[(--[^]]*)\]", r"\1", line)  # [--port 8000]
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # the output of a command, with an apostrophe
        return
    command: list[str] = []
    for word in [*words, ";"]:
        if word in SEPARATORS:
            if command and command[0].removeprefix(".venv/bin/") == "acrlpd":
                yield shlex.join(command[1:])
            command = []
        elif command or not re.fullmatch(r"\w+=.*", word):  # PYTHONPATH=. acrlpd ...
            command.append(word)
