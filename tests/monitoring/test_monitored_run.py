"""One run with everything on (debug mode, profile, TensorBoard, evaluation): what it leaves, and the docs of it."""

import io
import json
import pathlib
import re
from typing import Any

import jax
import numpy as np
import pytest
from monitoring_helpers import Run, state_config, train
from PIL import Image

from acrlpd.config import apply_config_overrides, get_config
from acrlpd.config.create_agent import create_agent
from acrlpd.data.pipeline.loader import create_data_loader
from acrlpd.evaluation.protocol import Evaluation
from acrlpd.evaluation.statistics import BestOfNEffect, Calibration, Summary
from acrlpd.evaluation.validation import DimError, Validation
from acrlpd.monitoring import debug_mode
from acrlpd.monitoring.debug_mode import (
    contact_sheet,
    describe,
    gradient_norms,
    histogram_overlap,
    layer_group,
    summarize,
)
from acrlpd.monitoring.profiling import PARTS
from acrlpd.training.online.records import Round

STEPS = 24


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("monitored")
    config = state_config(
        directory,
        offline_steps=STEPS,
        eval_frequency=12,
        save_frequency=13,
        checkpoints__max_to_keep=5,
        logging__debug=True,
        logging__tensorboard=True,
    )
    pytest.importorskip("tensorboardX")
    return train(config, directory / "run", profile_steps=(3, 8), eval_fn=lambda agent, step: {"success_rate": 0.5})


def debug_lines(run: Run) -> list[dict[str, Any]]:
    return [line for line in run.lines if any(name.startswith("debug/") for name in line)]


# -- debug mode ------------------------------------------------------------------------------------------------


def test_every_tenth_line_is_inspected(run: Run) -> None:
    assert [line["step"] for line in debug_lines(run)] == [1, 10, 20]
    assert sorted(path.name for path in (run.directory / "debug").iterdir()) == [
        "00000001.json",
        "00000010.json",
        "00000020.json",
    ]


def test_gradient_groups_add_up_to_the_gradient_of_the_update(run: Run) -> None:
    """The inspection sees the very update that the line is about, group by group."""
    for line in debug_lines(run):
        for component in ("policy", "critic"):
            groups = [v for name, v in line.items() if name.startswith(f"debug/gradient/{component}/")]
            assert len(groups) > 2
            assert np.linalg.norm(groups) == pytest.approx(line[f"{component}_grad_norm"], rel=1e-4)


def test_what_an_inspection_holds(run: Run) -> None:
    found = json.loads((run.directory / "debug" / "00000010.json").read_text())
    batch_size, action_dim, horizon = 64, 7, 10
    assert sum(found["best_of_n"]["choices"]) == batch_size
    values = found["best_of_n"]["candidate_q"]
    assert values["lowest"] <= values["mean"] <= values["highest"]
    assert len(found["critics"]["mean_q"]) == len(found["critics"]["std_q"]) == 4
    for kind in ("data", "chosen"):
        histograms = np.array(found["actions"][kind])
        assert histograms.shape == (action_dim, len(found["actions"]["bin_edges"]) - 1)
        assert (histograms.sum(axis=1) == batch_size * horizon).all()
    line = next(line for line in run.lines if line["step"] == 10 and "q_mean" in line)
    assert np.mean(found["critics"]["mean_q"]) == pytest.approx(line["q_mean"], rel=1e-4)
    assert line["debug/critic_range"] == pytest.approx(np.ptp(found["critics"]["mean_q"]))
    assert 0 <= line["debug/choice_entropy"] <= 1
    assert 0 <= line["debug/action_overlap"] <= 1


def test_a_run_that_only_clones_shows_nothing_of_its_critics(tmp_path: pathlib.Path) -> None:
    """Traced only: critics that nobody trains have no numbers."""
    config = state_config(
        tmp_path,
        acrlpd__loss_weights__critic_weight=0.0,
        acrlpd__loss_weights__actor_weight=0.0,
        acrlpd__learnable_temperature=False,
    )
    key = jax.random.key(0)
    agent = jax.eval_shape(lambda rng: create_agent(config, rng), key)
    with create_data_loader(config) as loader:
        shapes = jax.eval_shape(debug_mode._inspect, agent, loader.sample_batch(), key)
    found = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)
    names = {name for name in summarize(found) if "gradient" not in name}
    assert names == {"debug/action_distance", "debug/action_overlap"}
    assert set(describe(found)) == {"gradient_norms", "actions"}


