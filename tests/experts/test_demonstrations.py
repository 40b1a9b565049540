"""Collections of demonstrations have the wanted mix, and the same seed gives the same dataset, also after a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from sim_marks import needs_aloha, needs_egl, needs_ogbench
from toy_env import Toy, ToyEnv
from toy_expert import ToyExpert

from acrlpd.cli.demos import COMMANDS
from acrlpd.config import apply_config_overrides, get_config
from acrlpd.data.pipeline.config_norm_stats import write_norm_stats
from acrlpd.data.pipeline.dataset import open_dataset
from acrlpd.data.sources.source import EpisodeSource, open_source
from acrlpd.envs import Env, EnvError, make_env, register_env
from acrlpd.envs.env import Columns
from acrlpd.experts import expert
from acrlpd.experts.demonstrations import DemonstrationSettings, collect_demonstrations
from acrlpd.experts.expert import Expert, demonstrate, register_expert
from acrlpd.files import only_one


def collect(output: Path, **settings: object) -> EpisodeSource:
    fields = {"env": "toy", "num_episodes": 12, "mix": {"mixed": 1.0}} | settings
    collect_demonstrations(
        DemonstrationSettings(**fields),  # type: ignore[arg-type]
        output,
        num_workers=0,
        show_progress=False,
    )
    return open_source(output)


def all_columns(source: EpisodeSource) -> dict[str, np.ndarray]:
    return source.read_columns().columns


def test_a_dataset_with_rewards_success_prompt_and_frames(tmp_path: Path) -> None:
    source = collect(tmp_path / "demos")
    assert source.format == "LeRobot v3.0" and len(source) == 12 and source.fps == 10
    env = make_env("toy")
    settings = DemonstrationSettings("toy", 12, {"mixed": 1.0})
    outcomes = []
    for i, episode in enumerate(source):
        expected = demonstrate(env, ToyExpert, settings.seed_of(i), "mixed")
        assert (episode.prompt, episode.length) == ("go right", expected.length)
        for name, values in expected.columns().items():
            if name in source.cameras:
                frames = episode.frames(name, np.arange(episode.length))
                assert np.abs(frames.astype(int) - values).mean() < 6
            else:
                np.testing.assert_array_equal(episode.columns[name], values)
        outcomes.append(expected.succeeded)
    assert set(outcomes) == {True, False}
    assert not (tmp_path / "demos.partial").exists()


def test_the_seed_decides_about_the_dataset(tmp_path: Path) -> None:
    first = all_columns(collect(tmp_path / "a", num_episodes=3))
    again = all_columns(collect(tmp_path / "b", num_episodes=3))
    other = all_columns(collect(tmp_path / "c", num_episodes=3, seed=1))
    for name, values in first.items():
        np.testing.assert_array_equal(values, again[name])
    assert first["action"].shape != other["action"].shape or (first["action"] != other["action"]).any()


def test_the_share_of_successes_is_met_exactly(tmp_path: Path) -> None:
    source = collect(tmp_path / "demos", num_episodes=10, success_share=0.3)
    successes = [bool(episode.columns["next.success"].any()) for episode in source]
    assert sum(successes) == 3 and len(successes) == 10
    with pytest.raises(EnvError, match=r"success_share of 0\.0 is out of reach with the mix"):
        collect(tmp_path / "never", num_episodes=2, success_share=0.0, mix={"good": 1.0})
    assert [path.name for path in tmp_path.iterdir()] == ["demos"]  # no episode was kept, and nothing is left over


def test_the_mix_is_met_exactly() -> None:
    settings = DemonstrationSettings("toy", 10, {"good": 1.0, "mixed": 3.0})
    qualities = [settings.quality_of(i) for i in range(20)]
    assert qualities.count("good") == 5
    assert all(qualities[i : i + 4].count("good") == 1 for i in range(0, 20, 4))


def test_a_collection_that_was_killed_continues_to_the_same_dataset(tmp_path: Path) -> None:
    """A process is killed with SIGKILL in the middle of an episode."""
    script = tmp_path / "collect.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import conftest\nfrom pathlib import Path\nfrom test_demonstrations import collect\n"
        f"collect(Path({str(tmp_path / 'killed')!r}))\n"
    )
    partial = tmp_path / "killed.partial"
    # The experts stand still after three episodes, so the process is still at work when the test kills it.
    environment = os.environ | {"TOY_STOPS_AFTER_3_EPISODES": str(partial)}
    process = subprocess.Popen([sys.executable, str(script)], env=environment)
    while len(list(partial.glob("episode-*.npz"))) < 3:
        assert process.poll() is None, "the collection ended before it could be killed"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = sorted(partial.glob("episode-*.npz"))
    assert 3 <= len(kept) < 12 and not (tmp_path / "killed").exists()
    with pytest.raises(EnvError, match="unfinished collection with other settings: seed was 0 and is 5"):
        collect(tmp_path / "killed", seed=5)
    written = {path.name: path.stat().st_mtime_ns for path in kept}

    from acrlpd.experts import demonstrations

    played = []
    original = demonstrations.demonstrate
    try:
        demonstrations.demonstrate = lambda env, expert, seed, quality: (
            played.append(seed) or original(env, expert, seed, quality)
        )
        resumed = all_columns(collect(tmp_path / "killed"))
    finally:
        demonstrations.demonstrate = original
    assert len(played) < 12 + 4  # the episodes on disk were not played again
    assert not set(played) & {DemonstrationSettings("toy", 12).seed_of(i) for i in range(len(written))}
    whole = all_columns(collect(tmp_path / "whole"))
    for name, values in whole.items():
        np.testing.assert_array_equal(resumed[name], values)


def test_one_process_collects_at_a_time(tmp_path: Path) -> None:
    partial = tmp_path / "demos.partial"
    partial.mkdir()
    with only_one(partial, "collecting", EnvError):
        with pytest.raises(EnvError, match=r"demos\.partial: another process is collecting these demonstrations; wait"):
            collect(tmp_path / "demos", num_episodes=2)
        assert [path.name for path in partial.iterdir()] == [".lock"]
    assert len(collect(tmp_path / "demos", num_episodes=2)) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["demos"]


class OddToyEnv(ToyEnv):
    """The height of its frames is odd, which a video cannot have."""

    def observation_columns(self, raw: np.ndarray) -> Columns:
        columns = super().observation_columns(raw)
        return columns | {"observation.images.side": columns["observation.images.side"][1:]}


def make_odd_toy(name: str, **options: object) -> Env:
    return OddToyEnv(Toy("toy"), name=name, prompt="go right", fps=10)


register_env("odd-toy", make_odd_toy)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_episodes": 0}, "num_episodes must be at least 1"),
        ({"mix": {}}, "mix must give qualities"),
        ({"mix": {"perfect": 1.0}}, "has the qualities good, mixed; found 'perfect'"),
        ({"success_share": 2.0}, r"success_share must lie in \[0, 1\]"),
        ({"mix": {"good": float("nan")}}, "mix must give qualities"),
        ({"seed": -1}, "seed must be at least 0; found -1"),
        ({"max_episode_steps": 0}, "max_episode_steps must be at least 1; found 0"),
        ({"image_size": (0, 24)}, r"image_size must be .* found \[0, 24\]"),
        ({"env": "odd-toy"}, "15x24 frames; video needs even sizes"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, settings: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        collect(tmp_path / "demos", **settings)
    assert not list(tmp_path.iterdir())  # nothing was played, and no directory is left over


def test_an_episode_that_fails_twice_is_replaced_by_the_next(tmp_path: Path) -> None:
    settings = DemonstrationSettings("toy", 2)
    source = collect(tmp_path / "demos", env=f"toy-raise-{settings.seed_of(0)}", num_episodes=2)
    starts = [float(episode.columns["observation.state"][0, 0]) for episode in source]
    expected = [np.random.default_rng(settings.seed_of(i)).uniform(0.0, 0.2) for i in (1, 2)]
    np.testing.assert_allclose(starts, expected, rtol=1e-6)


def test_the_expert_of_a_users_own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module of the environment registers both, and the processes of the pool import what they need."""
    (tmp_path / "my_bench.py").write_text(
        "import numpy as np\nimport toy_env\nfrom acrlpd.envs import register_env\n"
        "from acrlpd.experts import Expert, register_expert\n\n\n"
        "def make_bench(name, **options):\n    return toy_env.make_toy('toy', **options)\n\n\n"
        "class BenchExpert(Expert):\n    qualities = {'expert': 'goes right'}\n\n"
        "    def __init__(self, env, quality, rng):\n        pass\n\n"
        "    def act(self):\n        return np.array([1.0, 0.0], np.float32)\n\n\n"
        "register_env('bench', make_bench)\nregister_expert('bench', BenchExpert)\n"
        "register_env('lost', make_bench)\nregister_expert('lost', 'my_bench:make_bench')\n"
        "register_env('alone', make_bench)\n"
        "class Unqualified(BenchExpert):\n    qualities = None\n\n\n"
        "register_env('bare', make_bench)\nregister_expert('bare', 'my_bench:Unqualified')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(expert, "_EXPERTS", dict(expert._EXPERTS))  # what this test registers is forgotten again
    settings = DemonstrationSettings("my_bench:bench", 2)
    collection = collect_demonstrations(settings, tmp_path / "demos", num_workers=1, show_progress=False)
    assert (collection.episodes, collection.successes) == (2, 2)
    with pytest.raises(EnvError, match=r"of 'my_bench:lost' must be a class .*\.Expert; found 'my_bench:make_bench'"):
        collect(tmp_path / "others", env="my_bench:lost")
    with pytest.raises(EnvError, match=r"'my_bench:bare', my_bench:Unqualified, must have .*`qualities`.*found None"):
        collect(tmp_path / "others", env="my_bench:bare")
    missing = (
        r"'my_bench:alone' has no scripted expert.*register_env\(.*register_expert\(.*LeRobotWriter.*my_bench:bench"
    )
    with pytest.raises(EnvError, match=missing):
        collect(tmp_path / "others", env="my_bench:alone")
    with pytest.raises(EnvError, match=r"'my_bench:bensh' is not registered, .*did you mean 'my_bench:bench'"):
        collect(tmp_path / "others", env="my_bench:bensh")


class WithoutQualities(Expert):
    def __init__(self, env: Env, quality: str, rng: np.random.Generator) -> None: ...

    def act(self) -> np.ndarray:
        return np.zeros(2, np.float32)


def test_an_expert_without_qualities_is_not_registered() -> None:
    with pytest.raises(EnvError, match=r"the expert of 'bare', .*:WithoutQualities, must have .*`qualities`"):
        register_expert("bare", WithoutQualities)
    assert "bare" not in expert._EXPERTS


def test_an_existing_dataset_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "demos").mkdir()
    (tmp_path / "demos" / "precious.txt").touch()
    with pytest.raises(EnvError, match="exists already"):
        collect(tmp_path / "demos")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    COMMANDS["collect"](env="toy", output=tmp_path / "demos", episodes=4, mix={"good": 1.0}, num_workers=0, json_=True)
    facts = json.loads(capsys.readouterr().out)
    assert (facts["episodes"], facts["successes"], facts["failures"]) == (4, 4, [])
    COMMANDS["list"]()
    assert "AlohaTransferCube" in capsys.readouterr().out


