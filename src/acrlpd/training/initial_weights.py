"""The agent at step 0, with the initial weights of the policy and of the critics that the config names."""

import logging
import pathlib
import re
from typing import Any

import jax
from etils import epath
from flax import nnx

from acrlpd.agents import Agent
from acrlpd.checksums import CHECKSUMS_FILE, ChecksumError, directory_problems
from acrlpd.config import ConfigError, RLTrainConfig
from acrlpd.config.run import WeightLoaderConfig
from acrlpd.hub import fetch, is_hub_address, parse_hub_address
from acrlpd.models.openpi_checkpoint import (
    LORA,
    find_paligemma_file,
    find_params_directory,
    load_paligemma_weights,
    load_pi0_weights_from_openpi,
)
from acrlpd.models.openpi_pytorch import WEIGHTS_FILE, find_pytorch_file, load_pytorch_weights
from acrlpd.process import compile_fast
from acrlpd.runs.checkpoint_layout import CRITIC, EXPORT_FILE, PARAMS, PARTS_FILE, RUN, RUN_FILE
from acrlpd.runs.parts import find_critics, find_policy
from acrlpd.training.checkpoints.critics import check_critics, with_critics
from acrlpd.training.sharding import FSDPSharding, abstract_train_state, init_fsdp_train_state

logger = logging.getLogger(__name__)


def check_initial_weights(rl_config: RLTrainConfig) -> None:
    """Refuses weights that are missing or cannot be verified, and critics that do not fit the config.

    Called before the data is decoded, which is slow, and before baselines train, which have no critics.
    """
    loader = rl_config.weight_loader
    if loader.critics is not None:
        check_critics(rl_config, _find_critics(loader.critics))
    if loader.kind == "none" or loader.path is None:
        return
    path = _find_weights(loader)
    if loader.kind == "paligemma":
        find_paligemma_file(path)
    elif (file := find_pytorch_file(path)) is not None:
        _verify_pytorch_file(file)
    else:
        _require_checksums(find_params_directory(path))


def local_weights(path: str) -> str:
    """Where the weights can be read from: for an address of the hub a copy on this machine, otherwise `path`."""
    if not is_hub_address(path):
        return path
    one_of = (f"{PARAMS}/_METADATA", "_METADATA", WEIGHTS_FILE)  # the second one if the address ends in /params
    others = [
        CHECKSUMS_FILE,
        EXPORT_FILE,
        f"{RUN}/*",
        "_*",
        "d/*",
        "manifest.ocdbt",
        "ocdbt.process_*",
        "array_metadatas/*",
    ]
    return str(fetch(parse_hub_address(path), one_of=one_of, patterns=[f"{PARAMS}/*", WEIGHTS_FILE, *others]))


def _find_weights(loader: WeightLoaderConfig) -> str:
    """Where the weights of the policy lie on this machine or in openpi's bucket; of a run, its newest checkpoint."""
    if loader.path is None:
        raise ConfigError(f"weight_loader.kind={loader.kind} needs weight_loader.path")
    path = local_weights(loader.path)
    return find_policy(path) if loader.kind == "checkpoint" else path


def _find_critics(path: str) -> pathlib.Path:
    """The directory with the critics of a checkpoint on this machine or on the hub."""
    if is_hub_address(path):
        described = (f"{RUN}/{RUN_FILE}", EXPORT_FILE, PARTS_FILE)
        patterns = [f"{CRITIC}/*", f"{RUN}/*", EXPORT_FILE, PARTS_FILE, CHECKSUMS_FILE]
        path = str(fetch(parse_hub_address(path), one_of=described, patterns=patterns))
    return find_critics(path)


def _verify_pytorch_file(file: pathlib.Path) -> None:
    """Refuses a file of an export of acrlpd that has changed; openpi and lerobot write no checksums."""
    if (file.parent / CHECKSUMS_FILE).is_file():
        for problem in directory_problems(file.parent, only_recorded=True):
            raise ChecksumError(f"{problem}. Copy the directory again from a place where it is intact")


def _require_checksums(directory: epath.Path) -> None:
    """Refuses a `params` directory of acrlpd that has lost its checksums; openpi writes no checksums."""
    is_ours = any((directory.parent / name).exists() for name in (f"{RUN}/{RUN_FILE}", EXPORT_FILE, PARTS_FILE))
    if is_ours and not (directory / CHECKSUMS_FILE).exists():
        raise ChecksumError(
            f"{directory / CHECKSUMS_FILE} is missing, so the initial weights cannot be verified. acrlpd wrote this "
            "file with the weights: copy the directory again from a place where it is intact, or use another checkpoint"
        )


def create_initial_agent(rl_config: RLTrainConfig, sharding: FSDPSharding, rng: jax.Array) -> Agent:
    """The agent of a run at step 0. Weights go from the files straight to their devices and dtypes."""
    agent = _create_with_policy(rl_config, sharding, rng)
    critics = rl_config.weight_loader.critics
    if critics is None:
        return agent
    directory = _find_critics(critics)
    logger.info("loading the critics' weights from %s", directory.parent)
    return with_critics(agent, directory)


def _create_with_policy(rl_config: RLTrainConfig, sharding: FSDPSharding, rng: jax.Array) -> Agent:
    """The agent with the policy that the config names, and with new critics."""
    loader = rl_config.weight_loader
    if loader.kind == "none":
        return init_fsdp_train_state(rl_config, sharding, rng)
    check_initial_weights(rl_config)
    path = _find_weights(loader)
    logger.info("loading the policy's weights from %s", path)
    abstract = abstract_train_state(rl_config, sharding)
    wanted = nnx.merge_state(abstract.policy_params, abstract.frozen_params)
    # A checkpoint has every parameter but adapters, so only adapters are initialised.
    is_checkpoint = loader.kind == "checkpoint"
    target = _with_initial_values(rl_config, rng, wanted, only=LORA if is_checkpoint else ".*")
    file = find_pytorch_file(path) if is_checkpoint else None
    if file is not None:
        params = load_pytorch_weights(file, target)
    else:
        load = load_pi0_weights_from_openpi if is_checkpoint else load_paligemma_weights
        params = load(path, target)
    return init_fsdp_train_state(rl_config, sharding, rng, nnx.to_pure_dict(params))


def _with_initial_values(rl_config: RLTrainConfig, rng: jax.Array, wanted: nnx.State, *, only: str) -> nnx.State:
    """`wanted` with arrays in place of shapes for the parameters whose name matches `only`."""
    pattern = re.compile(only)
    chosen = {path: leaf for path, leaf in nnx.to_flat_state(wanted) if pattern.fullmatch("/".join(map(str, path)))}
    if not chosen:
        return wanted

    def create(rng: jax.Array) -> dict[Any, jax.Array]:
        flat = dict(nnx.to_flat_state(nnx.state(rl_config.model.create(rng))))
        return {path: flat[path].get_value().astype(leaf.get_value().dtype) for path, leaf in chosen.items()}

    places = {path: leaf.get_value().sharding for path, leaf in chosen.items()}
    values = jax.jit(create, out_shardings=places, compiler_options=compile_fast())(rng)
    return nnx.from_flat_state(
        [(path, leaf.replace(values.get(path, leaf.get_value()))) for path, leaf in nnx.to_flat_state(wanted)]
    )
