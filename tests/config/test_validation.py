"""The errors and the warnings of validation."""

import pytest

from acrlpd.config import ConfigError, apply_config_overrides, get_config, validate_config
from acrlpd.models.families.base import RELEASED_WEIGHTS

DEBUG = get_config("debug")
ALOHA = get_config("aloha")


def validate(changes, base=DEBUG, **kwargs):
    return validate_config(apply_config_overrides(base, changes), **kwargs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"batch_size": 9, "gradient_accumulation_steps": 2}, "use 8 or 10"),
        ({"qchunking.horizon_length": 11}, "the critics see 11 actions, more than the policy's action_horizon 10"),
        ({"qchunking.critic_action_horizon": 6}, "critic_action_horizon 6 exceeds horizon_length"),
        ({"qchunking.sequence_ratio": 1.5}, "sequence_ratio must lie in [0, 1]"),
        ({"qchunking.action_dim": 33}, "must lie between 1 and model.action_dim 32"),
        ({"env.replan_steps": 20}, "env.execution asks the policy every 20 steps, but a chunk of the policy has only"),
        ({"env.execution.steps": 0}, "env.execution.steps must be at least 1; found 0"),
        ({"acrlpd.discount": 1.1}, "acrlpd.discount must lie in (0, 1]"),
        ({"acrlpd.action_bounds": (1.0, -1.0), "data.normalize": ()}, "must be the lowest and the highest action"),
        ({"acrlpd.action_bounds": (-1.0, 1.0)}, "actions must not be normalised: set data.normalize state"),
        (
            {"acrlpd.action_bounds": (-1.0, 1.0), "data.normalize": (), "data.use_delta_joint_actions": True},
            "data.use_delta_joint_actions makes actions relative",
        ),
        ({"acrlpd.target_update_tau": 0.0}, "acrlpd.target_update_tau must lie in (0, 1]"),
        ({"acrlpd.ema_decay": 1.0}, "acrlpd.ema_decay must lie in [0, 1)"),
        ({"acrlpd.best_of_n.top_k": 3, "online_steps": 9}, "top_k 3 exceeds the 2 candidates"),
        (
            {
                "acrlpd.best_of_n.top_k": 3,
                "acrlpd.num_action_samples": 4,
                "online.best_of_n": 2,
                "online_steps": 9,
            },
            "top_k 3 exceeds the 2 candidates of online rounds: lower top_k, or raise online.best_of_n",
        ),
        (
            {"acrlpd.bc_difficulty_weighting": True, "model.type": "gaussian"},
            "the loss of the gaussian policy, -log pi, may be below 0: set acrlpd.bc_difficulty_weighting false",
        ),
        ({"acrlpd.num_action_samples": 1, "improvement": "best_of_n"}, "clones the policy itself"),
        ({"acrlpd.num_action_samples": 1, "acrlpd.learnable_temperature": True}, "learned temperature needs"),
        ({"acrlpd.loss_weights.bc_weight": -1.0}, "acrlpd.loss_weights.bc_weight must be at least 0"),
        ({"acrlpd.initial_temperature": 0.0}, "acrlpd.initial_temperature must be above 0"),
        ({"critic.target_subset_size": 3}, "target_subset_size 3 must lie between 1 and num_critics 2"),
        ({"critic.hidden_dims": []}, "critic.hidden_dims must have at least 1 elements"),
        ({"critic.dropout_rate": 1.0}, "critic.dropout_rate must lie in [0, 1)"),
        ({"weight_loader.kind": "checkpoint"}, "weight_loader.kind checkpoint needs weight_loader.path"),
        ({"actor_lr_schedule.decay_lr": 1.0}, "actor_lr_schedule.decay_lr 1.0 must lie between 0 and peak_lr"),
        ({"actor_lr_schedule.decay_steps": 10}, "decay_steps 10 must exceed warmup_steps 1000"),
        ({"critic_lr_schedule.peak_lr": 0.0}, "critic_lr_schedule.peak_lr must be above 0"),
        ({"offline_steps": 0}, "training.offline_steps and training.online_steps are both 0"),
        ({"checkpoints.keep_period": 0}, "checkpoints.keep_period must be at least 1; found 0"),
        ({"data.num_workers": -1}, "data.num_workers must be at least 0; found -1"),
        ({"data.prefetch_batches": 0}, "data.prefetch_batches must be at least 1; found 0"),
        ({"seed": -1}, "seed must lie in [0, 4294967295]; found -1"),
        ({"seed": 10**23}, "seed must lie in [0, 4294967295]; found 1"),
        ({"evaluation.seed": -1}, "evaluation.seed must lie in [0, 4294967295]; found -1"),
        ({"data.demonstrations.seed": -1}, "data.demonstrations.seed must lie in [0, 4294967295]"),
        ({"actor_optimizer.b2": 1.0}, "actor_optimizer.b2 must lie in [0, 1); found 1.0"),
        ({"critic_optimizer.b1": -0.9}, "critic_optimizer.b1 must lie in [0, 1); found -0.9"),
        ({"critic_optimizer.eps": 0.0}, "critic_optimizer.eps must be above 0; found 0.0"),
        ({"actor_optimizer.weight_decay": -1e-4}, "actor_optimizer.weight_decay must be at least 0"),
        (
            {"actor_lr_schedule.type": "rsqrt", "actor_lr_schedule.timescale": 0.0},
            "actor_lr_schedule.timescale must be above 0",
        ),
        ({"data.repack.state": []}, "data.repack.state must have at least 1 elements"),
        ({"data.repack.actions": []}, "data.repack.actions must have at least 1 elements"),
        ({"data.demonstrations.num_episodes": -1}, "data.demonstrations.num_episodes must be at least 0"),
        ({"data.demonstrations.max_episode_steps": 0}, "data.demonstrations.max_episode_steps must be at least 1"),
        ({"evaluation.noise_levels": [0.1, -0.1]}, "evaluation.noise_levels must be at least 0"),
        ({"evaluation.best_of_n_values": [4, 0]}, "evaluation.best_of_n_values must be at least 1"),
        ({"evaluation.num_videos": -1}, "evaluation.num_videos must be at least 0"),
        ({"exp_name": "a/b"}, "exp_name must be a plain directory name"),
        ({"exp_name": "a\x1b[2Jb"}, "exp_name must be a plain directory name"),
        ({"data.asset_id": "../../x"}, "data.asset_id must be plain names with single slashes between them; found"),
        ({"data.asset_id": "/etc"}, "data.asset_id must be plain names with single slashes between them; found"),
        ({"data.repo_id": "../x"}, "data.repo_id must be plain names with single slashes between them; found '../x'."),
        ({"data.robot": "aloha"}, "qchunking.action_dim 7 does not fit robot aloha, which has 14"),
        ({"data.robot": "droid"}, "data.repack.state must name a column for each of observation/joint_position"),
        ({"data.delta_action_mask": [6, -2]}, "covers more than the 7 action dims"),
        ({"data.repack.base_0_rgb": None}, "camera base_0_rgb of the policy has no column"),
        ({"data.tokenizer": "paligemma"}, "the paligemma tokenizer needs model.vocab_size 257152"),
        ({"model.vocab_size": 100}, "the byte tokenizer needs model.vocab_size 259"),
        ({"data.prompt_from_task": False, "data.default_prompt": None}, "no prompt"),
        ({"freeze_pi0_backbone": True, "acrlpd.critic_gradient_to_policy": True}, "critic_gradient_to_policy"),
        ({"freeze_pi0_backbone": True, "model.paligemma_variant": "dummy_lora"}, "adapters included"),
        ({"model.type": "state_flow"}, "qchunking.action_dim 7 must equal model.action_dim 5"),
        ({"model.type": "state_flow", "freeze_pi0_backbone": True}, "has no backbone"),
        (
            {"model.type": "state_flow", "weight_loader.kind": "paligemma", "weight_loader.path": "pt_224.npz"},
            "PaliGemma's weights do not fit the state_flow policy",
        ),
        (
            {"model.type": "state_flow", "weight_loader.kind": "checkpoint", "weight_loader.path": RELEASED_WEIGHTS},
            "do not fit the state_flow policy; name a checkpoint of a run that trained such a policy",
        ),
        (
            {"improvement": "sac"},
            "sac needs the probability of a chunk, which the pi0 policy cannot say: set model gaussian",
        ),
        ({"improvement": "sac", "acrlpd.learnable_temperature": True}, "set acrlpd.learnable_temperature false"),
        ({"improvement.temperature": 0.5}, "improvement.temperature 0.5 has no effect"),
        (
            {"improvement": "distillation", "critic.use_pi0_features": False},
            "distillation reads the features of the pi0 policy. Features are computed only for critics that read",
        ),
        (
            {"improvement": "dsrl", "model.type": "gaussian"},
            "the gaussian policy is no flow: set model pi0 or state_flow",
        ),
        (
            {"improvement": "dsrl", "loss_weights.bc_weight": 0.1},
            "dsrl freezes the policy, so nothing can be cloned: set acrlpd.loss_weights.bc_weight 0; found 0.1",
        ),
        (
            {"improvement": "dsrl", "acrlpd.critic_gradient_to_policy": True},
            "the critics cannot train its features: set acrlpd.critic_gradient_to_policy false",
        ),
        ({"improvement": "dsrl", "acrlpd.learnable_temperature": True}, "dsrl learns a temperature of its own"),
        (
            {"improvement": "dsrl", "improvement.noise_bound": 0.4, "acrlpd.target_entropy": 0.0},
            "dsrl cannot reach its target entropy of 0 for each dim: numbers between -0.4 and 0.4 have at most -0.223",
        ),
        (
            {"improvement": "dsrl_sac", "online.offline_ratio": 0.0},
            "dsrl_sac has critics of noise, and a dataset does not know the noise of its actions: set "
            "training.offline_steps 0 and online.offline_ratio 0",
        ),
        ({"improvement": "dsrl_sac", "offline_steps": 0, "online_steps": 9}, "choose improvement dsrl, whose critics"),
        (
            {"improvement": "dsrl_sac", "qchunking.horizon_length": 5, "env.replan_steps": 4},
            "a target reaches from chunk to chunk: set env.replan_steps to qchunking.horizon_length 5; found 4",
        ),
        (
            {"improvement": "policy_gradient", "loss_weights.bc_weight": 0.0, "acrlpd.policy_data": "success"},
            "acrlpd.policy_data success chooses what the policy is cloned from, and nothing is cloned",
        ),
        (
            {"improvement": "dsrl"},
            "dsrl keeps the weights that the policy starts with: set weight_loader.kind checkpoint",
        ),
        ({"improvement": "expo", "critic.use_pi0_features": False}, "expo reads the features of the pi0 policy"),
        ({"improvement": "expo", "acrlpd.learnable_temperature": True}, "expo learns a temperature of its own"),
        (
            {"improvement": "expo", "acrlpd.num_action_samples": 5},
            "acrlpd.num_action_samples must be even; found 5. Use 6",
        ),
        (
            {"improvement": "expo", "loss_weights.critic_weight": 0.0},
            "trains no critic, which a policy improvement needs: set acrlpd.loss_weights.actor_weight 0",
        ),
    ],
)
def test_errors(changes, message):
    assert any(message in error for error in validate(changes).errors), validate(changes)


