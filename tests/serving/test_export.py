"""Exports act as the training policy does, and have what openpi and our server need."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
import pytest
from flax import nnx
from serving_helpers import STATE_DIM, pi0_observation, state_observation
from small_checkpoints import (
    GOLDENS,
    make_agent,
    openpi_checkpoint,
    openpi_config,
    pi0_config,
    save_run,
    served_model,
    state_config,
)
from toy_agent import NORM_STATS

from acrlpd.agents import Agent
from acrlpd.agents.backups.implicit_value import ImplicitValue
from acrlpd.agents.improvements.distillation import Distillation
from acrlpd.checksums import ChecksumError, write_checksums
from acrlpd.cli.export import main as export_main
from acrlpd.config import DataConfig, EvaluationConfig, get_config
from acrlpd.models.openpi_checkpoint import verify_openpi_checkpoint_compatibility
from acrlpd.policies.acting_model import candidate_noise
from acrlpd.policies.checkpoint import open_checkpoint
from acrlpd.policies.levels import Level, serving_level, trained_level
from acrlpd.robots.base import ServingLevel
from acrlpd.runs.checkpoint_layout import CheckpointError
from acrlpd.serving.export import export_policy, rank_critics, verify_export
from acrlpd.serving.serving_policy import load_serving_policy
from openpi_params import read_openpi_params


@pytest.fixture(scope="module")
def agent() -> Agent:
    return make_agent(pi0_config())


@pytest.fixture(scope="module")
def run(agent: Agent, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("runs") / "pi0", pi0_config(), {3: make_agent(pi0_config(), 1), 20: agent})


@pytest.fixture(scope="module")
def state_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = state_config()
    return save_run(tmp_path_factory.mktemp("runs") / "state", config, {8: make_agent(config)})


def flat(params: object) -> dict[str, np.ndarray]:
    return {
        jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
    }


def test_an_export_has_openpis_layout_and_the_average(run: Path, agent: Agent, tmp_path: Path) -> None:
    assert export_main([str(run), "--output", str(tmp_path / "out")]) == 0
    out = tmp_path / "out"
    names = {"params", "assets", "critic", "acrlpd.json", "checksums.json", "README.md"}
    assert {path.name for path in out.iterdir()} == names
    assert verify_openpi_checkpoint_compatibility(out, pi0_config().model) == []
    exported = flat(read_openpi_params(out))
    average = nnx.to_pure_dict(agent.ema_params)
    assert exported.keys() == flat(average).keys()
    for name, value in flat(average).items():
        np.testing.assert_array_equal(exported[name], value)
    stats = json.loads((out / "assets" / "lab" / "robot" / "norm_stats.json").read_text())
    assert stats["norm_stats"]["state"]["mean"] == NORM_STATS["state"].mean.tolist()
    content = json.loads((out / "acrlpd.json").read_text())
    assert content["step"] == 20 and content["critics"] == [0, 1, 2, 3, 4]
    readme = (out / "README.md").read_text()
    assert "policy:checkpoint --policy.config=acrlpd_small --policy.dir=THIS_DIRECTORY" in readme
    assert "action_horizon=4" in readme and "asset_id='lab/robot'" in readme


def test_an_export_acts_as_the_run(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    verification = export_policy(run / "20", out)
    assert verification and verification.max_difference < 1e-5
    message = pi0_observation() | {"seed": 4}
    replies = []
    for path in (run, out):
        policy = load_serving_policy(open_checkpoint(path), best_of_n=4, num_steps=(2,))
        [reply] = policy.infer([policy.prepare(message)])
        assert isinstance(reply, dict)
        replies.append(reply)
    np.testing.assert_allclose(replies[1]["actions"], replies[0]["actions"], atol=1e-5)
    np.testing.assert_allclose(replies[1]["best_of_n"]["q_values"], replies[0]["best_of_n"]["q_values"], atol=1e-5)
    assert not verify_export(open_checkpoint(run / "3"), open_checkpoint(out), None)  # another policy is noticed


def test_other_networks_of_an_improvement_are_noticed(tmp_path: Path) -> None:
    config = state_config(improvement=Distillation(hidden_dims=(8,)))
    agent, changed = make_agent(config), make_agent(config, 1)
    run = save_run(tmp_path / "run", config, {1: agent, 2: agent.replace(improvement=changed.improvement)})
    assert export_policy(run / "1", tmp_path / "out", critics="all")
    assert not verify_export(open_checkpoint(run / "2"), open_checkpoint(tmp_path / "out"), None)


def test_bfloat16_exports_stay_close(run: Path, tmp_path: Path) -> None:
    verification = export_policy(run, tmp_path / "out", dtype="bfloat16", critics="none")
    assert 0 < verification.mean_difference < 2e-2
    assert {array.dtype.name for array in flat(read_openpi_params(tmp_path / "out")).values()} == {"bfloat16"}
    checkpoint = open_checkpoint(tmp_path / "out")
    assert not checkpoint.has_critics and checkpoint.level == ServingLevel(2, 1, 0)
    assert not (tmp_path / "out" / "critic").exists()


def test_merged_adapters_act_as_adapters(tmp_path: Path) -> None:
    base = pi0_config().model
    model = dataclasses.replace(base, paligemma_variant="dummy_lora", action_expert_variant="dummy_lora", image_keys=())
    config = pi0_config(model=model, data=DataConfig(repo_id="fake", asset_id="a", tokenizer="byte"))
    agent = make_agent(config)
    run = save_run(tmp_path / "lora", config, {5: agent})
    kept = export_policy(run, tmp_path / "kept", critics="all")
    merged = export_policy(run, tmp_path / "merged", merge_adapters=True, critics="all")
    assert kept.max_difference < 1e-5 and merged.max_difference < 1e-3
    names = flat(read_openpi_params(tmp_path / "merged"))
    assert not [name for name in names if "lora" in name]
    assert [name for name in flat(read_openpi_params(tmp_path / "kept")) if "lora" in name]
    configs = [
        set(re.findall(r"acrlpd_\w+", (tmp_path / name / "README.md").read_text())) for name in ("kept", "merged")
    ]
    assert configs == [{"acrlpd_small"}, {"acrlpd_small_merged"}]  # openpi's list can have both
    plain = nnx.merge_state(agent.ema_params, agent.frozen_params)
    merged_model, merged_params = config.model.merge_adapters(plain)
    assert merged_model == dataclasses.replace(model, paligemma_variant="dummy", action_expert_variant="dummy")
    assert verify_openpi_checkpoint_compatibility(tmp_path / "merged", merged_model) == []
    # Adapters do change the actions, so that agreement means something.
    without = jax.tree_util.tree_map_with_path(
        lambda path, x: x * 0 if "lora" in jax.tree_util.keystr(path) else x, plain
    )
    different = config.model.merge_adapters(without)[1], merged_params
    changes = [np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, different), strict=True)]
    assert max(changes) > 0.1


def test_merging_without_adapters_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no adapters to merge"):
        export_policy(run, tmp_path / "out", merge_adapters=True)
    assert list(tmp_path.iterdir()) == []


def test_the_networks_that_make_the_actions_are_not_left_behind(tmp_path: Path) -> None:
    config = state_config(improvement=Distillation(hidden_dims=(8,)))
    run = save_run(tmp_path / "run", config, {8: make_agent(config)})
    with pytest.raises(CheckpointError, match=r"distillation makes the actions of this run.*choose --critics level"):
        export_policy(run, tmp_path / "out", critics="none")
    assert not (tmp_path / "out").exists()


def test_the_value_network_of_targets_is_left_behind(tmp_path: Path) -> None:
    """Acting needs the critics alone, and does not change without V."""
    hyperparams = dataclasses.replace(state_config().acrlpd, learnable_temperature=False)
    config = state_config(backup=ImplicitValue(hidden_dims=(8,)), acrlpd=hyperparams)
    run = save_run(tmp_path / "run", config, {8: make_agent(config)})
    assert export_policy(run, tmp_path / "out")
    assert "backup" not in (tmp_path / "out" / "critic" / "_METADATA").read_text()


def test_a_policy_is_served_as_it_was_judged() -> None:
    config = pi0_config(evaluation=EvaluationConfig(best_of_n=16))
    assert trained_level(config).best_of_n == serving_level(config, "accurate").best_of_n == 16
    assert trained_level(pi0_config()).best_of_n == pi0_config().acrlpd.num_action_samples


def test_fast_keeps_the_critics_that_choose_best(state_run: Path, tmp_path: Path) -> None:
    export_policy(state_run, tmp_path / "out", level="fast")
    checkpoint = open_checkpoint(tmp_path / "out")
    content = json.loads((tmp_path / "out" / "acrlpd.json").read_text())
    # Never more steps than "standard", which are those of the training here.
    assert checkpoint.level == ServingLevel(num_steps=2, best_of_n=4, num_critics=3)
    model = open_checkpoint(state_run).load_model()
    subset = checkpoint.load_model()
    assert [m.networks().critics.online_ensemble.config.num_critics for m in (subset, model)] == [3, 5]
    for kept, every in zip(*(jax.tree.leaves(m.critics.online) for m in (subset, model)), strict=True):
        np.testing.assert_array_equal(kept, every[np.array(content["critics"])])


def test_the_ranking_is_by_the_value_of_what_members_choose() -> None:
    """Brute force: member by member, candidate by candidate."""

    from acrlpd.models.observation import Observation

    agent = make_agent(state_config())
    model = served_model(agent)
    states = np.random.default_rng(0).standard_normal((6, STATE_DIM)).astype(np.float32)
    observation = Observation(images={}, image_masks={}, state=states)
    noise = np.stack([candidate_noise(seed, 16, 4, 2) for seed in range(6)])
    candidates = model.policy().sample_candidates(jax.random.key(1), observation, 16, num_steps=2, noise=noise)
    critics = model.networks().critics.online_ensemble
    values = np.asarray(critics(None, observation, candidates[:, :, :3].reshape(6, 16, -1)))  # [b, n, E]
    scores = [np.mean([values[b].min(axis=-1)[values[b, :, member].argmax()] for b in range(6)]) for member in range(5)]
    ranking = rank_critics(model, observation, num_steps=2)
    assert ranking.tolist() == np.argsort(-np.array(scores)).tolist()


def test_levels_follow_the_robot() -> None:
    droid, aloha, libero = (get_config(name) for name in ("droid", "aloha", "libero"))
    critics = [config.critic.num_critics for config in (droid, aloha, libero)]
    assert serving_level(droid, "standard") == ServingLevel(20, 8, 5)
    assert serving_level(aloha, "standard") == ServingLevel(15, 12, 4)
    assert serving_level(libero, "standard") == ServingLevel(10, 16, 8)
    assert serving_level(aloha, "fast") == ServingLevel(10, 12, 3)
    assert serving_level(droid, "accurate") == ServingLevel(50, 8, critics[0])
    assert serving_level(state_config(), "standard") == ServingLevel(2, 4, 5)
    few = dataclasses.replace(aloha, critic=dataclasses.replace(aloha.critic, num_critics=2))
    assert {serving_level(few, level).num_critics for level in get_args(Level)} == {2}  # there are no more


def test_what_exists_is_replaced_only_when_asked(state_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_policy(state_run, out)
    with pytest.raises(CheckpointError, match="--overwrite"):
        export_policy(state_run, out)
    export_policy(state_run, out, overwrite=True)
    (tmp_path / "mine").mkdir()
    with pytest.raises(CheckpointError, match="is not an exported directory"):
        export_policy(state_run, tmp_path / "mine", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "out"]


def test_a_link_leads_to_what_is_replaced(state_run: Path, tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to(tmp_path / "v1")
    export_policy(state_run, tmp_path / "current", critics="none")
    export_policy(state_run, tmp_path / "current", critics="all", overwrite=True)
    assert (tmp_path / "current").is_symlink() and (tmp_path / "v1" / "critic").is_dir()
    assert {path.name for path in tmp_path.iterdir()} == {"current", "v1"}


def test_without_the_data_critics_cannot_be_ranked(tmp_path: Path) -> None:
    base = state_config()
    config = dataclasses.replace(base, data=dataclasses.replace(base.data, repo_id=None, data_dir=str(tmp_path / "no")))
    run = save_run(tmp_path / "run", config, {1: make_agent(config)})
    with pytest.raises(ValueError, match="--critics all"):
        export_policy(run, tmp_path / "out", level="fast")
    export_policy(run, tmp_path / "out", level="fast", critics="all")
    assert open_checkpoint(tmp_path / "out").level.num_critics == 5


def test_plain_openpi_checkpoints_are_served_without_critics(tmp_path: Path) -> None:
    step = openpi_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="--config"):
        open_checkpoint(step)
    checkpoint = open_checkpoint(step, openpi_config())
    assert checkpoint.kind == "openpi" and not checkpoint.has_critics and checkpoint.level.best_of_n == 1
    assert checkpoint.load_norm_stats() is not None
    shutil.rmtree(step / "assets")
    with pytest.raises(CheckpointError, match=r"norm_stats\.json"):
        checkpoint.load_norm_stats()
    golden = np.load(GOLDENS / "params_pi0.npz")
    for path, leaf in nnx.to_flat_state(checkpoint.load_model().params):
        np.testing.assert_array_equal(leaf.get_value(), golden["/".join(path)])


def test_what_is_not_a_checkpoint_is_named(tmp_path: Path, state_run: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a directory"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="neither an exported directory"):
        open_checkpoint(tmp_path)
    export_policy(state_run, tmp_path / "out")
    with pytest.raises(CheckpointError, match="not a checkpoint of a run"):
        export_policy(tmp_path / "out", tmp_path / "again")
    (tmp_path / "out" / "critic" / "manifest.ocdbt").unlink()
    with pytest.raises(ChecksumError, match=r"critic/manifest\.ocdbt is missing"):
        open_checkpoint(tmp_path / "out").load_model()


def test_a_state_policy_is_exported_for_our_server(state_run: Path, tmp_path: Path) -> None:
    export_policy(state_run, tmp_path / "out")
    assert "openpi has no policy of the family `state_flow`" in (tmp_path / "out" / "README.md").read_text()
    policy = load_serving_policy(open_checkpoint(tmp_path / "out"))
    [reply] = policy.infer([policy.prepare(state_observation())])
    assert isinstance(reply, dict) and reply["actions"].shape == (4, 2)


def without_field(config: dict[str, Any], name: str) -> None:
    """Takes a field out, as if it had not been there when the config was written."""
    *sections, field = name.split(".")
    for section in sections:
        config = config[section]
    del config[field]


def test_checkpoints_that_are_older_than_a_config_field(state_run: Path, tmp_path: Path) -> None:
    """What was saved before a field existed is served and exported with the field's default."""
    older = tmp_path / "8"
    shutil.copytree(state_run / "8", older)
    file = older / "run" / "run.json"
    metadata = json.loads(file.read_text())
    for name in ("openpi_compatibility.reset_pose", "online", "acrlpd.best_of_n.top_k", "data.demonstrations"):
        without_field(metadata["config"], name)
    file.write_text(json.dumps(metadata))
    write_checksums(older / "run")
    assert export_policy(older, tmp_path / "out")
    description = tmp_path / "out" / "acrlpd.json"
    content = json.loads(description.read_text())
    without_field(content["config"], "openpi_compatibility")
    description.write_text(json.dumps(content))
    write_checksums(tmp_path / "out", [description])
    policies = [load_serving_policy(open_checkpoint(path)) for path in (state_run, older, tmp_path / "out")]
    replies = [policy.infer([policy.prepare(state_observation() | {"seed": 1})])[0] for policy in policies]
    assert policies[0].metadata() == policies[1].metadata() == policies[2].metadata()
    for reply in replies[1:]:
        np.testing.assert_array_equal(reply["actions"], replies[0]["actions"])  # type: ignore[index]
