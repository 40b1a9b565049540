"""The README of an exported directory: what it is, and the exact commands that serve it."""

import pathlib
import shlex
from collections.abc import Iterator

from acrlpd.config import RLTrainConfig
from acrlpd.data.pipeline.transforms import delta_action_mask
from acrlpd.models.families.base import PolicyConfig
from acrlpd.models.families.pi0 import Pi0Config
from acrlpd.policies.checkpoint import EXPORT_FILE, PolicyCheckpoint
from acrlpd.policies.levels import Level
from acrlpd.training.checkpoints.items import ASSETS

# Fields of the model that openpi fixes.
_NOT_IN_OPENPI = ("siglip_variant", "vocab_size", "image_resolution")
_VARIANTS = ("paligemma_variant", "action_expert_variant")
_OPENPI_VARIANTS = ("dummy", "gemma_300m", "gemma_300m_lora", "gemma_2b", "gemma_2b_lora")


def write_readme(directory: pathlib.Path, checkpoint: PolicyCheckpoint, level: Level) -> None:
    """Describes the export of `checkpoint` in `directory`."""
    rl_config, serving = checkpoint.rl_config, checkpoint.level
    critics = f"{serving.num_critics} critics, best of {serving.best_of_n}" if checkpoint.has_critics else "no critics"
    lines = [
        f"# {rl_config.name}, step {checkpoint.step}",
        "",
        f"A policy trained with acrlpd, exported at level `{level}`: {serving.num_steps} denoising steps, {critics}.",
        "",
        "- `params/`: the policy's parameters in openpi's layout",
        f"- `{EXPORT_FILE}`: the complete config, for `acrlpd serve`",
    ]
    stats = checkpoint.norm_stats_directory
    if stats is not None:
        name = (stats / "norm_stats.json").relative_to(directory)
        lines.append(f"- `{name}`: the statistics that scale states and actions")
    if checkpoint.has_critics:
        lines.append("- `critic/`: the critics that choose among candidates; openpi does not look at them")
    lines += ["", "## Serve with acrlpd", "", "```", "acrlpd serve THIS_DIRECTORY", "```", ""]
    lines += [
        "## Serve with openpi (one sample in 10 denoising steps, no critics)",
        "",
        *_openpi_section(checkpoint),
        "",
    ]
    (directory / "README.md").write_text("\n".join(lines))


def _openpi_section(checkpoint: PolicyCheckpoint) -> list[str]:
    rl_config = checkpoint.rl_config
    model, like = rl_config.model, rl_config.openpi_compatibility.config_name
    if not model.in_openpi:
        return ["openpi has no state-space policy: serve this one with acrlpd."]
    name, prompt = f"acrlpd_{rl_config.name}", rl_config.data.default_prompt
    command = [
        "uv run scripts/serve_policy.py",
        *([] if prompt is None else [shlex.quote(f"--default_prompt={prompt}")]),
        f"policy:checkpoint --policy.config={name} --policy.dir=THIS_DIRECTORY",
    ]
    lines = ["Add this config to `_CONFIGS` in openpi's `src/openpi/training/config.py`:", ""]
    lines += ["```python", *_train_config(checkpoint, name), "```", "", "and serve it:", ""]
    lines += ["```", " ".join(command), "```", ""]
    lines += [
        "openpi does not notice settings that are not those of the training, such as another `action_horizon`: it "
        "acts wrongly without an error."
        + ("" if like is None else f" Its own `{like}` will do only if it has every setting above.")
    ]
    for difference in _differences(rl_config):
        lines += ["", difference]
    return lines


def _train_config(checkpoint: PolicyCheckpoint, name: str) -> list[str]:
    """The entry for openpi's list of configs."""
    data, stats = checkpoint.rl_config.data, checkpoint.norm_stats_directory
    asset_id = None if stats is None else stats.relative_to(checkpoint.directory / ASSETS).as_posix()
    arguments = [f"assets=AssetsConfig(asset_id={asset_id!r}),"]
    if asset_id is None:
        arguments[0] += "  # the run was trained on data without norm statistics; openpi asks for them"
    for argument, value in data.robot.openpi_arguments(use_delta_joint_actions=data.use_delta_joint_actions).items():
        arguments.append(f"{argument}={value!r},")
    lines = ["TrainConfig(", f"    name={name!r},", f"    model={_model_call(checkpoint.rl_config.model)},"]
    data_config = data.robot.openpi_data_config or "YourDataConfig"
    lines += [f"    data={data_config}(", *(f"        {argument}" for argument in arguments), "    ),"]
    reset_pose = checkpoint.rl_config.openpi_compatibility.reset_pose
    if reset_pose is not None:
        lines.append(f"    policy_metadata={{'reset_pose': {list(reset_pose)}}},")
    return [*lines, "),"]


def _model_call(model: PolicyConfig) -> str:
    fields = ("pi05", "action_dim", "action_horizon", "max_token_len", "discrete_state_input", "dtype", *_VARIANTS)
    arguments = ", ".join(f"{field}={getattr(model, field)!r}" for field in fields)
    return f"pi0_config.Pi0Config({arguments})"


def _model_differences(model: PolicyConfig) -> Iterator[str]:
    foreign = [field for field in _NOT_IN_OPENPI if getattr(model, field) != getattr(Pi0Config(), field)]
    foreign += [field for field in _VARIANTS if getattr(model, field) not in _OPENPI_VARIANTS]
    if foreign:
        settings = ", ".join(f"`{field}={getattr(model, field)!r}`" for field in foreign)
        yield f"openpi has no setting for {settings}: stock openpi cannot build this model."
    if model.discrete_state_input and not model.use_quantile_norm:
        yield "This policy reads the state in its prompt, which openpi writes there for pi0.5 only."


def _differences(rl_config: RLTrainConfig) -> Iterator[str]:
    """What the entry cannot say, because stock openpi has no setting for it."""
    data, model = rl_config.data, rl_config.model
    yield from _model_differences(model)
    if data.tokenizer != "paligemma":
        yield f"openpi always uses PaliGemma's tokenizer; this policy reads `{data.tokenizer}` tokens."
    if data.use_quantile_norm not in (None, model.use_quantile_norm):
        used, openpis = ("quantiles", "mean and deviation")[:: 1 if data.use_quantile_norm else -1]
        yield f"This policy normalises by {used}, openpi by {openpis}: change `use_quantile_norm` in its config.py."
    yield from data.robot.openpi_differences(action_dim=rl_config.qchunking.action_dim)
    mask = delta_action_mask(data)
    if mask is not None and (data.robot.openpi_delta_argument is None or data.delta_action_mask is not None):
        yield (
            "Some actions are relative to the state: the data config needs `DeltaActions` and `AbsoluteActions` with "
            f"the mask {mask}, and no others."
        )
    seen = [slot for slot in data.repack.cameras if slot in model.image_keys]
    unseen = [f"`{camera}`" for slot, camera in data.robot.cameras.items() if slot not in seen]
    if unseen and data.robot.openpi_data_config is not None:
        yield f"The policy has never seen {', '.join(unseen)}; openpi shows it all images that a client sends."
