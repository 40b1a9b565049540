"""The seeds' data loader: `acrlpd.data` with the seeds' arguments."""

import dataclasses
import pathlib
from typing import Any

from jax.sharding import NamedSharding

from acrlpd.batch import Batch
from acrlpd.config import RLTrainConfig, apply_config_overrides
from acrlpd.data.pipeline.dataset import open_dataset
from acrlpd.data.pipeline.loader import DataLoader
from acrlpd.training.sharding import create_sharding

# The keys of the seeds' batches, each a field of `Batch`.
QCHUNKING_KEYS = (
    *("observations", "next_observations", "actions", "rewards", "masks", "valid"),
    *("terminals", "next_terminal", "sequence_mask"),
)


class ACRLPDDataLoader(DataLoader):
    """A `DataLoader` that opens its own dataset and puts batches on the devices."""

    def __init__(
        self,
        rl_config: RLTrainConfig,
        batch_size: int | None = None,
        episodes_per_memory_pool: int | None = None,
        skip_norm_stats: bool = False,
        device_sharding: NamedSharding | None = None,
        data_sharding: NamedSharding | None = None,
        **overrides: Any,
    ) -> None:
        """`batch_size` and `episodes_per_memory_pool` are those of the config unless given.

        With `skip_norm_stats` states and actions stay as they are. `data_sharding` is 001's other name of
        `device_sharding`. `overrides` are further fields of the config.
        """
        if episodes_per_memory_pool is not None:
            overrides["data.episodes_per_memory_pool"] = episodes_per_memory_pool
        if skip_norm_stats:
            overrides["data.normalize"] = ()
        rl_config = apply_config_overrides(rl_config, overrides)
        super().__init__(
            open_dataset(rl_config),
            rl_config,
            batch_size=batch_size,
            device_sharding=device_sharding or data_sharding or create_sharding(rl_config).data,
        )

    def refresh_memory_pool(self, epoch_seed: int) -> None:
        """Goes to the first batch of an epoch. The loader does this by itself when an epoch ends."""
        self.load_state_dict(self.state_dict() | {"step": epoch_seed * self.steps_per_epoch})

    def get_dataset_statistics(self) -> dict[str, Any]:
        """Numbers about the episodes that batches are drawn from; `acrlpd data inspect` says more."""
        table, statistics = self.dataset.table, self.dataset.norm_stats or {}
        return {
            "num_episodes": len(table.offsets) - 1,
            "num_steps": int(table.offsets[-1]),
            "steps_per_epoch": self.steps_per_epoch,
            "norm_stats": {name: dataclasses.asdict(stats) for name, stats in statistics.items()},
        }


create_acrlpd_data_loader = ACRLPDDataLoader


def create_lerobot_acrlpd_dataloader(
    lerobot_dataset: Any, batch_size: int, horizon_length: int, *, rl_config: RLTrainConfig
) -> ACRLPDDataLoader:
    """The loader of a LeRobot dataset: a directory, an id on the hub, or lerobot's own object (its `root` is read).

    `rl_config` names the robot, the columns and the policy, which a dataset does not know.
    """
    root = str(getattr(lerobot_dataset, "root", lerobot_dataset))
    place = {"data_dir": root} if pathlib.Path(root).is_dir() else {"repo_id": root}
    changes = {f"data.{name}": value for name, value in place.items()} | {"qchunking.horizon_length": horizon_length}
    return ACRLPDDataLoader(apply_config_overrides(rl_config, changes), batch_size)


def validate_qchunking_batch_format(batch: Batch | dict[str, Any]) -> bool:
    """Whether a batch has everything that the algorithm reads; a `Batch` always has."""
    return all(key in batch if isinstance(batch, dict) else hasattr(batch, key) for key in QCHUNKING_KEYS)
