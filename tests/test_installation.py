"""The line that messages give to install an extra fits the installation."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from acrlpd.installation import OPTIONAL_PACKAGES, install_command, install_command_of, packages_left_out

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ({"url": "file:///home/me/acrlpd", "dir_info": {"editable": True}}, "pip install -e '.[sim]'"),
        ({"url": "file:///home/me/acrlpd-1.0-py3-none-any.whl", "archive_info": {}}, "pip install 'acrlpd[sim]'"),
        (None, "pip install 'acrlpd[sim]'"),  # from an index
    ],
)
def test_the_line_fits(origin: dict | None, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = tmp_path / "acrlpd-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acrlpd\nVersion: 1.0\n")
    if origin is not None:
        (metadata / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(tmp_path)
    assert install_command("sim") == command


def test_every_optional_package_is_in_its_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package, extra in OPTIONAL_PACKAGES.items():
        assert any(requirement.startswith(package) for requirement in extras[extra]), package
    assert install_command_of("prometheus_client.metrics") == install_command("serve")
    assert install_command_of("numpy") is None


def test_what_an_extra_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = tmp_path / "acrlpd-1.0.dist-info"
    metadata.mkdir()
    requirements = (
        "jax>=0.10",
        "old==1.0; (python_version < '3.11') and extra == 'sim'",
        "older==1.0; (python_version < '3.11') and extra == 'serve'",
        "new==2.0; (python_version < '3.99') and extra == 'sim'",
    )
    lines = ["Metadata-Version: 2.1", "Name: acrlpd", "Version: 1.0", *(f"Requires-Dist: {x}" for x in requirements)]
    (metadata / "METADATA").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    assert packages_left_out("sim") == ["old==1.0"]


def test_a_command_without_its_extra_is_refused_in_one_line() -> None:
    code = (
        "import sys; sys.modules['websockets'] = None; from acrlpd.cli.main import main; sys.exit(main(['serve', 'x']))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 2
    [line] = found.stderr.splitlines()
    assert line.startswith("acrlpd: ") and line.endswith(f": {install_command('serve')}")
