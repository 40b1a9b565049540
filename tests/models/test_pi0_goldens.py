"""pi0 and pi0.5 compute what openpi computes, from tokens to gradients and samples."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from model_goldens import GOLDENS, load_golden, tiny_config, with_params

from acrlpd.models.paligemma_config import IMAGE_KEYS
from acrlpd.models.paligemma_sizes import GEMMA_VARIANTS, GemmaConfig
from acrlpd.models.pi0 import Pi0

F32 = {"atol": 2e-5, "rtol": 1e-5}
BF16_ACTIVATIONS = {"atol": 8e-2, "rtol": 0}
BF16_RESULTS = {"atol": 3e-2, "rtol": 0}


def forward(model: Pi0, observation, batch):
    """Every intermediate that the goldens hold, in openpi's terms, from one pass."""
    observation = model.preprocess(None, observation, train=False)
    img, llm = model.PaliGemma.img, model.PaliGemma.llm
    x_t = batch["time"][:, None, None] * batch["noise"] + (1 - batch["time"][:, None, None]) * batch["actions"]
    prefix_tokens, prefix_mask = model.embed_prefix(observation)
    action_tokens, condition = model.embed_actions(x_t[:, None], batch["time"][:, None])
    state_tokens = [] if model.config.pi05 else [model.embed_state(observation)]
    suffix_tokens = jnp.concatenate([*state_tokens, action_tokens[:, 0]], axis=1)
    # Our passes take valid tokens first; the goldens have them in place.
    order = jnp.argsort(~prefix_mask, axis=-1, stable=True)
    back = jnp.argsort(order, axis=-1)
    tokens = jnp.take_along_axis(prefix_tokens, order[..., None], axis=1)
    prefix_out, cache = llm.run_prefix(tokens, prefix_mask.sum(axis=-1, dtype=jnp.int32))
    prefix_out = jnp.take_along_axis(prefix_out, back[..., None], axis=1)
    k, v = (jnp.take_along_axis(x, back[None, ..., None], axis=2) for x in (cache.k, cache.v))
    context = model.encode(observation)
    state_len = suffix_tokens.shape[1] - model.action_horizon
    suffix_k, suffix_v = [], []
    if state_len:
        _, state_k, state_v = llm.run_suffix(suffix_tokens[:, None, :state_len], cache)
        suffix_k, suffix_v = [state_k[:, :, 0]], [state_v[:, :, 0]]
    action_out, action_k, action_v = llm.run_suffix(
        suffix_tokens[:, None, state_len:],
        context.memory,
        condition=condition,
    )
    suffix_k, suffix_v = [*suffix_k, action_k[:, :, 0]], [*suffix_v, action_v[:, :, 0]]
    return {
        "x_t": x_t,
        "siglip/tokens": img(observation.images["base_0_rgb"]),
        "siglip/with_posemb_sample0": img.embed_patches(observation.images["base_0_rgb"])[0],
        "prefix/tokens": prefix_tokens,
        "prefix/mask": prefix_mask,
        "suffix/tokens": suffix_tokens,
        **({} if condition is None else {"suffix/adarms_cond": condition[:, 0]}),
        "prefixonly/out_stride16": prefix_out[:, ::16],
        "prefix_out_stride16": prefix_out[:, ::16],
        "prefixonly/kv_k_stride16": k[:, :, ::16, None],
        "prefixonly/kv_v_stride16": v[:, :, ::16, None],
        "kv_k_stride16": jnp.concatenate([k, *suffix_k], axis=2)[:, :, ::16, None],
        "kv_v_stride16": jnp.concatenate([v, *suffix_v], axis=2)[:, :, ::16, None],
        "suffix_out": action_out[:, 0],
        "v_t": model.velocity(context, x_t[:, None], batch["time"][:, None])[:, 0],
        "features": context.features.mean(),
    }


def run(model: Pi0, observation, batch, num_steps: int) -> dict:
    """`forward`, the loss and samples for the golden noise, in one compile."""

    @nnx.jit  # of the batch, too: XLA would compute with constants while it compiles
    def call(m: Pi0, observation, batch) -> dict:
        loss = m.compute_loss(
            jax.random.key(0), observation, batch["actions"], noise=batch["noise"], time=batch["time"]
        )
        actions = m.sample_actions(jax.random.key(0), observation, num_steps=num_steps, noise=batch["noise"])
        return forward(m, observation, batch) | {"loss": loss, f"sample_actions/num_steps_{num_steps}": actions}

    return call(model, observation, batch)


