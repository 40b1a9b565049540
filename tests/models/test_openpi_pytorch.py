"""openpi's PyTorch layout: names, shapes and meaning of every array, and the way back."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import pytorch_pi0
from flax import nnx
from model_goldens import GOLDENS, load_golden, tiny_config, with_params
from safetensors.numpy import load_file, save_file

from acrlpd.models.families.pi0 import Pi0Config
from acrlpd.models.openpi_checkpoint import OpenPICheckpointError, flatten_params
from acrlpd.models.openpi_pytorch import load_pytorch_weights, pytorch_shapes, save_pytorch_weights
from acrlpd.models.paligemma_config import IMAGE_KEYS

EMBEDDING = "paligemma_with_expert.paligemma.lm_head.weight"
EMBED_TOKENS = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
EXPERT_OUTPUT = "paligemma_with_expert.gemma_expert.lm_head.weight"


def abstract_params(config: Pi0Config) -> nnx.State:
    return nnx.state(nnx.eval_shape(lambda: config.create(jax.random.key(0))), nnx.Param)


def golden_params(tag: str) -> nnx.State:
    return nnx.state(with_params(tiny_config(pi05=tag == "pi05"), load_golden(f"params_{tag}")), nnx.Param)


def random_params(config: Pi0Config) -> nnx.State:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(np.float32), abstract_params(config))


@pytest.fixture(scope="module", params=["pi0", "pi05"])
def tag(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def file(tag: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parameters of openpi's golden outputs."""
    path = tmp_path_factory.mktemp("pytorch") / "model.safetensors"
    save_pytorch_weights(golden_params(tag), path)
    return path


def read_tree(arrays: dict[str, np.ndarray], config: Pi0Config) -> dict[str, np.ndarray]:
    """A second way back, written from the shapes of both sides: one line for each of our parameters."""
    width, head_dim = config.siglip.width, config.siglip.width // config.siglip.num_heads
    per_head = (config.siglip.num_heads, head_dim)
    vision, tree = "paligemma_with_expert.paligemma.model.vision_tower.vision_model", {}

    def stack(name: str) -> np.ndarray:
        pattern = re.compile(re.escape(name).replace(r"\*", r"(\d+)"))
        found = {int(match[1]): array for key, array in arrays.items() if (match := pattern.fullmatch(key))}
        return np.stack([found[layer] for layer in range(len(found))])

    img = "PaliGemma/img"
    tree[f"{img}/embedding/kernel"] = arrays[f"{vision}.embeddings.patch_embedding.weight"].transpose(2, 3, 1, 0)
    tree[f"{img}/embedding/bias"] = arrays[f"{vision}.embeddings.patch_embedding.bias"]
    tree[f"{img}/pos_embedding"] = arrays[f"{vision}.embeddings.position_embedding.weight"][None]
    block = f"{img}/Transformer/encoderblock"
    for ours, theirs in (("LayerNorm_0", "layer_norm1"), ("LayerNorm_1", "layer_norm2")):
        tree[f"{block}/{ours}/scale"] = stack(f"{vision}.encoder.layers.*.{theirs}.weight")
        tree[f"{block}/{ours}/bias"] = stack(f"{vision}.encoder.layers.*.{theirs}.bias")
    for ours, theirs in (("Dense_0", "fc1"), ("Dense_1", "fc2")):
        tree[f"{block}/MlpBlock_0/{ours}/kernel"] = stack(f"{vision}.encoder.layers.*.mlp.{theirs}.weight").mT
        tree[f"{block}/MlpBlock_0/{ours}/bias"] = stack(f"{vision}.encoder.layers.*.mlp.{theirs}.bias")
    attention = f"{block}/MultiHeadDotProductAttention_0"
    for ours, theirs in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
        kernel = stack(f"{vision}.encoder.layers.*.self_attn.{theirs}.weight").mT
        tree[f"{attention}/{ours}/kernel"] = kernel.reshape(-1, width, *per_head)
        bias = stack(f"{vision}.encoder.layers.*.self_attn.{theirs}.bias")
        tree[f"{attention}/{ours}/bias"] = bias.reshape(-1, *per_head)
    out = stack(f"{vision}.encoder.layers.*.self_attn.out_proj.weight").mT
    tree[f"{attention}/out/kernel"] = out.reshape(-1, *per_head, width)
    tree[f"{attention}/out/bias"] = stack(f"{vision}.encoder.layers.*.self_attn.out_proj.bias")
    tree[f"{img}/Transformer/encoder_norm/scale"] = arrays[f"{vision}.post_layernorm.weight"]
    tree[f"{img}/Transformer/encoder_norm/bias"] = arrays[f"{vision}.post_layernorm.bias"]
    projector = "paligemma_with_expert.paligemma.model.multi_modal_projector.linear"
    tree[f"{img}/head/kernel"], tree[f"{img}/head/bias"] = arrays[f"{projector}.weight"].T, arrays[f"{projector}.bias"]
    tree["PaliGemma/llm/embedder/input_embedding"] = arrays[EMBEDDING]
    models = ("paligemma_with_expert.paligemma.model.language_model", "paligemma_with_expert.gemma_expert.model")
    for expert, model, sizes in zip(("", "_1"), models, (config.paligemma, config.action_expert), strict=True):
        layers, gemma_heads = f"{model}.layers.*", (sizes.num_heads, sizes.head_dim)
        attn, mlp = "PaliGemma/llm/layers/attn", f"PaliGemma/llm/layers/mlp{expert}"
        q = stack(f"{layers}.self_attn.q_proj.weight").reshape(-1, *gemma_heads, sizes.width)
        tree[f"{attn}/q_einsum{expert}/w"] = q.mT
        k, v = (stack(f"{layers}.self_attn.{part}_proj.weight").mT for part in "kv")
        tree[f"{attn}/kv_einsum{expert}/w"] = np.stack([k, v], axis=1)[:, :, None]
        o = stack(f"{layers}.self_attn.o_proj.weight").mT
        tree[f"{attn}/attn_vec_einsum{expert}/w"] = o.reshape(-1, *gemma_heads, sizes.width)
        gate_and_up = [stack(f"{layers}.mlp.{part}_proj.weight").mT for part in ("gate", "up")]
        tree[f"{mlp}/gating_einsum"] = np.stack(gate_and_up, axis=1)
        tree[f"{mlp}/linear"] = stack(f"{layers}.mlp.down_proj.weight").mT
        norms = {
            f"layers/pre_attention_norm{expert}": f"{layers}.input_layernorm",
            f"layers/pre_ffw_norm{expert}": f"{layers}.post_attention_layernorm",
            f"final_norm{expert}": f"{model}.norm",
        }
        for ours, theirs in norms.items():
            read = stack if "*" in theirs else arrays.__getitem__
            if config.pi05 and expert:
                tree[f"PaliGemma/llm/{ours}/Dense_0/kernel"] = read(f"{theirs}.dense.weight").mT
                tree[f"PaliGemma/llm/{ours}/Dense_0/bias"] = read(f"{theirs}.dense.bias")
            else:
                tree[f"PaliGemma/llm/{ours}/scale"] = read(f"{theirs}.weight")
    own = (
        ("time_mlp_in", "time_mlp_out") if config.pi05 else ("action_time_mlp_in", "action_time_mlp_out", "state_proj")
    )
    for name in ("action_in_proj", "action_out_proj", *own):
        tree[f"{name}/kernel"], tree[f"{name}/bias"] = arrays[f"{name}.weight"].T, arrays[f"{name}.bias"]
    return tree


