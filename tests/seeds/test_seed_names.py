"""The Python lines of the seed documents, with agents that are small enough for a test."""

import dataclasses
import json
import logging
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from training_helpers import WAIT_S, Processes

from acrlpd import seeds
from acrlpd.config import ConfigError, apply_config_overrides, get_config
from acrlpd.runs.directory import run_directory

# A run of the seeds and a step of its own, with arrays that are split although they are small.
ON_FOUR_DEVICES = """
import pathlib, sys
import jax
from training_helpers import state_config
from acrlpd import seeds
changes = {"fsdp_devices": 4, "fsdp__min_size_mib": 0.0001, "offline_steps": 2, "batch_size": 8}
config = state_config(pathlib.Path(sys.argv[1]), **changes)
mesh, data_sharding, _ = seeds.setup_jax_environment(config)
agent, _, create_step = seeds.init_acrlpd_fsdp_training(config, mesh, jax.random.key(0))
report = seeds.validate_fsdp_sharding(seeds.setup_fsdp_sharding(agent, mesh), mesh)
assert report and report.device_bytes < 0.3 * report.total_bytes, report
with seeds.ACRLPDDataLoader(config) as loader:
    agent, _ = create_step()(agent, loader.sample_batch(), jax.random.key(1))
    whole = seeds.create_acrlpd_pi0_agent_from_rl_config(config, jax.random.key(0))
    print(agent.step, seeds.ACRLPDTrainer(whole, loader, config, mesh=mesh).train().step)
"""


def equal(one, other) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def test_the_agent_answers_to_the_seeds_names(config, agent, loader):
    assert isinstance(agent, seeds.ACRLPDPi0Agent)
    assert (agent.num_action_samples, agent.horizon_length, agent.real_action_dim) == (2, 5, 7)
    assert (agent.discount, agent.target_update_tau, agent.q_aggregation) == (0.99, 0.005, "min")
    assert (agent.critic_weight, agent.actor_weight, agent.bc_weight) == (1, 1, 1)
    observations = loader.sample_batch()["observations"]
    assert agent.pi0_model.sample_actions(jax.random.key(1), observations, num_steps=2).shape == (8, 10, 7)
    assert float(agent.temperature_module()) == pytest.approx(config.acrlpd.initial_temperature)


def test_the_losses_of_a_batch(agent, loader):
    batch, rng = loader.sample_batch(), jax.random.key(1)
    assert batch["actions"].shape == (8, 10, 7) and batch["rewards"].shape == (8, 5)
    assert seeds.validate_qchunking_batch_format(batch)
    assert not seeds.validate_qchunking_batch_format({"actions": batch["actions"]})
    with pytest.raises(KeyError, match="found 'action'"):
        batch["action"]
    total, info = agent.compute_loss(batch, rng)
    parts = {
        name: getattr(agent, f"compute_{name}")(batch, rng)[0] for name in ("critic_loss", "actor_loss", "bc_loss")
    }
    assert parts == {name: info[name] for name in parts}
    assert float(total) == pytest.approx(float(sum(parts.values())), rel=1e-5)


def test_a_train_step_leaves_the_old_agent_as_it_was(agent, loader):
    batch, rng, initial_step = loader.sample_batch(), jax.random.key(1), agent.step
    total, _ = agent.compute_loss(batch, rng)
    updated, info = agent.train_step(batch, rng)
    assert isinstance(updated, seeds.ACRLPDPi0Agent)
    assert updated.step == initial_step + 1
    assert float(info["total_loss"]) == pytest.approx(float(total), rel=1e-5)
    targets = updated.update_target_networks().critics.target
    assert not equal(targets, updated.critics.target)
    assert equal(targets, updated.critics.soft_update_target_networks(agent.target_update_tau).target)


def test_a_training_with_the_seeds_trainer(config, agent, loader, caplog):
    caplog.set_level(logging.INFO, logger="acrlpd")
    judged = []

    def judge(agent, step):
        judged.append(step)
        return {"success_rate": 0.5}

    settings = seeds.ACRLPDTrainingConfig(experiment_name="trainer")
    trainer = seeds.ACRLPDTrainer(agent, loader, config, settings, eval_fn=judge)
    mesh, data_sharding, _ = seeds.setup_jax_environment(config)
    trainer.setup_fsdp(mesh, data_sharding)
    directory = run_directory(config).with_name("trainer")
    assert not directory.exists()
    trainer.initialize()
    assert (directory / "config.yaml").is_file()
    with pytest.raises(ConfigError, match="setup_fsdp comes before initialize"):
        trainer.setup_fsdp(mesh, data_sharding)
    assert trainer.train_epoch(0, num_steps=2)["total_loss"] > 0
    trainer.close()
    assert int(trainer.agent.step) == 2
    settings = dataclasses.replace(settings, resume=True)
    trainer = seeds.ACRLPDTrainer(trainer.agent, loader, config, settings, judge)
    trained = trainer.train()
    assert int(trained.step) == 4 and judged == [4]
    assert trainer.evaluate(trained) == {"success_rate": 0.5}
    with pytest.raises(ConfigError, match="holds a run with checkpoints up to step 4"):
        seeds.ACRLPDTrainer(trained, loader, config, seeds.ACRLPDTrainingConfig(experiment_name="trainer")).train()
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "total_loss" in line] == [2, 4]
    trainer.log_training_metrics(4, {"total_loss": trained.step})
    trainer.log_memory_usage(4, phase="training")
    assert "metrics at step 4: total_loss 4" in caplog.text
    assert "training step 4: " in caplog.text
    # What the run wrote is a checkpoint like any other.
    loaded, step = seeds.load_acrlpd_checkpoint(directory)
    assert step == 4 and equal(loaded, trained)
    assert seeds.validate_checkpoint_compatibility(directory, config)
    assert not seeds.validate_checkpoint_compatibility(directory, apply_config_overrides(config, batch_size=16))


