"""Policies go to a hub and come back, by the real client, with everything that acting needs."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from small_checkpoints import make_agent, state_config

import acrlpd
from acrlpd.cli.pull import main as pull_main
from acrlpd.cli.push import main as push_main
from acrlpd.cli.runs import verify
from acrlpd.config import WeightLoaderConfig
from acrlpd.hub import HubError
from acrlpd.policies.checkpoint import open_checkpoint
from acrlpd.publishing.parcels import pack
from acrlpd.runs.checkpoint_layout import CheckpointError
from acrlpd.serving.export import export_policy
from acrlpd.training.initial_weights import check_initial_weights, create_initial_agent
from acrlpd.training.sharding import create_sharding
from local_hub import LocalHub


def assert_same_model(first: Path | str, second: Path | str) -> None:
    models = [open_checkpoint(path).load_model() for path in (first, second)]
    for left, right in zip(*map(jax.tree.leaves, models), strict=True):
        np.testing.assert_array_equal(left, right)


def test_a_checkpoint_goes_to_the_hub_and_comes_back(trained: Path, policies: LocalHub, tmp_path: Path) -> None:
    """The copy is made by a process of its own, which has its own cache and knows the hub by its settings alone."""
    repository = policies.repositories["models", "lab/arm"]
    assert repository.is_private and list(repository.tags) == ["step-50"]
    names = repository.files(repository.head)
    assert {name.split("/")[0] for name in names} == {
        *("params", "critic", "assets", "run", "config.yaml", "report.html", "report.md"),
        *("README.md", "hub.json", ".gitattributes"),
    }
    assert not [name for name in names if "train_state" in name]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    pulled = subprocess.run(
        [sys.executable, "-m", "acrlpd.cli.main", "pull", "lab/arm@step-50", "--output", str(tmp_path / "copy")],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment | policies.environment(tmp_path / "home"),
    )
    assert pulled.returncode == 0, pulled.stderr
    assert "pulled commit 000000000000" in pulled.stdout and "3 checked" in pulled.stdout
    assert json.loads((tmp_path / "copy" / "hub.json").read_text())["left_out"] == ["train_state"]
    with pytest.raises(CheckpointError, match=r"without the state of the optimizers.*push --train_state"):
        acrlpd.load_agent(tmp_path / "copy")
    assert verify(tmp_path / "copy") == 0
    assert_same_model(trained, tmp_path / "copy")
    stats = "assets/robot/norm_stats.json"
    assert (tmp_path / "copy" / stats).read_bytes() == (trained / "50" / stats).read_bytes()
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_the_card_says_what_was_measured_and_how_to_load_it(trained: Path, hub: LocalHub) -> None:
    push_main([str(trained / "50"), "hf://lab/arm", "--tag", "best", "--public"])
    repository = hub.repositories["models", "lab/arm"]
    assert not repository.is_private
    card = repository.files(repository.tags["best"])["README.md"].decode()
    _, header, text = card.split("---\n", 2)
    assert yaml.safe_load(header)["library_name"] == "acrlpd"
    assert yaml.safe_load(header)["tags"] == ["robotics", "reinforcement-learning", "state_flow"]  # openpi has no such
    assert "| **this policy** | 50 | 88.0 % |" in text and "| Imitation | 30 | 44.0 % |" in text
    assert "acrlpd serve hf://lab/arm@best" in text and "acrlpd pull lab/arm@best --output THIS_DIRECTORY" in text
    assert "openpi has no policy of the family `state_flow`" in text


def test_every_command_takes_an_address(trained: Path, policies: LocalHub) -> None:
    address = Path("hf://lab/arm@step-50")  # as command lines make it: with one slash
    opened = open_checkpoint(address)
    assert opened.hub_address == "hf://lab/arm@step-50" and opened.step == 50
    assert_same_model(trained, address)
    assert opened.load_norm_stats() is not None
    loader = WeightLoaderConfig("checkpoint", "hf://lab/arm@step-50", critics="hf://lab/arm@step-50")
    config = dataclasses.replace(opened.rl_config, weight_loader=loader)
    check_initial_weights(config)
    started = create_initial_agent(config, create_sharding(config), jax.random.key(0))
    critics = [agent.critics.online for agent in (started, make_agent(state_config()))]
    for left, right in zip(*map(jax.tree.leaves, critics), strict=True):
        np.testing.assert_array_equal(left, right)
    assert not [name for name in policies.downloaded if name.startswith("report")]  # acting does not need it


def test_an_export_and_the_steps_of_a_run_have_their_tags(policies: LocalHub, tmp_path: Path) -> None:
    export_policy("hf://lab/arm@step-50", tmp_path / "export", critics="none")
    with pytest.raises(
        HubError, match="has the tag step-50 already: choose another --tag, or move it with --overwrite"
    ):
        push_main([str(tmp_path / "export"), "lab/arm"])
    push_main([str(tmp_path / "export"), "lab/arm", "--tag", "export"])
    repository = policies.repositories["models", "lab/arm"]
    first, second = (repository.files(repository.tags[tag]) for tag in ("step-50", "export"))
    assert "run/run.json" in first and "acrlpd.json" not in first
    assert "acrlpd.json" in second and not [name for name in second if name.startswith(("run/", "critic/"))]
    card = second["README.md"].decode()
    assert "state_flow" in yaml.safe_load(card.split("---\n", 2)[1])["tags"]
    assert "exported at level `standard`" in card and "the record of its run was not at hand" in card
    pull_main(["lab/arm@export", "--output", str(tmp_path / "copy")])
    assert verify(tmp_path / "copy") == 0
    assert not open_checkpoint(tmp_path / "copy").has_critics
    push_main([str(tmp_path / "export"), "lab/arm", "--overwrite"])
    assert repository.tags["step-50"] == repository.head


def test_the_state_of_the_optimizers_goes_along_when_asked_for(trained: Path) -> None:
    names = {asked: {name.split("/")[0] for name in pack(trained, train_state=asked).files} for asked in (False, True)}
    assert names[True] - names[False] == {"train_state"}


def test_what_else_lies_in_a_directory_stays_there(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    for name in (".env", "key.txt", "50/key.pem", "50/assets/.hidden"):
        (run / name).write_text("secret")
    assert not [path for path in pack(run).files.values() if path.read_bytes() == b"secret"]


def test_damage_is_noticed_on_both_ways(trained: Path, policies: LocalHub, tmp_path: Path) -> None:
    repository = policies.repositories["models", "lab/arm"]
    files = repository.files(repository.head)
    name = max((name for name in files if name.startswith("params/d/")), key=lambda name: len(files[name]))
    repository.commit(files | {name: files[name][:-1] + bytes([files[name][-1] ^ 1])})
    with pytest.raises(HubError, match=r"damaged and was not kept: .*has changed since it was written"):
        pull_main(["lab/arm", "--output", str(tmp_path / "copy")])
    assert not list(tmp_path.glob("*copy*"))
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (run / "50" / name).write_bytes(b"")
    with pytest.raises(HubError, match=r"nothing was uploaded: .*has changed"):
        push_main([str(run), "lab/other"])
    assert ("models", "lab/other") not in policies.repositories


def test_damage_of_what_stays_here_is_no_reason_to_refuse(trained: Path, hub: LocalHub, tmp_path: Path) -> None:
    """An older checkpoint, and the state of the optimizers, which is not asked for."""
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    shutil.copytree(run / "50", run / "10")
    for damaged in (run / "10" / "params", run / "50" / "train_state"):
        (damaged / "_METADATA").write_bytes(b"")
    assert verify(run) == 1
    assert push_main([str(run), "hf://lab/arm"]) == 0
    with pytest.raises(HubError, match=r"nothing was uploaded: .*50/train_state/_METADATA has changed"):
        push_main([str(run), "hf://lab/arm", "--train_state", "--tag", "all"])


def test_an_interrupted_pull_goes_on(policies: LocalHub, tmp_path: Path) -> None:
    policies.unavailable.add("report.html")
    with pytest.raises(HubError, match="lab/arm"):
        pull_main(["lab/arm", "--output", str(tmp_path / "copy")])
    assert not (tmp_path / "copy").exists()
    before = list(policies.downloaded)
    policies.unavailable.clear()
    assert pull_main(["lab/arm", "--output", str(tmp_path / "copy")]) == 0
    assert len(policies.downloaded) == len(set(policies.downloaded)) > len(before)  # nothing was fetched twice
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    with pytest.raises(HubError, match="exists; choose another --output"):
        pull_main(["lab/arm", "--output", str(tmp_path / "copy")])