def assert_same(tree: dict[str, np.ndarray], params: nnx.State) -> None:
    expected = flatten_params(params)
    assert tree.keys() == expected.keys()
    for name, value in expected.items():
        assert tree[name].dtype == value.dtype
        np.testing.assert_array_equal(tree[name], value, err_msg=name, strict=True)


def test_the_module_of_pytorch_computes_what_openpi_computes(
    tag: str, file: Path, batch: dict[str, np.ndarray]
) -> None:
    """Golden outputs are those of openpi's own networks; the arrays come from our file and nothing else."""
    arrays, config = load_file(file), tiny_config()
    golden, sample = (
        {name: x[:1] for name, x in values.items() if x.ndim} for values in (load_golden(f"out_{tag}_f32"), batch)
    )
    images = [
        pytorch_pi0.image_tokens(arrays, sample[f"image/{key}"].astype(np.float32) / 127.5 - 1, config.siglip.num_heads)
        for key in IMAGE_KEYS
    ]
    prefix = np.concatenate([*images, pytorch_pi0.prompt_tokens(arrays, sample["tokenized_prompt"])], axis=1)
    suffix, condition = pytorch_pi0.suffix_tokens(arrays, sample["state"], golden["x_t"], sample["time"])
    _, out = pytorch_pi0.transformer(
        arrays, (prefix, suffix), condition, golden["attn_mask"], golden["positions"], config.paligemma.head_dim
    )
    velocity = pytorch_pi0.linear(arrays, "action_out_proj", out[:, -config.action_horizon :])
    found = {"siglip/tokens": images[0], "prefix/tokens": prefix, "suffix_out": out, "v_t": velocity}
    for name, value in found.items():  # float32 angles of the flow time reach 1570 radians, and are off by 1e-4
        np.testing.assert_allclose(value, golden[name], atol=1e-4, rtol=1e-4, err_msg=name)


def test_the_way_back_is_exact(tag: str, file: Path) -> None:
    params, config = golden_params(tag), tiny_config(pi05=tag == "pi05")
    assert_same(read_tree(load_file(file), config), params)
    assert_same(flatten_params(load_pytorch_weights(file, abstract_params(config))), params)


def test_merged_adapters_come_back_exactly(tmp_path: Path) -> None:
    config = tiny_config(paligemma_variant="dummy_lora", action_expert_variant="dummy_lora")
    plain, merged = config.merge_adapters(random_params(config))
    save_pytorch_weights(merged, tmp_path / "model.safetensors")
    assert_same(read_tree(load_file(tmp_path / "model.safetensors"), plain), merged)


