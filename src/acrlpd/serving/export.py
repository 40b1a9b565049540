"""A directory that stock openpi serves, and that the server of this project serves with best-of-N."""

import contextlib
import dataclasses
import json
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from flax.traverse_util import unflatten_dict

from acrlpd.agents.critics.base import keep_members
from acrlpd.checksums import write_checksums
from acrlpd.choice import kind_name
from acrlpd.config import RLTrainConfig, to_dict
from acrlpd.data.pipeline.loader import create_data_loader
from acrlpd.files import new_directory
from acrlpd.models.observation import Observation
from acrlpd.models.openpi_checkpoint import save_openpi_pi0_checkpoint, verify_openpi_checkpoint_compatibility
from acrlpd.models.paligemma_sizes import DType
from acrlpd.policies.acting_model import ActingModel, candidate_noise, choose_actions, judge_candidates
from acrlpd.policies.checkpoint import Checkpoint, critic_arrays, open_checkpoint
from acrlpd.policies.levels import Level, serving_level
from acrlpd.runs.checkpoint_layout import (
    ASSETS,
    CRITIC,
    EXPORT_FILE,
    FORMAT,
    PARAMS,
    CheckpointError,
    describe_assets,
)
from acrlpd.serving.export_readme import write_readme

Critics = Literal["level", "all", "none"]

# The mean difference of normalised actions between the training policy and its export that rounding explains.
_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
_VERIFY_BATCH = 2
# An export that does not keep all critics keeps those whose choices, among so many candidates for so many observations
# of the run's data, the whole ensemble values most.
_NUM_CANDIDATES = 16
_NUM_OBSERVATIONS = 32


@dataclasses.dataclass(frozen=True)
class Verification:
    """How far the actions of an export are from those of the training policy, in normalised units."""

    mean_difference: float
    max_difference: float
    tolerance: float

    def __bool__(self) -> bool:
        return self.mean_difference <= self.tolerance


def export_policy(
    source: str | pathlib.Path,
    output: str | pathlib.Path,
    *,
    level: Level = "standard",
    merge_adapters: bool = False,
    dtype: DType | None = None,
    critics: Critics = "level",
    guidance: float | None = None,
    overwrite: bool = False,
    no_norm_stats: bool = False,
) -> Verification:
    """Exports a run (its newest checkpoint) or one checkpoint, and compares the result with the source.

    `dtype` None keeps every parameter as it was trained, and `guidance` None is the guidance of the run. With
    `no_norm_stats` the export has no norm statistics. The directory appears when it is complete and its actions are
    right, or not at all.
    """
    checkpoint = open_trained(source, no_norm_stats=no_norm_stats).with_guidance(guidance)
    if critics == "none":
        refuse_to_lose_networks(checkpoint.rl_config, "choose --critics level or --critics all")
    with exported_directory(output, overwrite=overwrite) as directory:
        _write(checkpoint, directory, level, merge_adapters, dtype, critics)
        verification = verify_export(checkpoint, open_checkpoint(directory), dtype)
        refuse_other_actions(verification)
    return verification


def open_trained(source: str | pathlib.Path, *, no_norm_stats: bool) -> Checkpoint:
    """The checkpoint of a run that is to be exported, with the norm statistics of the training or refused."""
    checkpoint = open_checkpoint(source, no_norm_stats=no_norm_stats)
    if checkpoint.kind != "run":
        raise CheckpointError(f"{checkpoint.directory} is not a checkpoint of a run: there is nothing to export")
    checkpoint.load_norm_stats()
    return checkpoint


@contextlib.contextmanager
def exported_directory(output: str | pathlib.Path, *, overwrite: bool) -> Iterator[pathlib.Path]:
    """A directory to write an export to. It appears as `output` at the end of the `with` statement, or not at all."""
    target = pathlib.Path(output).expanduser().resolve()  # of a link, the directory that it points to is replaced
    if target.exists() and not overwrite:
        raise CheckpointError(f"{target} exists; choose another --output or replace it with --overwrite")
    if target.exists() and not (target / EXPORT_FILE).is_file():
        raise CheckpointError(f"--overwrite: {target} is not an exported directory; move it away")
    with new_directory(target) as partial:
        yield partial
        if target.exists():
            shutil.rmtree(target)


