"""`acrlpd regress` from one end to the other: a baseline is recorded, and a fault is found."""

import json
from pathlib import Path

import pytest

from acrlpd.cli.main import main

SCENARIO = """
description: The smallest policy on random data.
config: debug
seeds: [0, 1, 2]
overrides:
  model: {{type: state_flow, state_dim: 7, action_dim: 7, action_horizon: 5, hidden_dims: [16]}}
  critic: {{hidden_dims: [16], use_pi0_features: false}}
  backup: {{type: implicit_value, hidden_dims: [16]}}
  acrlpd: {{loss_weights: {{actor_weight: 0.0, bc_weight: 1.0}}}}
  data: {{validation_share: 0.0}}
  critic_lr_schedule: {{type: constant, peak_lr: {lr}}}
  training: {{offline_steps: 8, log_frequency: 4}}
"""


@pytest.fixture(scope="module")
def baselines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("regress")
    (directory / "tiny.yaml").write_text(SCENARIO.format(lr=1e-3))
    assert main(["regress", "record", str(directory / "tiny.yaml"), "--baselines", str(directory)]) == 0
    return directory


def test_a_baseline_holds_what_is_compared(baselines: Path) -> None:
    content = json.loads((baselines / "tiny.json").read_text())
    assert content["seeds"] == [0, 1, 2] and content["config"]["training"]["offline_steps"] == 8
    for line in ("early", "final"):
        assert {"critic_loss", "bc_loss", "backup_loss"} <= content[line].keys()
        assert all(len(set(values)) == 3 for name, values in content[line].items() if name != "actor_loss")
    assert content["early"] != content["final"]
    assert content["update_flops"] > 0 and content["program_bytes"] > 0 and content["num_compilations"] > 0
    assert content["peak_host_bytes"] > 2**27
    assert len(content["update_cost"]) >= 5 and all(ratio > 0 for ratio in content["update_cost"])
    assert content["problems"] == [] and content["success"] == {}
    assert not [path for path in baselines.iterdir() if path.name not in ("tiny.yaml", "tiny.json")]


def test_a_learning_rate_that_is_ten_times_too_high_is_found(
    baselines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other quantities, which the learning rate does not change, are as they were in the other process."""
    (tmp_path / "tiny.yaml").write_text(SCENARIO.format(lr=1e-2))
    command = ["regress", "check", str(tmp_path / "tiny.yaml"), "--baselines", str(baselines), "--busy", "--json"]
    assert main(command) == 1
    result = json.loads(capsys.readouterr().out)
    rows = {row["quantity"]: row for row in result["rows"]["tiny"]}
    assert "tiny: critic_loss, early" in result["regressions"]
    assert {row["verdict"] for name, row in rows.items() if "critic" not in name and "q_mean" not in name} <= {
        *("ok", "better")
    }
    assert "critic_lr_schedule.peak_lr 0.001 -> 0.01" in result["notes"]["tiny"][0]