def test_online_rounds_may_explore_among_more_candidates_than_training_has():
    changes = {"acrlpd.best_of_n.top_k": 3, "acrlpd.num_action_samples": 2, "evaluation.best_of_n": 16}
    assert not any("top_k" in error for error in validate(changes | {"online_steps": 9}).errors)
    # A baseline of such a run has no online rounds.
    assert not any("top_k" in error for error in validate(changes | {"evaluation.best_of_n": 1}).errors)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.action_dim": 14}, "model.action_dim 14 does not fit the released weights"),
        ({"model.siglip_variant": "B/14"}, "model.siglip_variant B/14 does not fit"),
        (
            {"model.pi05": True},
            "model.pi05 is True, but gs://openpi-assets/checkpoints/pi0_base/params are pi0 weights",
        ),
        ({"data.tokenizer": "byte"}, "byte makes tokens that pretrained weights do not know"),
    ],
)
def test_released_weights_are_checked_against_the_model(changes, message):
    assert any(message in error for error in validate(changes, ALOHA).errors)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 2}, "batch_size 2 is small"),
        ({"acrlpd.num_action_samples": 128}, "num_action_samples 128 costs more than the rest"),
        ({"critic.num_critics": 20}, "critic.num_critics 20 is unusual"),
        (
            {"freeze_pi0_backbone": True, "improvement": "policy_gradient"},
            "policy_gradient with a frozen backbone",
        ),
        ({"critic_lr_schedule.peak_lr": 0.1}, "critic peak_lr 0.1 is high"),
        ({"online_steps": 10}, "online steps need an environment"),
        ({"data.repack.left_wrist_0_rgb": "x"}, "which model.image_keys leaves out"),
        ({"loss_weights.actor_weight": 0.0, "bc_weight": 0.0}, "the policy does not train"),
        ({"data.repo_id": None}, "no dataset"),
        ({"data.data_dir": "/does/not/exist"}, "data.data_dir /does/not/exist does not exist"),
        ({"model.pi05": True, "model.max_token_len": 16}, "max_token_len 16 may cut the prompt"),
    ],
)
def test_warnings(changes, message):
    result = validate(changes)
    assert result.errors == ()
    assert any(message in warning for warning in result.warnings), result


