"""The sections of a config that are about neither the algorithm nor the data."""

import dataclasses
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Interval

from acrlpd.config.score import SUCCESS
from acrlpd.execution.base import ChunkExecution
from acrlpd.execution.open_loop import OpenLoop

# Simulators take no larger seed.
SEEDS = Interval(ge=0, le=2**32 - 1)
Seed = Annotated[int, SEEDS]


@dataclasses.dataclass(frozen=True)
class WeightLoaderConfig:
    """Where the weights come from when a run starts; --load is short for these fields."""

    # "none": random; "checkpoint": an openpi checkpoint's `params`, a step directory, a run (its newest checkpoint), an
    # export, extracted parts, or model.safetensors of openpi's PyTorch models; "paligemma": PaliGemma's npz for the
    # vision-language part, random for the rest.
    kind: Literal["none", "checkpoint", "paligemma"] = "none"
    # Directory or file: local, gs:// or hf://owner/name@tag; every kind except "none" needs a path.
    path: str | None = None
    # Directory of a run, a checkpoint, an export or extracted parts whose critics the run starts with; None: random.
    critics: str | None = None


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Phases, frequencies and the shape of an update. Steps are updates of the agent."""

    # Updates on the dataset alone.
    offline_steps: Annotated[int, Ge(0)] = 30_000
    # Updates while the policy acts in the environment; 0: offline only.
    online_steps: Annotated[int, Ge(0)] = 0
    # Updates between evaluations; online they are twice as frequent. 0: only one evaluation, at the end of each phase.
    eval_frequency: Annotated[int, Ge(0)] = 10_000
    # Updates between two lines of metrics.
    log_frequency: Annotated[int, Ge(1)] = 100
    # Updates between checkpoints; there is always a checkpoint at the end.
    save_frequency: Annotated[int, Ge(1)] = 1_000
    # Evaluations without improvement after which a phase ends; 0: never.
    early_stopping_patience: Annotated[int, Ge(0)] = 0
    # Micro-batches per update, into which batch_size is split. More: the same result, less memory, slightly slower.
    gradient_accumulation_steps: Annotated[int, Ge(1)] = 1
    # Updates that are handed to the devices in one call, at most. The result is the same; small policies need many, or
    # the host is slower than the devices. None: as many as take a quarter of a second; one, if several processes train.
    updates_per_call: Annotated[int | None, Ge(1)] = None


@dataclasses.dataclass(frozen=True)
class FSDPConfig:
    """How the state of training lies on the devices. Batches are always split over all devices."""

    # Devices that share one copy of the large arrays; 1: every device holds all arrays. More: less memory on each
    # device, more communication.
    fsdp_devices: Annotated[int, Ge(1)] = 1
    # Arrays below this size, in MiB, are kept whole on every device.
    min_size_mib: Annotated[float, Ge(0)] = 4.0


@dataclasses.dataclass(frozen=True)
class OpenPICompatibilityConfig:
    """What stock openpi needs to serve the checkpoints."""

    # Write the moving average of the policy as the checkpoint's `params`, as openpi does.
    enable_ema_for_inference: bool = True
    # Check names, shapes and dtypes of a checkpoint's `params` against openpi's layout when it is written.
    validate_openpi_compatibility: bool = True
    # The config of openpi that this config follows; the README of an export names it.
    config_name: str | None = None
    # Joints of an arm at the start of an episode. As openpi's server does for ALOHA, ours sends them to clients in the
    # metadata "reset_pose". None: clients use their own pose.
    reset_pose: tuple[float, ...] | None = None


@dataclasses.dataclass(frozen=True)
class EnvConfig:
    """The environment of the online phase and of evaluation."""

    # gymnasium id, a name of `acrlpd.envs`, or module:name of your own; None: no environment (offline only).
    id: str | None = None
    # Environments stepped in parallel. More: larger policy batches, more processes.
    num_envs: Annotated[int, Ge(1)] = 1
    # Steps after which an episode is cut (not a terminal); None: the environment's own limit.
    max_episode_steps: Annotated[int | None, Ge(1)] = None
    # How the chunks of the policy are executed; env.replan_steps is short for env.execution.steps.
    execution: ChunkExecution = dataclasses.field(default_factory=OpenLoop)
    # Height and width of the rendered images, which must be those of the demonstrations. Smaller: faster.
    image_size: Annotated[tuple[int, int], Ge(1)] = (224, 224)
    # Seconds without an answer after which an environment is restarted.
    timeout_s: Annotated[float, Gt(0)] = 60.0


@dataclasses.dataclass(frozen=True)
class OnlineConfig:
    """The online phase: RLPD's mixture of replay and dataset."""

    # Share of each batch that comes from the dataset; the rest is replay. None: dataset and replay are one buffer, in
    # which every step is equally likely to begin a window.
    offline_ratio: Annotated[float | None, Interval(ge=0, le=1)] = 0.5
    # Updates per environment step. Higher: more learning per interaction, more overfitting.
    update_to_data_ratio: Annotated[float, Gt(0)] = 0.2
    # Environment steps collected before the first online update.
    start_steps: Annotated[int, Ge(0)] = 1_000
    # Episodes per round, in which the policy does not change; None: env.num_envs. Fewer: fresher policy, less parallel.
    episodes_per_round: Annotated[int | None, Ge(1)] = None
    # Candidates when acting; None: evaluation.best_of_n. More: greedier, less exploration.
    best_of_n: Annotated[int | None, Ge(1)] = None
    # First online updates in which only the critics learn, so that they see what the policy does before it changes.
    critic_warmup_steps: Annotated[int, Ge(0)] = 0
    # bc_weight moves linearly from its offline value to this value; None: bc_weight does not change.
    final_bc_weight: Annotated[float | None, Ge(0)] = None
    # Online updates over which bc_weight and actor_weight move.
    bc_weight_decay_steps: Annotated[int, Ge(0)] = 10_000
    # actor_weight, the weight of the policy improvement, moves in the same way to this value; None: actor_weight does
    # not change. Higher than offline: the policy follows the critics more as cloning counts less.
    final_actor_weight: Annotated[float | None, Gt(0)] = None
    # Let an actor process play while the learner trains. update_to_data_ratio is then an upper limit.
    async_actor: bool = False
    # Updates after which the actor process gets the newest policy.
    actor_refresh_steps: Annotated[int, Ge(1)] = 100


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """How a policy is judged. All policies that are compared play the same seeds."""

    # Episodes per evaluation. More: narrower interval (50 give about +-14 points at one half).
    num_episodes: Annotated[int, Ge(1)] = 50
    # Seed of the first episode; the i-th gets seed + i.
    seed: Seed = 10_000
    # Candidates when acting; None: num_action_samples.
    best_of_n: Annotated[int | None, Ge(1)] = None
    # What makes an evaluation the best one, whose checkpoint is kept and for which early stopping waits: success (equal
    # success is decided by reward), reward, length (shorter is better), validation_loss, action_error (both on held-out
    # episodes, lower is better), or a weighted sum such as "success + 0.01*reward". A run without an environment has no
    # success, and goes by its validation_loss.
    score: str = SUCCESS
    # Also measure success under noise on observations and actions, and for several numbers of candidates, at every
    # fifth evaluation step (multiples of 5 eval_frequency).
    robustness: bool = False
    noise_levels: Annotated[tuple[float, ...], Ge(0)] = (0.01, 0.05, 0.1)
    best_of_n_values: Annotated[tuple[int, ...], Ge(1)] = (1, 4, 16, 32)
    # Episodes recorded as video per evaluation.
    num_videos: Annotated[int, Ge(0)] = 0
    # Policies that `acrlpd train` also trains and judges, for comparison: cloning of all episodes, cloning of the
    # successful episodes, offline RL whose policy is cloned from what leads to a success, and offline RL for as many
    # updates as both phases have. Each takes about as long as a phase.
    baselines: tuple[Literal["bc", "bc_success_only", "offline_success", "offline_continued"], ...] = ()


