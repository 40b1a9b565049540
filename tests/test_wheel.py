"""The wheel holds all that a checkout has at run time, and knows the commit that it was built from."""

import datetime
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import acrlpd

ROOT = Path(__file__).parents[1]
BUILD = "import sys, hatchling.build; print(hatchling.build.build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked."""
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-c", BUILD, str(directory)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(directory / built.stdout.split()[-1]) as archive:
        archive.extractall(directory / "unpacked")
    return directory / "unpacked"


def test_every_file_of_the_package_is_inside(wheel: Path) -> None:
    package = ROOT / "src" / "acrlpd"
    wanted = {path.relative_to(package) for path in package.rglob("*") if path.is_file()}
    wanted = {path for path in wanted if "__pycache__" not in path.parts}
    inside = {path.relative_to(wheel / "acrlpd") for path in (wheel / "acrlpd").rglob("*") if path.is_file()}
    assert inside - wanted == ({Path("commit.txt")} if (ROOT / ".git").exists() else set())
    assert wanted <= inside


def test_the_version_names_the_commit(wheel: Path) -> None:
    """The package of the wheel, run away from the checkout; of a checkout, git knows the commit."""
    command = [sys.executable, "-m", "acrlpd.cli.main", "--version"]
    found = subprocess.run(command, cwd=wheel, env={"PYTHONPATH": str(wheel)}, capture_output=True, text=True)
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
    commit = head.stdout.strip() or "unknown"
    shown = found.stdout.strip().replace("-dirty)", ")")
    assert shown == f"acrlpd {acrlpd.__version__} (commit {commit})"


def test_changelog_and_citation_have_the_version(wheel: Path) -> None:
    """A release takes its notes from the first part of the changelog, which has a date."""
    parts = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    version, date = parts[0].split(", ")
    assert datetime.date.fromisoformat(date) and len(set(parts)) == len(parts)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    [metadata] = wheel.glob("*.dist-info/METADATA")
    assert acrlpd.__version__ == version == str(citation["version"])
    assert f"\nVersion: {version}\n" in metadata.read_text()


def test_without_git_and_without_a_file_the_commit_is_unknown(wheel: Path) -> None:
    (wheel / "acrlpd" / "commit.txt").unlink(missing_ok=True)
    code = "from acrlpd.installation import describe_version; print(describe_version())"
    environment = {"PYTHONPATH": str(wheel)}
    found = subprocess.run([sys.executable, "-c", code], cwd=wheel, env=environment, capture_output=True, text=True)
    assert found.stdout == f"{acrlpd.__version__} (commit unknown)\n"
