"""A hub on this machine, and directories to upload."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from local_hub import TOKEN, LocalHub

for _directory in ("envs", "serving", "monitoring"):
    sys.path.append(str(Path(__file__).parents[1] / _directory))

STEP = 50


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with metrics, evaluations and one checkpoint."""
    from run_factory import make_run
    from small_checkpoints import make_agent, save_run, state_config

    run = make_run(tmp_path_factory.mktemp("runs") / "small" / "first", offline_steps=30, online_steps=20)
    for path in run.iterdir():
        if path.name.isdecimal():
            shutil.rmtree(path)
    return save_run(run, state_config(), {STEP: make_agent(state_config())})


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A hub for this process, with a cache of its own."""
    from huggingface_hub import constants

    with LocalHub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("NO_PROXY", "*")
        yield hub
