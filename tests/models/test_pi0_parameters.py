"""Parameter trees, counts and freeze filters are openpi's."""

import json

import jax
import numpy as np
import pytest
from flax import nnx
from model_goldens import GOLDENS, tiny_config

from acrlpd.config.bounds import check_bounds
from acrlpd.models.families.pi0 import Pi0Config
from acrlpd.models.observation import Observation
from acrlpd.models.paligemma_sizes import GEMMA_VARIANTS, GemmaConfig, LoRAConfig

FULL_SIZE = {
    "pi0": (Pi0Config(), 50, 3_238_048_528),
    "pi05": (Pi0Config(pi05=True), 51, 3_353_433_872),
    "pi0_lora": (
        Pi0Config(paligemma_variant="gemma_2b_lora", action_expert_variant="gemma_300m_lora"),
        70,
        3_288_036_112,
    ),
}


def parameters(config: Pi0Config) -> nnx.State:
    return nnx.state(nnx.eval_shape(lambda: config.create(jax.random.key(0))), nnx.Param)


def names(state: nnx.State) -> set[str]:
    return {"/".join(path) for path, _ in nnx.to_flat_state(state)}


@pytest.mark.parametrize("name", FULL_SIZE)
def test_full_size_tree_equals_manifest(name):
    config, num_leaves, num_parameters = FULL_SIZE[name]
    manifest = json.loads((GOLDENS / f"manifest_{name}.json").read_text())
    found = {
        "/".join(path): [list(leaf.shape), str(leaf.dtype)] for path, leaf in nnx.to_flat_state(parameters(config))
    }
    assert found == manifest
    assert len(found) == num_leaves
    assert sum(np.prod(shape) for shape, _ in found.values()) == num_parameters


@pytest.mark.parametrize("case", ["both", "paligemma_only", "expert_only", "rslora_both", "none"])
def test_freeze_filter(case, monkeypatch):
    rslora = GemmaConfig(64, 4, 128, 8, 16, LoRAConfig(4, 8.0, rslora=True))
    monkeypatch.setitem(GEMMA_VARIANTS, "dummy_rslora", rslora)
    golden = json.loads((GOLDENS / "lora_freeze_filter.json").read_text())[case]
    config = tiny_config(
        paligemma_variant=golden["paligemma_variant"], action_expert_variant=golden["action_expert_variant"]
    )
    frozen, trainable = nnx.split_state(parameters(config), config.get_freeze_filter(), ...)
    assert names(frozen) == set(golden["frozen"])
    assert names(trainable) == set(golden["trainable"])


@pytest.mark.parametrize("pi05", [False, True])
def test_frozen_backbone_trains_action_expert_and_projections(pi05):
    config = tiny_config(pi05=pi05)
    frozen, trainable = nnx.split_state(parameters(config), config.get_freeze_filter(freeze_pi0_backbone=True), ...)
    assert all("llm" in name and "_1/" in name for name in names(trainable) if name.startswith("PaliGemma"))
    assert all("/img/" in name or ("/llm/" in name and "_1/" not in name) for name in names(frozen))
    projections = {name.split("/")[0] for name in names(trainable) if not name.startswith("PaliGemma")}
    shared = {"action_in_proj", "action_out_proj"}
    own = {"time_mlp_in", "time_mlp_out"} if pi05 else {"state_proj", "action_time_mlp_in", "action_time_mlp_out"}
    assert projections == shared | own


def test_initialisation_statistics():
    """lecun fan-in per projection, zero norms, small adapters: as openpi, but for what SigLIP needs to learn to see."""
    config = tiny_config(paligemma_variant="dummy_lora", pi05=True)
    state = nnx.state(nnx.jit(lambda: config.create(jax.random.key(1)))())
    flat = {"/".join(path): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(state)}
    expected_std = {
        "PaliGemma/llm/layers/attn/q_einsum/w": 64**-0.5,
        "PaliGemma/llm/layers/attn/kv_einsum/w": 64**-0.5,
        "PaliGemma/llm/layers/attn/attn_vec_einsum/w": (8 * 16) ** -0.5,
        "PaliGemma/llm/layers/mlp/gating_einsum": 64**-0.5,
        "PaliGemma/llm/layers/mlp/linear": 128**-0.5,
        "PaliGemma/llm/layers/mlp/linear_lora_a": 0.01,
        "PaliGemma/llm/layers/attn/q_einsum/lora_b": 0.01,
        "PaliGemma/llm/embedder/input_embedding": 0.01,
        "PaliGemma/img/embedding/kernel": (14 * 14 * 3) ** -0.5,
        "PaliGemma/img/pos_embedding": 1.0,
        "PaliGemma/img/head/kernel": config.siglip.width**-0.5,
    }
    for name, std in expected_std.items():
        assert flat[name].std() == pytest.approx(std, rel=0.1), name
    for name in (
        "PaliGemma/llm/layers/pre_attention_norm_1/Dense_0/kernel",
        "PaliGemma/llm/final_norm/scale",
        "action_in_proj/bias",
    ):
        assert not flat[name].any(), name


