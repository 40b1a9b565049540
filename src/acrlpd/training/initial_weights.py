"""The agent at step 0, with the initial weights of the policy and of the critics that the config names."""

import dataclasses
import logging
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import jax
from etils import epath
from flax import nnx

from acrlpd.agents import Agent
from acrlpd.checksums import CHECKSUMS_FILE, ChecksumError, directory_problems
from acrlpd.config import ConfigError, RLTrainConfig
from acrlpd.config.command_line import CRITICS, POLICY
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


# For each part: the files by which acrlpd knows a repository of the hub that has the part, and the files that are read.
# An address may end in /params, or name a file.
_ON_HUB = {
    POLICY: (
        [f"{PARAMS}/_METADATA", "_METADATA", WEIGHTS_FILE],
        [f"{PARAMS}/*", WEIGHTS_FILE, "_*", "d/*", "manifest.ocdbt", "ocdbt.process_*", "array_metadatas/*"],
    ),
    CRITICS: ([f"{RUN}/{RUN_FILE}", EXPORT_FILE, PARTS_FILE], [f"{CRITIC}/*", PARTS_FILE]),
}
_OF_BOTH_PARTS = [CHECKSUMS_FILE, EXPORT_FILE, f"{RUN}/*"]


@dataclasses.dataclass(frozen=True)
class InitialWeights:
    """Where the weights lie that a run starts with; None: they are random."""

    policy: str | None  # a directory or a file, on this machine or in openpi's bucket
    critics: pathlib.Path | None  # the directory of the critics in a checkpoint


def locate_weights(loader: WeightLoaderConfig) -> InitialWeights:
    """The places of the weights that a config names: of a run its newest checkpoint, of the hub a copy on this machine.

    The hub is asked once for an address, so policy and critics of one address are of one state of the repository. Both
    parts are located before one of them is read, which takes long: a run that trains has newer checkpoints then.
    """
    if loader.kind != "none" and loader.path is None:
        raise ConfigError(f"weight_loader.kind={loader.kind} needs weight_loader.path")
    named = {POLICY: None if loader.kind == "none" else loader.path, CRITICS: loader.critics}
    paths = {path for path in named.values() if path is not None}
    places = {path: _find_place(path, [part for part in named if named[part] == path]) for path in paths}
    policy, critics = (None if path is None else places[path] for path in named.values())
    if policy is not None and loader.kind == "checkpoint":
        policy = find_policy(policy)
    return InitialWeights(policy, None if critics is None else find_critics(critics))


def _find_place(path: str, parts: Sequence[str]) -> str:
    """Where parts can be read from: for an address of the hub a copy on this machine, otherwise `path`."""
    if not is_hub_address(path):
        return path
    one_of = [name for part in parts for name in _ON_HUB[part][0]]
    patterns = [name for part in parts for name in _ON_HUB[part][1]]
    return str(fetch(parse_hub_address(path), one_of=one_of, patterns=patterns + _OF_BOTH_PARTS))


def check_initial_weights(rl_config: RLTrainConfig) -> InitialWeights:
    """Locates the weights. Refuses weights that are missing or cannot be verified, and critics that do not fit.

    Called before the data is decoded, which is slow, and before baselines train, which have no critics.
    """
    weights = locate_weights(rl_config.weight_loader)
    if weights.critics is not None:
        check_critics(rl_config, weights.critics)
    if weights.policy is None:
        return weights
    if rl_config.weight_loader.kind == "paligemma":
        find_paligemma_file(weights.policy)
    elif (file := find_pytorch_file(weights.policy)) is not None:
        _verify_pytorch_file(file)
    else:
        _require_checksums(find_params_directory(weights.policy))
    return weights


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


def create_initial_agent(
    rl_config: RLTrainConfig, sharding: FSDPSharding, rng: jax.Array, weights: InitialWeights | None = None
) -> Agent:
    """The agent of a run at step 0. Weights go from the files straight to their devices and dtypes.

    `weights` are those of the config, if they have been checked; otherwise they are checked here.
    """
    weights = weights or check_initial_weights(rl_config)
    if weights.policy is None:
        agent = init_fsdp_train_state(rl_config, sharding, rng)
    else:
        agent = _create_with_policy(rl_config, sharding, rng, weights.policy)
    if weights.critics is None:
        return agent
    logger.info("loading the critics' weights from %s", weights.critics.parent)
    return with_critics(agent, weights.critics)


def _create_with_policy(rl_config: RLTrainConfig, sharding: FSDPSharding, rng: jax.Array, path: str) -> Agent:
    """The agent with the policy that lies at `path`, and with new critics."""
    logger.info("loading the policy's weights from %s", path)
    abstract = abstract_train_state(rl_config, sharding)
    wanted = nnx.merge_state(abstract.policy_params, abstract.frozen_params)
    # A checkpoint has every parameter but adapters, so only adapters are initialised.
    is_checkpoint = rl_config.weight_loader.kind == "checkpoint"
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
