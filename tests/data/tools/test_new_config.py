"""`acrlpd configs new`: from an unknown dataset to a config that trains, without an edit by hand."""

import io
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from acrlpd.choice import kind_name
from acrlpd.cli.main import main
from acrlpd.config import RLTrainConfig, load_config, validate_config
from acrlpd.data.pipeline.dataset import open_dataset
from acrlpd.data.pipeline.labels import labels_path, load_labels
from acrlpd.data.sources.source import Feature, open_source
from acrlpd.data.tools.layout import find_layout
from acrlpd.data.tools.lerobot_writer import LeRobotWriter
from acrlpd.data.tools.new_config import Devices, new_config
from acrlpd.runs.directory import saved_steps

# Dataset -> robot, cameras by slot, columns of the state, action dims, and whether it has to be labelled.
ALOHA_CAMERAS = {
    "base_0_rgb": "observation.images.cam_high",
    "left_wrist_0_rgb": "observation.images.cam_left_wrist",
    "right_wrist_0_rgb": "observation.images.cam_right_wrist",
}
HIGH = {"base_0_rgb": "observation.images.cam_high"}
LIBERO_CAMERAS = {"base_0_rgb": "image", "left_wrist_0_rgb": "wrist_image"}
DROID_CAMERAS = {"base_0_rgb": "exterior_image_1_left", "left_wrist_0_rgb": "wrist_image_left"}
KNOWN = {
    "aloha_v21": ("aloha", HIGH, ("observation.state",), 14, False),
    "aloha_v30": ("aloha", HIGH, ("observation.state",), 14, False),
    "aloha_hdf5_compressed": ("aloha", ALOHA_CAMERAS, ("observation.state",), 14, True),
    "aloha_hdf5_sim_raw": ("aloha", ALOHA_CAMERAS, ("observation.state",), 14, True),
    "libero_v21": ("libero", LIBERO_CAMERAS, ("state",), 7, True),
    "libero_v30": ("libero", LIBERO_CAMERAS, ("state",), 7, True),
    "droid_like": ("droid", DROID_CAMERAS, ("joint_position", "gripper_position"), 8, False),
}
SMALL_GPU, LARGE_GPU = Devices("RTX-4090", 24), Devices("H200", 140, num_devices=8)


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_dataset(root: Path, features: dict[str, Feature], task: str = "reach the ball") -> Path:
    with LeRobotWriter(root, fps=20, features=features, codec="h264") as writer:
        for _ in range(2):
            for t in range(12):
                columns = {n: np.full(f.shape, t, f.dtype) for n, f in features.items() if not f.is_camera}
                writer.add_step(columns, {n: np.zeros(f.shape, np.uint8) for n, f in features.items() if f.is_camera})
            writer.end_episode(task)
    return root


def own_arm(root: Path) -> Path:
    """A robot that nobody knows, with names of its own."""
    features = {
        "camera.side": Feature("video", (32, 32, 3)),
        "camera.front": Feature("video", (32, 32, 3)),
        "camera.wrist": Feature("video", (32, 32, 3)),
        "arm.joints": Feature("float32", (6,)),
        "arm.gripper": Feature("float32", (1,)),
        "arm.command": Feature("float32", (7,)),
        "env.reward": Feature("float32", ()),
    }
    return write_dataset(root / "own_arm", features)


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("devices", [None, SMALL_GPU, LARGE_GPU], ids=["cpu", "small", "large"])
def test_the_config_of_each_dataset_is_valid(datasets: Path, name: str, devices: Devices | None) -> None:
    robot, cameras, state, action_dim, needs_labels = KNOWN[name]
    made = new_config(open_source(datasets / name), str(datasets / name), devices)
    Path("new.yaml").write_text(made.text)
    config = load_config("new.yaml")
    assert config == made.config
    found = validate_config(config, num_devices=devices.num_devices if devices else 1)
    assert found.errors == ()
    assert kind_name(config.data.robot) == robot
    assert (config.data.repack.cameras, config.model.image_keys) == (cameras, tuple(cameras))
    assert (config.data.repack.state, config.qchunking.action_dim) == (state, action_dim)
    assert config.data.norm_stats_path == Path("assets") / name / "norm_stats.json"
    assert (made.label_command is not None) == needs_labels
    has_tasks = not name.startswith("aloha_hdf5")
    assert config.data.default_prompt == (None if has_tasks else name.replace("_", " "))
    assert config.training.online_steps == 0 and config.env.id is None
    assert (config.weight_loader.kind == "none") == (devices is None)
    training = config.training
    assert training.eval_frequency == training.save_frequency <= max(50, training.offline_steps / 20)
    assert (config.checkpoints.keep_period or 0) % training.save_frequency == 0
    assert not any("ema_decay" in warning for warning in found.warnings)