def test_debug_mode_survives_a_restart_and_changes_nothing(run: Run, tmp_path: pathlib.Path) -> None:
    """Resumed from the checkpoint at 13 without debug mode: the same numbers, nothing inspected."""
    (tmp_path / "run").mkdir()
    (run.directory / "13").rename(tmp_path / "run" / "13")
    config = state_config(tmp_path, offline_steps=STEPS, eval_frequency=0, logging__debug=False)
    plain = train(config, tmp_path / "run", resume=True)
    assert not (plain.directory / "debug").exists()
    assert not debug_lines(plain)
    computed = [name for name in plain.lines[0] if "/" not in name]
    later = [line for line in run.lines if line["step"] > 13 and "q_mean" in line]
    assert [{n: line[n] for n in computed} for line in plain.lines] == [
        {n: line[n] for n in computed} for line in later
    ]


def test_layer_groups() -> None:
    assert layer_group(("PaliGemma", "llm", "layers", "attn", "q_einsum_1", "w")) == (
        "PaliGemma/llm/layers/attn/q_einsum_1",
        True,
    )
    assert layer_group(("action_in_proj", "kernel")) == ("action_in_proj", False)
    assert layer_group(("hidden", 0, "kernel")) == ("hidden/0", False)
    assert layer_group(("bias",)) == ("bias", False)


def test_gradients_of_stacked_layers_are_told_apart(tmp_path: pathlib.Path) -> None:
    """A tiny pi0, traced only: one number per layer of the two experts, one for everything else."""
    config = apply_config_overrides(get_config("debug"), {"checkpoints.directory": str(tmp_path)})
    key = jax.random.key(0)
    agent = jax.eval_shape(lambda rng: create_agent(config, rng), key)
    with create_data_loader(config) as loader:
        norms = jax.eval_shape(gradient_norms, agent, loader.sample_batch(), key)
    depth = config.model.paligemma.depth  # type: ignore[union-attr]
    assert (
        norms["policy/PaliGemma/llm/layers/mlp"].shape == norms["policy/PaliGemma/llm/layers/mlp_1"].shape == (depth,)
    )
    assert norms["policy/action_out_proj"].shape == norms["critic/out"].shape == (1,)


def test_overlap_of_histograms() -> None:
    ones = np.array([[1, 0, 3], [0, 2, 2]])
    assert histogram_overlap(ones, 5 * ones) == pytest.approx(1.0)
    assert histogram_overlap([[1, 0]], [[0, 7]]) == 0.0
    assert histogram_overlap([[2, 2]], [[4, 0]]) == pytest.approx(0.5)


def test_contact_sheet_shows_the_batch(tmp_path: pathlib.Path) -> None:
    """Every window is a row, every camera a column, now and a chunk later; pixels are those of the batch."""
    config = apply_config_overrides(get_config("debug"), {"batch_size": 16, "checkpoints.directory": str(tmp_path)})
    with create_data_loader(config) as loader:
        batch = loader.sample_batch()
    sheet = contact_sheet(batch)
    assert sheet is not None
    pixels = np.array(Image.open(io.BytesIO(sheet)))
    cameras = list(batch.observations.images)
    height, width = batch.observations.images[cameras[0]].shape[1:3]
    pitch = pixels.shape[1] // (2 * len(cameras))
    shown = [batch.observations.images[c] for c in cameras] + [batch.next_observations.images[c] for c in cameras]
    found = []
    for column, images in enumerate(shown):
        strip = pixels[:, column * pitch : column * pitch + width]
        tops = [top for top in range(strip.shape[0] - height + 1) if (strip[top : top + height] == images[0]).all()]
        found.append(tops[0])
    assert len(set(found)) == 1


