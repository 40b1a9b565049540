"""examples/my_env as a reader would try it: the commands of its README, with fewer episodes and updates."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from acrlpd.cli.main import main
from acrlpd.config import apply_config_overrides, load_config
from acrlpd.data.sources.source import open_source
from acrlpd.envs import make_env
from acrlpd.experts.expert import demonstrate, find_expert
from acrlpd.training.demonstrations import collect_missing_demonstrations

EXAMPLE = Path(__file__).parents[1] / "examples" / "my_env"
# What is added to each command.
FEWER = {
    "demos": "--episodes 6",
    "train": "--offline_steps 2 --evaluation.num_episodes 3 --evaluation.baselines --env.num_envs 3 --batch_size 8",
    "eval": "--episodes 3 --num-envs 3 --json",
}

pytest.importorskip("gymnasium", reason="gymnasium is missing: pip install 'acrlpd[sim]'")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a copy of the example, in which the commands are run."""
    shutil.copytree(EXAMPLE, tmp_path / "examples" / "my_env", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "examples" / "my_env")  # the processes that play get the path, too
    return tmp_path


@pytest.mark.slow
def test_the_commands_lead_from_nothing_to_an_evaluated_policy(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [block] = re.findall(r"```bash\n(.*?)```", (EXAMPLE / "README.md").read_text(), re.DOTALL)
    path, *commands = [line.split() for line in block.splitlines()]
    assert path == ["export", "PYTHONPATH=examples/my_env"]
    assert [words[:2] for words in commands] == [["acrlpd", "demos"], ["acrlpd", "train"], ["acrlpd", "eval"]]
    for _, command, *words in commands:
        capsys.readouterr()
        assert main([command, *words, *FEWER[command].split()]) == 0
    [result] = json.loads(capsys.readouterr().out).values()
    assert (result["env"], result["episodes"], result["lost_episodes"]) == ("my_env:reach", 3, 0)
    info = json.loads((here / "data" / "my_env" / "meta" / "info.json").read_text())
    assert info["total_episodes"] == 6 and "observation.images.top" in info["features"]


def test_training_can_collect_the_demonstrations_itself(here: Path) -> None:
    """Whoever leaves out the first command gets the same demonstrations from the second one."""
    config = load_config(here / "examples" / "my_env" / "my_env.yaml")
    few = {"data.demonstrations.num_episodes": 2, "data.data_dir": str(here / "collected")}
    collect_missing_demonstrations(apply_config_overrides(config, few))
    source = open_source(here / "collected")
    assert (len(source), source.features["observation.images.top"].shape) == (2, (28, 28, 3))
    assert Path("assets/my_env/norm_stats.json").is_file()


def test_the_expert_goes_where_only_the_image_tells(here: Path) -> None:
    env, expert = make_env("my_env:reach", image_size=(28, 28)), find_expert("my_env:reach", ["expert", "mixed"])
    right = [demonstrate(env, expert, seed, "expert") for seed in range(20)]
    mixed = [demonstrate(env, expert, seed, "mixed") for seed in range(20)]
    assert all(episode.succeeded for episode in right)
    assert 10 <= sum(episode.succeeded for episode in mixed) < 20
    for episode in right:
        image, places = (episode.observations[name] for name in ("observation.images.top", "observation.state"))
        [_, red] = np.argwhere((image[0] == [255, 0, 0]).all(axis=-1)).mean(axis=0)  # row and column of 28
        assert places.shape[1] == 2 and abs(places[-1, 0] - (red / 27 * 2 - 1)) < 0.5
