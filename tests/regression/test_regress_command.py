"""`acrlpd regress check` from one end to the other: a scenario is trained in its process and compared."""

import json
from pathlib import Path

import pytest
from measurements import measurement

from acrlpd.cli.main import main
from acrlpd.config import to_dict
from acrlpd.regression.baseline import write_baseline
from acrlpd.regression.scenario import load_scenario

SCENARIO = """
description: The smallest policy on random data.
config: debug
seeds: [0, 1, 2]
overrides:
  model: {type: state_flow, state_dim: 7, action_dim: 7, action_horizon: 5, hidden_dims: [16]}
  critic: {hidden_dims: [16], use_pi0_features: false}
  backup: {type: implicit_value, hidden_dims: [16]}
  acrlpd: {loss_weights: {actor_weight: 0.0, bc_weight: 1.0}}
  data: {validation_share: 0.0}
  training: {offline_steps: 8, log_frequency: 4}
"""


def test_a_training_is_compared_with_its_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The baseline has a loss that this training cannot have, one that nobody reports, and the most of everything."""
    path = tmp_path / "tiny.yaml"
    path.write_text(SCENARIO)
    scenario = load_scenario(path)
    baseline = measurement(
        scenario="tiny",
        seeds=(0, 1, 2),
        config=to_dict(scenario.config) | {"batch_size": 9},
        early={"bc_loss": (100.0, 100.1, 99.9)},
        final={"bc_loss": (1.0, 1e6, -1e6), "actor_loss": (0.0, 0.0, 0.0), "gone_loss": (1.0, 1.1, 0.9)},
        metric_names=("bc_loss", "critic_loss", "gone_loss"),
        success={},
        update_flops=1e12,
        program_bytes=2**40,
        num_compilations=1_000,
        peak_host_bytes=2**40,
        update_cost=(1e6,) * 9,
    )
    write_baseline(tmp_path / "baselines" / "tiny.json", baseline)
    before = (tmp_path / "baselines" / "tiny.json").read_bytes()
    assert main(["regress", "check", str(path), "--baselines", str(tmp_path / "baselines"), "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["regressions"] == ["tiny: bc_loss, early", "tiny: gone_loss", "tiny: names of metrics"]
    rows = {row["quantity"]: row for row in result["rows"]["tiny"]}
    assert (
        rows["bc_loss"]["verdict"] == rows["actor_loss"]["verdict"] == rows["checkpoint and export"]["verdict"] == "ok"
    )
    assert 0.5 < float(rows["bc_loss"]["now"]) < 10 and rows["gone_loss"]["now"] == "missing"
    assert rows["names of metrics"]["now"] == "without gone_loss"
    for name in ("operations of an update", "compiled memory", "compilations", "peak host memory"):
        assert rows[name]["verdict"] == "better" and float(rows[name]["now"].split()[0]) > 0
    assert rows["processor time of an update"]["verdict"] == "better"
    assert any("batch_size 9 -> 8" in note for note in result["notes"]["tiny"])
    assert (tmp_path / "baselines" / "tiny.json").read_bytes() == before