def test_high_learning_rate_is_remarked_only_for_pretrained_weights():
    assert any("is high for pretrained" in w for w in validate_config(get_config("libero_seeds")).warnings)
    assert not any(
        "is high for pretrained" in w for w in validate({"pi0_lr": 1e-3, "actor_lr_schedule.decay_lr": 0.0}).warnings
    )


def test_an_average_that_is_slower_than_the_run_is_remarked():
    def is_remarked(decay: float | None, steps: int, **changes) -> bool:
        result = validate({"acrlpd.ema_decay": decay, "training.offline_steps": steps, **changes})
        return any("acrlpd.ema_decay" in warning for warning in result.warnings)

    assert is_remarked(0.999, 2_301) and not is_remarked(0.999, 2_302)  # 0.999 ** 2301.4 is 0.1
    assert not is_remarked(None, 20)
    assert not is_remarked(0.999, 20, **{"openpi_compatibility.enable_ema_for_inference": False})
    (found,) = [w for w in validate({"training.offline_steps": 200}).warnings if "ema_decay" in w]
    assert "82% of the policy" in found and "at most 0.988 fits" in found


def test_batch_must_split_over_the_devices():
    assert validate({}, num_devices=8).errors == ()
    assert any("use 6 or 9" in e or "use 6 or 12" in e for e in validate({"batch_size": 8}, num_devices=3).errors)
    errors = validate({"fsdp_devices": 3}, num_devices=8).errors
    assert any("fsdp.fsdp_devices 3 does not divide the 8 devices; use one of 1, 2, 4, 8" in e for e in errors)


def test_files_are_errors_only_when_a_run_is_about_to_start(tmp_path):
    changes = {"data.data_dir": str(tmp_path), "data.asset_id": "x", "data.assets_dir": str(tmp_path / "assets")}
    assert any("norm statistics" in w for w in validate(changes).warnings)
    result = validate(changes, ready_to_train=True)
    assert any("norm_stats.json are missing; compute them with `acrlpd data stats" in e for e in result.errors)
    (tmp_path / "assets" / "x").mkdir(parents=True)
    (tmp_path / "assets" / "x" / "norm_stats.json").write_text("{}")
    assert validate(changes, ready_to_train=True).errors == ()
    assert validate({}, ready_to_train=True).errors == ()  # random data needs no files


def test_all_errors_in_one_message():
    result = validate({"batch_size": 0, "acrlpd.discount": 2.0, "critic.dropout_rate": 5.0})
    with pytest.raises(ConfigError) as error:
        result.raise_for_errors()
    assert len(result.errors) == 3
    assert all(message in str(error.value) for message in result.errors)
    validate({}).raise_for_errors()
