"""Where episodes come from and how they become what the policy reads, as plain data."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Ge, Interval, MinLen

from acrlpd.config.run import Seed
from acrlpd.files import path_within
from acrlpd.models.augmentation import AugmentationLevel
from acrlpd.robots.base import SLOTS, Robot
from acrlpd.robots.generic import Generic

# The name that openpi gives to the file of norm statistics.
NORM_STATS_FILE = "norm_stats.json"

OnBadEpisode = Literal["error", "skip"]
OnDevice = Literal["auto", "always", "never"]
RewardSource = Literal["auto", "reward_column", "success_column", "labels"]
RewardKind = Literal["zero_one", "minus_one_zero"]
EpisodeFilter = Literal["all", "success"]


def _expand_home(config: object, *names: str) -> None:
    """Resolves `~/` in paths of a frozen config: no shell does it in YAML files and in `--key=~/path`."""
    for name in names:
        path = getattr(config, name)
        if path is not None and path.startswith("~/"):
            object.__setattr__(config, name, str(pathlib.Path(path).expanduser()))


@dataclasses.dataclass(frozen=True)
class RepackConfig:
    """Which dataset column goes where: openpi's repack transform, with the model's own slot names."""

    # Column or video feature for each of the model's cameras; None: the robot has no such camera.
    base_0_rgb: str | None = None
    left_wrist_0_rgb: str | None = None
    right_wrist_0_rgb: str | None = None
    # State columns, concatenated in this order.
    state: Annotated[tuple[str, ...], MinLen(1)] = ("observation.state",)
    # Action columns, concatenated in this order.
    actions: Annotated[tuple[str, ...], MinLen(1)] = ("action",)

    @property
    def cameras(self) -> dict[str, str]:
        """Slot -> column for the cameras that exist, in openpi's order."""
        return {slot: getattr(self, slot) for slot in SLOTS if getattr(self, slot) is not None}


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """Where rewards and terminals come from.

    A success is a terminal, and a failure is one if it has a reward of its own. A time limit is not a terminal.
    """

    # "labels": the sidecar file written by `acrlpd data label`; "reward_column" / "success_column": the
    # dataset's own; "auto": labels if there are any, else the reward column, else the success column.
    source: RewardSource = "auto"
    # Names of the dataset's columns; the value of a row belongs to the action of that row.
    reward_column: str = "next.reward"
    success_column: str = "next.success"
    done_column: str = "next.done"
    truncated_column: str = "next.truncated"
    # Whether a recording ends at its first success: right for demonstrations. In play data the robot may reach the goal
    # and leave it again: there each success is a terminal, and the recording goes on. Episodes of an environment end
    # when the environment says so.
    success_ends_episode: bool = True
    # Sidecar file; None: `<dataset>.labels.json` next to the dataset.
    labels_file: str | None = None
    # Rewards made from success: "zero_one" gives 1 at a success and 0 elsewhere, "minus_one_zero" gives 0 at a success
    # and -1 elsewhere, so that short episodes are worth more. The scale of the critics' values follows.
    kind: RewardKind = "zero_one"
    # Reward of the last step of an episode that failed, before `scale` and `bias`. The failure is then a terminal. An
    # episode failed if its label says so, or if `done_column` says at its last step that the episode is over,
    # `truncated_column` says that no time limit cut it, and it has no success. None: a failure is the end of a
    # recording, beyond which the critics know nothing.
    failure_reward: float | None = None
    # Rewards of any source are multiplied by `scale`, then `bias` is added.
    scale: float = 1.0
    bias: float = 0.0

    def __post_init__(self) -> None:
        _expand_home(self, "labels_file")