def test_the_policy_is_what_the_accelerator_holds(datasets: Path) -> None:
    def policy(memory_gib: float) -> tuple[RLTrainConfig, str]:
        made = new_config(open_source(datasets / "libero_v30"), str(datasets / "libero_v30"), Devices("x", memory_gib))
        return made.config, made.note

    full, adapters, frozen, tiny = (policy(gib) for gib in (140, 45, 24, 4))
    assert not full[0].freeze_pi0_backbone and "all of which learns" in full[1]
    assert adapters[0].model.paligemma_variant == "gemma_2b_lora" and "LoRA" in adapters[1]  # type: ignore[attr-defined]
    assert frozen[0].freeze_pi0_backbone and "of which the action expert learns" in frozen[1]
    assert tiny[0].weight_loader.kind == "none" and "No pi0 fits x (4 GiB)" in tiny[1]


@pytest.mark.parametrize("action", ["action", "arm.Actions"])
def test_the_action_is_the_column_of_that_name(tmp_path: Path, action: str) -> None:
    names = ("observation.state", "policy_action", "action_of_operator", action, "target")
    root = write_dataset(tmp_path / "data", {name: Feature("float32", (3,)) for name in names})
    columns = find_layout(open_source(root)).columns
    assert (columns.state, columns.actions) == (("observation.state",), (action,))


def test_an_unknown_robot_is_described_by_its_names(tmp_path: Path) -> None:
    made = new_config(open_source(own_arm(tmp_path)), str(tmp_path / "own_arm"), SMALL_GPU)
    data = made.config.data
    assert kind_name(data.robot) == "generic"
    slots = {"base_0_rgb": "camera.front", "left_wrist_0_rgb": "camera.wrist", "right_wrist_0_rgb": "camera.side"}
    assert data.repack.cameras == slots
    assert (data.repack.state, data.repack.actions) == (("arm.joints", "arm.gripper"), ("arm.command",))
    assert (data.rewards.reward_column, made.label_command) == ("env.reward", None)
    assert made.config.model.action_horizon == 10  # half a second
    assert validate_config(made.config).errors == ()


def test_a_dataset_without_cameras_gets_a_policy_without_cameras(tmp_path: Path) -> None:
    features = {"observation.state": Feature("float32", (40,)), "action": Feature("float32", (5,))}
    root = write_dataset(tmp_path / "states", features)
    made = new_config(open_source(root), str(root), SMALL_GPU)
    assert "The dataset has no cameras" in made.note
    assert (made.config.model.image_keys, made.config.model.action_dim) == ((), 40)
    assert made.label_command == f"acrlpd data label {root} --success 0-1"
    assert main(["data", "label", str(root), *made.label_example.split()]) == 0
    labels = load_labels(labels_path(root), open_source(root))
    assert labels is not None and [labels.episodes[i].success for i in (0, 1)] == [True, False]
    assert validate_config(made.config).errors == ()


def test_texts_of_the_dataset_stay_in_comments(tmp_path: Path) -> None:
    features = {"observation.state": Feature("float32", (3,)), "action": Feature("float32", (3,))}
    root = write_dataset(tmp_path / "nasty", features, task="pick\nname: evil\x1b[2J")
    made = new_config(open_source(root), str(root), None)
    assert made.config.name == "nasty"
    assert "\x1b" not in made.text


