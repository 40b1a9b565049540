"""Writes the commit that a wheel or a source archive is built from into the package, for `acrlpd --version`."""

import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMMIT_FILE = "src/acrlpd/commit.txt"


class CommitHook(BuildHookInterface):
    """Adds one file to what is built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """`version` is "editable" for an installation that runs from the checkout, which asks git itself."""
        root = Path(self.root)
        # A source archive brings the file along, and a copy without .git has no commit.
        if version == "editable" or (root / COMMIT_FILE).exists() or not (root / ".git").exists():
            return
        command = ["git", "-C", self.root, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        if found.returncode == 0:
            written = Path(self.directory) / "commit.txt"
            written.parent.mkdir(parents=True, exist_ok=True)
            written.write_text(found.stdout)
            place = COMMIT_FILE if self.target_name == "sdist" else COMMIT_FILE.removeprefix("src/")
            build_data["force_include"][str(written)] = place
            self.written = written

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "written"):
            self.written.unlink()