def refuse_other_actions(verification: Verification) -> None:
    if not verification:
        raise CheckpointError(
            f"the exported policy acts differently: actions differ by {verification.mean_difference:.2g} on "
            f"average, rounding explains {verification.tolerance:.2g}; nothing was exported"
        )


def refuse_to_lose_networks(rl_config: RLTrainConfig, fix: str) -> None:
    """The networks of an improvement are exported with the critics; without them, another policy would act."""
    improvement = rl_config.improvement
    if improvement.makes_candidates and rl_config.acrlpd.loss_weights.actor_weight != 0:
        raise CheckpointError(
            f"the improvement {kind_name(improvement)} makes the actions of this run, and its networks are exported "
            f"with the critics: {fix}"
        )


def _write(
    checkpoint: Checkpoint,
    directory: pathlib.Path,
    level: Level,
    merge_adapters: bool,
    dtype: DType | None,
    critics: Critics,
) -> None:
    model, rl_config = checkpoint.load_model(), checkpoint.rl_config
    serving = serving_level(rl_config, level)
    members = None
    if critics == "none" or not checkpoint.has_critics:
        serving = dataclasses.replace(serving, best_of_n=1, num_critics=0)
    else:
        wanted = rl_config.critic.num_critics if critics == "all" else serving.num_critics
        members = _choose_members(model, rl_config, wanted)
        serving = dataclasses.replace(serving, num_critics=len(members))
        _write_critics(model, rl_config, directory, members)
        # The config describes what the directory holds; random subsets of critics are for training.
        critic_config = dataclasses.replace(rl_config.critic, num_critics=len(members), target_subset_size=None)
        rl_config = dataclasses.replace(rl_config, critic=critic_config)
    rl_config, params = convert_policy(rl_config, model.params, merge_adapters=merge_adapters, dtype=dtype)
    save_openpi_pi0_checkpoint(params, directory)
    write_checksums(directory / PARAMS)
    content = {
        "level": level,
        "serving": dataclasses.asdict(serving),
        "critics": None if members is None else members.tolist(),
        "params_dtype": dtype or "as trained",
        "config": to_dict(rl_config),
    }
    describe_export(checkpoint, directory, content)
    write_checksums(directory, [directory / EXPORT_FILE])  # the README may be changed; the others have their own
    exported = open_checkpoint(directory, no_norm_stats=checkpoint.no_norm_stats)
    write_readme(directory, exported, level, merged_adapters=merge_adapters)
    if rl_config.model.in_openpi:
        problems = verify_openpi_checkpoint_compatibility(directory, rl_config.model)
        if problems:
            raise CheckpointError("openpi would not load the export:\n  " + "\n  ".join(problems))


def _write_critics(model: ActingModel, rl_config: RLTrainConfig, directory: pathlib.Path, members: np.ndarray) -> None:
    """Writes these members of the ensemble, and the other arrays by which a policy chooses."""
    assert model.critics is not None
    chosen = keep_members(model.critics.online, members)
    with ocp.PyTreeCheckpointer(use_ocdbt=True, use_zarr3=False) as checkpointer:
        arrays = critic_arrays(model.critics.replace(online=chosen), rl_config.acrlpd)
        checkpointer.save(directory / CRITIC, unflatten_dict(arrays))
    write_checksums(directory / CRITIC)


def convert_policy(
    rl_config: RLTrainConfig, params: nnx.State, *, merge_adapters: bool, dtype: DType | None
) -> tuple[RLTrainConfig, nnx.State]:
    """The policy as it is exported, and its config: with its adapters merged, and in another dtype, if asked for."""
    if merge_adapters:
        policy_config, params = rl_config.model.merge_adapters(params)
        rl_config = dataclasses.replace(rl_config, model=policy_config)
    if dtype is not None:
        params = jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)), params)
    return rl_config, params


