"""The plan's bytes against openpi's sharding, the agent's own shapes, and XLA's analysis."""

import json
import math
import pathlib

import jax
import pytest

from acrlpd.agents import train_step
from acrlpd.config import apply_config_overrides, get_config
from acrlpd.config.create_agent import create_agent
from acrlpd.config.plan.flops import batch_spec
from acrlpd.config.plan.memory import estimate_memory

GOLDENS = pathlib.Path(__file__).parent.parent / "goldens"
ITEMSIZE = {"float32": 4, "bfloat16": 2}


def trace_agent(config):
    return jax.eval_shape(lambda key: create_agent(config, key), jax.random.key(0))


def _size(tree) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"freeze_pi0_backbone": True, "critic.num_critics": 5},
        {"model.paligemma_variant": "dummy_lora"},
        {"acrlpd.ema_decay": None},
        {"model.type": "state_flow", "model.action_dim": 7},
        {"model.type": "gaussian", "model.action_dim": 7},
        {"backup": "implicit_value", "acrlpd.learnable_temperature": False},
        {"improvement": "distillation"},
    ],
)
def test_state_is_exactly_the_agents(changes):
    config = apply_config_overrides(get_config("debug"), changes)
    memory, agent = estimate_memory(config), trace_agent(config)
    assert memory.parameters == _size((agent.policy_params, agent.frozen_params))
    assert memory.ema == _size(agent.ema_params)
    assert memory.gradients == _size(agent.policy_params)
    counters = 64  # the optimizers' own step counts
    assert memory.optimizer == pytest.approx(_size(agent.policy_opt_state), abs=counters)
    learned = (agent.critics.online, agent.improvement.params, agent.backup.params)
    critics = _size((agent.critics, agent.critic_opt_state, agent.improvement, agent.backup)) + _size(learned)
    assert memory.critics == pytest.approx(critics, abs=counters)


@pytest.mark.parametrize(
    ("manifest", "specs", "changes"),
    [
        ("manifest_pi0.json", "fsdp_specs_pi0_fsdp8.json", {}),
        (
            "manifest_pi0_lora.json",
            "fsdp_specs_pi0_lora_frozenbf16_fsdp8.json",
            {"model.paligemma_variant": "gemma_2b_lora", "model.action_expert_variant": "gemma_300m_lora"},
        ),
    ],
)
def test_sharded_parameters_follow_openpis_specs(manifest, specs, changes):
    golden = json.loads((GOLDENS / specs).read_text())
    dtypes = golden.get("dtypes", {})
    expected = 0
    for name, (shape, dtype) in json.loads((GOLDENS / manifest).read_text()).items():
        frozen = bool(changes) and "llm" in name and "lora" not in name
        size = math.prod(shape) * ITEMSIZE[dtypes.get(name, "bfloat16" if frozen else dtype)]
        expected += size // 8 if golden["specs"][name] else size
    config = apply_config_overrides(
        get_config("aloha"), {"freeze_pi0_backbone": False, "fsdp_devices": 8, "batch_size": 32, **changes}
    )
    assert estimate_memory(config, num_devices=8).parameters == expected


def test_what_saves_memory_saves_memory():
    base = apply_config_overrides(
        get_config("aloha"), {"freeze_pi0_backbone": False, "batch_size": 32, "gradient_accumulation_steps": 1}
    )

    def peak(changes, num_devices=1):
        return estimate_memory(apply_config_overrides(base, changes), num_devices).peak

    whole = peak({})
    assert peak({"fsdp_devices": 8}, 8) < peak({}, 8) / 4
    assert peak({}, 8) < whole
    assert peak({"model.remat_policy": "none"}) > peak({"model.remat_policy": "dots"}) > whole
    assert peak({"freeze_pi0_backbone": True}) < peak({"model.paligemma_variant": "gemma_2b_lora"}) < whole
    dsrl = {"improvement": "dsrl", "loss_weights.bc_weight": 0.0, "acrlpd.learnable_temperature": False}
    assert peak(dsrl) < peak({"freeze_pi0_backbone": True})
    assert peak({"acrlpd.ema_decay": None}) < whole
    assert peak({"batch_size": 8}) < whole
    many = {"acrlpd.num_action_samples": 256, "freeze_pi0_backbone": True}
    parallel = peak({**many, "acrlpd.best_of_n.strategy": "parallel"})
    assert peak({**many, "acrlpd.best_of_n.strategy": "sequential"}) < parallel


@pytest.mark.parametrize("changes", [{}, pytest.param({"freeze_pi0_backbone": True}, marks=pytest.mark.slow)])
def test_peak_is_near_xlas_own_analysis(changes):
    """On CPU, where XLA keeps more alive at once than on an accelerator: there it is within 6 %."""
    config = apply_config_overrides(
        get_config("debug"),
        {
            "model.image_resolution": [112, 112],
            "model.max_token_len": 31,
            "model.dtype": "float32",
            "batch_size": 32,
            "acrlpd.num_action_samples": 4,
            "acrlpd.sampling_steps": 4,
            **changes,
        },
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    lowered = train_step.lower(trace_agent(config), batch_spec(config), key)
    # The machine code does not change the buffers, so it need not be good.
    analysis = lowered.compile(compiler_options={"xla_backend_optimization_level": "0"}).memory_analysis()
    peak = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
    peak += analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    assert estimate_memory(config).peak == pytest.approx(peak, rel=0.3)
