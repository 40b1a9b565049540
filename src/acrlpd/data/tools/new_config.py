"""A config file for a dataset that nobody has described yet.

What the dataset shows is set; where it leaves a choice, a comment names the alternatives.
The file starts from the preset of the robot, or from the defaults of a config. It has a policy that the plan fits into
the accelerator, or a tiny one where there is no accelerator.
"""

import dataclasses
import functools
import pathlib
import shlex
from collections.abc import Sequence

from acrlpd.config import RewardConfig, RLTrainConfig, apply_config_overrides, get_config, to_dict
from acrlpd.config.plan.plan import make_plan
from acrlpd.config.registry import list_configs
from acrlpd.config.run import WeightLoaderConfig
from acrlpd.config.yaml_files import Setting, parse_config, settings_to_yaml
from acrlpd.data.pipeline.labels import Outcomes
from acrlpd.data.pipeline.rewards import read_rewards
from acrlpd.data.sources.source import ColumnTable, DatasetError, EpisodeSource
from acrlpd.data.tools.label import format_indices
from acrlpd.data.tools.layout import Layout, find_layout
from acrlpd.models.families.pi0 import Pi0Config
from acrlpd.robots.base import SLOTS
from acrlpd.units import format_bytes

Settings = dict[str, Setting]

_BASE_WEIGHTS = WeightLoaderConfig("checkpoint", "gs://openpi-assets/checkpoints/pi0_base/params")
_OTHER_FIELDS = (
    "All other fields are as in the preset or by default; `acrlpd configs show FILE` lists them, docs/configuration.md "
    "describes them. Comments name the alternatives where the dataset leaves a choice."
)
_ABOUT_GENERIC = (
    "No robot that acrlpd knows: state and actions go to the policy as they are. Relative actions need "
    "use_delta_joint_actions and delta_action_mask; units of its own need a class (docs/data_batches.md)."
)
_ABOUT_EVALUATION = (
    "Updates between two verdicts on the held-out episodes. The best one keeps its checkpoint, so checkpoints come as "
    "often."
)
# How a robot without a preset is fine-tuned, where the defaults of a config are meant for smaller policies.
_RECIPE: Settings = {
    "acrlpd.num_action_samples": Setting(8, "Candidates per observation. More: better choices, slower updates."),
    "training.eval_frequency": Setting(1_500, _ABOUT_EVALUATION),
    "training.save_frequency": Setting(1_500),
    "checkpoints.keep_period": Setting(None, "Only the newest checkpoint is kept; one has tens of GB."),
}
# A tiny policy from scratch: some minutes on a CPU.
_TINY_RECIPE: Settings = {
    "actor_lr_schedule.type": Setting("constant"),
    "actor_lr_schedule.peak_lr": Setting(1e-3),
    "acrlpd.ema_decay": Setting(
        None,
        "No moving average: after 200 updates, one with the usual decay 0.999 would still be 82 % the initial policy.",
    ),
    "training.offline_steps": Setting(200),
    "training.eval_frequency": Setting(50, _ABOUT_EVALUATION),
    "training.log_frequency": Setting(20),
    "training.save_frequency": Setting(50),
}


@dataclasses.dataclass(frozen=True)
class Devices:
    """The accelerators that the policy should fit."""

    name: str
    memory_gib: float
    num_devices: int = 1


@dataclasses.dataclass(frozen=True)
class NewConfig:
    """The file, and what it takes to train with it."""

    config: RLTrainConfig
    text: str
    note: str  # which policy was chosen, and why
    label_command: str | None  # None: the dataset says how its episodes ended
    label_example: str  # options of `acrlpd data label` that say by number how all episodes ended, for example


def new_config(
    source: EpisodeSource, dataset: str, devices: Devices | None, config_name: str | None = None
) -> NewConfig:
    """Describes a dataset, which the user calls `dataset`, for a policy that fits the devices (None: a CPU).

    The config is called `config_name`, so that two configs of a dataset keep their runs apart; None: like the dataset.
    """
    source.require_episodes()
    layout, table = find_layout(source), source.read_columns()
    is_local = pathlib.Path(dataset).expanduser().is_dir()
    dataset = str(pathlib.Path(dataset).expanduser().resolve()) if is_local else dataset
    name = pathlib.PurePath(dataset).name
    rewards, label_command = _rewards(source, table, dataset)
    base, policy, note = _policy(layout, table, name, source.fps, devices)
    settings = {
        **({} if base is None else {"base_config": Setting(base)}),
        "name": Setting(config_name or name, "Runs are kept in checkpoints/<name>/<exp_name>."),
        "data.data_dir" if is_local else "data.repo_id": Setting(
            dataset, f"Norm statistics are kept under its name, in assets/{name if is_local else dataset}."
        ),
        **_broken(source),
        **_prompts(table, name),
        **_data(layout),
        **rewards,
        **policy,
    }
    facts = f"{source.format}, {len(source)} episodes, {table.num_rows} steps at {source.fps:g} fps"
    text = settings_to_yaml(settings, (f"What `acrlpd configs new` found in {dataset}: {facts}.", note, _OTHER_FIELDS))
    return NewConfig(parse_config(text, "the new config"), text, note, label_command, _label_example(source.indices))


