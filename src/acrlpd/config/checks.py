"""The single checks behind `validate_config`, one function per part of the config."""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Literal, NamedTuple

from acrlpd.config.optimizers import ConstantSchedule, CosineDecaySchedule, LRSchedule
from acrlpd.config.train_config import RLTrainConfig
from acrlpd.models.flow_policy_config import StateFlowPolicyConfig

# Action dims that a robot's transforms produce.
ROBOT_ACTION_DIM = {"aloha": 14, "droid": 8, "libero": 7}
PALIGEMMA_VOCAB = 257_152
BYTE_VOCAB = 259  # 256 bytes, padding, begin and end
RELEASED_WEIGHTS = "gs://openpi-assets/checkpoints/"


class Finding(NamedTuple):
    """One thing wrong with a config."""

    level: Literal["error", "warning"]
    message: str


def _error(message: str) -> Finding:
    return Finding("error", message)


def _warning(message: str) -> Finding:
    return Finding("warning", message)


def _at_least(minimum: float, **values: float) -> Iterator[Finding]:
    """Field names are given with double underscores for dots."""
    for name, value in values.items():
        if value < minimum:
            yield _error(f"{name.replace('__', '.')} must be at least {minimum}; found {value}")


def check_batch(config: RLTrainConfig, num_devices: int | None) -> Iterator[Finding]:
    accumulation, fsdp = config.training.gradient_accumulation_steps, config.fsdp.fsdp_devices
    bad = list(
        _at_least(
            1,
            batch_size=config.batch_size,
            training__gradient_accumulation_steps=accumulation,
            fsdp__fsdp_devices=fsdp,
            **({} if num_devices is None else {"num_devices": num_devices}),
        )
    )
    if bad:
        yield from bad
        return
    devices = fsdp if num_devices is None else num_devices
    if devices % fsdp:
        yield _error(
            f"fsdp.fsdp_devices {fsdp} does not divide the {devices} devices; use one of "
            f"{', '.join(str(n) for n in range(1, devices + 1) if devices % n == 0)}"
        )
    if config.batch_size % (accumulation * devices):
        step = accumulation * devices
        below, above = config.batch_size // step * step, -(-config.batch_size // step) * step
        choice = f"{below} or {above}" if below else f"{above}"
        yield _error(
            f"batch_size {config.batch_size} does not split into {accumulation} micro-batches over {devices} "
            f"devices; use {choice}, or change gradient_accumulation_steps"
        )
    if config.batch_size < 8:
        yield _warning(f"batch_size {config.batch_size} is small: gradients and advantages will be noisy")


def check_chunks(config: RLTrainConfig) -> Iterator[Finding]:
    chunk, horizon = config.qchunking, config.model.action_horizon
    if not 1 <= chunk.horizon_length <= horizon:
        yield _error(
            f"qchunking.horizon_length {chunk.horizon_length} must lie between 1 and the policy's "
            f"action_horizon {horizon}; lower it, or raise model.action_horizon"
        )
    if chunk.critic_action_horizon is not None and not (1 <= chunk.critic_action_horizon <= chunk.horizon_length):
        yield _error(
            f"qchunking.critic_action_horizon {chunk.critic_action_horizon} must lie between 1 and "
            f"horizon_length {chunk.horizon_length}"
        )
    if not 0.0 <= chunk.sequence_ratio <= 1.0:
        yield _error(f"qchunking.sequence_ratio must lie in [0, 1]; found {chunk.sequence_ratio}")
    if isinstance(config.model, StateFlowPolicyConfig):
        if chunk.action_dim != config.model.action_dim:
            yield _error(
                f"the state-space policy pads nothing: qchunking.action_dim {chunk.action_dim} must equal "
                f"model.action_dim {config.model.action_dim}"
            )
    elif not 1 <= chunk.action_dim <= config.model.action_dim:
        yield _error(
            f"qchunking.action_dim {chunk.action_dim} (the robot's) must lie between 1 and model.action_dim "
            f"{config.model.action_dim} (what the policy pads to)"
        )
    replan = config.env.replan_steps
    if replan is not None and not 1 <= replan <= horizon:
        yield _error(f"env.replan_steps {replan} must lie between 1 and model.action_horizon {horizon}")