def test_adapters_have_no_place(tmp_path: Path) -> None:
    config = tiny_config(action_expert_variant="dummy_lora")
    with pytest.raises(OpenPICheckpointError, match=r"no place for .*lora_a.* and 7 more parameters"):
        save_pytorch_weights(random_params(config), tmp_path / "model.safetensors")


def test_a_policy_with_adapters_starts_from_a_file_without(tmp_path: Path) -> None:
    config = tiny_config(action_expert_variant="dummy_lora")
    params, golden = random_params(config), golden_params("pi0")
    save_pytorch_weights(golden, tmp_path / "model.safetensors")
    loaded = flatten_params(load_pytorch_weights(tmp_path / "model.safetensors", params))
    for name, value in flatten_params(params).items():
        np.testing.assert_array_equal(loaded[name], value if "lora" in name else flatten_params(golden)[name])


def test_every_array_keeps_its_precision(tmp_path: Path) -> None:
    rounded = jax.tree.map(lambda x: np.asarray(x).astype(jnp.bfloat16), golden_params("pi0"))
    save_pytorch_weights(rounded, tmp_path / "model.safetensors")
    arrays = load_file(tmp_path / "model.safetensors")
    assert {array.dtype for array in arrays.values()} == {jnp.dtype("bfloat16")}
    assert_same(read_tree(arrays, tiny_config()), rounded)
    into_float32 = load_pytorch_weights(tmp_path / "model.safetensors", abstract_params(tiny_config()))
    assert_same(flatten_params(into_float32), jax.tree.map(lambda x: x.astype(jnp.float32), rounded))


def test_the_names_and_shapes_of_the_full_model_are_those_of_transformers() -> None:
    """The golden is the state dict of PaliGemma and Gemma of transformers 4.53.2 in openpi's `PI0Pytorch`."""
    folded = json.loads((GOLDENS / "pytorch_pi0_shapes.json").read_text())
    expected = {}
    for name, (count, shape) in folded.items():
        for layer in range(count):
            expected[name.replace("*", str(layer))] = tuple(shape)
    assert expected.pop(EMBED_TOKENS) == expected[EMBEDDING]  # PyTorch has the table twice, a file once
    shapes = {name: tuple(leaf.shape) for name, leaf in flatten_params(abstract_params(Pi0Config())).items()}
    assert pytorch_shapes(shapes) == expected


def test_pi05_has_the_arrays_of_pi0_but_for_norms_and_projections() -> None:
    of_pi0, of_pi05 = (
        pytorch_shapes({name: tuple(leaf.shape) for name, leaf in flatten_params(abstract_params(config)).items()})
        for config in (Pi0Config(), Pi0Config(pi05=True))
    )
    assert (len(of_pi0), len(of_pi05)) == (777, 812)  # as in openpi's own files
    norm = r"paligemma_with_expert\.gemma_expert\.model\.(layers\.\d+\.(input|post_attention)_layernorm|norm)"
    for name in of_pi0.keys() - of_pi05.keys():
        assert re.fullmatch(rf"{norm}\.weight|(state_proj|action_time_mlp_(in|out))\.(weight|bias)", name)
    for name in of_pi05.keys() - of_pi0.keys():
        assert re.fullmatch(rf"{norm}\.dense\.(weight|bias)|time_mlp_(in|out)\.(weight|bias)", name)
    layer = "paligemma_with_expert.gemma_expert.model.layers.17.input_layernorm.dense"
    assert of_pi05[f"{layer}.weight"] == (3072, 1024) and of_pi05[f"{layer}.bias"] == (3072,)


def test_files_of_lerobot_are_read(file: Path, tag: str, tmp_path: Path) -> None:
    """lerobot puts "model." before each name, and may name the embedding as the input layer or leave out zeros."""
    arrays = load_file(file)
    del arrays[EXPERT_OUTPUT]
    arrays[EMBED_TOKENS] = arrays.pop(EMBEDDING)
    save_file({f"model.{name}": array for name, array in arrays.items()}, tmp_path / "model.safetensors")
    target = abstract_params(tiny_config(pi05=tag == "pi05"))
    assert_same(flatten_params(load_pytorch_weights(tmp_path / "model.safetensors", target)), golden_params(tag))


def test_another_model_and_damaged_files_are_refused(file: Path, tag: str, tmp_path: Path) -> None:
    other = abstract_params(tiny_config(pi05=tag != "pi05"))
    with pytest.raises(OpenPICheckpointError, match=r"does not fit the model:\n  .*missing from the checkpoint"):
        load_pytorch_weights(file, other)
    narrow = abstract_params(tiny_config(pi05=tag == "pi05", action_dim=8))
    with pytest.raises(OpenPICheckpointError, match=r"action_in_proj\.weight: shape \(64, 32\) in the checkpoint"):
        load_pytorch_weights(file, narrow)
    cut = tmp_path / "model.safetensors"
    cut.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(OpenPICheckpointError, match="is damaged or not a safetensors file"):
        load_pytorch_weights(cut, abstract_params(tiny_config(pi05=tag == "pi05")))
