"""The lock file of tests, lint and types agrees with pyproject.toml, and binds every file by its hash."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCK = (ROOT / ".ci" / "requirements.lock").read_text()
HINT = "run `make lock` and commit .ci/requirements.lock"


def wanted() -> Iterator[Requirement]:
    """What pyproject.toml asks for, with the extras that the Makefile names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = re.search(r"^EXTRAS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert extras is not None
    for group in (project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras[1].split())):
        yield from map(Requirement, group)


def locked() -> Iterator[tuple[str, str, str]]:
    """Name, version, and the rest (hashes, and who asked for it) of every entry."""
    for entry in re.split(r"^(?=[A-Za-z0-9])", LOCK, flags=re.MULTILINE)[1:]:
        name, version, rest = re.fullmatch(r"([\w.-]+)==([^\s;]+)(.*)", entry, re.DOTALL).groups()
        yield canonicalize_name(name), version, rest


@pytest.mark.parametrize("requirement", list(wanted()), ids=str)
def test_every_requirement_is_locked_in_a_version_that_it_allows(requirement: Requirement) -> None:
    versions = [version for name, version, _ in locked() if name == canonicalize_name(requirement.name)]
    assert versions, f"{requirement} is not in the lock file: {HINT}"
    assert all(requirement.specifier.contains(version) for version in versions), f"{requirement}: {versions}; {HINT}"


def test_nothing_is_locked_that_nobody_asks_for() -> None:
    asked = {name for name, _, rest in locked() if re.search(r"acrlpd \(pyproject\.toml\)", rest)}
    assert asked == {canonicalize_name(requirement.name) for requirement in wanted()}, HINT


def test_packages_without_their_dependencies_are_locked() -> None:
    names = [Requirement(line) for line in (ROOT / ".ci" / "no-deps.in").read_text().splitlines() if line[0] != "#"]
    versions = {name: version for name, version, _ in locked()}
    assert all(requirement.specifier.contains(versions[requirement.name]) for requirement in names), HINT


def test_every_file_is_bound_by_its_hash() -> None:
    without = [name for name, _, rest in locked() if not re.search(r"--hash=sha256:[0-9a-f]{64}", rest)]
    assert without == [] and "://" not in LOCK and "index" not in LOCK