def check_algorithm(config: RLTrainConfig) -> Iterator[Finding]:
    hp, weights = config.acrlpd, config.acrlpd.loss_weights
    samples = hp.num_action_samples
    yield from _at_least(
        1,
        acrlpd__num_action_samples=samples,
        acrlpd__sampling_steps=hp.sampling_steps,
        acrlpd__best_of_n__chunk_size=hp.best_of_n.chunk_size,
        acrlpd__best_of_n__top_k=hp.best_of_n.top_k,
    )
    yield from _at_least(
        0,
        acrlpd__critic_warmup_steps=hp.critic_warmup_steps,
        acrlpd__best_of_n__diversity_weight=hp.best_of_n.diversity_weight,
        **{f"acrlpd__loss_weights__{name}": value for name, value in dataclasses.asdict(weights).items()},
    )
    positive = {
        "acrlpd.discount": hp.discount,
        "acrlpd.target_update_tau": hp.target_update_tau,
        "acrlpd.huber_delta": hp.huber_delta,
        "acrlpd.awr_weight_clip": hp.awr_weight_clip,
        "acrlpd.initial_temperature": hp.initial_temperature,
    }
    yield from (_error(f"{name} must be above 0; found {v}") for name, v in positive.items() if v <= 0)
    at_most_one = {"acrlpd.discount": hp.discount, "acrlpd.target_update_tau": hp.target_update_tau}
    yield from (_error(f"{name} must be at most 1; found {v}") for name, v in at_most_one.items() if v > 1)
    if hp.ema_decay is not None and not 0.0 <= hp.ema_decay < 1.0:
        yield _error(f"acrlpd.ema_decay must lie in [0, 1), or be null for no average; found {hp.ema_decay}")
    temperature = hp.best_of_n.selection_temperature
    if temperature is not None and temperature <= 0:
        yield _error(f"acrlpd.best_of_n.selection_temperature must be above 0; found {temperature}")
    if hp.best_of_n.top_k > max(samples, 1):
        yield _error(f"acrlpd.best_of_n.top_k {hp.best_of_n.top_k} exceeds the {samples} candidates")
    if samples == 1 and weights.actor_weight > 0 and hp.actor_loss == "best_of_n":
        yield _error("actor_loss best_of_n with num_action_samples 1 clones the policy itself; use 2 or more")
    if samples == 1 and weights.actor_weight > 0 and hp.actor_loss == "awr":
        yield _warning("with num_action_samples 1 the advantage baseline is a single sample: noisy weights")
    if samples == 1 and hp.learnable_temperature:
        yield _error(
            "a learned temperature needs the spread of at least 2 candidates: raise num_action_samples, or set "
            "acrlpd.learnable_temperature false"
        )
    if samples > 64:
        yield _warning(
            f"num_action_samples {samples} costs more than the rest of the step; 4 to 32 is usual. "
            "`acrlpd plan` shows what it costs"
        )
    if weights.actor_weight == 0 and weights.bc_weight == 0:
        yield _warning("actor_weight and bc_weight are both 0: the policy does not train, only the critics do")


def check_critic(config: RLTrainConfig) -> Iterator[Finding]:
    critic = config.critic
    yield from _at_least(1, critic__num_critics=critic.num_critics)
    if not critic.hidden_dims or min(critic.hidden_dims) < 1:
        yield _error(f"critic.hidden_dims must be one or more sizes; found {list(critic.hidden_dims)}")
    if not 0.0 <= critic.dropout_rate < 1.0:
        yield _error(f"critic.dropout_rate must lie in [0, 1); found {critic.dropout_rate}")
    if critic.kernel_init_scale <= 0:
        yield _error(f"critic.kernel_init_scale must be above 0; found {critic.kernel_init_scale}")
    subset = critic.target_subset_size
    if subset is not None and not 1 <= subset <= critic.num_critics:
        yield _error(f"critic.target_subset_size {subset} must lie between 1 and num_critics {critic.num_critics}")
    if critic.num_critics == 1 or critic.num_critics > 12:
        yield _warning(f"critic.num_critics {critic.num_critics} is unusual; 2 to 12 are tried")


