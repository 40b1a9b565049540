"""Checks of sections that must fit each other; what a section can check alone, the section checks itself."""

import math
import os
import pathlib
import shutil
from collections.abc import Iterator

from acrlpd.choice import kind_name
from acrlpd.config.score import METRICS, SUCCESS, parse_score
from acrlpd.config.train_config import RLTrainConfig
from acrlpd.files import are_plain_names, is_plain_name
from acrlpd.findings import Finding, Level, error, warning

PALIGEMMA_VOCAB = 257_152
BYTE_VOCAB = 259  # 256 bytes, padding, begin and end
# The share of the initial policy that a moving average may still have at the end of a run.
_LARGEST_INITIAL_SHARE = 0.1


def check_batch(config: RLTrainConfig, num_devices: int | None) -> Iterator[Finding]:
    accumulation, fsdp = config.training.gradient_accumulation_steps, config.fsdp.fsdp_devices
    devices = fsdp if num_devices is None else num_devices
    if num_devices is not None and num_devices < 1:
        yield error(f"num_devices must be at least 1; found {num_devices}")
    if min(config.batch_size, accumulation, fsdp, devices) < 1:
        return  # A number below 1 has been reported already, and cannot divide a batch.
    if devices % fsdp:
        yield error(
            f"fsdp.fsdp_devices {fsdp} does not divide the {devices} devices; use one of "
            f"{', '.join(str(n) for n in range(1, devices + 1) if devices % n == 0)}"
        )
    step = accumulation * devices
    if config.batch_size % step:
        below = config.batch_size // step * step
        choice = f"{below} or {below + step}" if below else f"{step}"
        yield error(
            f"batch_size {config.batch_size} does not split into {accumulation} micro-batches over {devices} "
            f"device{'s' if devices > 1 else ''}; use {choice}, or change gradient_accumulation_steps"
        )
    if config.batch_size < 8:
        yield warning(f"batch_size {config.batch_size} is small: gradients and advantages will be noisy")


def check_chunks(config: RLTrainConfig) -> Iterator[Finding]:
    model, action_dim = config.model, config.qchunking.action_dim
    if not model.pads_actions and action_dim != model.action_dim:
        yield error(
            f"this policy pads nothing: qchunking.action_dim {action_dim} must equal model.action_dim "
            f"{model.action_dim}"
        )
    yield from config.env.execution.check(config.model.action_horizon)


def check_noise(config: RLTrainConfig) -> Iterator[Finding]:
    """Where critics judge noise, they can learn from chunks alone that the policy has played, one window for each."""
    if config.noise_dim is None:
        return
    kind, horizon = kind_name(config.improvement), config.qchunking.horizon_length
    if config.training.offline_steps > 0 or config.online.offline_ratio != 0:
        yield error(
            f"improvement {kind} has critics of noise, and a dataset does not know the noise of its actions: set "
            "training.offline_steps 0 and online.offline_ratio 0, or choose improvement dsrl, whose critics judge "
            f"chunks; found {config.training.offline_steps} and {config.online.offline_ratio}"
        )
    steps = config.env.execution.for_horizon(config.qchunking.chunk_length).replan_steps
    if steps != horizon:
        yield error(
            f"improvement {kind} has critics of noise, so a target reaches from chunk to chunk: set env.replan_steps "
            f"to qchunking.horizon_length {horizon}; found {steps}"
        )