def model_for(tag: str, dtype: str) -> Pi0:
    return with_params(tiny_config(pi05=tag == "pi05", dtype=dtype), load_golden(f"params_{tag}"))


@pytest.fixture(scope="module", params=["pi0", "pi05"])
def tag(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(tag) -> Pi0:
    return model_for(tag, "float32")


def compare(found: dict, golden: dict, activations, results) -> None:
    for name, value in found.items():
        if name not in golden:
            continue
        tolerance = results if name == "loss" or "sample_actions" in name else activations
        expected = golden[name]
        if name == "suffix_out":  # our pass leaves pi0's state token in the context
            expected = expected[:, -value.shape[1] :]
        assert value.shape == expected.shape, name
        if "kv_" in name or "out_stride16" in name:
            # Rows of invalid tokens depend on how padding is laid out; nobody reads them.
            valid = golden_valid_rows(golden)[:, : value.shape[-2 if value.ndim == 3 else -3]]
            value, expected = (rows_of(x, valid) for x in (value, expected))
        if expected.dtype == bool:
            np.testing.assert_array_equal(value, expected, err_msg=name)
        else:
            np.testing.assert_allclose(value.astype(jnp.float32), expected, err_msg=name, **tolerance)


def golden_valid_rows(golden: dict) -> np.ndarray:
    """Which rows of the strided joint sequence are valid, [b, s / 16]."""
    return np.concatenate([golden["prefix/mask"], golden["suffix/mask"]], axis=1)[:, ::16]


def rows_of(x, valid: np.ndarray):
    """Valid rows of [b, s, d] or [depth, b, s, 1, d]."""
    return x[valid] if x.ndim == 3 else x[:, valid]


def test_forward_float32(tag, model, observation, batch):
    found = nnx.jit(forward)(model, observation, batch)
    golden = load_golden(f"out_{tag}_f32")
    compare(found, golden, F32, F32)
    # The critic's features are the mean of the prefix output over valid tokens (brute force on the stride).
    assert found["features"].shape == (2, 64)


@pytest.fixture(scope="module")
def results(model, observation, batch) -> dict[str, jax.Array]:
    """The public methods' results, from one compile (XLA shares what the calls have in common)."""

    @nnx.jit
    def call(m: Pi0, observation, batch) -> dict[str, jax.Array]:
        samples = {
            f"sample_actions/num_steps_{steps}": m.sample_actions(
                jax.random.key(0), observation, num_steps=steps, noise=batch["noise"]
            )
            for steps in (1, 4, 10)
        }
        keyed = {
            f"keyed/loss_train_{str(train).lower()}": m.compute_loss(
                jax.random.key(7), observation, batch["actions"], train=train
            )
            for train in (False, True)
        }
        loss = m.compute_loss(
            jax.random.key(0), observation, batch["actions"], noise=batch["noise"], time=batch["time"]
        )
        keyed["keyed/sample_actions_10"] = m.sample_actions(jax.random.key(11), observation)
        return {"loss": loss} | samples | keyed

    return call(model, observation, batch)


@pytest.mark.parametrize(
    "name",
    [
        "loss",
        "sample_actions/num_steps_1",
        "sample_actions/num_steps_4",
        "sample_actions/num_steps_10",
        "keyed/loss_train_false",
        "keyed/loss_train_true",
        "keyed/sample_actions_10",
    ],
)
def test_losses_and_samples_float32(tag, results, name):
    """From given noise and times, and from a key that draws openpi's noise, times and augmentation."""
    np.testing.assert_allclose(results[name], load_golden(f"out_{tag}_f32")[name], **F32)


def test_gradients(tag, model, observation, batch):
    golden = load_golden(f"out_{tag}_f32")

    @nnx.jit
    def gradients(model, observation, batch):
        def loss(model):
            return model.compute_loss(
                jax.random.key(0), observation, batch["actions"], noise=batch["noise"], time=batch["time"]
            ).mean()

        return nnx.value_and_grad(loss)(model)

    loss, grads = gradients(model, observation, batch)
    np.testing.assert_allclose(loss, golden["grad/loss"], **F32)
    flat = {"/".join(path): leaf[...] for path, leaf in nnx.to_flat_state(grads)}
    norms = {name.removeprefix("grad_norm/"): value for name, value in golden.items() if "grad_norm/" in name}
    assert set(flat) == set(norms)
    for name, norm in norms.items():
        np.testing.assert_allclose(jnp.linalg.norm(flat[name].ravel()), norm, err_msg=name, **F32)
        if f"grad/{name}" in golden:
            np.testing.assert_allclose(flat[name], golden[f"grad/{name}"], err_msg=name, **F32)


def test_bfloat16(tag, observation, batch):
    found = run(model_for(tag, "bfloat16"), observation, batch, num_steps=10)
    compare(found, load_golden(f"out_{tag}_bf16"), BF16_ACTIVATIONS, BF16_RESULTS)
    assert_dtypes(found, f"{tag}_bf16")


def assert_dtypes(found: dict, report_tag: str) -> None:
    report = json.loads((GOLDENS / "model_report.json").read_text())[f"{report_tag}/dtypes"]
    for name, dtype in report.items():
        if name in found:
            assert found[name].dtype == dtype, name


def test_bfloat16_parameters(observation, batch):
    """What a server runs: parameters cast to bfloat16."""
    params = {name: value.astype(jnp.bfloat16) for name, value in load_golden("params_pi0").items()}
    found = run(with_params(tiny_config(dtype="bfloat16"), params), observation, batch, num_steps=10)
    compare(found, load_golden("out_pi0_bf16_bf16params"), BF16_ACTIVATIONS, BF16_RESULTS)
    assert_dtypes(found, "pi0_bf16params")


def outputs(golden: dict) -> dict:
    return {name.removeprefix("out/"): value for name, value in golden.items() if name.startswith("out/")}


def test_experts_of_different_width(monkeypatch, observation, batch):
    monkeypatch.setitem(GEMMA_VARIANTS, "narrow", GemmaConfig(48, 4, 96, 8, 16))
    golden = load_golden("narrow_pi0_f32")
    changed = {name.removeprefix("params/"): value for name, value in golden.items() if "params/" in name}
    model = with_params(tiny_config(action_expert_variant="narrow"), load_golden("params_pi0") | changed)
    compare(run(model, observation, batch, num_steps=4), outputs(golden), F32, F32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lora_in_both_experts(dtype, observation, batch):
    adapters = {
        name.removeprefix("params/"): value for name, value in load_golden("lora_both_f32").items() if "params/" in name
    }
    config = tiny_config(paligemma_variant="dummy_lora", action_expert_variant="dummy_lora", dtype=dtype)
    model = with_params(config, load_golden("params_pi0") | adapters)
    found = run(model, observation, batch, num_steps=4)
    if dtype == "float32":
        compare(found, outputs(load_golden("lora_both_f32")), F32, F32)
    else:
        compare(found, outputs(load_golden("lora_both_bf16")), BF16_ACTIVATIONS, BF16_RESULTS)


def test_candidates_share_the_prefix_and_equal_single_samples(model, observation):
    noise = jax.random.normal(jax.random.key(5), (2, 3, 10, 32))
    sample = nnx.jit(lambda m, seen: m.sample_candidates(jax.random.key(0), seen, 3, num_steps=4, noise=noise))
    candidates = sample(model, observation)
    single = nnx.jit(lambda m, seen, n: m.sample_actions(jax.random.key(0), seen, num_steps=4, noise=n))
    for i in range(3):
        np.testing.assert_allclose(candidates[:, i], single(model, observation, noise[:, i]), **F32)


def test_camera_that_is_never_provided_costs_nothing(tag, model, observation, batch):
    """Leaving a camera out of image_keys equals openpi's masking of it."""
    masked = observation.replace(image_masks=observation.image_masks | {IMAGE_KEYS[2]: np.zeros(2, bool)})
    sample = nnx.jit(lambda m, seen: m.sample_actions(jax.random.key(0), seen, num_steps=4, noise=batch["noise"]))
    two = with_params(tiny_config(pi05=tag == "pi05", image_keys=IMAGE_KEYS[:2]), load_golden(f"params_{tag}"))
    np.testing.assert_allclose(sample(two, observation), sample(model, masked), **F32)
    tokens, _ = two.embed_prefix(observation.replace(images=two.preprocess(None, observation, train=False).images))
    assert tokens.shape[1] == 2 * 256 + 16
