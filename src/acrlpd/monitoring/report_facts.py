"""What the report says of a run, computed from the run's record. The templates decide how the facts look."""

import base64
import dataclasses
import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from acrlpd.monitoring.report_curves import round_numbers
from acrlpd.monitoring.report_training import analyze_training
from acrlpd.monitoring.report_validation import validation_view
from acrlpd.monitoring.report_verdict import critic_sentences, judge
from acrlpd.runs.best_evaluation import describe_best
from acrlpd.runs.record import EVALUATIONS, STAGES, Anomaly, Outcome, RunRecord, read_outcome
from acrlpd.units import format_bytes, format_seconds, short

UNKNOWN = "–"
_MAX_EPISODES = 4  # per run
_DRAWN = {"seed", "chunk_steps", "rewards"}  # a trace without these cannot be drawn


@dataclasses.dataclass(frozen=True)
class Stage:
    """One row of the evaluation: how the policy of a stage did."""

    name: str  # the templates have a note for each
    label: str
    outcome: Outcome


def collect_facts(record: RunRecord, output: Path) -> dict[str, Any]:
    """What the page and the summary show of one run, for a page that will be written to `output`."""
    times = record.summary.get("time_s") or {}
    return {
        "record": record,
        "verdict": judge(record),
        "overview": overview(record),
        "stages": final_stages(record),
        "validation": _validation(record),
        "training": analyze_training(record),
        "critic": _critic_view(record, output),
        "plan": plan_comparison(record),
        # Seconds by activity in the last process of the run.
        "times": {name.replace("_", " "): seconds for name, seconds in times.items()},
        "profile": record.profile or {},  # empty where no updates were profiled
    }


def overview(record: RunRecord) -> dict[str, str]:
    """The run in a few numbers."""
    rate, memory = median_of(record, "timing/samples_per_s"), peak_bytes(record)
    host = median_of(record, "memory/host_gib")
    steps = f"{record.last_step:,}"
    if record.total_steps and record.total_steps != record.last_step:
        steps += f" of {record.total_steps:,}"
    facts = {
        "status": record.status.partition(":")[0],
        "updates": steps,
        "time": _known(record.summary.get("wall_time_s"), format_seconds),
        "samples per second": _known(rate, lambda found: short(found, 4)),
        **({} if memory is None else {"peak device memory": format_bytes(memory)}),
        **({} if host is None else {"host memory": format_bytes(host * 2**30)}),
        "anomalies": str(len(record.anomalies)) if record.anomalies else "none",
    }
    best = record.summary.get("best_evaluation")
    if isinstance(best, dict) and "score" in best:
        facts["best evaluation"] = describe_best(best)
    return facts


def median_of(record: RunRecord, name: str) -> float | None:
    """The median over the run: a few slow lines, such as the first, do not matter."""
    series = record.series.get(name)
    if series is None or not np.isfinite(series.values).any():
        return None
    return float(np.nanmedian(series.values))


def peak_bytes(record: RunRecord) -> float | None:
    """The peak that the devices counted; CPUs do not count."""
    peak = record.summary.get("peak_device_bytes")
    if isinstance(peak, int | float):
        return float(peak)
    series = record.series.get("memory/device_peak_gib")
    known = [] if series is None else series.values[np.isfinite(series.values)]
    return float(np.max(known)) * 2**30 if len(known) else None


def plan_comparison(record: RunRecord) -> dict[str, tuple[str, str, str]]:
    """Planned, measured, and their ratio, where at least one of the two is known."""
    plan = record.summary.get("plan") or {}
    rows = {}
    for what, planned, measured, form in (
        ("peak memory per device", plan.get("peak_bytes"), peak_bytes(record), format_bytes),
        ("time of an update", plan.get("step_s"), median_of(record, "timing/step_s"), format_seconds),
    ):
        if planned is not None or measured is not None:
            ratio = f"{measured / planned:.2f}" if planned and measured else UNKNOWN
            rows[what] = _known(planned, form), _known(measured, form), ratio
    return rows


def describe_steps(anomaly: Anomaly) -> str:
    return f"{anomaly.step:,} to {'the end' if anomaly.last_step is None else f'{anomaly.last_step:,}'}"


def _known(value: float | None, form: Callable[[float], str]) -> str:
    return UNKNOWN if value is None else form(value)


