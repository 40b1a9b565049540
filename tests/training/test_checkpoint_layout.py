"""What lies in a step directory: a stock openpi checkpoint, and the run beside it."""

import dataclasses
import json
import pathlib
import shutil
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from training_helpers import pi0_config, state_config

from acrlpd.agents import Agent
from acrlpd.checksums import ChecksumError
from acrlpd.config import RLTrainConfig
from acrlpd.models.openpi_checkpoint import verify_openpi_checkpoint_compatibility
from acrlpd.runs.checkpoint_layout import CheckpointError, load_checkpoint_metadata
from acrlpd.runs.directory import saved_steps
from acrlpd.training.checkpoints import items as checkpoint_items
from acrlpd.training.checkpoints import writer as checkpoint_writer
from acrlpd.training.checkpoints.agent_items import agent_from_items, agent_items
from acrlpd.training.checkpoints.reader import load_checkpoint_agent
from acrlpd.training.checkpoints.writer import CheckpointWriter, SaveFailedError
from acrlpd.training.sharding import abstract_train_state, create_sharding
from openpi_params import read_openpi_params

ASSETS = {"lerobot/some_robot/norm_stats.json": b'{"norm_stats": {}}'}


def make_agent(config: RLTrainConfig) -> Agent:
    """Any numbers will do; drawing them is faster than compiling the initialisation."""
    abstract = abstract_train_state(config, create_sharding(config))
    random = np.random.default_rng(0)

    def draw(x: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(random.normal(size=x.shape).astype(x.dtype), x.sharding)

    return jax.tree.map(draw, abstract)


def flip_bytes(path: pathlib.Path) -> None:
    """Flips 8 bytes in the middle of a file."""
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 8] = bytes(byte ^ 0xFF for byte in content[middle : middle + 8])
    path.write_bytes(content)


def save(config: RLTrainConfig, agent: Agent, directory: pathlib.Path, *steps: int, scores: dict = {}) -> None:  # noqa: B006
    directory.mkdir(parents=True, exist_ok=True)
    writer = CheckpointWriter(directory, config, ASSETS)
    for step in steps:
        writer.save(agent, step, rng=jax.random.key(0), state={}, score=scores.get(step))
    writer.wait()
    writer.close()


def test_waiting_long_for_a_save_is_not_silent(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpoint_writer, "SLOW_SAVE_S", 0.001)
    config = state_config(tmp_path)
    with caplog.at_level("WARNING"):
        save(config, make_agent(config), tmp_path / "run", 1)
    assert "the checkpoint of step 1 is still being written" in caplog.text
    assert saved_steps(tmp_path / "run") == [1]


@pytest.fixture(scope="module", params=["ema", "no ema", "ema not served", "frozen"])
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RLTrainConfig, Agent, pathlib.Path]:
    overrides = {
        "ema": {},
        "no ema": {"acrlpd__ema_decay": None},
        "ema not served": {"openpi_compatibility__enable_ema_for_inference": False},
        "frozen": {"freeze_pi0_backbone": True},
    }[request.param]
    directory = tmp_path_factory.mktemp("run")
    config = pi0_config(directory, **overrides)
    agent = make_agent(config)
    save(config, agent, directory, 10)
    return config, agent, directory / "10"


def test_openpi_finds_its_parameters(saved: tuple[RLTrainConfig, Agent, pathlib.Path]) -> None:
    config, agent, directory = saved
    assert verify_openpi_checkpoint_compatibility(directory, config.model) == []
    average = config.openpi_compatibility.enable_ema_for_inference and agent.ema_params is not None
    expected = nnx.merge_state(agent.ema_params if average else agent.policy_params, agent.frozen_params)
    found = read_openpi_params(directory)
    leaves = dict(nnx.traversals.flatten_mapping(found))
    assert len(leaves) == len(jax.tree.leaves(expected))
    for path, variable in nnx.to_flat_state(expected):
        np.testing.assert_array_equal(leaves[path], variable.get_value())
        assert leaves[path].dtype == variable.get_value().dtype


def test_files_are_those_that_openpi_looks_for(
    saved: tuple[RLTrainConfig, Agent, pathlib.Path],
) -> None:
    directory = saved[2]
    assert (directory / "assets/lerobot/some_robot/norm_stats.json").read_bytes() == b'{"norm_stats": {}}'
    metadata = json.loads((directory / "params" / "_METADATA").read_text())
    assert metadata["use_zarr3"] is False
    assert all(eval_path(key)[0] == "params" and eval_path(key)[-1] == "value" for key in metadata["tree_metadata"])
    assert (directory / "params" / "manifest.ocdbt").exists()
    assert not list(directory.rglob("*.pkl"))


def eval_path(key: str) -> list[str]:
    return [part.strip("' ") for part in key.strip("()").split(",") if part.strip()]