def test_a_fresh_policy_can_learn_to_see():
    """The loss depends on where something is in the image, and teaches the layer that looks at pixels."""
    config = tiny_config(image_resolution=(28, 28), image_keys=("base_0_rgb",))
    graphdef, params = nnx.split(nnx.jit(config.create)(jax.random.key(0)))
    observation, actions = config.fake_obs(2), config.fake_act(2)
    image = np.full((2, 28, 28, 3), -1, np.float32)
    image[0, :6, :6] = image[1, -6:, -6:] = 1
    observation = observation.replace(images={"base_0_rgb": jax.numpy.asarray(image)})

    def loss(params: nnx.State, observation: Observation) -> tuple[jax.Array, jax.Array]:
        noise, time = jax.numpy.zeros_like(actions), jax.numpy.full(2, 0.9)
        model = nnx.merge(graphdef, params)
        losses = model.flow_matching_loss(model.encode(observation, features=False), actions, noise, time).mean(axis=1)
        return losses.mean(), losses

    gradient, (first, second) = jax.jit(jax.grad(loss, has_aux=True))(params, observation)
    assert abs(first - second) > 1e-3 * first
    norms = {"/".join(path): float(np.linalg.norm(leaf[...])) for path, leaf in nnx.to_flat_state(gradient)}
    total = np.linalg.norm(list(norms.values()))
    assert norms["PaliGemma/img/embedding/kernel"] > 1e-2 * total
    assert total < 100, "clipped to 1, such gradients hide the others"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"paligemma_variant": "gemma_3b"}, "paligemma_variant must be one of dummy"),
        ({"paligemma_variant": "gemma_2b"}, "depth must agree: gemma_2b has 18, dummy has 4"),
        ({"image_keys": ("wrist",)}, "image_keys must be a subset"),
        ({"image_keys": ("left_wrist_0_rgb", "base_0_rgb")}, "in that order"),
    ],
)
def test_impossible_configs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**changes)


@pytest.mark.parametrize("name", ["action_dim", "action_horizon", "max_token_len", "vocab_size"])
def test_sizes_have_bounds(name):
    assert [message for _, message in check_bounds(tiny_config(**{name: 0}))] == [f"{name} must be at least 1; found 0"]
    assert not list(check_bounds(tiny_config()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda o: o.replace(state=np.zeros((2, 14), np.float32)), r"state must be padded to action_dim 32"),
        (lambda o: o.replace(tokenized_prompt=np.zeros((2, 48), np.int32)), "max_token_len = 16"),
        (lambda o: o.replace(images={"base_0_rgb": o.images["base_0_rgb"]}), "lacks camera left_wrist_0_rgb"),
    ],
)
def test_wrong_observations_are_named(observation, change, message):
    with pytest.raises(ValueError, match=message):
        nnx.eval_shape(
            lambda: tiny_config().create(jax.random.key(0)).sample_actions(jax.random.key(0), change(observation))
        )


def test_wrong_image_size_and_chunk_are_named(observation):
    model = nnx.eval_shape(lambda: tiny_config().create(jax.random.key(0)))
    images = {key: np.zeros((2, 100, 224, 3), np.float32) for key in observation.images}
    with pytest.raises(ValueError, match=r"image base_0_rgb must be \[b, 224, 224, 3\]"):
        model.embed_prefix(observation.replace(images=images))
    with pytest.raises(ValueError, match=r"\[action_horizon, action_dim\] = \[10, 32\]"):
        model.embed_actions(np.zeros((2, 1, 10, 14), np.float32), np.zeros((2, 1), np.float32))
