"""The README of an exported directory: what it is, and the exact commands that serve it."""

import pathlib
import shlex
from collections.abc import Iterator

from acrlpd.choice import kind_name
from acrlpd.config import RLTrainConfig, to_dict
from acrlpd.config.data import NORM_STATS_FILE
from acrlpd.data.pipeline.tokenizer import LABELS, add_label
from acrlpd.data.pipeline.transforms import delta_action_mask
from acrlpd.models.observation import POSITIVE
from acrlpd.policies.checkpoint import Checkpoint
from acrlpd.policies.levels import Level, describe_steps
from acrlpd.runs.checkpoint_layout import EXPORT_FILE
from acrlpd.text import escape_markdown

_README = """\
# {name}, step {step}

A policy trained with acrlpd, exported at level `{level}`: {steps}, {critics}.
{warning}
{files}

## Serve with acrlpd

```
acrlpd serve THIS_DIRECTORY
```
{label}
## Serve with openpi (one sample, {openpi_steps}, no critics)

{openpi}
"""
_OPENPI = """\
{warnings}Add this config to `_CONFIGS` in openpi's `src/openpi/training/config.py`:

```python
{train_config}
```

and serve it:

```
uv run scripts/serve_policy.py {prompt}policy:checkpoint --policy.config={name} --policy.dir=THIS_DIRECTORY
```

openpi does not notice settings that are not those of the training, such as another `action_horizon`: it acts wrongly \
without an error."""


_PYTORCH_README = """\
# {name}, step {step}, for PyTorch

A policy trained with acrlpd, in the layout of openpi's PyTorch models. Critics are not part of this layout.
{warning}
{files}

## Serve with openpi's PyTorch server (one sample in 10 denoising steps)

openpi's README says how PyTorch is set up there (`transformers==4.53.2` and the files of `transformers_replace`). The \
server takes PyTorch because this directory has `model.safetensors`.

{openpi}

To train on with openpi's `scripts/train_pytorch.py`, add `pytorch_weight_path="THIS_DIRECTORY"` to the config.

## Load with lerobot

lerobot has a config, names and statistics of its own. Its `from_pretrained` prints a warning and goes on if weights \
do not fit, so look for "All keys loaded successfully".

```python
{lerobot}
```

lerobot scales states and actions by these statistics, and does nothing else to them. What openpi does between a robot \
`{robot}` and the policy (units, signs, order of the cameras{delta}) has to be done around lerobot's processors.
"""
_LEROBOT = """\
import json
import torch
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.{family}.configuration_{family} import {prefix}Config
from lerobot.policies.{family}.modeling_{family} import {prefix}Policy
from lerobot.policies.{family}.processor_{family} import make_{family}_pre_post_processors

cameras = {cameras!r}  # in the order in which the policy was trained with them
config = {prefix}Config(
    dtype={dtype!r},
    chunk_size={action_horizon},
    n_action_steps={action_horizon},
    max_state_dim={action_dim},
    max_action_dim={action_dim},
    tokenizer_max_length={max_token_len},
    paligemma_variant={paligemma_variant!r},
    action_expert_variant={action_expert_variant!r},
    input_features={{"observation.state": PolicyFeature(FeatureType.STATE, ({robot_dim},))}}
    | {{f"observation.images.{{camera}}": PolicyFeature(FeatureType.VISUAL, (3, 224, 224)) for camera in cameras}},
    output_features={{"action": PolicyFeature(FeatureType.ACTION, ({robot_dim},))}},
)
policy = {prefix}Policy.from_pretrained("THIS_DIRECTORY", config=config)
{stats}
preprocess, postprocess = make_{family}_pre_post_processors(config, dataset_stats=stats)"""
_LEROBOT_STATS = """\
with open("THIS_DIRECTORY/{file}") as file:
    norm_stats = json.load(file)["norm_stats"]
stats = {{
    name: {{key: torch.tensor(values) for key, values in norm_stats[ours].items() if values is not None}}
    for name, ours in (("observation.state", "state"), ("action", "actions"))
}}"""


_LABEL = """
The policy acts well because its prompt ends with `{label}`. This server adds the label: clients send the task alone.
"""

