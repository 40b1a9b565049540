"""The line that messages give to install an extra fits the installation."""

import json
from pathlib import Path

import pytest

from acrlpd.installation import install_command


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
