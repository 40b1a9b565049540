"""pi0-FAST against openpi's own numbers: embeddings, logits, loss, gradients, written tokens, and parameter names."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from model_goldens import GOLDENS, load_golden, with_params

from acrlpd.models.families.pi0_fast import Pi0FASTConfig
from acrlpd.models.observation import Observation

CAMERAS = ("base_0_rgb", "base_1_rgb", "wrist_0_rgb")
F32 = {"atol": 2e-5, "rtol": 1e-5}
PROMPT, ACTIONS = 12, 14  # the longest prefix and the longest action of the goldens
STEPS = 12  # written tokens in the goldens


@pytest.fixture(scope="module")
def golden():
    return load_golden("pi0_fast_tiny")


def create(golden, dtype="float32", cameras=CAMERAS):
    config = Pi0FASTConfig(
        dtype=dtype,
        paligemma_variant="dummy",
        siglip_variant="mu/14",
        vocab_size=512,
        state_dim=7,
        action_dim=7,
        action_horizon=8,
        max_token_len=PROMPT + ACTIONS,
        max_action_tokens=ACTIONS,
        image_keys=cameras,
        fast_tokenizer="byte",
    )
    return with_params(config, {k.removeprefix("params/"): v for k, v in golden.items() if k.startswith("params/")})


def observe(golden, rows=slice(None), cameras=CAMERAS):
    """openpi's sequences, cut into the prompt and the action tokens."""
    prompt, actions = np.zeros((3, PROMPT), np.int32), np.zeros((3, ACTIONS), np.int32)
    for row, (start, count) in enumerate(zip(golden["prefix_lengths"], golden["action_token_lengths"], strict=True)):
        prompt[row, :start] = golden["tokens"][row, :start]
        actions[row, :count] = golden["tokens"][row, start : start + count]
    return Observation(
        images={key: golden[f"image/{key}"][rows] for key in cameras},
        image_masks={key: golden[f"image_mask/{key}"][rows] for key in cameras},
        state=np.zeros((len(prompt[rows]), 7), np.float32),
        tokenized_prompt=prompt[rows],
        tokenized_prompt_mask=prompt[rows] != 0,
        action_tokens=actions[rows],
    )


def forward(graphdef, params, observation):
    """The mean loss, and everything on the way to it."""
    model = nnx.merge(graphdef, params)
    embedded, _ = model.embed_prefix(observation)
    context = model.encode(observation)
    prefix, llm = context.memory, model.PaliGemma.llm
    positions = prefix.next_position[:, None] + jnp.arange(ACTIONS - 1)
    written, _, _ = llm.run_causal(llm.embed(observation.action_tokens[:, :-1])[:, None], prefix.cache, positions)
    loss = model.flow_matching_loss(context, CHUNKS, None, None)
    return jnp.mean(loss), (embedded, context.features, written[:, 0], model.token_logits(prefix), loss)


CHUNKS = np.zeros((3, 8, 7), np.float32)  # only their shape counts


def text_outputs(golden, features, written):
    """Pairs of our outputs and openpi's at the tokens of each sample: prompt, then all action tokens but the last."""
    for row, (start, count) in enumerate(zip(golden["prefix_lengths"], golden["action_token_lengths"], strict=True)):
        end = int(features.length[row])
        ours = np.concatenate([features.tokens[row, end - start : end], written[row, : count - 1]]).astype(np.float32)
        yield ours, slice(0, start + count - 1), row


def test_forward_pass_and_gradients_in_float32(golden):
    graphdef, params = nnx.split(create(golden))

    @jax.jit
    def differentiate(params, observation):
        grads, results = jax.grad(lambda params: forward(graphdef, params, observation), has_aux=True)(params)
        return jax.tree.map(jnp.linalg.norm, grads), results

    norms, (embedded, features, written, logits, loss) = differentiate(params, observe(golden))
    np.testing.assert_allclose(embedded[:, : 48 * 16 : 16], golden["float32/embedded"][:, :48], **F32)
    for ours, places, row in text_outputs(golden, features, written):
        np.testing.assert_allclose(ours, golden["float32/prelogits_tail"][row, places], **F32)
        first, count = golden["prefix_lengths"][row] - 1, golden["action_token_lengths"][row]
        np.testing.assert_allclose(logits[row, :count], golden["float32/logits"][row, first : first + count], **F32)
    np.testing.assert_allclose(loss[:, 0], golden["float32/loss"], **F32)
    assert (np.asarray(loss) == np.asarray(loss)[:, :1]).all()
    norms = {"/".join(path): leaf.get_value() for path, leaf in nnx.to_flat_state(norms)}
    expected = {k.removeprefix("grad_norm/"): v for k, v in golden.items() if k.startswith("grad_norm/")}
    assert norms.keys() == expected.keys()
    for name, norm in norms.items():
        np.testing.assert_allclose(norm, expected[name], err_msg=name, **F32)


