"""Checkpoints written by openpi load bit-equal, ours have its layout, and broken ones are refused by name."""

import json
import shutil
import tarfile
import threading

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from model_goldens import GOLDENS, load_golden, tiny_config

from acrlpd import checksums
from acrlpd.models import openpi_checkpoint
from acrlpd.models.openpi_checkpoint import (
    OpenPICheckpointError,
    load_paligemma_weights,
    load_pi0_weights_from_openpi,
    save_openpi_pi0_checkpoint,
    verify_openpi_checkpoint_compatibility,
)


@pytest.fixture(scope="module")
def openpi_checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("openpi")
    for kind in ("ema", "noema"):
        with tarfile.open(GOLDENS / f"ckpt_openpi_tiny_pi0_{kind}.tar.gz") as archive:
            archive.extractall(root, filter="data")
    return {"ema": root / "openpi_tiny_pi0_ema" / "100", "noema": root / "openpi_tiny_pi0_noema" / "7"}


def fresh(config, seed=1) -> nnx.State:
    """Random parameters of the right shapes (no compile, unlike a real initialisation)."""
    rng = np.random.default_rng(seed)
    abstract = nnx.state(nnx.eval_shape(lambda: config.create(jax.random.key(0))), nnx.Param)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape).astype(np.float32)), abstract)


@pytest.fixture(scope="module")
def params() -> nnx.State:
    return fresh(tiny_config())


def named(params: nnx.State) -> dict[str, np.ndarray]:
    return {"/".join(path): np.asarray(leaf.get_value()) for path, leaf in nnx.to_flat_state(params)}


def assert_bit_equal(found: dict, expected: dict) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("kind", ["ema", "noema"])
@pytest.mark.parametrize("inner", ["", "params"])
def test_openpi_checkpoint_loads_bit_equal(openpi_checkpoints, params, kind, inner):
    loaded = load_pi0_weights_from_openpi(openpi_checkpoints[kind] / inner, params)
    assert_bit_equal(named(loaded), load_golden("params_pi0"))


def test_loading_keeps_the_models_dtype_and_sharding(openpi_checkpoints, params):
    mesh = jax.make_mesh((1,), ("fsdp",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=sharding), params)
    loaded = load_pi0_weights_from_openpi(openpi_checkpoints["ema"], abstract)
    for leaf in jax.tree.leaves(loaded):
        assert leaf.dtype == jnp.bfloat16
        assert leaf.sharding == sharding
    expected = {name: value.astype(jnp.bfloat16) for name, value in load_golden("params_pi0").items()}
    assert_bit_equal(named(loaded), expected)


def test_written_checkpoint_has_openpis_layout(tmp_path, params):
    save_openpi_pi0_checkpoint(params, tmp_path / "0")
    directory = tmp_path / "0" / "params"
    layout = {path.name for path in directory.iterdir()}
    assert {"_METADATA", "_sharding", "manifest.ocdbt", "d", "ocdbt.process_0", "array_metadatas"} <= layout
    metadata = json.loads((directory / "_METADATA").read_text())
    assert metadata["use_zarr3"] is False
    keys = [tuple(k["key"] for k in entry["key_metadata"]) for entry in metadata["tree_metadata"].values()]
    assert len(keys) == 50
    assert all(key[0] == "params" and key[-1] == "value" for key in keys)
    assert_bit_equal(named(load_pi0_weights_from_openpi(tmp_path / "0", fresh(tiny_config(), 2))), named(params))
    with pytest.raises(OpenPICheckpointError, match="exists already"):
        save_openpi_pi0_checkpoint(params, tmp_path / "0")


def test_checkpoint_without_value_suffix(tmp_path, params):
    tree = {"params": nnx.to_pure_dict(params)}
    with ocp.PyTreeCheckpointer(use_ocdbt=True, use_zarr3=False) as checkpointer:
        checkpointer.save(tmp_path / "plain", tree)
    assert_bit_equal(named(load_pi0_weights_from_openpi(tmp_path / "plain", fresh(tiny_config(), 2))), named(params))


def test_lora_model_starts_from_a_plain_checkpoint(openpi_checkpoints):
    config = tiny_config(paligemma_variant="dummy_lora")
    initial = fresh(config)
    loaded = named(load_pi0_weights_from_openpi(openpi_checkpoints["ema"], initial))
    adapters = {name for name in loaded if "lora" in name}
    assert len(adapters) == 10
    expected = load_golden("params_pi0") | {name: named(initial)[name] for name in adapters}
    assert_bit_equal(loaded, expected)


def test_adapters_are_not_dropped_silently(tmp_path, params):
    save_openpi_pi0_checkpoint(fresh(tiny_config(paligemma_variant="dummy_lora")), tmp_path / "0")
    with pytest.raises(OpenPICheckpointError, match="lora_a: an adapter that the model has no place for"):
        load_pi0_weights_from_openpi(tmp_path / "0", params)