def check_policy(config: RLTrainConfig) -> Iterator[Finding]:
    loader, frozen = config.weight_loader, config.freeze_pi0_backbone
    if loader.kind != "none" and not loader.path:
        yield error(f"weight_loader.kind {loader.kind} needs weight_loader.path")
    if loader.kind == "paligemma" and not config.model.in_openpi:
        yield error(f"weight_loader: PaliGemma's weights do not fit the {kind_name(config.model)} policy")
    if loader.critics is not None and config.acrlpd.loss_weights.critic_weight == 0:
        yield error(
            "weight_loader.critics names critics, and this run has none: acrlpd.loss_weights.critic_weight is 0"
        )
    weights = None if loader.kind == "none" else loader.path or ""
    yield from config.model.check(freeze_pi0_backbone=frozen, weights=weights)
    if config.freezes_policy and loader.kind != "checkpoint":
        yield error(
            f"improvement {kind_name(config.improvement)} keeps the weights that the policy starts with: set "
            "weight_loader.kind checkpoint, and weight_loader.path to a checkpoint of a trained policy; found "
            f"weight_loader.kind {loader.kind}"
        )
    if frozen and config.acrlpd.critic_gradient_to_policy:
        yield error("critic_gradient_to_policy trains the prefix, which freeze_pi0_backbone freezes; turn one off")


def check_learning_rates(config: RLTrainConfig) -> Iterator[Finding]:
    for name in ("actor_lr_schedule", "critic_lr_schedule", "temperature_lr_schedule"):
        yield from getattr(config, name).check(name, config.num_train_steps)
    pretrained = config.weight_loader.kind != "none" and not config.freezes_policy
    if pretrained and config.actor_lr_schedule.peak_lr > 1e-4:
        yield warning(
            f"actor peak_lr {config.actor_lr_schedule.peak_lr} is high for pretrained weights; openpi "
            "fine-tunes with 2.5e-5 to 5e-5 (--pi0_lr)"
        )
    if config.critic_lr_schedule.peak_lr > 3e-3:
        yield warning(
            f"critic peak_lr {config.critic_lr_schedule.peak_lr} is high; 1e-4 to 1e-3 is usual (--critic_lr)"
        )


def check_average(config: RLTrainConfig) -> Iterator[Finding]:
    """A moving average that is slower than the run is still the initial network when the run ends."""
    steps, policy, critics = config.num_train_steps, "policy that is validated, served and exported", "critics that act"
    averages = {"critic_ema_decay": (critics, config.acrlpd.critic_ema_decay)}
    if config.acts_with_average and not config.freezes_policy:
        averages["ema_decay"] = (policy, config.acrlpd.ema_decay)
    for name, (network, decay) in averages.items():
        if decay is None or not 0 < decay < 1 or steps == 0:
            continue
        left = decay**steps
        if left > _LARGEST_INITIAL_SHARE:
            fitting = math.floor(1_000 * _LARGEST_INITIAL_SHARE ** (1 / steps)) / 1_000
            yield warning(
                f"acrlpd.{name} {decay} is slow for {steps} updates: {left:.0%} of the {network} will be as "
                f"initialised; at most {fitting:g} fits, or none for no average"
            )


def check_run(config: RLTrainConfig) -> Iterator[Finding]:
    if config.num_train_steps == 0:
        yield error("training.offline_steps and training.online_steps are both 0: a run needs at least 1 update")
    yield from check_names(config)


def check_names(config: RLTrainConfig) -> Iterator[Finding]:
    """Names that become paths must not lead out of the directory in which the run expects them."""
    for name in ("name", "exp_name"):
        if not is_plain_name(value := getattr(config, name)):
            yield error(f"{name} must be a plain directory name; found {value!r}")
    for name, hint in (("asset_id", ""), ("repo_id", ". A directory is given as data.data_dir")):
        value = getattr(config.data, name)
        if value is not None and not are_plain_names(value):
            yield error(f"data.{name} must be plain names with single slashes between them; found {value!r}{hint}")


def check_alerts(config: RLTrainConfig, level: Level) -> Iterator[Finding]:
    """Receivers of alerts that cannot work; what only this machine lacks is found at `level`."""
    alerts = config.logging.alerts
    if alerts.wandb and config.logging.wandb == "disabled":
        yield error(
            "logging.alerts.wandb needs Weights & Biases: set logging.wandb online, or logging.alerts.wandb false"
        )
    if (variable := alerts.webhook_variable) is not None:
        url = os.environ.get(variable)
        if not url:
            yield Finding(level, f"logging.alerts.webhook_variable: the environment has no variable {variable}; set it")
        elif not url.startswith(("https://", "http://")):
            yield error(
                f"logging.alerts.webhook_variable: the value of {variable} must begin with https:// or http://; the "
                "value is not shown, because it may be a secret"
            )
    if alerts.command and shutil.which(alerts.command[0]) is None:
        yield Finding(level, f"logging.alerts.command: there is no program {alerts.command[0]!r} to run here")


