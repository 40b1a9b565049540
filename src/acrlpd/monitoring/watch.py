"""The live view: a run's directory as a dashboard in the terminal.

The view reads files and nothing else: it needs no connection to the process that trains. It works on a mounted
disk, before the first metrics, and after the end.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from acrlpd.config.score import SUCCESS
from acrlpd.console import Console
from acrlpd.monitoring.report_curves import downsample
from acrlpd.runs.best_evaluation import describe_best, find_best
from acrlpd.runs.metrics_log import VALIDATION, Series, describe_validation
from acrlpd.runs.record import Anomaly, RunProgress, RunReader, running_baseline
from acrlpd.units import format_bytes, format_interval, format_percent, format_seconds, short

_BLOCKS = "▁▂▃▄▅▆▇█"
# Label -> metric. The view shows those that a run has.
_CURVES = {
    "success": "eval/success_rate",
    "online success": "online/success_rate",
    "held-out loss": "validation/flow_loss",
    "held-out error": "validation/relative_action_error",
    "held-out Q rank": "validation/q_rank_correlation",
    "loss": "total_loss",
    "critic loss": "critic_loss",
    "BC loss": "bc_loss",
    "actor loss": "actor_loss",
    "Q": "q_mean",
    "TD error": "td_error_mean",
    "best-of-N gain": "best_of_n_gain",
    "diversity": "candidate_diversity",
    "policy gradient": "policy_grad_norm",
    "critic gradient": "critic_grad_norm",
    "samples/s": "timing/samples_per_s",
}
_THROUGHPUT: dict[str, Callable[[float], str]] = {
    "timing/samples_per_s": lambda rate: f"{short(rate, 4)} samples/s",
    "timing/steps_per_s": lambda rate: f"{short(rate)} updates/s",
    "timing/mfu": lambda share: f"{share:.1%} MFU",
    "timing/data_wait_s": lambda seconds: f"{format_seconds(seconds)} per update waiting for data",
}
# Of the fullest device, where the backend reports it, and of the training process.
_MEMORY: dict[str, Callable[[float], str]] = {
    "memory/device_gib": lambda gib: f"device {format_bytes(gib * 2**30)}",
    "memory/device_peak_gib": lambda gib: f"at most {format_bytes(gib * 2**30)}",
    "memory/host_gib": lambda gib: f"host {format_bytes(gib * 2**30)}",
}
_SHOWN_ANOMALIES = 4
# A run is called silent after this many times the usual pause between two lines, and not before this many seconds.
_SILENT_AFTER = 10
_SILENT_AFTER_S = 60.0


def watch(directory: Path, *, once: bool, interval_s: float, console: Console | None = None) -> int:
    """Shows the run until the run is over or the user presses Ctrl-C."""
    console = console or Console()
    reader = RunReader(directory)
    run = reader.read()
    try:
        if not once and console.is_terminal and not is_over(run):
            with Live(render(run, console.width), console=console, screen=True, auto_refresh=False) as live:
                while not is_over(run):
                    time.sleep(interval_s)
                    run = reader.read()
                    live.update(render(run, console.width), refresh=True)
    except KeyboardInterrupt:
        pass  # the last frame stays on the screen
    console.print(render(run, console.width))
    return 0


def is_over(run: RunProgress) -> bool:
    return "status" in run.summary


def status(run: RunProgress) -> str:
    """How the run ended; while it is under way, whether it still writes metrics."""
    if is_over(run):
        return str(run.summary["status"])
    if run.metrics_written is None:
        baseline = running_baseline(run.directory)
        return "waiting for the first metrics" + (f"; baseline {baseline} comes first" if baseline else "")
    rate = run.latest("timing/steps_per_s")
    pause = (run.config.get("training.log_frequency") or 1) / rate if rate else 0.0
    if _age(run.metrics_written) > max(_SILENT_AFTER_S, _SILENT_AFTER * pause):
        return f"silent for {format_seconds(_age(run.metrics_written))}: stopped, or busy with something else"
    return "running"


def render(run: RunProgress, width: int) -> RenderableType:
    parts: list[RenderableType] = [_head(run)]
    if run.series:
        parts += ["", _curves(run, width)]
    if run.anomalies:
        parts += ["", _anomalies(run.anomalies)]
    text = status(run)
    style = {"finished": "green", "running": "cyan"}.get(text, "yellow")
    title, subtitle = Text(run.name, style="bold"), Text(text, style=style)
    return Panel(Group(*parts), title=title, subtitle=subtitle, padding=(1, 2))


def _head(run: RunProgress) -> RenderableType:
    """Phase, progress and the newest numbers."""
    total, step = run.total_steps, run.last_step
    progress = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=max(total, 1), completed=min(step, total), width=30) if total else ""
    phase = Text(run.phases[-1].name if run.phases else "")
    progress.add_row(bar, phase, f"step {step:,}" + (f" of {total:,}" if total else ""))
    table = Table.grid(Column(style="dim"), Column(), padding=(0, 3))
    table.add_row("progress", progress)
    for name, text in (
        ("time left", None if is_over(run) else time_left(run)),
        ("throughput", _describe(run, _THROUGHPUT)),
        ("memory", _describe(run, _MEMORY)),
        ("evaluation", _evaluation(run)),
        ("held-out", ", ".join(describe_validation(lambda name: run.latest(f"{VALIDATION}{name}")))),
        ("best", _best(run)),
        ("checkpoint", f"step {run.saved_steps[-1]:,}" if run.saved_steps else None),
        ("last metrics", run.metrics_written and f"{format_seconds(_age(run.metrics_written))} ago"),
    ):
        if text:
            table.add_row(name, text)
    return table


def time_left(run: RunProgress) -> str | None:
    """At the recent rate, which includes checkpoints and evaluations."""
    series = run.series.get("timing/steps_per_s")
    rates = [rate for rate in series.values[-5:].tolist() if rate > 0] if series else []
    if run.total_steps is None or not rates:
        return None
    seconds_per_step = sum(1 / rate for rate in rates) / len(rates)
    return format_seconds(max(run.total_steps - run.last_step, 0) * seconds_per_step)


def _describe(run: RunProgress, forms: Mapping[str, Callable[[float], str]]) -> str:
    """The newest values of the metrics that a run has."""
    found = ((run.latest(name), form) for name, form in forms.items())
    return ", ".join(form(value) for value, form in found if value is not None)


def _evaluation(run: RunProgress) -> str | None:
    rate, low, high = (run.latest(f"eval/success_rate{end}") for end in ("", "_low", "_high"))
    if rate is None:
        return None
    interval = "" if low is None or high is None else f" (95 %: {format_interval((low, high))})"
    return f"{format_percent(rate)} success{interval} at step {run.series['eval/success_rate'].steps[-1]:,}"


def _best(run: RunProgress) -> str | None:
    """The best step so far by the score of the config; a config that cannot be read has the usual score."""
    best = find_best(run.series, str(run.config.get("evaluation.score", SUCCESS)))
    return None if best is None else describe_best(best)


def _curves(run: RunProgress, width: int) -> Table:
    curve, scale = Column(style="cyan", no_wrap=True), Column(style="dim", no_wrap=True)
    table = Table.grid(Column(style="dim"), Column(justify="right"), curve, scale, padding=(0, 2))
    for label, name in _CURVES.items():
        if name not in run.series or not run.series[name].values.any():  # a metric that is always 0 is not used
            continue
        values, last = run.series[name].values, run.latest(name)
        finite = values[np.isfinite(values)]
        shown = Text("not finite", style="bold red") if last is None else Text(short(last, 4), style="bold")
        ends = f"{short(finite.min())} to {short(finite.max())}" if len(finite) else ""
        table.add_row(label, shown, sparkline(run.series[name], max(10, min(60, width - 60))), ends)
    return table


def sparkline(series: Series, width: int) -> str:
    """The values as blocks of eight heights; a gap where no value is finite."""
    means = downsample(series, width)[1]
    finite = means[np.isfinite(means)]
    low, span = (finite.min(), np.ptp(finite)) if len(finite) else (0.0, 0.0)
    heights = (means - low) / span if span else 0.5 + 0.0 * means
    return "".join(" " if np.isnan(height) else _BLOCKS[min(int(8 * height), 7)] for height in heights)


def _anomalies(anomalies: Sequence[Anomaly]) -> Table:
    """The latest anomalies; those that last come first."""
    table = Table.grid(padding=(0, 2))
    latest = sorted(anomalies, key=lambda a: (a.last_step is not None, -a.step))
    for anomaly in latest[:_SHOWN_ANOMALIES]:
        style = "bold red" if anomaly.severity == "error" else "yellow"
        ended = anomaly.last_step
        when = f"since step {anomaly.step:,}" if ended is None else f"{anomaly.step:,} to {ended:,}"
        text = Text(anomaly.message)
        text.append(f"\n{anomaly.advice}", style="dim")
        table.add_row(Text(anomaly.kind.replace("_", " "), style=style), Text(when, style="dim"), text)
    if len(latest) > _SHOWN_ANOMALIES:
        table.add_row(Text(f"and {len(latest) - _SHOWN_ANOMALIES} more", style="dim"), "", "")
    return table


def _age(written: float) -> float:
    """Seconds since a file was written; never negative, as the clock of another machine may be ahead."""
    return max(0.0, time.time() - written)