def test_without_cameras_there_is_no_contact_sheet(tmp_path: pathlib.Path) -> None:
    with create_data_loader(state_config(tmp_path)) as loader:
        assert contact_sheet(loader.sample_batch()) is None


# -- profile ---------------------------------------------------------------------------------------------------


def test_the_profile(run: Run) -> None:
    profile = json.loads((run.directory / "profile.json").read_text())
    assert profile["steps"] == [3, 8]
    assert list((run.directory / profile["trace"]).rglob("*.trace.json.gz"))
    parts = profile["parts"]
    assert set(parts) == set(PARTS)
    assert all(parts[part] > 0 for part in ("policy", "critic", "sampling", "optimizer"))


# -- documentation -----------------------------------------------------------------------------------------------

# Written only where the device says so much, where the config asks for it, or where something goes wrong.
NOT_IN_THIS_RUN = {
    "policy_data_ratio",
    "timing/mfu",
    "memory/device_gib",
    "memory/device_peak_gib",
    "anomaly/<kind>",
    "timing/anomaly/<kind>",
    # Of other backups and improvements.
    "backup_loss",
    "backup_grad_norm",
    "improvement_grad_norm",
    "entropy_estimate",
    "judge_loss",
    "value_error",
    "positive_share",
    "correction_share",
    "edit_norm",
    "edit_gain",
    "edit_wins",
    "noise_size",
    "noise_gain",
    "noise_critic_error",
}


def documented(directory: pathlib.Path) -> set[str]:
    """Names in the first column of the tables of the section Metrics."""
    text = (directory / "monitoring.md").read_text()
    section = re.split(r"^## ", text.partition("\n## Metrics")[2], flags=re.MULTILINE)[0]
    cells = re.findall(r"^\| (`.*?`) \|", section, flags=re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def general(name: str) -> str:
    """Families of names as they stand in the table."""
    name = re.sub(r"^debug/gradient/.*", "debug/gradient/<group>", name)
    name = re.sub(r"^eval/robustness/.*", "eval/robustness/<disturbance>", name)
    name = re.sub(r"^(validation/.*)/\d+$", r"\1/<dim>", name)
    return re.sub(r"^(timing/)?anomaly/.*", r"\1anomaly/<kind>", name)


def test_all_metrics_are_documented_and_no_others(run: Run, directory_of_docs: pathlib.Path) -> None:
    names = {name for name in documented(directory_of_docs) if not name.startswith(("eval/", "online/", "validation/"))}
    lines = [line for line in run.lines if "q_mean" in line]
    written = {general(name) for line in lines for name in line if name not in ("step", "phase")}
    assert written - names == set()
    assert names - written <= NOT_IN_THIS_RUN


def test_metrics_of_evaluations_and_of_acting_are_documented(directory_of_docs: pathlib.Path) -> None:
    summary = Summary(2, 1, 0.5, (0.1, 0.9), 1.0, 0.5, 0.5, 1.5, 30.0, 20.0)
    evaluation = Evaluation(
        env="toy",
        summary=summary,
        tasks={},
        episodes=(),
        best_of_n=BestOfNEffect(0.1, 0.1, 0.1),
        calibration=Calibration(
            chunks=1, bias=0.0, rmse=0.1, correlation=None, rank_correlation=0.5, success_auc=None, bins=()
        ),
        robustness={"obs_noise": {"0.1": summary}},
    )
    played = Round(0, (0,), (30,), ("",), successes=(True,), returns=(1.0,), lost_episodes=0, policy_step=7)
    written = {general(f"eval/{name}") for name in evaluation.metrics()}
    written |= {f"online/{name}" for name in (*played.metrics(), "env_steps", "total_episodes")}
    validation = Validation(3, 9, 4, 0.1, (DimError(0.1, 0.2, 1.0),), evaluation.calibration, 0.5, 0.9, 0.1, ())
    written |= {general(f"validation/{name}") for name in validation.metrics()}
    judged = ("eval/", "online/", "validation/")
    assert {name for name in documented(directory_of_docs) if name.startswith(judged)} == written
