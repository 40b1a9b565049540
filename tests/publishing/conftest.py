"""A hub on this machine, and directories to upload."""

import contextlib
import copy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from local_hub import TOKEN, LocalHub, Repository

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


@contextlib.contextmanager
def hub_of_this_process(cache: Path) -> Iterator[LocalHub]:
    """A hub for this process: its client reads the settings when it is imported, so they are changed here."""
    from huggingface_hub import constants

    with LocalHub() as hub, pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setenv("HF_TOKEN", TOKEN)
        patch.setenv("NO_PROXY", "*")
        yield hub


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LocalHub]:
    with hub_of_this_process(tmp_path / "cache") as hub:
        yield hub


@pytest.fixture(scope="session")
def pushed(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """The repository that a push of the run makes."""
    from acrlpd.cli.push import main as push_main

    with hub_of_this_process(tmp_path_factory.mktemp("cache")) as hub:
        assert push_main([str(trained), "lab/arm"]) == 0
        return hub.repositories["models", "lab/arm"]


@pytest.fixture
def policies(hub: LocalHub, pushed: Repository) -> LocalHub:
    """A hub that has this repository."""
    hub.repositories["models", "lab/arm"] = copy.deepcopy(pushed)
    return hub
