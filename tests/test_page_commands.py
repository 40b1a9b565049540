"""The `acrlpd` commands of the pages, run as a reader would: in the order of the page, after the quick start.

Each page has a directory of its own, where the quick start was followed and a dataset lies under the names that pages
use. Trainings are shortened by options at their end, and paths such as /data/my_robot are relative. Commands that serve
never end, so they are left to the tests of the server, which run them as processes.
"""

import io
import re
import shlex
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from acrlpd.cli.main import main
from page_commands import PAGES, ROOT, TESTED_APART, blocks, name, runnable

pytest.importorskip("ogbench", reason="ogbench is missing: pip install 'acrlpd[sim]'")

# What is added to each command, so that it takes seconds.
SHORT = (
    "--offline_steps 4 --batch_size 8 --training.save_frequency 2 --training.eval_frequency 0 --env.num_envs 2 "
    "--env.max_episode_steps 20 --evaluation.num_episodes 2 --evaluation.baselines --online_steps"
)
ONLINE = "2 --online.start_steps 10 --data.demonstrations.num_episodes 12"
# `configs new` writes a tiny policy from scratch for a CPU: with small images and without released weights.
FEWER = {
    "configs new": "--accelerator cpu",
    "data cache": "--height 28 --width 28",
    "eval": "--episodes 2 --num-envs 2 --num-workers 0",
    "demos collect": "--episodes 4",
    "data ogbench": "--episodes 4",
}
# The last step of the quick start, and that of its short form.
LAST_STEPS = ("/7600", "/6")
ENDLESS = {"serve"}

QUICKSTART = ROOT / "docs" / "quickstart.md"
RUN = [page for page in PAGES if page != QUICKSTART and name(page) not in TESTED_APART and runnable(page)]
DATASETS = {"my_dataset": "aloha_v30", "data/my_robot": "aloha_v30", "data/aloha": "aloha_v30"} | {
    "data/aloha_hdf5": "aloha_hdf5_sim_raw"
}


def shortened(words: Sequence[str]) -> list[str]:
    words = [word.removeprefix("/").replace(*LAST_STEPS) for word in words]
    if "--help" in words or "corridor" in " ".join(words):  # corridor takes seconds as it is
        return words
    if words[0] == "train":
        more = f"{SHORT} {ONLINE if {'quickstart', 'quickstart_mixed'} & {*words} else '0'}"
        return [*words, *more.split(), *(["--weight_loader.kind", "none"] if "my_dataset.yaml" in words else [])]
    return [*words, *next((more for start, more in FEWER.items() if shlex.join(words).startswith(start)), "").split()]


def run_commands(page: Path, patch: pytest.MonkeyPatch, lines: Sequence[str]) -> list[str]:
    """The commands that failed."""
    for body in blocks(page, "python"):
        if file := re.match(r"# (\w+\.py)\n", body):
            Path(file[1]).write_text(body)
    failed = []
    for line in lines:
        words = shortened(shlex.split(line))
        if words[0] in ENDLESS:
            continue
        patch.setattr("sys.stdin", io.StringIO("q\n"))  # to `--interactive`
        try:
            code = main(words)
        except SystemExit as end:  # --help
            code = int(end.code or 0)
        if code:
            failed.append(shlex.join(words))
    return failed


@pytest.fixture(scope="module")
def after_quickstart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("quickstart")
    for place, archive in DATASETS.items():
        with tarfile.open(ROOT / "tests" / "datasets" / f"{archive}.tar.gz") as tar:
            tar.extractall(directory / "archives", filter="data")
        shutil.copytree(directory / "archives" / archive, directory / place)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MUJOCO_GL", "disabled")
        patch.chdir(directory)
        first = "train --config quickstart --exp_name quickstart"  # make quickstart
        assert run_commands(QUICKSTART, patch, [first, *runnable(QUICKSTART)]) == []
        yield directory


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=name)
def test_the_commands_of_the_page_run(
    page: Path, after_quickstart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = shutil.copytree(after_quickstart, tmp_path / "here")
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(here)  # PYTHONPATH=.
    assert run_commands(page, monkeypatch, runnable(page)) == []
