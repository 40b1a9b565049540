import os
import shutil
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from data_pipeline_helpers import MODEL, SIZE, H

from acrlpd.config import DataConfig, QChunkingConfig, RepackConfig, RewardConfig, RLTrainConfig
from acrlpd.data.frames.cache_builder import build_frame_cache
from acrlpd.data.pipeline.config_norm_stats import write_norm_stats
from acrlpd.data.pipeline.labels import Labels
from acrlpd.data.sources.source import open_source
from acrlpd.data.tools.label import label_rule
from acrlpd.robots.libero import Libero

TESTS = Path(__file__).parents[1]
sys.path.append(str(TESTS / "robots"))  # the goldens of transforms


@pytest.fixture(scope="session")
def goldens() -> Path:
    return TESTS / "goldens"


def extract(folder: Path, name: str) -> Path:
    with tarfile.open(TESTS / "datasets" / f"{name}.tar.gz") as tar:
        tar.extractall(folder, filter="data")
    return folder / name


@pytest.fixture(scope="session")
def libero(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same six episodes in LeRobot v2.1 and v3.0; every frame says in its pixels which one it is."""
    folder = tmp_path_factory.mktemp("libero")
    return {version: extract(folder, f"libero_{version}") for version in ("v21", "v30")}


@pytest.fixture(scope="session")
def aloha(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Twelve episodes in LeRobot v2.1 and v3.0, with video and rewards."""
    folder = tmp_path_factory.mktemp("aloha")
    return {version: extract(folder, f"aloha_{version}") for version in ("v21", "v30")}


@pytest.fixture(scope="session")
def droid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return extract(tmp_path_factory.mktemp("droid"), "droid_like")


@pytest.fixture(scope="session")
def libero_configs(libero: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, RLTrainConfig]:
    """Version -> a config with norm statistics, labels and a frame cache for its copy of the dataset."""
    configs = {}
    for version, path in libero.items():
        folder = tmp_path_factory.mktemp(f"run_{version}")
        source = open_source(path)
        labels = Labels(folder / "labels.json", label_rule(source, "length != 61"))
        labels.save()
        build_frame_cache(source, folder / "cache", height=SIZE, width=SIZE)
        configs[version] = RLTrainConfig(
            name="test",
            seed=11,
            batch_size=24,
            model=MODEL,
            qchunking=QChunkingConfig(horizon_length=H, action_dim=7, sequence_ratio=0.5),
            data=DataConfig(
                data_dir=str(path),
                robot=Libero(),
                repack=RepackConfig(
                    base_0_rgb="image", left_wrist_0_rgb="wrist_image", state=("state",), actions=("actions",)
                ),
                rewards=RewardConfig(labels_file=str(labels.path), kind="minus_one_zero"),
                assets_dir=str(folder / "assets"),
                asset_id="libero",
                tokenizer="byte",
                frame_cache_dir=str(folder / "cache"),
                num_workers=0,
            ),
        )
        write_norm_stats(configs[version])
    return configs


@pytest.fixture
def config(libero_configs: dict[str, RLTrainConfig]) -> RLTrainConfig:
    return libero_configs["v30"]


@pytest.fixture(scope="session")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with all test datasets, unpacked. Not to be written to: see `copy_dataset`."""
    folder = tmp_path_factory.mktemp("datasets")
    for archive in (TESTS / "datasets").glob("*.tar.gz"):
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    return folder


@pytest.fixture
def copy_dataset(datasets: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Copies a dataset as hard links: replace files in the copy, never write into them."""

    def copy(name: str) -> Path:
        target = tmp_path / name
        shutil.copytree(datasets / name, target, copy_function=os.link)
        return target

    return copy
