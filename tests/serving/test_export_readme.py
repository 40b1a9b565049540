"""The README of an export says what openpi needs, and what whoever connects a robot must know."""

import ast
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from small_checkpoints import pi0_config
from toy_agent import NORM_STATS

from acrlpd.agents.improvements.distillation import Distillation
from acrlpd.config import RLTrainConfig, get_config
from acrlpd.config.run import OpenPICompatibilityConfig
from acrlpd.data.pipeline.norm_stats import save_norm_stats
from acrlpd.policies.checkpoint import Checkpoint
from acrlpd.robots.base import ServingLevel
from acrlpd.serving.export_readme import write_readme


def readme_of(config: RLTrainConfig, folder: Path) -> str:
    """What an export of this config would say."""
    save_norm_stats(folder / "assets" / "lab" / "robot", NORM_STATS)
    checkpoint = Checkpoint(folder, "export", config, ServingLevel(10, 1, 0), 7, has_critics=False)
    write_readme(folder, checkpoint, "standard")
    return (folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("preset", "data"),
    [
        ("aloha", "LeRobotAlohaDataConfig({}, use_delta_joint_actions=True, adapt_to_pi=True)"),
        ("aloha_fold", "LeRobotAlohaDataConfig({}, use_delta_joint_actions=True, adapt_to_pi=False)"),
        ("droid_pi05", "LeRobotDROIDDataConfig({})"),
        ("libero", "LeRobotLiberoDataConfig({}, extra_delta_transform=True)"),
        ("libero_pi05", "LeRobotLiberoDataConfig({}, extra_delta_transform=False)"),
    ],
)
def test_the_readme_has_the_config_that_openpi_needs(preset: str, data: str, tmp_path: Path) -> None:
    """Not one of openpi's own: with those it would act with another chunk length, and not say so."""
    config = get_config(preset)
    readme = readme_of(config, tmp_path)
    [entry] = ast.parse(readme.split("```python")[1].split("```")[0]).body
    assert isinstance(entry, ast.Expr) and isinstance(entry.value, ast.Tuple)
    [call] = entry.value.elts
    assert isinstance(call, ast.Call)
    arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    assert arguments["name"] == f"'acrlpd_{preset}'" and f"--policy.config=acrlpd_{preset} " in readme
    assert f"action_horizon={config.model.action_horizon}, " in arguments["model"]
    assert arguments["data"] == data.format("assets=AssetsConfig(asset_id='lab/robot')")
    assert "will do only if it has every setting above" in readme
    assert ("'--default_prompt=fold the box' policy:checkpoint" in readme) == (preset == "aloha_fold")
    assert "stock openpi cannot" not in readme and "never seen" not in readme


def test_the_readme_says_what_openpi_has_no_setting_for(tmp_path: Path) -> None:
    config = get_config("aloha")
    changes: dict[str, Any] = {"use_quantile_norm": True, "delta_action_mask": (6, -8)}
    data = dataclasses.replace(config.data, **changes)
    model = dataclasses.replace(
        config.model,
        paligemma_variant="small",
        action_expert_variant="small",
        image_keys=("base_0_rgb",),
        discrete_state_input=True,
    )
    improved = dataclasses.replace(config, data=data, model=model, improvement=Distillation())
    readme = readme_of(improved, tmp_path)
    assert "openpi serves the policy without the improvement `distillation`" in readme
    assert "openpi has no setting for `paligemma_variant='small'`, `action_expert_variant='small'`" in readme
    assert "reads the state in its prompt, which openpi writes there for pi0.5 only" in readme
    assert "normalises by quantiles, openpi by mean and deviation" in readme
    assert f"the mask {(True,) * 6 + (False,) * 8}" in readme
    assert "never seen `cam_left_wrist`, `cam_right_wrist`" in readme


def test_what_a_user_of_droid_must_know_stands_before_the_command(tmp_path: Path) -> None:
    config = get_config("droid")
    data = dataclasses.replace(config.data, use_delta_joint_actions=True)
    readme = readme_of(dataclasses.replace(config, data=data), tmp_path)
    before_any_command, before = (readme[: readme.index(part)] for part in ("```", "TrainConfig("))
    assert readme.count("executes the first 7 action dims as joint velocities") == 1
    assert "executes the first 7 action dims as joint velocities" in before_any_command
    assert f"needs `DeltaActions` and `AbsoluteActions` with the mask {(True,) * 7 + (False,)}" in before
    assert "rounds all weights" not in readme


def test_the_readme_says_that_openpi_rounds_a_float32_model(tmp_path: Path) -> None:
    config = get_config("aloha")
    exact = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="float32"))
    readme = readme_of(exact, tmp_path)
    before = readme[: readme.index("TrainConfig(")]
    assert "openpi rounds all weights to bfloat16" in before
    assert "`acrlpd export --dtype bfloat16` rounds them for both" in before
    assert "Read this before a robot moves" not in readme  # ALOHA's clients do what the policy has learned


def test_the_readme_says_where_the_arms_start(tmp_path: Path) -> None:
    """As openpi's ALOHA configs do: whoever serves the export with openpi needs it there too."""
    openpi = OpenPICompatibilityConfig(config_name="pi0_aloha", reset_pose=(0.0, -1.5))
    readme = readme_of(dataclasses.replace(pi0_config(), openpi_compatibility=openpi), tmp_path)
    assert "Its own `pi0_aloha` will do only" in readme
    assert "policy_metadata={'reset_pose': [0.0, -1.5]}" in readme
    assert "`assets/lab/robot/norm_stats.json`" in readme
