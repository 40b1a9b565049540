"""Facts about a run as short texts, for the page and for the Markdown summary alike."""

import dataclasses
import datetime
from collections.abc import Sequence
from typing import Any

import numpy as np

from acrlpd.monitoring.report_verdict import STAGE_LABELS, percent
from acrlpd.monitoring.units import format_bytes, format_seconds, short
from acrlpd.runs.record import Outcome, RunRecord, read_outcome

UNKNOWN = "–"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One line of plan against measurement."""

    what: str
    planned: str
    measured: str
    ratio: str  # measured to planned


def median_of(record: RunRecord, name: str) -> float | None:
    """The median over the run: a few slow lines, such as the first, do not matter."""
    series = record.series.get(name)
    if series is None or not np.isfinite(series.values).any():
        return None
    return float(np.nanmedian(series.values))


def overview(record: RunRecord) -> dict[str, str]:
    """What a run was, in a few numbers."""
    rate, memory = median_of(record, "timing/samples_per_s"), peak_bytes(record)
    host = median_of(record, "memory/host_gib")
    steps = f"{record.last_step:,}"
    if record.total_steps and record.total_steps != record.last_step:
        steps += f" of {record.total_steps:,}"
    wall = record.summary.get("wall_time_s")
    best = record.summary.get("best_evaluation")
    facts = {
        "status": record.status.partition(":")[0],
        "updates": steps,
        "time": UNKNOWN if wall is None else format_seconds(wall),
        "samples per second": UNKNOWN if rate is None else short(rate, 4),
        **({} if memory is None else {"peak device memory": format_bytes(memory)}),
        **({} if host is None else {"host memory": format_bytes(host * 2**30)}),
        "anomalies": str(len(record.anomalies)) if record.anomalies else "none",
    }
    if isinstance(best, dict) and "score" in best:
        facts["best evaluation"] = f"{percent(best['score'])} at step {best['step']:,}"
    return facts


def peak_bytes(record: RunRecord) -> float | None:
    """As the devices counted it; CPUs do not."""
    peak = record.summary.get("peak_device_bytes")
    if isinstance(peak, int | float):
        return float(peak)
    series = record.series.get("memory/device_peak_gib")
    return None if series is None else float(np.nanmax(series.values)) * 2**30


def plan_comparison(record: RunRecord) -> list[Comparison]:
    """What was planned against what was measured, as far as either is known."""
    plan = record.summary.get("plan")
    plan = plan if isinstance(plan, dict) else {}
    rows = []
    for what, planned, measured, form in (
        ("peak memory per device", plan.get("peak_bytes"), peak_bytes(record), format_bytes),
        ("time of an update", plan.get("step_s"), median_of(record, "timing/step_s"), format_seconds),
    ):
        if planned is None and measured is None:
            continue
        ratio = f"{measured / planned:.2f}" if planned and measured else UNKNOWN
        texts = [UNKNOWN if value is None else form(value) for value in (planned, measured)]
        rows.append(Comparison(what, texts[0], texts[1], ratio))
    return rows


def shown_stages(record: RunRecord) -> dict[str, Outcome]:
    """The run's stages as what they are: the offline phase of a run without a critic is imitation."""
    if record.has_critic:
        return record.stages
    return {"bc" if stage == "offline" else stage: outcome for stage, outcome in record.stages.items()}


def final_outcomes(record: RunRecord) -> dict[str, Outcome]:
    """The stages by their names; without stages, the last evaluation of the run."""
    if record.stages:
        return {STAGE_LABELS[stage]: outcome for stage, outcome in shown_stages(record).items()}
    if not record.evaluations:
        return {}
    step = max(record.evaluations)
    outcome = read_outcome(record.evaluations[step])
    return {} if outcome is None else {f"Step {step:,}": outcome}


def shown_evaluation(record: RunRecord) -> tuple[str, int] | None:
    """The evaluation whose episodes are shown, by name and step: at the end of the last phase, or the last one.

    None where there is nothing to see: no evaluation, or no critic.
    """
    if not record.has_critic:
        return None
    for stage in ("online", "offline"):
        step = record.stages[stage].step if stage in record.stages else None
        if step in record.evaluations:
            return STAGE_LABELS[stage], step
    return (f"Step {max(record.evaluations):,}", max(record.evaluations)) if record.evaluations else None


def config_differences(records: Sequence[RunRecord]) -> dict[str, list[Any]]:
    """Fields in which the runs differ, with the value in each."""
    names = dict.fromkeys(name for record in records for name in record.config)
    values = {name: [record.config.get(name) for record in records] for name in names if name != "exp_name"}
    return {name: found for name, found in values.items() if any(value != found[0] for value in found)}


def format_time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


def format_value(value: Any) -> str:
    return UNKNOWN if value is None else str(value)