_PYTORCH_ACTION_DIM = 32
OPENPI_STEPS = 10
# Fields of our model that lerobot's configs need.
_LEROBOT_FIELDS = (
    *("dtype", "action_horizon", "action_dim", "max_token_len"),
    *("paligemma_variant", "action_expert_variant"),
)


def write_readme(
    directory: pathlib.Path, checkpoint: Checkpoint, level: Level, *, merged_adapters: bool = False
) -> None:
    """Describes the export of `checkpoint` in `directory`; `merged_adapters`: its LoRA adapters are in the weights."""
    serving, stats = checkpoint.level, checkpoint.norm_stats_directory
    files = {"params/": "the policy's parameters in openpi's layout"}
    files[EXPORT_FILE] = "the complete config, for `acrlpd serve`"
    if stats is not None:
        name = (stats / NORM_STATS_FILE).relative_to(directory).as_posix()
        files[name] = "the statistics that scale states and actions"
    if checkpoint.has_critics:
        files["critic/"] = "the critics that choose among candidates; openpi does not look at them"
    text = _README.format(
        name=escape_markdown(checkpoint.rl_config.name),
        step=checkpoint.step,
        level=level,
        steps=describe_steps(checkpoint.rl_config.model, serving.num_steps),
        openpi_steps=describe_steps(checkpoint.rl_config.model, OPENPI_STEPS),
        critics=f"{serving.num_critics} critics, best of {serving.best_of_n}"
        if checkpoint.has_critics
        else "no critics",
        warning=client_warning(checkpoint.rl_config),
        files="\n".join(f"- `{file}`: {content}" for file, content in files.items()),
        label=_LABEL.format(label=LABELS[POSITIVE]) if checkpoint.rl_config.labels_prompts else "",
        openpi=openpi_section(checkpoint, merged_adapters),
    )
    (directory / "README.md").write_text(text)


def write_pytorch_readme(directory: pathlib.Path, checkpoint: Checkpoint, *, merged_adapters: bool) -> None:
    """Describes an export for PyTorch. `checkpoint` has the config of the policy without adapters."""
    rl_config, stats = checkpoint.rl_config, checkpoint.norm_stats_directory
    files = {"model.safetensors": "the policy's parameters, with the names of openpi's `PI0Pytorch`"}
    files["config.json"] = "what openpi's converter writes; openpi and lerobot do not need it"
    files[EXPORT_FILE] = "the complete config of the run, and where the policy comes from"
    load_stats = "stats = None  # the run was trained on data without norm statistics"
    if stats is not None:
        name = (stats / NORM_STATS_FILE).relative_to(checkpoint.directory).as_posix()
        files[name] = "the statistics that scale states and actions"
        load_stats = _LEROBOT_STATS.format(file=name)
    model = to_dict(rl_config.model)
    family = "pi05" if model["pi05"] else "pi0"
    text = _PYTORCH_README.format(
        name=escape_markdown(rl_config.name),
        step=checkpoint.step,
        warning=client_warning(rl_config),
        files="\n".join(f"- `{file}`: {content}" for file, content in files.items()),
        openpi=openpi_section(checkpoint, merged_adapters, pytorch=True),
        lerobot=_LEROBOT.format(
            family=family,
            prefix=family.upper(),
            cameras=list(rl_config.model.image_keys),
            robot_dim=rl_config.qchunking.action_dim,
            stats=load_stats,
            **{name: value for name, value in model.items() if name in _LEROBOT_FIELDS},
        ),
        robot=kind_name(rl_config.data.robot),
        delta="" if delta_action_mask(rl_config.data) is None else ", actions relative to the state",
    )
    (directory / "README.md").write_text(text)


def client_warning(rl_config: RLTrainConfig) -> str:
    """What whoever connects a robot must know, whichever server the robot talks to; it stands before all commands."""
    warning = rl_config.data.robot.client_warning
    return "" if warning is None else f"\n**Read this before a robot moves:** {warning}\n"