# -- the policy


def _policy(
    layout: Layout, table: ColumnTable, name: str, fps: float, devices: Devices | None
) -> tuple[str | None, Settings, str]:
    """The preset to start from, the settings of the policy and its training, and a sentence about both."""
    reason = _too_small_for_pi0(layout, devices)
    if devices is not None and reason is None:
        base = layout.robot if layout.robot in list_configs() else None
        settings = _pretrained(layout, fps, base, devices.num_devices)
        fitting = _fit(RLTrainConfig(name=name) if base is None else get_config(base), settings, devices)
        if fitting is not None:
            return base, *fitting
        reason = f"No pi0 fits {devices.name} ({devices.memory_gib:g} GiB)"
    note = (
        f"{reason}, so this is a tiny policy from scratch, which a CPU trains in minutes. It shows whether data, names "
        "and rewards fit, and learns little. `acrlpd configs new DATASET --accelerator NAME` writes one for a GPU."
    )
    return "debug", _sizes(layout) | _tiny(layout, table, name) | _TINY_RECIPE, note


def _too_small_for_pi0(layout: Layout, devices: Devices | None) -> str | None:
    widest = max(layout.state_dim, layout.action_dim)
    if devices is None:
        return "No GPU was found or named"
    if not layout.columns.cameras:
        return "The dataset has no cameras, and the released pi0 acts on images"
    if widest > Pi0Config.action_dim:
        return f"The robot has {widest} dims, and the released pi0 has {Pi0Config.action_dim}"
    return None


def _sizes(layout: Layout) -> Settings:
    return {
        "model.image_keys": Setting(list(layout.columns.cameras), "The slots that data.repack fills."),
        "qchunking.action_dim": Setting(layout.action_dim, "The robot's own dims; the policy pads them."),
    }


def _tiny(layout: Layout, table: ColumnTable, name: str) -> Settings:
    longest = max(len((prompt or _default_prompt(name)).encode()) for prompt in table.prompts)
    settings = {
        "model.max_token_len": Setting(
            longest + 2, "The tokenizer `byte` makes a token of each letter of a prompt, and two more."
        )
    }
    widest = max(layout.state_dim, layout.action_dim)
    if widest > Pi0Config.action_dim:
        settings["model.action_dim"] = Setting(widest)
    return settings


