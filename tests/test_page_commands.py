"""The `acrlpd` commands of the pages, run in the order of each page where a reader would run them.

All pages share one directory. It holds what the pages speak of: a dataset and the run of `make quickstart`. Trainings are
shortened by options at their end, and paths such as /data/my_robot lie in the directory. A command that serves never
ends, so the tests of the server run it, as processes.
"""

import io
import re
import shlex
import shutil
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from page_commands import PAGES, ROOT, TESTED_APART, blocks, name, runnable

from acrlpd.cli.main import main

SHORT = (
    "--offline_steps 4 --batch_size 8 --training.save_frequency 2 --training.eval_frequency 0 --training.log_frequency 1"
    " --evaluation.num_episodes 2 --evaluation.best_of_n 2 --evaluation.baselines --env.num_envs 2"
    " --env.max_episode_steps 20 --checkpoints.max_to_keep 3"
).split()
ONLINE = "--online_steps 2 --online.start_steps 10 --data.demonstrations.num_episodes 12".split()
OFFLINE = "--online_steps 0".split()
PLAY = "--episodes 2 --num-envs 2 --num-workers 0".split()
# A step of a page becomes a step that a short run has kept.
STEP = re.compile(r"(checkpoints/\w+/\w+)/\d+$")
ENDLESS = {"serve"}

pytest.importorskip("ogbench", reason="ogbench is missing: pip install 'acrlpd[sim]'")

RUN_HERE = [page for page in PAGES if name(page) not in TESTED_APART and runnable(page)]


def as_here(words: Sequence[str]) -> list[str]:
    words = [re.sub(r"^/(?=(data|fast_disk)/)", "", STEP.sub(r"\1/2", word)) for word in words]
    return [*words, *shorter(words)]


def shorter(words: Sequence[str]) -> Sequence[str]:
    """What is added to a command, so that it takes seconds."""
    if "--help" in words or (words[0] == "train" and words[1] == "--resume"):
        return []
    if words[0] == "train":
        online = any(word.startswith("quickstart") for word in words) and "--online_steps 0" not in " ".join(words)
        return [*SHORT, *(ONLINE if online else OFFLINE)]
    if words[0] == "eval":
        return PLAY
    if words[:2] == ["demos", "collect"] or words[:2] == ["data", "ogbench"]:
        return ["--episodes", "4"]
    return []


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("pages")
    for archive, place in {
        "aloha_v30": ("my_dataset", "data/my_robot", "data/aloha"),
        "aloha_hdf5_sim_raw": ("data/aloha_hdf5",),
    }.items():
        with tarfile.open(ROOT / "tests" / "datasets" / f"{archive}.tar.gz") as tar:
            tar.extractall(directory / "archives", filter="data")
        for name in place:
            shutil.copytree(directory / "archives" / archive, directory / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.setenv("MUJOCO_GL", "disabled")
        patch.syspath_prepend(directory)  # PYTHONPATH=.
        assert main(as_here("train --config quickstart --exp_name quickstart".split())) == 0
        yield directory


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN_HERE, ids=name)
def test_the_commands_of_the_page_run(
    page: Path, sandbox: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for body in blocks(page, "python"):
        if file := re.match(r"# (\w+\.py)\n", body):
            (sandbox / file[1]).write_text(body)
    failed = []
    for line in runnable(page):
        if line.split()[0] in ENDLESS:
            continue
        words = as_here(shlex.split(line))
        monkeypatch.setattr(sys, "stdin", io.StringIO("q\n"))
        try:
            code = main(words)
        except SystemExit as end:  # --help
            code = end.code
        shown = "".join(capsys.readouterr())
        if code:
            failed.append(f"acrlpd {shlex.join(words)}\n{shown[-1500:]}")
    assert not failed, "\n\n".join(failed)