def test_the_wrapped_step_and_the_step_of_a_run_agree(config, agent, loader):
    batch, rng = loader.sample_batch(), jax.random.key(3)
    settings = seeds.ACRLPDTrainingConfig(offline_steps=2, experiment_name="wrapped")
    trainer = seeds.ACRLPDTrainer(agent, loader, settings, lambda agent, step: {"step": step})  # the order of 004
    assert trainer.evaluate(agent) == {"step": int(agent.step)}
    assert (trainer.rl_config.exp_name, trainer.rl_config.training.offline_steps) == ("wrapped", 2)
    wrapped, info = trainer.train_step_wrapper(agent, batch, rng)
    compiled, same = trainer.create_fsdp_train_step()(agent, batch, rng)  # uses the agent up
    assert same["total_loss"] == pytest.approx(float(info["total_loss"]), rel=1e-5)
    for a, b in zip(jax.tree.leaves(wrapped), jax.tree.leaves(compiled), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=1e-4, atol=1e-6)


def test_checkpoints_of_an_agent(agent, tmp_path):
    full = tmp_path / "acrlpd_full_step_7"
    paths = seeds.save_acrlpd_checkpoint(agent, 7, tmp_path)
    assert paths == {"full_checkpoint": str(full), "openpi_checkpoint": str(full / "7" / "params")}
    later = seeds.save_acrlpd_checkpoint(agent, 8, tmp_path, save_full=False)["openpi_checkpoint"]
    assert later == str(tmp_path / "pi0_openpi_step_8" / "params")
    loaded, step = seeds.load_acrlpd_checkpoint(full)
    assert step == 7 and equal(loaded, agent) and loaded.config == agent.config
    assert seeds.verify_openpi_checkpoint_compatibility(full / "7")
    assert seeds.verify_openpi_checkpoint_compatibility(later, agent.config)
    other = seeds.create_acrlpd_pi0_agent_from_rl_config(agent.config, jax.random.key(5))
    assert not equal(other.policy_params, agent.policy_params)
    taken = seeds.load_pi0_weights_from_openpi(full / "7", other)
    assert equal(taken.policy_params, agent.policy_params) and equal(taken.ema_params, agent.ema_params)
    assert equal(taken.critics, other.critics)
    state = agent.create_openpi_train_state()
    assert equal(nnx.state(nnx.merge(state.model_def, state.params)), nnx.state(agent.pi0_model))
    assert equal(other.update_from_train_state(state).policy_params, agent.policy_params)
    described = seeds.create_checkpoint_metadata(agent.config, {"total_loss": 1.0}, 7)
    assert described["step"] == 7 and described["training_metrics"] == {"total_loss": 1.0}


def test_an_agent_from_networks_that_exist(agent):
    made = seeds.create_acrlpd_pi0_agent(
        agent.pi0_model,
        agent.critic_networks,
        rl_config=agent.config,
        num_action_samples=3,
        discount=0.9,
        use_ema=False,
    )
    assert equal(made.policy_params, agent.policy_params) and equal(made.critics, agent.critics)
    assert (made.num_action_samples, made.discount, made.ema_params) == (3, 0.9, None)
    trained = agent.replace(critic_opt_state=jax.tree.map(lambda leaf: leaf + 1, agent.critic_opt_state))
    made = seeds.create_acrlpd_pi0_agent(
        agent.pi0_model,
        agent.critic_networks,
        rl_config=agent.config,
        target_update_rate=0.1,
        critic_ema_decay=0.99,
        critic_opt_state=trained.critic_opt_state,
    )
    assert equal(made.critic_opt_state, trained.critic_opt_state) and made.target_update_tau == 0.1
    assert equal(made.critics.average, agent.critics.online) and made.algorithm.acrlpd.critic_ema_decay == 0.99
    with pytest.raises(ConfigError, match="unknown settings gamma; known: num_action_samples"):
        seeds.create_acrlpd_pi0_agent(agent.pi0_model, rl_config=agent.config, gamma=0.9)


