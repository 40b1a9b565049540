"""Run directories as training leaves them, made by hand: small, but with everything that a run can hold."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from acrlpd.config import apply_config_overrides, get_config, save_config
from acrlpd.evaluation.statistics import wilson_interval

STAGES = {"bc": 22, "bc_success_only": 27, "offline": 33, "offline_continued": 34, "online": 44}
EPISODES = 50
METRICS = (
    "bc_loss", "critic_loss", "td_error_mean", "q_mean", "target_q_mean", "q_std", "q_ensemble_std",
    "best_of_n_gain", "candidate_diversity", "policy_grad_norm", "critic_grad_norm", "policy_param_norm",
    "critic_param_norm", "mask_ratio", "valid_step_ratio", "bootstrap_ratio", "entropy_estimate", "advantage_mean",
    "advantage_std", "awr_weight_mean", "awr_weight_max",
)  # fmt: skip


def make_run(
    directory: Path,
    *,
    offline_steps: int = 1500,
    online_steps: int = 1000,
    log_frequency: int = 10,
    stages: dict[str, int] | None = None,
    rates: dict[int, float] | None = None,
    finished: bool = True,
    anomalies: bool = True,
    traces: bool = True,
    film: bool = True,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """A run of the quick start; `stages` are successes out of 50 episodes, `rates` success rates at steps."""
    rng = np.random.default_rng(seed)
    directory.mkdir(parents=True)
    changes = {
        "training.offline_steps": offline_steps,
        "training.online_steps": online_steps,
        "training.log_frequency": log_frequency,
        "exp_name": directory.name,
        "seed": seed,
    }
    save_config(apply_config_overrides(get_config("quickstart"), changes | overrides), directory / "config.yaml")
    total = offline_steps + online_steps
    if rates is None:
        every = max(log_frequency, total // 10)
        rates = {step: 0.3 + 0.55 * step / total for step in range(every, total + 1, every)}
    write_metrics(directory / "metrics.jsonl", offline_steps, total, log_frequency, rng, rates)
    for step in (total // 2, total):
        (directory / str(step) / "params").mkdir(parents=True)
        (directory / str(step) / "params" / "data").write_bytes(bytes(100_000))
    counts = STAGES if stages is None else stages
    steps = {"bc": offline_steps, "bc_success_only": offline_steps, "offline": offline_steps}
    table = {name: {"step": steps.get(name, total)} | outcome(successes) for name, successes in counts.items()}
    for name, entry in table.items():
        if name in ("offline", "online"):
            target = directory / "evaluations" / str(entry["step"])
            seeds = (10_000, 10_001) if traces else ()
            made = [make_trace(target, s, s % 2 == 0, rng, film=film) for s in seeds]
            episodes = [{"length": 60 + i, "success": i < counts[name]} for i in range(EPISODES)]
            found = outcome(counts[name]) | critic() | {"traces": made, "per_episode": episodes}
            write_json(target / "evaluation.json", found)
        else:
            summary = {"status": "finished", "final_step": entry["step"], "evaluation": {"offline": entry}}
            write_json(directory / "baselines" / name / "summary.json", summary)
    if anomalies:
        write_anomalies(directory / "anomalies.jsonl", total)
    if finished:
        write_json(directory / "summary.json", make_summary(total, table))
        parts = {"policy": 0.05, "critic": 0.012, "sampling": 0.031, "optimizer": 0.006, "data": 0.002, "other": 0.001}
        write_json(directory / "profile.json", {"steps": [100, 110], "parts": parts, "trace": "profile/trace"})
    return directory


def outcome(successes: int, episodes: int = EPISODES) -> dict[str, Any]:
    return {
        "success_rate": successes / episodes,
        "episodes": episodes,
        "successes": successes,
        "interval": list(wilson_interval(successes, episodes)),
        "mean_return": -120.0 + successes,
        "mean_length": 140.0 - successes,
    }


def critic() -> dict[str, Any]:
    bins = [{"chunks": 60, "predicted": -40.0 + 9 * i, "realised": -43.0 + 9.6 * i} for i in range(5)]
    return {
        "best_of_n": {"value_gain": 0.74, "value_spread": 0.9, "action_spread": 0.3},
        "calibration": {
            "chunks": 300, "bias": 2.1, "rmse": 4.5, "correlation": 0.83, "bins": bins, "success_auc": 0.81,
        },
    }  # fmt: skip


def make_summary(total: int, table: dict[str, Any]) -> dict[str, Any]:
    return {
        "status": "finished",
        "final_step": total,
        "wall_time_s": 412.7,
        "time_s": {"data_wait": 9.1, "checkpoint": 4.4, "evaluation": 96.0, "step": 301.2},
        "last_metrics": {"step": total},
        "best_evaluation": {"step": total, "score": 0.88},
        "failed_saves": 0,
        "peak_device_bytes": 3_400_000_000,
        "plan": {"peak_bytes": 3_000_000_000, "step_s": 0.1},
        "evaluation": table,
    }


def write_metrics(
    path: Path, offline_steps: int, total: int, frequency: int, rng: np.random.Generator, rates: dict[int, float]
) -> None:
    with path.open("w") as file:
        for step in range(frequency, total + 1, frequency):
            file.write(json.dumps(metrics_line(step, offline_steps, total, rng)) + "\n")
            if step > offline_steps:
                t, played = step / total, step - offline_steps
                line = {"online/episodes": 16.0, "online/success_rate": 0.4 + 0.5 * t, "online/env_steps": 5.0 * played}
                line |= {"online/total_episodes": played / 10, "online/episode_reward_mean": -100 + 50 * t}
                line |= {"online/episode_length_mean": 120 - 60 * t, "online/policy_step": float(step)}
                file.write(json.dumps({"step": step, **line}) + "\n")
            if step in rates:
                rate = rates[step]
                low, high = wilson_interval(round(50 * rate), 50)
                line = {"eval/success_rate": rate, "eval/success_rate_low": low, "eval/success_rate_high": high}
                line |= {"eval/episode_reward_mean": -120 + 60 * step / total, "eval/episodes": 50.0}
                line |= {"eval/q_bias": 4 * math.exp(-3 * step / total), "eval/q_rmse": 5.0}
                file.write(json.dumps({"step": step, **line}) + "\n")


def metrics_line(step: int, offline_steps: int, total: int, rng: np.random.Generator) -> dict[str, Any]:
    """About as many metrics as training writes, with the shapes that they have."""
    t = step / total
    noise = rng.normal(size=30)
    scales = {"q_mean": -30.0, "target_q_mean": -30.2, "policy_param_norm": 72.0, "critic_param_norm": 55.0}
    line: dict[str, Any] = {"step": step, "phase": "offline" if step <= offline_steps else "online"}
    for i, name in enumerate(METRICS):
        decay = math.exp(-6 * t)
        level = scales[name] * (1 - decay) if name in scales else 0.2 + (1 + i / 5) * decay
        if name.endswith("_ratio"):
            level = 0.8
        line[name] = level + 0.03 * abs(level) * noise[i]
    line["total_loss"] = line["bc_loss"] + line["critic_loss"]
    line |= {"alpha_value": 1.0, "policy_lr": 1e-3, "critic_lr": 3e-4, "skipped_updates": 0.0, "update_skipped": 0.0}
    line |= {"timing/steps_per_s": 7.5 + 0.2 * noise[26], "timing/step_s": 0.13 + 0.004 * noise[27]}
    line |= {"timing/data_wait_s": 0.003, "timing/checkpoint_s": 0.0, "timing/evaluation_s": 0.0}
    line["timing/samples_per_s"] = 64 * line["timing/steps_per_s"]
    line |= {"memory/device_gib": 2.9, "memory/device_peak_gib": 3.17, "memory/host_gib": 1.2 + 0.1 * t}
    return line


def make_trace(directory: Path, seed: int, success: bool, rng: np.random.Generator, *, film: bool) -> dict[str, Any]:
    length = 62 if success else 100
    chunks = list(range(0, length, 5))
    rise = np.linspace(-45, -4, len(chunks)) if success else -45 + 8 * np.sin(np.linspace(0, 4, len(chunks)))
    q = rise + rng.normal(0, 1.2, len(chunks))
    spread = np.abs(rng.normal(1.6, 0.5, len(chunks)))
    rewards = [-1.0] * (length - 1) + [0.0 if success else -1.0]
    trace: dict[str, Any] = {
        "seed": seed,
        "task": "move the cube",
        "success": success,
        "chunk_steps": chunks,
        "values": {
            "q": q.tolist(), "q_mean": (q - 0.6 * spread).tolist(), "q_std": spread.tolist(),
            "q_min": (q - 2 * spread).tolist(), "q_max": (q + 0.1).tolist(), "action_std": [0.3] * len(chunks),
        },
        "rewards": rewards,
        "returns": [-(1 - 0.99 ** (length - 1 - c)) / 0.01 for c in chunks] if success else None,
        "video": None,
        "film_strip": None,
        "film_steps": [],
    }  # fmt: skip
    if film:
        trace["film_strip"] = f"film_strips/{seed}.jpg"
        path = directory / trace["film_strip"]
        path.parent.mkdir(parents=True, exist_ok=True)
        _film(success).save(path, quality=80)
    return trace


def _film(success: bool) -> Image.Image:
    """A square that goes from left to right over 12 pictures, all the way if it succeeds."""
    strip = Image.new("RGB", (12 * 128, 96), (64, 74, 92))
    for i in range(12):
        x = 128 * i + 10 + round((88 if success else 40) * i / 11)
        strip.paste((226, 232, 240), (128 * i + 1, 70, 128 * i + 127, 96))
        strip.paste((0, 158, 115), (128 * i + 100, 50, 128 * i + 122, 70))
        strip.paste((213, 94, 0), (x, 50, x + 20, 70))
    return strip


def write_anomalies(path: Path, total: int) -> None:
    entries = [
        {
            "kind": "q_divergence", "step": total // 5, "last_step": total // 4, "severity": "error",
            "message": "Q is -134 on average; rewards and discount allow -100 to 0",
            "advice": "lower the critic's learning rate or the target's update rate",
        },
        {
            "kind": "data_starvation", "step": total // 2, "last_step": total // 2 + total // 50,
            "severity": "warning", "message": "43 % of the time went into waiting for data",
            "advice": "raise data.num_workers or build a frame cache",
        },
        {
            "kind": "throughput_drop", "step": round(total * 0.9), "last_step": None, "severity": "warning",
            "message": "310 samples/s after 480", "advice": "look for other jobs on the machine",
        },
    ]  # fmt: skip
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def add_validations(
    directory: Path,
    losses: dict[int, float],
    *,
    ratio: float = 0.4,
    ranks: float = 0.7,
    auc: float | None = 0.9,
    episodes: int = 4,
) -> None:
    """Adds validations with these flow losses by step, and the record of the last one."""
    numbers = {"relative_action_error": ratio, "q_rank_correlation": ranks, "relative_best_of_n_error": 1.1 * ratio}
    numbers |= {"action_error/0": 2.0 * ratio, "action_error/1": 3.0 * ratio, "q_rmse": 4.5, "q_bias": 2.1}
    numbers |= {} if auc is None else {"success_auc": auc}
    with (directory / "metrics.jsonl").open("a") as file:
        for step, loss in losses.items():
            named = {f"validation/{name}": value for name, value in ({"flow_loss": loss} | numbers).items()}
            file.write(json.dumps({"step": step} | named) + "\n")
    actions = [[math.sin(t), 0.1 * t] for t in range(8)]
    chunk = {"episode": 12, "step": 40, "logged": actions, "sample": actions[::-1], "best_of_n": actions}
    dims = [{"sample": m * ratio, "best_of_n": m * 1.1 * ratio, "mean_action": m} for m in (2.0, 3.0)]
    counts = {"episodes": episodes, "windows": 128, "candidates": 16}
    record = counts | {"dims": dims, "chunks": [chunk], "best_of_n_gain": 0.125}
    write_json(directory / "evaluations" / str(max(losses)) / "validation.json", record | critic())


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
