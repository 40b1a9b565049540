"""The README of an exported directory: what it is, and the exact commands that serve it."""

import pathlib

from acrlpd.models.pi0_config import Pi0Config
from acrlpd.serving.levels import Level
from acrlpd.serving.policy_checkpoint import EXPORT_FILE, PolicyCheckpoint
from acrlpd.training.checkpoint_items import ASSETS

# Fields of the model that openpi fixes.
_NOT_IN_OPENPI = ("siglip_variant", "vocab_size", "image_resolution")


def write_readme(directory: pathlib.Path, checkpoint: PolicyCheckpoint, level: Level) -> None:
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
    lines += ["## Serve with openpi (one sample, no critics)", "", *_openpi_section(checkpoint), ""]
    (directory / "README.md").write_text("\n".join(lines))


def _openpi_section(checkpoint: PolicyCheckpoint) -> list[str]:
    rl_config = checkpoint.rl_config
    model = rl_config.model
    if not isinstance(model, Pi0Config):
        return ["openpi has no state-space policy: serve this one with acrlpd."]
    name = rl_config.openpi_compatibility.config_name
    command = (
        f"uv run scripts/serve_policy.py policy:checkpoint --policy.config={name or 'YOUR_CONFIG'} "
        "--policy.dir=THIS_DIRECTORY"
    )
    lines = ["```", command, "```", ""]
    if name is None:
        lines.append("YOUR_CONFIG is an openpi `TrainConfig` that you add, whose model and data are:")
    else:
        lines.append(f"openpi's config `{name}` must have this model and data (check them against your openpi):")
    lines += ["", "```python", _model_call(model), *_data_lines(checkpoint), "```"]
    different = [
        f"`{field}={getattr(model, field)!r}`"
        for field in _NOT_IN_OPENPI
        if getattr(model, field) != getattr(Pi0Config(), field)
    ]
    if different:
        lines += ["", f"openpi has no setting for {', '.join(different)}: stock openpi cannot build this model."]
    if rl_config.data.tokenizer != "paligemma":
        lines += [
            "",
            f"openpi always uses PaliGemma's tokenizer; this policy reads `{rl_config.data.tokenizer}` tokens.",
        ]
    return lines


def _model_call(model: Pi0Config) -> str:
    fields = ("pi05", "action_dim", "action_horizon", "max_token_len", "discrete_state_input", "dtype")
    variants = ("paligemma_variant", "action_expert_variant")
    arguments = ", ".join(f"{field}={getattr(model, field)!r}" for field in (*fields, *variants))
    return f"model=pi0_config.Pi0Config({arguments})"


def _data_lines(checkpoint: PolicyCheckpoint) -> list[str]:
    data, stats = checkpoint.rl_config.data, checkpoint.norm_stats_directory
    asset_id = None if stats is None else stats.relative_to(checkpoint.directory / ASSETS).as_posix()
    lines = [f"# data: a {data.robot} robot, AssetsConfig(asset_id={asset_id!r})"]
    lines.append(f"# default_prompt={data.default_prompt!r}, use_delta_joint_actions={data.use_delta_joint_actions}")
    if data.robot == "aloha":
        lines.append(f"# adapt_to_pi={data.adapt_to_pi}")
    reset_pose = checkpoint.rl_config.openpi_compatibility.reset_pose
    if reset_pose is not None:
        lines.append(f"policy_metadata={{'reset_pose': {list(reset_pose)}}}")
    if asset_id is None:
        lines.append("# no norm statistics: the run was trained on data that has none; openpi asks for them")
    return lines