@needs_ogbench
def test_ogbench_demonstrations_train_the_quick_start(tmp_path: Path) -> None:
    """The config of the quick start can read the dataset of the scripted expert."""
    name = "cube-single-play-singletask-v0"
    settings = DemonstrationSettings(name, 4, {"expert": 1.0, "mixed": 1.0}, max_episode_steps=80)
    collection = collect_demonstrations(settings, tmp_path / "cube", num_workers=1, show_progress=False)
    assert collection.successes >= 2 and collection.failures == ()
    config = apply_config_overrides(
        get_config("quickstart"),
        {"data.data_dir": str(tmp_path / "cube"), "data.assets_dir": str(tmp_path / "assets")},
    )
    write_norm_stats(config)
    dataset = open_dataset(config)
    assert dataset.rewards.success.sum() == collection.successes
    assert set(np.unique(dataset.rewards.rewards)) == {-1.0, 0.0}
    assert dataset.norm_stats is not None and dataset.norm_stats["state"].dim == 20
    assert dataset.prompts.tolist() == ["cube"]


@needs_aloha
@needs_egl
def test_aloha_demonstrations_have_three_cameras(tmp_path: Path) -> None:
    name = "gym_aloha/AlohaTransferCube-v0"
    settings = DemonstrationSettings(name, 1, image_size=(32, 32), max_episode_steps=25)
    collect_demonstrations(settings, tmp_path / "aloha", num_workers=0, show_progress=False)
    source = open_source(tmp_path / "aloha")
    config = get_config("aloha_sim")
    assert set(source.cameras) == set(config.data.repack.cameras.values())
    episode = source.episode(0)
    assert episode.frame("observation.images.top", 24).shape == (32, 32, 3)
    assert episode.columns["action"].shape == (25, 14) and not episode.columns["next.success"].any()
    top, wrist = (episode.frame(camera, 24).astype(int) for camera in source.cameras[:2])
    assert np.abs(top - wrist).mean() > 5  # the cameras show different images
