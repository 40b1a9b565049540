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
from acrlpd.models.gemma import KVCache, rms_norm
from acrlpd.models.layers import param_dict
from acrlpd.models.observation import Observation
from acrlpd.models.pi0_fast import Prefix

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


@jax.jit
def forward(model, observation):
    """Embeddings of the prefix, its outputs, the outputs that predict action tokens, and their logits."""
    embedded, _ = model.embed_prefix(observation)
    context = model.encode(observation)
    outputs = model.token_outputs(context.memory)
    return embedded, context.features, outputs, model.PaliGemma.llm.logits(outputs)


def compare_activations(golden, dtype, results, **tolerance):
    """Prompt and action tokens of each sample; the positions of padding are no part of the policy."""
    embedded, features, outputs, _ = results
    near, expected = np.asarray(embedded[:, : 49 * 16 : 16], np.float32), golden[f"{dtype}/embedded"][:, :49]
    np.testing.assert_allclose(near, expected, **tolerance)
    for row, (start, count) in enumerate(zip(golden["prefix_lengths"], golden["action_token_lengths"], strict=True)):
        end = int(features.length[row])
        ours = np.concatenate([features.tokens[row, end - start : end - 1], outputs[row, :count]]).astype(np.float32)
        expected = golden[f"{dtype}/prelogits_tail"][row, : start + count - 1]
        np.testing.assert_allclose(ours, expected, **tolerance)


def test_forward_pass_in_float32(golden):
    results = forward(create(golden), observe(golden))
    compare_activations(golden, "float32", results, **F32)
    for row, (start, count) in enumerate(zip(golden["prefix_lengths"], golden["action_token_lengths"], strict=True)):
        expected = golden["float32/logits"][row, start - 1 : start - 1 + count]
        np.testing.assert_allclose(results[-1][row, :count], expected, **F32)


def test_forward_pass_in_bfloat16(golden):
    model = create(golden, "bfloat16")
    results = forward(model, observe(golden))
    embedded, features, outputs, logits = results
    assert embedded.dtype == features.tokens.dtype == outputs.dtype == jnp.bfloat16
    assert logits.dtype == jnp.float32
    compare_activations(golden, "bfloat16", results, atol=8e-2)
    # openpi's logits are float32 products of its bfloat16 outputs.
    last = jnp.asarray(golden["bfloat16/prelogits_tail"], jnp.bfloat16)
    np.testing.assert_allclose(model.PaliGemma.llm.logits(last), golden["bfloat16/logits"], **F32)


def test_loss_and_gradients(golden):
    graphdef, params = nnx.split(create(golden))
    chunks = np.zeros((3, 8, 7), np.float32)  # only their shape counts

    @jax.jit
    def differentiate(params, observation):
        def mean_loss(params):
            model = nnx.merge(graphdef, params)
            losses = model.flow_matching_loss(model.encode(observation), chunks, None, None)
            return jnp.mean(losses), losses

        grads, losses = jax.grad(mean_loss, has_aux=True)(params)
        return jax.tree.map(jnp.linalg.norm, grads), losses

    norms, losses = differentiate(params, observe(golden))
    np.testing.assert_allclose(losses, np.repeat(golden["float32/loss"][:, None], 8, axis=1), **F32)
    observation = observe(golden)
    without = dataclasses.replace(observation, action_tokens=observation.action_tokens * [[1], [0], [1]])
    _, others = differentiate(params, without)  # a chunk that could not be written has no tokens
    np.testing.assert_array_equal(others, losses * np.array([[1], [0], [1]]))
    norms = {"/".join(path): leaf.get_value() for path, leaf in nnx.to_flat_state(norms)}
    expected = {k.removeprefix("grad_norm/"): v for k, v in golden.items() if k.startswith("grad_norm/")}
    assert norms.keys() == expected.keys()
    for name, norm in norms.items():
        np.testing.assert_allclose(norm, expected[name], err_msg=name, **F32)


@jax.jit
def encode(model, observation):
    return model.encode(observation).memory


@jax.jit
def write(model, prefix, noise):
    """Two sequences for each sample, whose tokens are drawn at temperature 0.7; without noise, the most probable."""
    return model.generate(prefix, 2, lambda logits, index: jnp.argmax(logits / 0.7 + noise[index], axis=-1))


@pytest.fixture(scope="module")
def noise():
    """What openpi adds to the logits of each step of the goldens, and nothing in further steps."""
    key, steps = jax.random.key(1), []
    for _ in range(STEPS):
        key, step_key = jax.random.split(key)
        steps.append(jax.random.gumbel(step_key, (3, 1, 512)))
    return jnp.pad(jnp.stack(steps), ((0, ACTIONS - STEPS), (0, 0), (0, 0), (0, 0)))


