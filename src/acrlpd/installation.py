"""What this installation of acrlpd is: its version and commit, and how it gets an optional part."""

import importlib.metadata
import json
import pathlib
import re
import subprocess
import sys

UNKNOWN = "unknown"

# Package -> the extra of acrlpd that installs it.
OPTIONAL_PACKAGES = {
    "mujoco": "sim",
    "gymnasium": "sim",
    "ogbench": "sim",
    "gym-aloha": "sim",
    "huggingface-hub": "hub",
    "gcsfs": "gcs",
    "wandb": "wandb",
    "safetensors": "pytorch",
    "tokenizers": "fast",
    "tensorboardX": "tensorboard",
    "trackio": "trackio",
    "msgpack": "serve",
    "prometheus-client": "serve",
    "websockets": "serve",
    "optuna": "tune",
}


def describe_version() -> str:
    """The version and the commit, for example "0.1.0 (commit 3a4512e0c1f2)"."""
    return f"{importlib.metadata.version('acrlpd')} (commit {_commit()})"


def _commit() -> str:
    """The commit that a wheel was built from, or that of the checkout; `-dirty` says that files were changed since."""
    package = pathlib.Path(__file__).parent
    if (package / "commit.txt").is_file():  # hatch_build.py writes it into a wheel
        return (package / "commit.txt").read_text().strip()
    root = package.parents[1]
    if not (root / ".git").exists():
        return UNKNOWN
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git here, or files of another user
        return UNKNOWN


def install_command(extra: str) -> str:
    """The line that installs an extra: in a checkout from the checkout, otherwise from where the package came from."""
    package = f"-e '.[{extra}]'" if _is_checkout() else f"'acrlpd[{extra}]'"
    return f"pip install {package}"


def install_command_of(module: str) -> str | None:
    """The line that installs the package of a module; None if the package belongs to no extra."""
    package = module.partition(".")[0].replace("_", "-")
    return install_command(OPTIONAL_PACKAGES[package]) if package in OPTIONAL_PACKAGES else None


def packages_left_out(extra: str) -> list[str]:
    """What an extra leaves out because this Python is too new, for example ["ogbench==1.2.2"]."""
    try:
        lines = importlib.metadata.requires("acrlpd") or []
    except importlib.metadata.PackageNotFoundError:  # runs from a checkout
        return []
    found = []
    for package, _, marker in (line.partition(";") for line in lines):
        bound = re.search(r"python_version < '3\.(\d+)'", marker)
        if bound and sys.version_info >= (3, int(bound[1])) and f"extra == '{extra}'" in marker:
            found.append(package.strip())
    return found


def _is_checkout() -> bool:
    """Whether the package is installed in editable form. A package that is not installed runs from a checkout, too."""
    try:
        installed = importlib.metadata.distribution("acrlpd")
    except importlib.metadata.PackageNotFoundError:
        return True
    # pip keeps here where an installation came from; there is no such file for a package from an index.
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    return bool(origin.get("dir_info", {}).get("editable", False))
