"""`import acrlpd` as a program would use it: the names, the twenty-line example, the notebook, and runs."""

import dataclasses
import inspect
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import nbclient
import nbformat
import numpy as np
import pytest

import acrlpd
from acrlpd.cli.main import main
from acrlpd.config import ConfigError, apply_config_overrides
from acrlpd.training.sharding import create_sharding, init_fsdp_train_state

EXAMPLES = Path(__file__).parents[1] / "examples"
# The public surface: whoever changes a line breaks programs of others, and says so in the changelog.
SURFACE = {
    "act": ("policy", "observation", "prompt", "seed"),
    "create_agent": ("config",),
    "create_policy": ("config", "agent", "dataset", "best_of_n"),
    "evaluate": ("policy", "overrides", "num_workers", "directory"),
    "export_policy": (
        *("source", "output", "level", "merge_adapters", "dtype", "critics", "guidance", "overwrite", "no_norm_stats"),
    ),
    "get_config": ("name", "overrides"),
    "list_configs": (),
    "load_agent": ("checkpoint",),
    "load_policy": ("checkpoint", "config", "best_of_n"),
    "open_dataset": ("config",),
    "save_agent": ("config", "agent", "dataset", "directory"),
    "serve": ("checkpoint", "options"),
    "train": ("config", "resume", "overwrite"),
    "update_agent": ("config", "agent", "dataset", "num_updates"),
}


def test_the_public_names_stay_and_are_documented() -> None:
    assert set(acrlpd.__all__) - {"__version__"} == set(SURFACE) <= set(dir(acrlpd))
    found = {name: tuple(inspect.signature(getattr(acrlpd, name)).parameters) for name in SURFACE}
    assert found == SURFACE
    assert [name for name in SURFACE if not inspect.getdoc(getattr(acrlpd, name))] == []
    assert (Path(acrlpd.__file__).parent / "py.typed").is_file()
    with pytest.raises(AttributeError, match=r"no attribute .trian.; it offers .*train"):
        acrlpd.trian


def test_import_alone_imports_nothing_heavy() -> None:
    heavy = "{'jax', 'numpy', 'tyro', 'flax'} & set(sys.modules)"
    code = f"import sys, acrlpd, acrlpd.cli.main; print(acrlpd.__version__, {heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [acrlpd.__version__, "set()"]


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The example script, run in an empty directory; what it made, and what it printed."""
    directory = tmp_path_factory.mktemp("library")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        names = runpy.run_path(str(EXAMPLES / "train_in_python.py"))
        made = names["main"]()
    return SimpleNamespace(directory=directory, config=names["config"], made=made)


@pytest.fixture(autouse=True)
def in_its_directory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "example" in request.fixturenames:
        monkeypatch.chdir(request.getfixturevalue("example").directory)


def test_updates_are_those_of_a_run_and_a_saved_agent_is_a_run(example: SimpleNamespace) -> None:
    """Ten updates in a program, saved, then resumed by the command, give the arrays of a run that made all twenty."""
    steps = {"training.offline_steps": 20, "training.online_steps": 0}
    alone = {"env.id": None, "data.demonstrations.num_episodes": 0, "evaluation.baselines": (), "exp_name": "whole"}
    config = apply_config_overrides(example.config, steps | alone)
    run = acrlpd.train(config)
    whole = acrlpd.load_agent(run)
    with acrlpd.open_dataset(config) as dataset:
        agent, metrics = acrlpd.update_agent(config, acrlpd.create_agent(config), dataset, 4)
        agent, more = acrlpd.update_agent(config, agent, dataset, 6)
        half = dataclasses.replace(config, exp_name="half")
        saved = acrlpd.save_agent(half, agent, dataset)
        with pytest.raises(ConfigError, match="has a checkpoint of step 10, and this agent is at step 10"):
            acrlpd.save_agent(half, agent, dataset)
        agent, rest = acrlpd.update_agent(config, agent, dataset, 10)
    assert saved == example.directory / "checkpoints" / "corridor" / "half" / "10"
    assert len([*metrics, *more, *rest]) == 20 and all(np.isfinite(row["critic_loss"]) for row in [*metrics, *rest])
    assert_equal(agent, whole)
    assert main(["train", "--config", str(saved.parent / "config.yaml"), "--resume"]) == 0
    assert_equal(acrlpd.load_agent(saved.parent), whole)
    policy = acrlpd.load_policy(run)
    with acrlpd.open_dataset(config) as dataset:
        observation = {"observation.state": dataset.table.columns["observation.state"][7]}
        chunks = [
            acrlpd.act(one, observation, seed=3) for one in (policy, acrlpd.create_policy(config, whole, dataset))
        ]
    np.testing.assert_array_equal(*chunks)


def test_every_way_to_a_model_keeps_compiled_programs(example: SimpleNamespace) -> None:
    """A program of one's own compiles as often as the commands do: once."""
    run = example.directory / "checkpoints" / "corridor" / "default"
    for function, argument in (
        (acrlpd.create_agent, example.config),
        (acrlpd.load_agent, run),
        (acrlpd.load_policy, run),
    ):
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 12345)
        function(argument)
        assert jax.config.jax_persistent_cache_min_entry_size_bytes == 0  # type: ignore[attr-defined]


def test_an_agent_of_the_hub_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"found hf://lab/arm@step-50. load_policy takes the address"):
        acrlpd.load_agent("hf://lab/arm@step-50")


@pytest.mark.slow
def test_the_notebook_runs(example: SimpleNamespace) -> None:
    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": example.directory}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    [summary] = [output["data"]["text/plain"] for output in outputs if "Summary(" in str(output.get("data"))]
    assert summary.startswith("Summary(episodes=25")
    code = [line for cell in notebook.cells if cell.cell_type == "code" for line in cell.source.splitlines()]
    assert len([line for line in code if line.strip()]) <= 20
    assert not any(cell.get("outputs") for cell in nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4).cells)


def test_initial_weights_that_the_config_names_are_never_ignored(tmp_path: Path) -> None:
    config = acrlpd.get_config("debug", {"weight_loader.kind": "checkpoint", "weight_loader.path": str(tmp_path)})
    with pytest.raises(ValueError, match=str(tmp_path)):
        acrlpd.create_agent(config)
    with pytest.raises(ConfigError, match="names initial weights, which this function does not read"):
        init_fsdp_train_state(config, create_sharding(config), jax.random.key(0))


def assert_equal(agent: object, other: object) -> None:
    for one, two in zip(jax.tree.leaves(agent), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(one, two)