def test_other_variants_are_refused_by_name(openpi_checkpoints):
    checkpoint = openpi_checkpoints["ema"]
    assert verify_openpi_checkpoint_compatibility(checkpoint, tiny_config()) == []
    pi05 = verify_openpi_checkpoint_compatibility(checkpoint, tiny_config(pi05=True))
    assert "time_mlp_in/kernel: missing from the checkpoint" in pi05
    assert "state_proj/kernel: the model has no such parameter" in pi05
    with pytest.raises(OpenPICheckpointError, match=r"input_embedding: shape \(512, 64\) in the checkpoint"):
        load_pi0_weights_from_openpi(checkpoint, fresh(tiny_config(vocab_size=300)))


def test_damaged_checkpoints_are_refused(openpi_checkpoints, tmp_path, params):
    with pytest.raises(OpenPICheckpointError, match="does not exist"):
        load_pi0_weights_from_openpi(tmp_path / "nowhere", params)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(OpenPICheckpointError, match="not a complete openpi checkpoint"):
        load_pi0_weights_from_openpi(empty, params)
    assert "not a complete" in verify_openpi_checkpoint_compatibility(empty, tiny_config())[0]
    for number, victim in enumerate(("largest", "_METADATA", "manifest.ocdbt")):
        broken = tmp_path / f"broken{number}"
        shutil.copytree(openpi_checkpoints["ema"], broken)
        files = [path for path in (broken / "params").rglob("*") if path.is_file()]
        chosen = max(files, key=lambda path: path.stat().st_size) if victim == "largest" else broken / "params" / victim
        chosen.write_bytes(chosen.read_bytes()[: chosen.stat().st_size // 2])
        with pytest.raises(OpenPICheckpointError, match=str(broken)):
            load_pi0_weights_from_openpi(broken, params)


def test_nan_weights_are_refused(tmp_path, params):
    poisoned = jax.tree.map(lambda x: x, params)
    poisoned["action_out_proj"]["bias"].set_value(jnp.full(32, jnp.nan))
    save_openpi_pi0_checkpoint(poisoned, tmp_path / "0")
    with pytest.raises(OpenPICheckpointError, match="NaN or infinite values in action_out_proj/bias"):
        load_pi0_weights_from_openpi(tmp_path / "0", params)


def test_checks_of_files_do_not_hold_up_the_load(tmp_path, params, monkeypatch):
    """The checks of this test end only after the values have been looked at, so nothing may wait for them before."""
    save_openpi_pi0_checkpoint(params, tmp_path / "0")
    checksums.write_checksums(tmp_path / "0" / "params")
    has_looked, checksum, fill = threading.Event(), checksums.file_checksum, openpi_checkpoint.fill_params

    def checksum_after_looking(path):
        assert has_looked.wait(120)
        return checksum(path)

    def look(*args):
        has_looked.set()
        return fill(*args)

    monkeypatch.setattr(checksums, "_SMALL_BYTES", -1)  # all files count as large
    monkeypatch.setattr(checksums, "file_checksum", checksum_after_looking)
    monkeypatch.setattr(openpi_checkpoint, "fill_params", look)
    assert_bit_equal(named(load_pi0_weights_from_openpi(tmp_path / "0", fresh(tiny_config(), 2))), named(params))


def test_paligemma_weights_fill_their_part(tmp_path, params):
    golden = load_golden("params_pi0")
    paligemma = {
        "params/" + name.removeprefix("PaliGemma/"): value
        for name, value in golden.items()
        if name.startswith("PaliGemma/") and "_1/" not in name.removeprefix("PaliGemma/img")
    }
    paligemma |= {
        "params/" + name.removeprefix("PaliGemma/"): value
        for name, value in golden.items()
        if name.startswith("PaliGemma/img")
    }
    np.savez(tmp_path / "pt.npz", **paligemma)
    loaded = named(load_paligemma_weights(tmp_path / "pt.npz", params))
    for name, value in loaded.items():
        source = golden if f"params/{name.removeprefix('PaliGemma/')}" in paligemma else named(params)
        np.testing.assert_array_equal(value, source[name], err_msg=name)


def test_files_that_are_not_paligemma_are_refused(tmp_path, params):
    """Every parameter may be missing, so another file would train from random numbers without a word."""
    name = "img/embedding/bias"
    bias = np.asarray(named(params)[f"PaliGemma/{name}"])
    file = tmp_path / "pt.npz"
    np.savez(file, **{f"params/{name}": bias})
    content = file.read_bytes()
    load_paligemma_weights(file, params)
    np.savez(file, **{name: bias})
    with pytest.raises(OpenPICheckpointError, match=r"has nothing of PaliGemma: .* found none under params/"):
        load_paligemma_weights(file, params)
    np.savez(file, **{f"params/{name}": bias.astype(jnp.bfloat16)})
    with pytest.raises(OpenPICheckpointError, match=f"{name} is .V2, not float"):
        load_paligemma_weights(file, params)
    for broken in (content[: len(content) // 2], b"", b"<html>404</html>", content.replace(bias.tobytes(), b"")):
        file.write_bytes(broken)
        with pytest.raises(OpenPICheckpointError, match=r"pt.npz is damaged, incomplete or not an npz"):
            load_paligemma_weights(file, params)