@dataclasses.dataclass(frozen=True)
class AlertsConfig:
    """Who is told when trouble begins in a run (docs/monitoring.md#anomalies) and when the run ends."""

    # An alert at Weights & Biases, which mails it or sends it to Slack as your account there says. Needs logging.wandb.
    wandb: bool = False
    # Environment variable with the URL that gets each alert as JSON, by POST. Such URLs are secrets, and a config is no
    # place for a secret: checkpoints, exports, metric writers and the hub get the config.
    webhook_variable: str | None = None
    # Command and arguments, run without a shell. {title} and {text} stand for the alert; standard input is its JSON.
    command: tuple[str, ...] = ()
    # Seconds within which the same kind of trouble is told once.
    repeat_after_s: Annotated[float, Ge(0)] = 3_600.0

    @property
    def has_receiver(self) -> bool:
        return self.wandb or self.webhook_variable is not None or bool(self.command)


@dataclasses.dataclass(frozen=True)
class LoggingConfig:
    """Where metrics go. metrics.jsonl is always written."""

    # Weights & Biases; "disabled": not used.
    wandb: Literal["online", "offline", "disabled"] = "disabled"
    # The project at Weights & Biases and in trackio.
    project_name: str = "acrlpd_pi0"
    # TensorBoard event files in the run directory.
    tensorboard: bool = False
    # trackio, in its own directory on this machine.
    trackio: bool = False
    # Now and then, record an update in detail: gradients by layer, actions, critics, choices, images of the batch.
    debug: bool = False
    alerts: AlertsConfig = dataclasses.field(default_factory=AlertsConfig)


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Which checkpoints are kept. training.save_frequency says how often a checkpoint is written."""

    # Runs live in <directory>/<config name>/<exp_name>/.
    directory: str = "./checkpoints"
    # How many of the newest checkpoints are kept.
    max_to_keep: Annotated[int, Ge(1)] = 1
    # Checkpoints at multiples of this step are never removed; None: older checkpoints are removed.
    keep_period: Annotated[int | None, Ge(1)] = 5_000
    # Keep the best checkpoint by evaluation.score as well.
    keep_best: bool = True
    # Failed saves in a row after which the run stops.
    max_failures: Annotated[int, Ge(1)] = 3