def check_online(config: RLTrainConfig, level: Level) -> Iterator[Finding]:
    """What an online phase needs; a missing environment is found at `level`."""
    online_steps, actions = config.training.online_steps, config.data.repack.actions
    if online_steps > 0 and config.env.id is None:
        message = (
            f"the {online_steps} online steps need an environment: set env.id, or online_steps 0 to train offline only"
        )
        yield Finding(level, message)
    if config.online.final_actor_weight is not None and config.acrlpd.loss_weights.actor_weight == 0:
        yield error(
            "online.final_actor_weight moves the weight of a policy improvement, and acrlpd.loss_weights.actor_weight "
            "0 has no improvement: set acrlpd.loss_weights.actor_weight above 0, or online.final_actor_weight none"
        )
    if online_steps > 0 and config.labels_prompts:
        yield error(
            f"improvement {kind_name(config.improvement)} learns from the policy's own episodes in rounds, each of "
            "which starts from the first weights: set training.online_steps 0, and see `acrlpd recap`"
        )
    if online_steps > 0 and len(actions) != 1:
        yield error(
            "an online phase needs actions in one column of the dataset; data.repack.actions names "
            f"{', '.join(actions) or 'no column'}"
        )


def check_baselines(config: RLTrainConfig) -> Iterator[Finding]:
    names, training = config.evaluation.baselines, config.training
    if names and config.env.id is None:
        yield error(f"evaluation.baselines {', '.join(names)} are judged in an environment: set env.id")
    if len(set(names)) < len(names):
        yield error(f"evaluation.baselines names a baseline twice: {', '.join(names)}")
    if "offline_success" in names and config.acrlpd.policy_data == "success":
        yield error(
            "acrlpd.policy_data success makes the run itself what the baseline offline_success is: remove "
            "offline_success from evaluation.baselines, or set acrlpd.policy_data all"
        )
    if "offline_success" in names and config.acrlpd.loss_weights.critic_weight == 0:
        yield error(
            "the baseline offline_success is RL with critics, and acrlpd.loss_weights.critic_weight 0 trains none: "
            "remove offline_success from evaluation.baselines"
        )
    if "offline_continued" in names and not (training.online_steps and training.offline_steps):
        flags = " ".join(["--evaluation.baselines", *(name for name in names if name != "offline_continued")])
        yield error(
            "the baseline offline_continued trains offline while the run trains online, so it needs both "
            f"training.offline_steps and training.online_steps; found {training.offline_steps} and "
            f"{training.online_steps}. Set both, or leave the baseline out: {flags}"
        )


def check_score(config: RLTrainConfig) -> Iterator[Finding]:
    """A score of the evaluation must be made of what the evaluations of this run report."""
    try:
        score = parse_score(config.evaluation.score)
    except ValueError as problem:
        yield error(str(problem))
        return
    if score.text == SUCCESS:  # A run without an environment goes by its held-out loss.
        return
    for name in score.weights:
        if METRICS[name].needs_env and config.env.id is None:
            yield error(
                f"evaluation.score names {name}, which needs an environment: set env.id, or name validation_loss"
            )
        if not METRICS[name].needs_env and config.data.validation_share == 0:
            yield error(f"evaluation.score names {name}, which needs held-out episodes: raise data.validation_share")