def describe_export(checkpoint: Checkpoint, directory: pathlib.Path, content: Mapping[str, Any]) -> None:
    """Copies the assets of a checkpoint into its export, and writes acrlpd.json: `content` and the origin."""
    stats, assets = checkpoint.norm_stats_directory, directory / ASSETS
    if stats is not None:
        shutil.copytree(stats, directory / stats.relative_to(checkpoint.directory))
    for name, file_content in checkpoint.rl_config.model.asset_files().items():
        (assets / name).parent.mkdir(parents=True, exist_ok=True)
        (assets / name).write_bytes(file_content)
    files = {path.relative_to(assets).as_posix(): path.read_bytes() for path in assets.rglob("*") if path.is_file()}
    origin = {
        "format": FORMAT,
        "source": str(checkpoint.directory),
        "step": checkpoint.step,
        # Without its statistics an export still names them, so that nobody serves the export by mistake.
        "assets": checkpoint.assets if checkpoint.no_norm_stats else describe_assets(files),
        "reward_origin": checkpoint.reward_origin and checkpoint.reward_origin.name,
    }
    (directory / EXPORT_FILE).write_text(json.dumps(origin | dict(content), indent=2) + "\n")


def _choose_members(model: ActingModel, rl_config: RLTrainConfig, wanted: int) -> np.ndarray:
    """The `wanted` best members of the ensemble, or all; in the order of the ensemble."""
    num_critics = rl_config.critic.num_critics
    if wanted >= num_critics:
        return np.arange(num_critics)
    try:
        with create_data_loader(rl_config, _NUM_OBSERVATIONS) as loader:
            observation = jax.device_get(loader.sample_batch().observations)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"critics are ranked on the run's data, which cannot be read: {error}\n"
            "Export where the data is, or keep every critic with --critics all"
        ) from error
    return np.sort(rank_critics(model, observation, num_steps=rl_config.acrlpd.sampling_steps)[:wanted])


def rank_critics(model: ActingModel, observation: Observation, *, num_steps: int) -> np.ndarray:
    """Members of the ensemble, best first.

    A member's score is the value, by the whole ensemble, of the candidates that it alone would choose.
    """
    policy = model.policy()
    chunk_shape = (policy.action_horizon, policy.action_dim)
    noise = np.stack([candidate_noise(i, _NUM_CANDIDATES, *chunk_shape) for i in range(len(observation.state))])

    @jax.jit
    def scores(model: ActingModel, observation: Observation, noise: jax.Array) -> jax.Array:
        values = judge_candidates(model, observation, noise, num_steps=num_steps).member_values
        by_all = model.networks().critics.online_ensemble.aggregate(values)  # [b, n]
        chosen = jnp.argmax(values, axis=1)  # [b, E]
        return jnp.mean(jnp.take_along_axis(by_all, chosen, axis=1), axis=0)

    return np.argsort(-np.asarray(scores(model, observation, noise)), kind="stable")


def verify_export(trained: Checkpoint, exported: Checkpoint, dtype: DType | None) -> Verification:
    """Loads both from disk, the export in its `dtype`, and compares the candidates that they make of the same noise."""
    return compare_actions(trained, lambda: exported.load_model(dtype=dtype), dtype, critics=exported.has_critics)


def compare_actions(
    trained: Checkpoint, load_exported: Callable[[], ActingModel], dtype: DType | None, *, critics: bool
) -> Verification:
    """Loads one model after the other, and compares the candidates that they make of the same noise.

    With critics, candidates are those of the improvement, so that the improvement's own networks are compared as well.
    """
    config = trained.rl_config.model
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((_VERIFY_BATCH, 2, config.action_horizon, config.action_dim), np.float32)
    observation = jax.tree.map(
        lambda x: rng.uniform(-1, 1, x.shape).astype(np.float32) if x.dtype == np.float32 else np.asarray(x),
        config.fake_obs(_VERIFY_BATCH, labelled_prompts=trained.rl_config.labels_prompts),
    )
    actions = []
    for load in (trained.load_model, load_exported):
        model = load()
        model = model if critics else model.replace(critics=None)
        twos = np.full(_VERIFY_BATCH, 2, np.int32)
        chosen = choose_actions(model, observation, noise, twos, num_steps=trained.rl_config.acrlpd.sampling_steps)
        actions.append(np.asarray(chosen.candidates, np.float64))
    difference = np.abs(actions[0] - actions[1])
    rounded = "bfloat16" in (dtype, config.dtype)
    return Verification(
        float(difference.mean()), float(difference.max()), _TOLERANCE["bfloat16" if rounded else "float32"]
    )