def check_policy(config: RLTrainConfig) -> Iterator[Finding]:
    model, loader = config.model, config.weight_loader
    if loader.kind != "none" and not loader.path:
        yield _error(f"weight_loader.kind {loader.kind} needs weight_loader.path")
    if isinstance(model, StateFlowPolicyConfig):
        if config.freeze_pi0_backbone:
            yield _error("freeze_pi0_backbone: the state-space policy has no backbone; turn it off")
        if loader.kind != "none":
            yield _error("weight_loader: openpi and PaliGemma weights do not fit the state-space policy")
        return
    released = loader.path or ""
    if loader.kind == "checkpoint" and released.startswith(RELEASED_WEIGHTS):
        for name, needed in {
            "action_dim": 32,
            "vocab_size": PALIGEMMA_VOCAB,
            "siglip_variant": "So400m/14",
        }.items():
            if getattr(model, name) != needed:
                yield _error(
                    f"model.{name} {getattr(model, name)} does not fit the released weights {released}; "
                    f"they need {needed}"
                    + (" (the robot's own is qchunking.action_dim)" if name == "action_dim" else "")
                )
        family = released.removeprefix(RELEASED_WEIGHTS).partition("_")[0]
        if family in ("pi0", "pi05") and (family == "pi05") != model.pi05:
            yield _error(f"model.pi05 is {model.pi05}, but {released} are {family} weights")
    if config.freeze_pi0_backbone and config.acrlpd.critic_gradient_to_policy:
        yield _error("critic_gradient_to_policy trains the prefix, which freeze_pi0_backbone keeps fixed; turn one off")
    if config.freeze_pi0_backbone and "lora" in model.paligemma_variant:
        yield _error(
            f"freeze_pi0_backbone keeps {model.paligemma_variant} fixed, adapters included; use gemma_2b, "
            "or LoRA without freezing"
        )
    if config.freeze_pi0_backbone and config.acrlpd.actor_loss == "policy_gradient":
        yield _warning(
            "policy_gradient with a frozen backbone moves only the action expert, through all "
            f"{config.acrlpd.sampling_steps} denoising steps: much memory for little; awr is the usual choice"
        )
    if model.discrete_state_input and model.prompt_len < 100:
        yield _warning(
            f"the state takes about 4 prompt tokens per dim: max_token_len {model.prompt_len} may cut the "
            "prompt; released pi0.5 uses 200"
        )


def check_learning_rates(config: RLTrainConfig) -> Iterator[Finding]:
    schedules: dict[str, LRSchedule] = {
        "actor_lr_schedule": config.actor_lr_schedule,
        "critic_lr_schedule": config.critic_lr_schedule,
        "temperature_lr_schedule": config.temperature_lr_schedule,
    }
    for name, schedule in schedules.items():
        if schedule.peak_lr <= 0:
            yield _error(f"{name}.peak_lr must be above 0; found {schedule.peak_lr}")
        if not isinstance(schedule, ConstantSchedule):
            yield from _at_least(0, **{f"{name}.warmup_steps": schedule.warmup_steps})
            if schedule.warmup_steps >= max(config.num_train_steps, 1):
                yield _warning(
                    f"{name}.warmup_steps {schedule.warmup_steps} is not over within the {config.num_train_steps} steps"
                )
        if isinstance(schedule, CosineDecaySchedule):
            if schedule.decay_steps <= schedule.warmup_steps:
                yield _error(
                    f"{name}.decay_steps {schedule.decay_steps} must exceed warmup_steps {schedule.warmup_steps}"
                )
            if not 0 <= schedule.decay_lr <= schedule.peak_lr:
                yield _error(f"{name}.decay_lr {schedule.decay_lr} must lie between 0 and peak_lr {schedule.peak_lr}")
    for name in ("actor_optimizer", "critic_optimizer", "temperature_optimizer"):
        if getattr(config, name).clip_gradient_norm <= 0:
            yield _error(f"{name}.clip_gradient_norm must be above 0")
    if config.weight_loader.kind != "none" and config.actor_lr_schedule.peak_lr > 1e-4:
        yield _warning(
            f"actor peak_lr {config.actor_lr_schedule.peak_lr} is high for pretrained weights; openpi "
            "fine-tunes with 2.5e-5 to 5e-5 (--pi0_lr)"
        )
    if config.critic_lr_schedule.peak_lr > 3e-3:
        yield _warning(
            f"critic peak_lr {config.critic_lr_schedule.peak_lr} is high; 1e-4 to 1e-3 is usual (--critic_lr)"
        )