def test_the_agent_comes_back_bit_for_bit(
    saved: tuple[RLTrainConfig, Agent, pathlib.Path],
) -> None:
    _, agent, directory = saved
    found, step = load_checkpoint_agent(directory)
    assert step == 10
    assert jax.tree.structure(found) == jax.tree.structure(agent)
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(agent), strict=True):
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()


def test_a_state_larger_than_what_travels_at_once(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays go to the host a few at a time, and one by one where each of them is larger than that."""
    monkeypatch.setattr(checkpoint_items, "_TRANSFER_GB", 1e-5)
    config = state_config(tmp_path)
    agent = make_agent(config)
    save(config, agent, tmp_path, 10)
    found, _ = load_checkpoint_agent(tmp_path)
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(agent), strict=True):
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()


def test_no_array_is_stored_twice(saved: tuple[RLTrainConfig, Agent, pathlib.Path]) -> None:
    _, agent, directory = saved
    stored = 0
    for item in ("params", "critic", "train_state"):
        stored += len(json.loads((directory / item / "_METADATA").read_text())["tree_metadata"])
    assert stored == len(jax.tree.leaves(agent))


class AgentWithNewField(Agent):
    new_network: Any = None


def test_a_new_field_of_the_agent_is_stored_under_its_name(tmp_path: pathlib.Path) -> None:
    agent = make_agent(state_config(tmp_path))
    fields = {field.name: getattr(agent, field.name) for field in dataclasses.fields(agent)}
    new_network = nnx.State({"kernel": nnx.Param(jax.numpy.ones(3)), "layers": [nnx.Param(jax.numpy.zeros(2))]})
    extended = AgentWithNewField(**fields, new_network=new_network)
    items = agent_items(extended, average=True)
    assert set(items["train_state"]["new_network"]) == {"kernel", "layers"}
    assert "new_network" not in items["params"]["params"]
    found = agent_from_items(jax.eval_shape(lambda: extended), items, average=True)
    assert jax.tree.structure(found) == jax.tree.structure(extended)
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(extended), strict=True):
        assert left is right


def test_newest_best_and_periodic_checkpoints_stay(tmp_path: pathlib.Path) -> None:
    config = state_config(tmp_path, checkpoints__keep_period=40)
    scores = {10: 0.1, 20: 0.9, 30: 0.5, 50: 0.3}
    save(config, make_agent(config), tmp_path, 10, 20, 30, 40, 50, 60, scores=scores)
    assert saved_steps(tmp_path) == [20, 40, 60]
    # Another process goes on and remembers which was best.
    save(config, make_agent(config), tmp_path, 70, 80, scores={70: 0.8})
    assert saved_steps(tmp_path) == [20, 40, 80]
    save(config, make_agent(config), tmp_path, 90, 100, scores={90: 0.95})
    assert saved_steps(tmp_path) == [40, 80, 90, 100]
    newest = state_config(tmp_path, checkpoints__keep_best=False)
    save(newest, make_agent(newest), tmp_path / "newest", 10, 20, scores={10: 0.9, 20: 0.1})
    assert saved_steps(tmp_path / "newest") == [20]


@pytest.mark.parametrize("is_checked", [True, False])
def test_what_openpi_would_not_load_is_a_failed_save(tmp_path: pathlib.Path, is_checked: bool) -> None:
    config = pi0_config(
        tmp_path, checkpoints__max_failures=1, openpi_compatibility__validate_openpi_compatibility=is_checked
    )
    agent = make_agent(config)
    other = dataclasses.replace(config, model=dataclasses.replace(config.model, action_dim=config.model.action_dim + 1))
    if is_checked:
        with pytest.raises(SaveFailedError, match=r"openpi would not load it:\n.*action_in_proj"):
            save(other, agent, tmp_path, 10)
    else:
        save(other, agent, tmp_path, 10)
        assert saved_steps(tmp_path) == [10]


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    config = state_config(tmp_path)
    save(config, make_agent(config), tmp_path, 10)
    wider = state_config(tmp_path, critic__hidden_dims=(32, 64))
    with pytest.raises(
        CheckpointError, match=r"mu/hidden/0/bias: shape \(2, 32\) in the checkpoint, \(2, 64\) in the model"
    ):
        load_checkpoint_agent(tmp_path, wider)
    with pytest.raises(CheckpointError, match=r"set acrlpd\.ema_decay"):
        load_checkpoint_agent(tmp_path, state_config(tmp_path, acrlpd__ema_decay=None))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A checkpoint to copy and to damage."""
    directory = tmp_path_factory.mktemp("small")
    config = state_config(directory)
    save(config, make_agent(config), directory, 10)
    return directory / "10"


@pytest.mark.parametrize("item", ["params", "critic", "train_state"])
def test_flipped_bytes_are_found_in_every_array_file(item: str, small: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Uncompressed arrays have no check of their own: without checksums, the flipped bytes would be read as numbers."""
    shutil.copytree(small, tmp_path / "10")
    largest = max((tmp_path / "10" / item).rglob("d/*"), key=lambda path: path.stat().st_size)
    flip_bytes(largest)
    with pytest.raises(
        ChecksumError, match=rf"{largest} has changed since it was written: expected the XXH3-128"
    ) as error:
        load_checkpoint_agent(tmp_path)
    assert "Copy the directory again" in str(error.value) and "an earlier checkpoint" in str(error.value)


def test_a_damaged_checkpoint_is_called_damaged(small: pathlib.Path, tmp_path: pathlib.Path) -> None:
    shutil.copytree(small, tmp_path / "10")
    state = tmp_path / "10" / "train_state"
    largest = max((path for path in state.rglob("d/*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = largest.read_bytes()
    largest.write_bytes(content[:1000])
    with pytest.raises(ChecksumError, match=rf"{largest} has changed .*expected {len(content)} bytes, found 1000"):
        load_checkpoint_agent(tmp_path)
    largest.write_bytes(content)
    (state / "_METADATA").rename(tmp_path / "_METADATA")
    with pytest.raises(ChecksumError, match="train_state/_METADATA is missing"):
        load_checkpoint_agent(tmp_path)
    (tmp_path / "_METADATA").rename(state / "_METADATA")
    (state / "checksums.json").unlink()
    with pytest.raises(ChecksumError, match=r"train_state/checksums\.json is missing"):
        load_checkpoint_agent(tmp_path)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        load_checkpoint_agent(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "JSONDecodeError"),
        ("[]", "expected a JSON object, found list"),
        ("{}", "it lacks format, step, config, assets, params_hold_average, rng"),
        ('{"format": 1}', "has format 1; this version of acrlpd reads format 2"),
        ("config", "config must be dict; found NoneType"),
        ("step", "has changed since it was written: expected the XXH3-128"),
    ],
)
def test_a_damaged_run_file_is_called_damaged(
    content: str, problem: str, small: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    shutil.copytree(small / "run", tmp_path / "10" / "run")
    file = tmp_path / "10" / "run" / "run.json"
    changes: dict[str, Any] = {"config": {"config": None}, "step": {"step": 11}}
    file.write_text(json.dumps(json.loads(file.read_text()) | changes[content]) if content in changes else content)
    with pytest.raises(CheckpointError, match=r"run\.json .*" + problem):
        load_checkpoint_agent(tmp_path)


def test_the_writer_gives_up_after_failures_in_a_row(tmp_path: pathlib.Path) -> None:
    """The directory is gone, as when a disk was unmounted; a success in between starts the count anew."""
    config = state_config(tmp_path, checkpoints__max_failures=2)
    directory = tmp_path / "run"
    directory.mkdir()
    writer, agent = CheckpointWriter(directory, config, {}), make_agent(config)

    def save_step(step: int) -> None:
        writer.save(agent, step, rng=jax.random.key(0), state={})
        writer.wait()

    directory.rename(tmp_path / "unmounted")
    (tmp_path / "run").write_text("not a directory")
    save_step(1)
    assert writer.num_failures == 1
    (tmp_path / "run").unlink()
    (tmp_path / "unmounted").rename(directory)
    save_step(2)
    directory.rename(tmp_path / "unmounted")
    (tmp_path / "run").write_text("not a directory")
    save_step(3)
    with pytest.raises(SaveFailedError, match=r"step 4 .*failure 2 in a row"):
        save_step(4)
    assert writer.num_failures == 3
    (tmp_path / "run").unlink()
    (tmp_path / "unmounted").rename(directory)
    assert saved_steps(directory) == [2]
    writer.close()


def test_what_happens_during_a_save_is_not_in_it(tmp_path: pathlib.Path) -> None:
    config = state_config(tmp_path)
    writer, phases = CheckpointWriter(tmp_path, config, {}), {"offline": {"step": 10}}
    state = {"evaluation": {"phases": phases}}
    writer.save(make_agent(config), 10, rng=jax.random.key(0), state=state)
    phases["offline"] = {"step": 20}  # training goes on while the checkpoint of step 10 is written
    writer.wait()
    writer.close()
    assert load_checkpoint_metadata(tmp_path / "10")["evaluation"] == {"phases": {"offline": {"step": 10}}}


def test_a_copy_that_does_not_fit_on_the_devices_goes_to_the_host(tmp_path: pathlib.Path) -> None:
    config = state_config(tmp_path)
    agent, writer = make_agent(config), CheckpointWriter(tmp_path, config, {})
    writer._on_device = False
    writer.save(agent, 10, rng=jax.random.key(0), state={})
    expected = [np.array(leaf) for leaf in jax.tree.leaves(agent)]
    jax.tree.map(lambda x: x.delete(), agent)  # as the next step would
    writer.wait()
    writer.close()
    found, _ = load_checkpoint_agent(tmp_path)
    for left, right in zip(jax.tree.leaves(found), expected, strict=True):
        np.testing.assert_array_equal(left, right)