def test_the_file_is_kept_unless_told_otherwise(datasets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["configs", "new", str(datasets / "droid_like"), "--output", "mine.yaml", "--accelerator", "cpu"]
    Path("mine.yaml").write_text("my work")
    assert main(command) == 2
    assert "mine.yaml exists: replace it with --overwrite" in capsys.readouterr().err
    assert Path("mine.yaml").read_text() == "my work"
    assert main([*command, "--overwrite"]) == 0
    config = load_config("mine.yaml")
    assert (config.name, config.data.norm_stats_path) == ("mine", Path("assets/droid_like/norm_stats.json"))


def test_episodes_that_are_left_out_are_named(
    copy_dataset, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """When the config is written, and when the data of a run is opened."""
    root = copy_dataset("droid_like")
    damaged = min(root.rglob("trajectory.h5"))
    damaged.write_bytes(damaged.read_bytes()[:1000])
    expected = (
        f"1 of 3 episodes are broken and left out (`acrlpd data validate` lists them), the first because: {damaged}"
    )
    assert main(["configs", "new", str(root), "--accelerator", "cpu"]) == 0
    assert f"warning: {expected}" in capsys.readouterr().err
    assert main(["data", "stats", "--config", "droid_like.yaml"]) == 0
    with caplog.at_level("WARNING", "acrlpd"), open_dataset(load_config("droid_like.yaml")) as dataset:
        assert len(dataset.source) == 2
    assert expected in caplog.text


def test_what_released_weights_need_is_fetched_if_it_is_missing(
    datasets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def next_commands() -> list[str]:
        command = ["configs", "new", str(datasets / "droid_like"), "--accelerator", "RTX-4090", "--overwrite"]
        assert main(command) == 0
        return capsys.readouterr().out.split("Next:\n")[1].splitlines()

    *_, tokenizer, weights, train = next_commands()
    path = tmp_path / "cache" / "acrlpd" / "paligemma_tokenizer.model"
    assert tokenizer.startswith(f"  mkdir -p {path.parent} && curl -fLo {path} https://")
    assert weights.startswith("  mkdir -p openpi && gsutil -m cp -r gs://openpi-assets/checkpoints/pi0_droid openpi ")
    assert train == "  acrlpd train --config droid_like.yaml --exp_name first --weight_loader.path openpi/pi0_droid"

    path.parent.mkdir(parents=True)
    path.touch()
    Path("openpi/pi0_droid").mkdir(parents=True)
    assert [line.split()[:2] for line in next_commands()] == [["acrlpd", name] for name in ("data", "plan", "train")]


@pytest.mark.parametrize("name", ["aloha_v21", "aloha_v30", "aloha_hdf5_sim_raw"])
def test_the_printed_commands_lead_to_the_first_updates(
    name: str, copy_dataset, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LeRobot v2.1, v3.0 and HDF5. With one camera and one length of prompts, all of them compile one small program."""
    root = copy_dataset(name)
    assert main(["configs", "new", str(root), "--accelerator", "cpu"]) == 0
    commands = re.findall(r"^  acrlpd (.*?)(?:    #.*)?$", capsys.readouterr().out, re.MULTILINE)
    assert [command.split()[0] for command in commands][-2:] == ["data", "train"] and len(commands) <= 3
    monkeypatch.setattr("sys.stdin", io.StringIO("y\nn\n"))  # the answers to --interactive
    for command in commands[:-1]:
        assert main(shlex.split(command)) == 0
    same = "--model.image_keys base_0_rgb --model.max_token_len 32 --max_steps 2 --data.validation_share 0"
    small = "--model.paligemma_variant tiny --model.action_expert_variant tiny --critic.hidden_dims 32"
    assert main(shlex.split(f"{commands[-1]} {same} {small}")) == 0
    assert saved_steps(Path("checkpoints") / name / "first") == [2]