def test_the_loader_answers_to_the_seeds_names(config, loader):
    statistics = loader.get_dataset_statistics()
    assert statistics["num_episodes"] == 8 and statistics["num_steps"] > 8
    loader.refresh_memory_pool(epoch_seed=2)
    assert loader.state_dict()["step"] == 2 * loader.steps_per_epoch
    _, places, _ = seeds.setup_jax_environment(config)
    with seeds.create_acrlpd_data_loader(config, 4, data_sharding=places) as other:
        assert other.sample_batch()["actions"].sharding.is_equivalent_to(places, 3)


def test_fsdp_of_the_seeds(config, agent):
    mesh = seeds.create_fsdp_mesh(fsdp_devices=1, data_parallel_devices=1)
    assert seeds.create_fsdp_mesh() == seeds.create_fsdp_mesh(1) == mesh
    with pytest.raises(ConfigError, match="2 x 4 devices are asked for, and 1 are here"):
        seeds.create_fsdp_mesh(4, 2)
    data, replicated = seeds.create_fsdp_sharding_strategy(mesh, config.model)
    state, places, create_step = seeds.init_acrlpd_fsdp_training(
        config, mesh, jax.random.key(0), data, global_pi0_tx=None, global_critic_tx=None
    )
    assert equal(state, agent) and callable(create_step())
    assert replicated in jax.tree.leaves(places)
    assert seeds.validate_fsdp_sharding(seeds.setup_fsdp_sharding(state, mesh), mesh)
    assert seeds.validate_fsdp_compatibility(state, mesh, data)
    assert seeds.check_optimizer_consistency(*2 * [seeds.create_global_optimizers(config)[0]])
    again = seeds.create_global_optimizers(apply_config_overrides(config, exp_name="other"))
    assert seeds.check_optimizer_consistency(seeds.create_global_optimizers(config)[1], again[1])
    assert not seeds.check_optimizer_consistency(*again)


@pytest.mark.slow
def test_small_arrays_are_split_as_the_config_says(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-c", ON_FOUR_DEVICES, str(tmp_path)]
    environment = Processes().environment(devices=4)
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_S)
    assert ended.stdout.split() == ["1", "2"], ended.stderr


def test_what_makes_a_batch_fit():
    droid = get_config("droid")
    assert seeds.optimize_fsdp_memory(32, droid, 8, device_memory_gib=80) == {}
    changes = seeds.optimize_fsdp_memory(64, droid.model, 8, device_memory_gib=24)
    assert changes.get("fsdp.fsdp_devices", 1) > 1


def test_checks_of_trees(agent):
    found = seeds.diagnose_pytree_structure(agent, "agent")
    assert found["num_leaves"] == len(jax.tree.leaves(agent)) and set(found["dtypes"]) == {"float32", "int32"}
    tree, other = {"a": jnp.zeros(2), "b": jnp.zeros(3)}, {"a": jnp.zeros(4), "c": jnp.zeros(3)}
    assert seeds.check_pytree_leaf_dtypes(tree, jnp.float32) == {}
    assert seeds.check_pytree_leaf_dtypes(tree) == {"float32": ["['a']", "['b']"]}
    assert seeds.compare_pytree_structures(tree, other, "old", "new") == {
        "same_structure": False,
        "only_in_old": ["['b']"],
        "only_in_new": ["['c']"],
        "different": {"['a']": ("float32(2,)", "float32(4,)")},
    }


def test_the_memory_of_an_agent(agent):
    monitor = seeds.GPUMemoryMonitor()
    monitor.checkpoint_memory("start", agent)
    parts = monitor.analyze_train_state_memory(agent)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(agent)) / 2**20
    assert sum(part["total_mib"] for part in parts.values()) == pytest.approx(total)
    assert parts["critics"]["device_mib"] == parts["critics"]["total_mib"]
    assert "start: " in monitor.get_memory_report() and "policy_params: " in monitor.get_memory_report()
    assert seeds.log_gpu_memory("start")["host"] > 0 and seeds.get_gpu_memory_usage() >= 0


def test_configs_of_the_seeds():
    assert seeds.get_droid_config() == seeds.ACRLPD_V2_DROID == get_config("droid_seeds")
    assert seeds.CriticConfig(num_critics=10, hidden_dims=[512, 512, 256]).hidden_dims == (512, 512, 256)
    assert seeds.create_cosine_schedule(3e-5, 50_000) == seeds.ACRLPD_V2_ALOHA_FOLD.actor_lr_schedule
    settings = seeds.ACRLPDTrainingConfig(checkpoint_dir="/runs", use_wandb=True, max_grad_norm=0.5, keep_period=7)
    config = settings.apply(seeds.get_libero_config())
    assert (config.checkpoints.directory, config.checkpoints.keep_period) == ("/runs", 7)
    assert (config.logging.wandb, config.actor_optimizer.clip_gradient_norm) == ("online", 0.5)
    merged = seeds.merge_configurations(config, {"batch_size": 8}, {"batch_size": 16})
    assert merged.batch_size == 16
    assert any("is high for pretrained" in warning for warning in seeds.validate_config_compatibility(merged))