def check_training(config: RLTrainConfig) -> Iterator[Finding]:
    training = config.training
    yield from _at_least(
        0,
        training__offline_steps=training.offline_steps,
        training__online_steps=training.online_steps,
        training__eval_frequency=training.eval_frequency,
        training__early_stopping_patience=training.early_stopping_patience,
        seed=config.seed,
    )
    yield from _at_least(
        1,
        training__log_frequency=training.log_frequency,
        training__save_frequency=training.save_frequency,
        checkpoints__max_to_keep=config.checkpoints.max_to_keep,
        checkpoints__max_failures=config.checkpoints.max_failures,
        evaluation__num_episodes=config.evaluation.num_episodes,
        num_train_steps=config.num_train_steps,
    )
    for name in ("name", "exp_name"):
        value = getattr(config, name)
        if not value or value in (".", "..") or "/" in value:
            yield _error(f"{name} must be a plain directory name; found {value!r}")


def check_online(config: RLTrainConfig, level: Literal["error", "warning"]) -> Iterator[Finding]:
    """The environment and all that happens in it; a missing one is found at `level`."""
    env, online, online_steps = config.env, config.online, config.training.online_steps
    optional = {
        "env__max_episode_steps": env.max_episode_steps,
        "online__episodes_per_round": online.episodes_per_round,
        "online__best_of_n": online.best_of_n,
        "evaluation__best_of_n": config.evaluation.best_of_n,
    }
    yield from _at_least(
        1,
        env__num_envs=env.num_envs,
        online__actor_refresh_steps=online.actor_refresh_steps,
        **{name: value for name, value in optional.items() if value is not None},
    )
    yield from _at_least(
        0,
        online__start_steps=online.start_steps,
        online__critic_warmup_steps=online.critic_warmup_steps,
        online__bc_weight_decay_steps=online.bc_weight_decay_steps,
        online__final_bc_weight=online.final_bc_weight or 0.0,
    )
    if min(env.image_size) < 1:
        yield _error(f"env.image_size must be height and width in pixels; found {list(env.image_size)}")
    if env.timeout_s <= 0:
        yield _error(f"env.timeout_s must be above 0; found {env.timeout_s}")
    if not 0.0 <= online.offline_ratio <= 1.0:
        yield _error(f"online.offline_ratio must lie in [0, 1]; found {online.offline_ratio}")
    if online.update_to_data_ratio <= 0:
        yield _error(f"online.update_to_data_ratio must be above 0; found {online.update_to_data_ratio}")
    if online_steps > 0 and env.id is None:
        yield Finding(
            level,
            f"the {online_steps} online steps need an environment: set env.id, or online_steps 0 to train offline only",
        )
    if online_steps > 0 and len(config.data.repack.actions) != 1:
        yield _error(
            "an online phase needs actions in one column of the dataset; data.repack.actions names "
            f"{', '.join(config.data.repack.actions) or 'none'}"
        )


def check_baselines(config: RLTrainConfig) -> Iterator[Finding]:
    names, training = config.evaluation.baselines, config.training
    if names and config.env.id is None:
        yield _error(f"evaluation.baselines {', '.join(names)} are judged in an environment: set env.id")
    if len(set(names)) < len(names):
        yield _error(f"evaluation.baselines names one twice: {', '.join(names)}")
    if "offline_continued" in names and not (training.online_steps and training.offline_steps):
        yield _error(
            "evaluation.baselines offline_continued goes on offline where the run goes online: it needs both "
            f"training.offline_steps and training.online_steps; found {training.offline_steps} and "
            f"{training.online_steps}"
        )