def test_forward_pass_in_bfloat16(golden):
    graphdef, params = nnx.split(create(golden, "bfloat16"))
    _, results = jax.jit(functools.partial(forward, graphdef))(params, observe(golden))
    embedded, features, written, logits, loss = results
    assert embedded.dtype == features.tokens.dtype == written.dtype == jnp.bfloat16
    assert logits.dtype == jnp.float32
    near = np.asarray(embedded[:, : 48 * 16 : 16], np.float32)
    np.testing.assert_allclose(near, golden["bfloat16/embedded"][:, :48], atol=8e-2)
    for ours, places, row in text_outputs(golden, features, written):
        np.testing.assert_allclose(ours, golden["bfloat16/prelogits_tail"][row, places], atol=8e-2)
    np.testing.assert_allclose(loss[:, 0], golden["bfloat16/loss"], atol=8e-2)
    # openpi's logits are float32 products of its bfloat16 outputs.
    llm, last = create(golden, "bfloat16").PaliGemma.llm, golden["bfloat16/prelogits_tail"].astype(jnp.bfloat16)
    np.testing.assert_allclose(llm.logits(jnp.asarray(last)), golden["bfloat16/logits"], **F32)


def test_written_tokens(golden):
    """Sample 1 has a masked image, which openpi never gives this family; see the next test."""
    rows, keys, key = jnp.array([0, 2]), [], jax.random.key(1)
    for _ in range(ACTIONS):
        key, step_key = jax.random.split(key)
        keys.append(step_key)
    noise = jnp.stack([jax.random.gumbel(step_key, (3, 1, 512)) for step_key in keys])[:, rows]

    @jax.jit
    def write(model, observation, noise):
        prefix = model.encode(observation).memory
        drawn = model.generate(prefix, 1, lambda logits, i: jnp.argmax(logits / 0.7 + noise[i], axis=-1))
        greedy = model.generate(prefix, 2, lambda logits, _: jnp.argmax(logits, axis=-1))
        # Without openpi's offset, a written token sees what the same token sees in training.
        model.config = dataclasses.replace(model.config, openpi_decode_positions=False)
        unshifted = model.generate(prefix, 1, lambda logits, _: jnp.argmax(logits, axis=-1))[:, 0]
        predicted = jnp.argmax(model.token_logits(prefix.replace(action_tokens=unshifted)), axis=-1)
        return greedy, drawn[:, 0, :STEPS], unshifted, predicted

    greedy, drawn, unshifted, predicted = write(create(golden), observe(golden, rows), noise)
    np.testing.assert_array_equal(greedy[:, 0], greedy[:, 1])
    np.testing.assert_array_equal(greedy[:, 0, :STEPS], golden["float32/greedy_tokens"][rows])
    np.testing.assert_array_equal(drawn, golden["float32/drawn_tokens_key1_t0.7"][rows])
    np.testing.assert_array_equal(unshifted, predicted)


def test_tokens_after_a_masked_image(golden):
    """openpi's decoding closes the gap of a masked image, so the sample is as if that camera did not exist."""
    cameras = ("base_0_rgb", "wrist_0_rgb")

    @jax.jit
    def write(model, observation):
        return model.generate(model.encode(observation).memory, 1, lambda logits, _: jnp.argmax(logits, axis=-1))

    tokens = write(create(golden, cameras=cameras), observe(golden, [1], cameras))
    np.testing.assert_array_equal(tokens[:, 0, :STEPS], golden["float32/greedy_tokens"][[1]])


def test_parameters_have_openpis_names_and_shapes():
    manifest = json.loads((GOLDENS / "manifest_pi0_fast.json").read_text())
    state = nnx.state(nnx.eval_shape(lambda: Pi0FASTConfig().create(jax.random.key(0))), nnx.Param)
    ours = {"/".join(path): [list(leaf.shape), str(leaf.dtype)] for path, leaf in nnx.to_flat_state(state)}
    assert ours == manifest