def compare_tokens(golden, model, prefix, noise, rows):
    for name, added in (("greedy_tokens", jnp.zeros_like(noise)), ("drawn_tokens_key1_t0.7", noise)):
        tokens = write(model, prefix, added)
        np.testing.assert_array_equal(tokens[:, 0], tokens[:, 1])
        np.testing.assert_array_equal(tokens[rows, 0, :STEPS], golden[f"float32/{name}"][rows], err_msg=name)


def test_written_tokens(golden, noise):
    """Sample 1 has a masked image, which neither openpi nor this project gives this family; see the next test."""
    model = create(golden)
    compare_tokens(golden, model, encode(model, observe(golden)), noise, [0, 2])


def test_written_tokens_after_a_masked_image(golden, noise):
    """`openpi_prefix` says how openpi decodes then. This family masks no image, so the policy need not do the same."""
    model = create(golden)
    compare_tokens(golden, model, jax.jit(openpi_prefix)(model, observe(golden)), noise, [0, 1, 2])


def test_training_at_the_positions_of_writing(golden, noise):
    """A written token is then the one that training predicts after the tokens before it."""
    model = create(golden)
    prefix = encode(model, observe(golden))
    tokens = write(model, prefix, jnp.zeros_like(noise))[:, 0]
    predicted = {}
    for at_decode_positions in (False, True):
        model.config = dataclasses.replace(model.config, train_at_decode_positions=at_decode_positions)
        predicted[at_decode_positions] = jnp.argmax(predict(model, prefix.replace(action_tokens=tokens)), axis=-1)
    np.testing.assert_array_equal(predicted[True], tokens)
    assert (predicted[False] != tokens).any()


@jax.jit
def predict(model, prefix):
    return model.PaliGemma.llm.logits(model.token_outputs(prefix))


def openpi_prefix(model, observation):
    """The keys and values that openpi's decoding lets written tokens see, and the output that predicts the first one.

    openpi moves the last valid token to the end, and lets written tokens see as many places before them as there are
    valid tokens. Where an image in between is masked, these places have the masked tokens, and lack as many of the
    first tokens: the first camera. Masked tokens attend to all places alike, also to the empty ones at the end.
    """
    llm = model.PaliGemma.llm
    x, valid = model.embed_prefix(observation)
    count, (b, size) = jnp.sum(valid, axis=1), valid.shape
    shift = jax.vmap(functools.partial(jnp.roll, axis=0))
    to_end = -1 - jnp.max(valid * jnp.arange(size), axis=1)
    x, valid = shift(x, to_end), shift(valid, to_end)
    sees = jnp.pad(valid[:, None] & valid[:, :, None], ((0, 0), (0, 0), (0, STEPS)))
    positions, keys, values = jnp.cumsum(valid, axis=1) - 1, [], []
    for w in llm.unstack(0):
        y, _ = rms_norm(x, w["pre_attention_norm"], None)
        qkv = (y @ w["qkv"]).reshape(b, size, -1, llm.experts[0].head_dim)
        q, k, v = rotate(qkv[:, :, :-2], positions), rotate(qkv[:, :, -2:-1], positions)[:, :, 0], qkv[:, :, -1]
        room = ((0, 0), (0, STEPS), (0, 0))
        scores = jnp.einsum("bqhd,bkd->bhqk", q, jnp.pad(k, room)) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(sees[:, None], scores, -1e38), axis=-1)
        attended = jnp.einsum("bhqk,bkd->bqhd", weights, jnp.pad(v, room))
        x = x + attended.reshape(b, size, -1) @ w["attn_vec"]
        y, _ = rms_norm(x, w["pre_ffw_norm"], None)
        gate, up = jnp.split(y @ w["gate_up"], 2, axis=-1)
        x = x + (jax.nn.gelu(gate) * up) @ w["down"]
        keys.append(shift(k, count - size))
        values.append(shift(v, count - size))
    last, _ = rms_norm(x[:, -1], param_dict(llm.final_norm), None)
    return Prefix(KVCache(jnp.stack(keys), jnp.stack(values), count), last, count, None)


def rotate(x, positions):
    """Rotary positions [b, t] on x [b, t, heads, d]."""
    first, second = jnp.split(x, 2, axis=-1)
    angles = positions[..., None, None] / 10_000 ** (jnp.arange(first.shape[-1]) / first.shape[-1])
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def test_parameters_have_openpis_names_and_shapes():
    manifest = json.loads((GOLDENS / "manifest_pi0_fast.json").read_text())
    state = nnx.state(nnx.eval_shape(lambda: Pi0FASTConfig().create(jax.random.key(0))), nnx.Param)
    ours = {"/".join(path): [list(leaf.shape), str(leaf.dtype)] for path, leaf in nnx.to_flat_state(state)}
    assert ours == manifest