def final_stages(record: RunRecord) -> list[Stage]:
    """The stages of the run; without stages, the last evaluation of the run."""
    if record.stages:
        names = {stage: "bc" if stage == "offline" and record.is_imitation else stage for stage in record.stages}
        return [Stage(name, STAGES[name], record.stages[stage]) for stage, name in names.items()]
    step = max(record.evaluations, default=0)
    outcome = read_outcome(record.evaluations.get(step))
    return [] if outcome is None else [Stage("last", f"Step {step:,}", outcome)]


# -- several runs ----------------------------------------------------------------------------------------------


def side_by_side(tables: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Every name of the tables, one table for each run, with its value in each; None where a run has no value."""
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: [table.get(name) for table in tables] for name in names}


def config_differences(records: Sequence[RunRecord]) -> dict[str, list[Any]]:
    """Fields in which the runs differ, with the value in each."""
    values = side_by_side([record.config for record in records]).items()
    return {name: found for name, found in values if name != "exp_name" and any(value != found[0] for value in found)}


# -- the critic ------------------------------------------------------------------------------------------------


def shown_evaluation(record: RunRecord) -> tuple[str, int] | None:
    """The evaluation whose episodes are shown, by name and step: that of the last phase, or else the last one.

    None where there is no evaluation or no critic.
    """
    if not record.has_critic or not record.evaluations:
        return None
    for stage in ("online", "offline"):
        step = record.stages[stage].step if stage in record.stages else None
        if step in record.evaluations:
            return STAGES[stage], step
    return f"Step {max(record.evaluations):,}", max(record.evaluations)


def _critic_view(record: RunRecord, output: Path) -> dict[str, Any] | None:
    """Title, sentences, calibration and episodes of the evaluation that is shown; None if it tells nothing."""
    shown = shown_evaluation(record)
    if shown is None:
        return None
    title, step = shown
    evaluation, directory = record.evaluations[step], record.directory / EVALUATIONS / str(step)
    traces = [trace for trace in evaluation.get("traces") or [] if trace.keys() >= _DRAWN]
    sentences = critic_sentences(evaluation)
    if not sentences and not traces:
        return None
    episodes = [_episode(trace, directory, output) for trace in traces[:_MAX_EPISODES]]
    return {"title": title, "sentences": sentences, "calibration": _calibration(evaluation), "episodes": episodes}


def _validation(record: RunRecord) -> dict[str, Any] | None:
    view = validation_view(record)
    return None if view is None else view | {"calibration": _calibration(view["record"])}


def _calibration(evaluation: Mapping[str, Any]) -> dict[str, Any] | None:
    """Predicted against realised values, and the range of both axes; None with fewer than two bins of finite values."""
    ends = ("predicted", "realised")
    found = (evaluation.get("calibration") or {}).get("bins") or []
    bins = [one for one in found if all(math.isfinite(one[end]) for end in ends)]
    if len(bins) < 2:
        return None
    values = [one[end] for one in bins for end in ends]
    low, high = min(values), max(values)
    margin = 0.08 * (high - low) or 1.0
    return {"bins": bins, "low": low - margin, "high": high + margin, "ticks": (low, (low + high) / 2, high)}


def _episode(trace: Mapping[str, Any], directory: Path, output: Path) -> dict[str, Any]:
    """One episode with the critic's values; `data` is what the page's script draws: short numbers, the film strip."""
    values = {name: round_numbers(found) for name, found in (trace.get("values") or {}).items()}
    q, mean = values.get("q", []), values.get("q_mean")
    data: dict[str, Any] = {
        "seed": trace["seed"],
        "chunk_steps": trace["chunk_steps"],
        "q": q,
        "rewards": round_numbers(trace["rewards"]),
        "returns": round_numbers(trace["returns"]) if trace.get("returns") else None,
        "q_mean": mean,
        "q_low": values.get("q_min"),
        "q_high": values.get("q_max"),
    }
    if mean is not None:
        gains = [None if a is None or b is None else a - b for a, b in zip(q, mean, strict=True)]
        data["advantage"] = round_numbers(gains)
    if trace.get("film_strip") and (directory / trace["film_strip"]).is_file():
        content = (directory / trace["film_strip"]).read_bytes()
        with Image.open(io.BytesIO(content)) as image:
            width, height = image.size
        source = f"data:image/jpeg;base64,{base64.b64encode(content).decode()}"
        data["strip"] = {"source": source, "width": width, "height": height}
    video = directory / trace["video"] if trace.get("video") else None
    return {
        "success": bool(trace.get("success")),
        "task": str(trace.get("task") or ""),
        "num_steps": len(trace["rewards"]),
        "video": os.path.relpath(video, output.parent) if video is not None and video.is_file() else None,
        "data": data,
    }