def check_cloning(config: RLTrainConfig) -> Iterator[Finding]:
    """A run that trains no critic cannot use what only critics can tell."""
    hp, evaluation = config.acrlpd, config.evaluation
    if hp.loss_weights.critic_weight != 0:
        return
    without = "acrlpd.loss_weights.critic_weight 0 trains no critic"
    if config.training.online_steps > 0:
        yield error(f"{without}, and cloning one's own episodes improves nothing: set training.online_steps 0")
    samples = hp.num_action_samples if evaluation.best_of_n is None else evaluation.best_of_n
    if config.env.id is not None and samples > 1:
        yield error(f"{without} that could choose among {samples} candidates: set evaluation.best_of_n 1")
    if evaluation.robustness and max(evaluation.best_of_n_values, default=1) > 1:
        yield error(f"{without} that could choose among candidates: set evaluation.best_of_n_values 1")


def check_data(config: RLTrainConfig) -> Iterator[Finding]:
    data, model, action_dim = config.data, config.model, config.qchunking.action_dim
    cameras = data.repack.cameras
    yield from data.robot.check(
        action_dim=action_dim,
        state=data.repack.state,
        actions=data.repack.actions,
        cameras={slot: column for slot, column in cameras.items() if slot in model.image_keys},
    )
    if data.delta_action_mask is not None and sum(map(abs, data.delta_action_mask)) > action_dim:
        yield error(
            f"data.delta_action_mask {list(data.delta_action_mask)} covers more than the {action_dim} action dims"
        )
    for camera in model.image_keys:
        if camera not in cameras:
            yield error(
                f"camera {camera} of the policy has no column: set data.repack.{camera}, or leave it out of "
                "model.image_keys"
            )
    for camera, column in cameras.items():
        if model.image_keys and camera not in model.image_keys:
            yield warning(f"column {column!r} is mapped to camera {camera}, which model.image_keys leaves out")
    if config.acrlpd.action_bounds is not None and "actions" in data.normalize:
        yield error(
            "acrlpd.action_bounds are in the robot's units, so actions must not be normalised: set data.normalize state"
        )
    if config.acrlpd.action_bounds is not None and data.use_delta_joint_actions:
        yield error(
            "acrlpd.action_bounds are of absolute actions, but data.use_delta_joint_actions makes actions relative: "
            "set one of the two"
        )
    if model.prompt_len:
        yield from _check_prompts(config)


def _check_prompts(config: RLTrainConfig) -> Iterator[Finding]:
    data, vocab_size = config.data, config.model.vocab_size
    if data.tokenizer == "paligemma" and vocab_size < PALIGEMMA_VOCAB:
        yield error(
            f"the paligemma tokenizer needs model.vocab_size {PALIGEMMA_VOCAB}; found {vocab_size}. Small models read "
            "bytes: data.tokenizer byte"
        )
    if data.tokenizer == "byte" and vocab_size < BYTE_VOCAB:
        yield error(f"the byte tokenizer needs model.vocab_size {BYTE_VOCAB} or more; found {vocab_size}")
    # A network with a smaller vocabulary has weights of a run of our own, which may have read bytes.
    if data.tokenizer == "byte" and config.weight_loader.kind != "none" and vocab_size >= PALIGEMMA_VOCAB:
        yield error("data.tokenizer byte makes tokens that pretrained weights do not know; use paligemma")
    if not data.prompt_from_task and data.default_prompt is None:
        yield error("no prompt: set data.default_prompt, or data.prompt_from_task true")


def check_files(config: RLTrainConfig, level: Level) -> Iterator[Finding]:
    data = config.data
    if any(check_names(config)):
        return  # The names have been reported, and no path can be made of them.
    if data.repo_id is None and data.data_dir is None:
        yield Finding(level, "no dataset: give --lerobot_repo_id or --data_dir")
        return
    if data.data_dir is not None and not pathlib.Path(data.data_dir).exists():
        yield Finding(level, f"data.data_dir {data.data_dir} does not exist; name the directory of a dataset")
        return
    if data.is_fake:
        return
    stats = data.norm_stats_path
    if stats is not None and not stats.exists():
        command = "`acrlpd data stats --config ...`, with the config and the dataset that are given here"
        yield Finding(level, f"norm statistics {stats} are missing; compute them with {command}")