@dataclasses.dataclass(frozen=True)
class DemonstrationsConfig:
    """Episodes by the scripted expert of env.id, collected by `acrlpd train` if data_dir does not exist yet."""

    # How many episodes to collect; 0: data_dir must exist.
    num_episodes: Annotated[int, Ge(0)] = 0
    # Quality of the expert (`acrlpd demos list`): expert, noisy, mixed, detours or play.
    quality: str = "mixed"
    # Steps after which an episode is cut; None: the environment's own limit.
    max_episode_steps: Annotated[int | None, Ge(1)] = None
    # Seed of the episodes.
    seed: Seed = 0


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """One dataset and its way to the policy."""

    # LeRobot dataset id on the hub. "fake": random data in the model's shapes, for trying things out.
    repo_id: str | None = None
    # Local directory (LeRobot v2.x / v3.0, ALOHA or DROID HDF5). Wins over repo_id.
    data_dir: str | None = None
    # The robot: its names, units and cameras. "generic" passes state and actions through.
    robot: Robot = dataclasses.field(default_factory=Generic)
    repack: RepackConfig = dataclasses.field(default_factory=RepackConfig)
    rewards: RewardConfig = dataclasses.field(default_factory=RewardConfig)
    demonstrations: DemonstrationsConfig = dataclasses.field(default_factory=DemonstrationsConfig)

    # Norm statistics are read from and written to <assets_dir>/<asset_id>/norm_stats.json.
    assets_dir: str = "./assets"
    # One or more names with slashes in between. None: repo_id, or the name of data_dir.
    asset_id: str | None = None
    # What is normalised; the rest is given to the policy as it comes.
    normalize: tuple[Literal["state", "actions"], ...] = ("state", "actions")
    # Normalise by quantiles instead of mean and deviation; None: as openpi, quantiles for pi0.5.
    use_quantile_norm: bool | None = None
    # Train on actions relative to the state at the chunk's first step.
    use_delta_joint_actions: bool = False
    # Dims that become relative, run-length coded as in openpi: (6, -1, 6, -1) makes 6 joints relative and keeps the
    # gripper absolute, twice. None: the robot's usual mask.
    delta_action_mask: tuple[int, ...] | None = None

    # Take the prompt from the dataset's task. Where a step has no task, and with false, the default prompt is used.
    prompt_from_task: bool = True
    default_prompt: str | None = None
    # "paligemma": the SentencePiece model from the cache; "byte": built in, for small models; or a path.
    tokenizer: str = "paligemma"

    # Which episodes to train on. "success": clone only what worked.
    episode_filter: EpisodeFilter = "all"
    # At most this many episodes, from the first; None: all.
    max_episodes: Annotated[int | None, Ge(1)] = None
    # Share of the episodes that no batch is drawn from: evaluations compare the policy and the critics with them, also
    # without an environment. Of 10 and more episodes at least one is held out. 0: train on all episodes.
    validation_share: Annotated[float, Interval(ge=0, le=0.5)] = 0.05
    # Stop at a broken episode, or leave the episode out and list it.
    on_bad_episode: OnBadEpisode = "error"

    # Directory of the frame cache; None: a pool of decoded episodes in memory.
    frame_cache_dir: str | None = None
    # Decoded episodes kept in memory at a time when there is no frame cache; bounds resident memory. Other episodes
    # replace them after about one draw from each. 0: every frame is decoded when a batch needs it, which
    # takes the most CPU.
    episodes_per_memory_pool: Annotated[int, Ge(0)] = 64
    # Threads that prepare batches ahead; 0: a batch is made when it is asked for. The batches are the same either way.
    num_workers: Annotated[int, Ge(0)] = 2
    # Batches prepared ahead of the train step.
    prefetch_batches: Annotated[int, Ge(1)] = 2
    # Keep states, actions and rewards on the devices, where the train step gathers its batches: "auto" does so for
    # policies without images, if the data fits. "always" stops with a message where that is impossible.
    on_device: OnDevice = "auto"
    # Random crop, rotation and colour jitter of training images, on the device, as in openpi.
    augment_images: bool = True
    # How far these changes go: "standard" is openpi's own, "light" about half of them, "strong" about one and a half
    # times (docs/data_batches.md). Stronger: less over-fitting to light and camera, blurrier places of objects.
    augmentation_level: AugmentationLevel = "standard"

    def __post_init__(self) -> None:
        _expand_home(self, "data_dir", "assets_dir", "tokenizer", "frame_cache_dir")

    def implied_changes(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """A dataset that is named by `repo_id` replaces the directory, and the demonstrations, of a preset."""
        if given.get("repo_id") is None or "data_dir" in given:
            return {}
        return {"data_dir": None, "demonstrations.num_episodes": 0}

    @property
    def is_fake(self) -> bool:
        """Whether the data are random numbers in the model's shapes."""
        return self.repo_id == "fake" and self.data_dir is None

    @property
    def norm_stats_path(self) -> pathlib.Path | None:
        """Where the norm statistics of this dataset live; None while there is no dataset."""
        name = self.asset_id or (pathlib.Path(self.data_dir).resolve().name if self.data_dir else self.repo_id)
        if name is None:
            return None
        return path_within(pathlib.Path(self.assets_dir), name, "data.asset_id") / NORM_STATS_FILE