def check_cloning(config: RLTrainConfig) -> Iterator[Finding]:
    """Without a critic there is nobody to ask for a value."""
    hp, evaluation = config.acrlpd, config.evaluation
    if hp.loss_weights.critic_weight != 0:
        return
    without = "acrlpd.loss_weights.critic_weight 0 trains no critic"
    if hp.loss_weights.actor_weight > 0:
        yield _error(f"{without}, which actor_loss {hp.actor_loss} needs: set acrlpd.loss_weights.actor_weight 0")
    if hp.bc_importance_weighting:
        yield _error(f"{without}, which bc_importance_weighting needs: turn it off")
    if hp.learnable_temperature:
        yield _error(f"{without}, and with it no temperature: set acrlpd.learnable_temperature false")
    if hp.critic_warmup_steps > 0:
        yield _error(f"{without}, and there is nothing to warm up: set acrlpd.critic_warmup_steps 0")
    if config.training.online_steps > 0:
        yield _error(f"{without}, and cloning one's own episodes improves nothing: set training.online_steps 0")
    samples = hp.num_action_samples if evaluation.best_of_n is None else evaluation.best_of_n
    if config.env.id is not None and samples > 1:
        yield _error(f"{without} that could choose among {samples} candidates: set evaluation.best_of_n 1")
    if evaluation.robustness and max(evaluation.best_of_n_values, default=1) > 1:
        yield _error(f"{without} that could choose among candidates: set evaluation.best_of_n_values 1")


def check_data(config: RLTrainConfig) -> Iterator[Finding]:
    data = config.data
    yield from _at_least(
        1,
        data__episodes_per_memory_pool=data.episodes_per_memory_pool,
        data__num_workers=data.num_workers,
        data__prefetch_batches=data.prefetch_batches,
    )
    expected = ROBOT_ACTION_DIM.get(data.robot)
    if expected is not None and config.qchunking.action_dim != expected:
        yield _error(
            f"qchunking.action_dim {config.qchunking.action_dim} does not fit robot {data.robot}, which has {expected}"
        )
    if data.adapt_to_pi and data.robot != "aloha":
        yield _error(f"data.adapt_to_pi is for ALOHA; the robot is {data.robot}")
    if data.delta_action_mask is not None and sum(map(abs, data.delta_action_mask)) > config.qchunking.action_dim:
        yield _error(
            f"data.delta_action_mask {list(data.delta_action_mask)} covers more than the "
            f"{config.qchunking.action_dim} action dims"
        )
    if isinstance(config.model, StateFlowPolicyConfig):
        return
    cameras = data.repack.cameras
    for camera in config.model.image_keys:
        if camera not in cameras:
            yield _error(
                f"camera {camera} of the policy has no column: set data.repack.{camera}, or leave it out of "
                "model.image_keys"
            )
    for camera, column in cameras.items():
        if camera not in config.model.image_keys:
            yield _warning(f"column {column!r} is mapped to camera {camera}, which model.image_keys leaves out")
    if data.tokenizer == "paligemma" and config.model.vocab_size < PALIGEMMA_VOCAB:
        yield _error(
            f"the paligemma tokenizer needs model.vocab_size {PALIGEMMA_VOCAB}; found "
            f"{config.model.vocab_size}. Small models read bytes: data.tokenizer byte"
        )
    if data.tokenizer == "byte" and config.model.vocab_size < BYTE_VOCAB:
        yield _error(f"the byte tokenizer needs model.vocab_size {BYTE_VOCAB} or more; found {config.model.vocab_size}")
    if data.tokenizer == "byte" and config.weight_loader.kind != "none":
        yield _error("data.tokenizer byte does not speak the language of pretrained weights; use paligemma")
    if not data.prompt_from_task and data.default_prompt is None:
        yield _error("no prompt: set data.default_prompt, or data.prompt_from_task true")


def check_files(config: RLTrainConfig, level: Literal["error", "warning"]) -> Iterator[Finding]:
    data = config.data
    if data.repo_id is None and data.data_dir is None:
        yield Finding(level, "no dataset: give --lerobot_repo_id or --data_dir")
        return
    if data.data_dir is not None and not pathlib.Path(data.data_dir).exists():
        yield Finding(level, f"data.data_dir {data.data_dir} does not exist")
        return
    if data.repo_id == "fake" and data.data_dir is None:
        return
    stats = data.norm_stats_path
    if stats is not None and not stats.exists():
        command = "`acrlpd data stats --config ...`, the config and dataset as given here"
        yield Finding(level, f"norm statistics {stats} are missing; compute them with {command}")
