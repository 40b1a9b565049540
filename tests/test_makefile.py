"""`make` on a machine where something goes wrong the first time."""

import shutil
import subprocess
from pathlib import Path

MAKEFILE = Path(__file__).parents[1] / "Makefile"
# Like Debian's python3 without python3-venv: the first environment has an interpreter, but no pip.
PYTHON = """#!/bin/sh
case "$*" in
    "-m venv "*)
        mkdir -p "$3/bin" && cp "$0" "$3/bin/python"
        test -e was_here || { touch was_here; echo "ensurepip is not available"; exit 1; }
        touch "$3/bin/pip" ;;
    "-m pip "*) test -e "$(dirname "$0")/pip" || { echo "No module named pip"; exit 1; } ;;
esac
"""


def test_an_environment_that_was_not_finished_is_made_again(tmp_path: Path) -> None:
    shutil.copy(MAKEFILE, tmp_path / "Makefile")
    (tmp_path / "pyproject.toml").touch()
    python = tmp_path / "python4"
    python.write_text(PYTHON)
    python.chmod(0o755)
    command = ["make", "install", f"PYTHON={python}"]
    first = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert first.returncode != 0 and "ensurepip is not available" in first.stdout
    second = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert second.returncode == 0, second.stdout + second.stderr
    third = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert third.returncode == 0 and "making the environment" not in third.stdout