def openpi_section(checkpoint: Checkpoint, merged_adapters: bool = False, *, pytorch: bool = False) -> str:
    """How openpi serves a checkpoint: first what is different there, then the config and the command."""
    rl_config = checkpoint.rl_config
    if not rl_config.model.in_openpi:
        return f"openpi has no policy of the family `{kind_name(rl_config.model)}`: serve this one with acrlpd."
    # openpi's list of configs may have both: the model of a merged export is another one.
    name = f"acrlpd_{rl_config.name}{'_merged' if merged_adapters else ''}"
    prompt, like = rl_config.data.default_prompt, rl_config.openpi_compatibility.config_name
    if prompt is not None and rl_config.labels_prompts:
        prompt = add_label(prompt, LABELS[POSITIVE])
    # Before the command, because whoever reads on only after the command has moved a robot already.
    differences = [*_differences(rl_config), *(_pytorch_differences(rl_config) if pytorch else ())]
    warnings = "".join(f"- {difference}\n" for difference in differences)
    text = _OPENPI.format(
        warnings=warnings and f"Read this first:\n\n{warnings}\n",
        train_config="\n".join(_train_config(checkpoint, name)),
        prompt="" if prompt is None else shlex.quote(f"--default_prompt={prompt}") + " ",
        name=name,
    )
    return text if like is None else f"{text} Its own `{like}` will do only if it has every setting above."


def _pytorch_differences(rl_config: RLTrainConfig) -> Iterator[str]:
    if rl_config.model.action_dim != _PYTORCH_ACTION_DIM:
        yield (
            f"openpi's PyTorch model has room for {_PYTORCH_ACTION_DIM} actions and no setting for it; this policy has "
            f"{rl_config.model.action_dim}."
        )


def _train_config(checkpoint: Checkpoint, name: str) -> list[str]:
    """The entry for openpi's list of configs."""
    rl_config, stats = checkpoint.rl_config, checkpoint.norm_stats_directory
    data = rl_config.data
    # The directory of the statistics is assets/<asset_id>.
    asset_id = None if stats is None else "/".join(stats.relative_to(checkpoint.directory).parts[1:])
    arguments = [f"assets=AssetsConfig(asset_id={asset_id!r}),"]
    if asset_id is None:
        arguments[0] += "  # the run was trained on data without norm statistics; openpi asks for them"
    for argument, value in data.robot.openpi_arguments(use_delta_joint_actions=data.use_delta_joint_actions).items():
        arguments.append(f"{argument}={value!r},")
    lines = ["TrainConfig(", f"    name={name!r},", f"    model={rl_config.model.openpi_call()},"]
    data_config = data.robot.openpi_data_config or "YourDataConfig"
    lines += [f"    data={data_config}(", *(f"        {argument}" for argument in arguments), "    ),"]
    reset_pose = rl_config.openpi_compatibility.reset_pose
    if reset_pose is not None:
        lines.append(f"    policy_metadata={{'reset_pose': {list(reset_pose)}}},")
    return [*lines, "),"]


def _differences(rl_config: RLTrainConfig) -> Iterator[str]:
    """What the entry cannot say, because stock openpi has no setting for it."""
    data, model = rl_config.data, rl_config.model
    yield from model.openpi_differences()
    if rl_config.improvement.makes_candidates and rl_config.acrlpd.loss_weights.actor_weight != 0:
        yield (
            f"openpi serves the policy without the improvement `{kind_name(rl_config.improvement)}`, whose networks "
            "make the actions of this run, so its actions differ. `acrlpd serve` serves both."
        )
    if rl_config.labels_prompts:
        yield (
            f"openpi adds no label: every prompt that it is sent must be the task, one space and `{LABELS[POSITIVE]}`, "
            f"for example `{add_label(data.default_prompt or 'fold the shirt', LABELS[POSITIVE])}`. Without the label "
            "the policy acts like all of its data, good and bad."
        )
        guidance = to_dict(rl_config.improvement).get("guidance", 1.0)
        if guidance != 1.0:
            yield f"openpi has no guidance, so it acts as with guidance 1; this policy is exported with {guidance:g}."
    if rl_config.acrlpd.action_bounds is not None:
        low, high = rl_config.acrlpd.action_bounds
        yield f"openpi does not clip actions; this policy was trained with actions clipped to {low} and {high}."
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