def _pretrained(layout: Layout, fps: float, base: str | None, num_devices: int) -> Settings:
    """pi0 with released weights, as in the preset `base`; None: by default."""
    preset = RLTrainConfig(name="", weight_loader=_BASE_WEIGHTS) if base is None else get_config(base)
    settings = _sizes(layout)
    settings["weight_loader.kind"] = Setting(preset.weight_loader.kind)
    settings["weight_loader.path"] = Setting(
        preset.weight_loader.path,
        'Name your copy of the weights here, or with --weight_loader.path: docs/model.md, "Released weights".',
    )
    horizon = min(max(round(fps / 2), 5), 50) if base is None else preset.model.action_horizon
    settings["model.action_horizon"] = Setting(horizon, f"Steps of a chunk: {horizon / fps:.2g} s.")
    settings["qchunking.horizon_length"] = Setting(horizon, "Steps that the critics judge, at most those of a chunk.")
    if preset.batch_size % num_devices:
        share = max(preset.batch_size // num_devices, 1)
        settings["batch_size"] = Setting(share * num_devices, f"{share} windows on each device.")
    every = min(preset.training.save_frequency, preset.training.offline_steps // 20)
    settings["training.eval_frequency"] = Setting(every, _ABOUT_EVALUATION)
    settings["training.save_frequency"] = Setting(every)
    if preset.env.id is not None:
        settings["env.id"] = Setting(None, f"The run is offline; the preset acts in {preset.env.id}.")
        settings["training.online_steps"] = Setting(0)
    return settings | (_RECIPE if base is None else {})


def _fit(start: RLTrainConfig, settings: Settings, devices: Devices) -> tuple[Settings, str] | None:
    """The settings with the plan's smallest change that fits, and a sentence about the plan; None if no change does."""
    plan_for = functools.partial(
        make_plan, num_devices=devices.num_devices, device_memory_gib=devices.memory_gib, accelerator=None
    )
    config = apply_config_overrides(start, {key: setting.value for key, setting in settings.items()})
    changes = plan_for(config).suggestion
    if changes is None:
        return None
    reason = f"Without this setting an update does not fit {devices.name}."
    plan = plan_for(apply_config_overrides(config, changes))
    note = (
        f"The policy is pi0 with released weights, {_what_learns(plan.config)}. An update takes "
        f"{format_bytes(plan.memory.peak)} of the {format_bytes(plan.usable_bytes)} that it may use on each "
        f"{devices.name}."
    )
    return settings | {key: Setting(value, reason) for key, value in changes.items()}, note


def _what_learns(config: RLTrainConfig) -> str:
    if config.freeze_pi0_backbone:
        return "of which the action expert learns (freeze_pi0_backbone)"
    is_lora = isinstance(config.model, Pi0Config) and config.model.paligemma.lora is not None
    return "of which the 2B expert learns through adapters (LoRA)" if is_lora else "all of which learns"


# -- the data


def _data(layout: Layout) -> Settings:
    """The robot and its columns."""
    about = _ABOUT_GENERIC if layout.robot == "generic" else "Recognised by its names and dims."
    settings = {"data.robot.type": Setting(layout.robot, about)}
    if layout.robot in list_configs():
        preset, comment = get_config(layout.robot).data, f"As in the preset {layout.robot} (docs/data_batches.md)."
        settings |= {f"data.robot.{name}": Setting(value, comment) for name, value in to_dict(preset.robot).items()}
        settings["data.use_delta_joint_actions"] = Setting(preset.use_delta_joint_actions, comment)
    columns = layout.columns
    settings |= {f"data.repack.{slot}": Setting(columns.cameras.get(slot)) for slot in SLOTS}
    left_out = f" Not used: {', '.join(layout.other_columns)}." if layout.other_columns else ""
    if layout.other_cameras:
        left_out += f" Cameras that are not used: {', '.join(layout.other_cameras)}."
    settings["data.repack.state"] = Setting(list(columns.state), f"{layout.state_dim} dims.")
    settings["data.repack.actions"] = Setting(list(columns.actions), f"{layout.action_dim} dims.{left_out}")
    return settings


def _broken(source: EpisodeSource) -> Settings:
    if not source.skipped:
        return {}
    count = f"{len(source.skipped)} broken episodes are left out (`acrlpd data validate` lists them)."
    return {"data.on_bad_episode": Setting("skip", count)}


def _prompts(table: ColumnTable, name: str) -> Settings:
    known = [prompt for prompt in table.prompts if prompt]
    some = ", ".join(map(repr, known[:3])) + (f" and {len(known) - 3} more" if len(known) > 3 else "")
    if len(known) == len(table.prompts):
        return {
            "data.prompt_from_task": Setting(True, f"The dataset says what the robot does: {some}."),
            "data.default_prompt": Setting(None, "No other prompt stands in: whoever asks the policy names the task."),
        }
    which = f"Steps without a task get this prompt; others have {some}." if known else "The dataset names no task."
    comment = f"{which} This is the name of the dataset: write what the robot does."
    return {"data.default_prompt": Setting(_default_prompt(name), comment)}


def _default_prompt(name: str) -> str:
    return name.replace("_", " ").replace("-", " ")


def _rewards(source: EpisodeSource, table: ColumnTable, dataset: str) -> tuple[Settings, str | None]:
    """Where rewards come from, and the command that labels the episodes if the dataset does not say."""
    scalars = [name for name in source.column_names if not source.features[name].shape]
    config, settings = RewardConfig(), {}
    named = [name for name in scalars if "reward" in name.lower()]
    if named and not {config.reward_column, config.success_column} & set(scalars):
        config = RewardConfig(reward_column=named[0])
        others = f" The dataset also has {', '.join(named[1:])}." if named[1:] else ""
        settings["data.rewards.reward_column"] = Setting(named[0], f"A guess by the name.{others}")
    try:
        rewards = read_rewards(source, table, config)
    except DatasetError as error:
        skip = " --on-bad-episode skip" if source.skipped else ""
        command = f"acrlpd data label {shlex.quote(dataset)} {_how_to_label(source, scalars)}{skip}"
        return {"data.rewards.source": Setting("labels", f"Labels are needed, because {error}.")}, command
    comment = f"Found: {rewards.origin.describe(config)}; {_describe_outcomes(rewards.outcomes)}."
    return settings | {"data.rewards.source": Setting("auto", comment)}, None


def _describe_outcomes(outcomes: Outcomes) -> str:
    if not outcomes.successes:
        return f"{outcomes}. Without a success there is nothing to learn from"
    if not outcomes.failures + outcomes.neither:
        return f"{outcomes}. Critics learn more from data with failures, too"
    return str(outcomes)


def _how_to_label(source: EpisodeSource, scalars: list[str]) -> str:
    about_success = [name for name in scalars if "success" in name.lower()]
    if about_success:
        return f"--rule 'max({about_success[0]}) > 0'"
    return "--interactive" if source.cameras else f"--success {format_indices(source.indices)}"


def _label_example(indices: Sequence[int]) -> str:
    """As if the last of several episodes had failed."""
    if len(indices) == 1:
        return f"--success {indices[0]}"
    return f"--success {format_indices(indices[:-1])} --failure {indices[-1]}"
