"""The live view: a run's directory as a dashboard in the terminal, read from disk only.

It needs nothing from the process that trains, so it works on a mounted disk, before the first metrics, and
after the end.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from acrlpd.monitoring.units import format_bytes, format_seconds, short
from acrlpd.monitoring.watch_metrics import MetricsTail
from acrlpd.runs.directory import CONFIG_FILE, METRICS_FILE, SUMMARY_FILE, saved_steps
from acrlpd.runs.record import (
    ANOMALIES_FILE,
    BASELINES,
    Anomaly,
    check_run_directory,
    current_summary,
    read_anomalies,
    read_config,
    run_name,
)

_BLOCKS = "▁▂▃▄▅▆▇█"
# (label, metric): those that a run has are shown.
_CURVES = (
    ("success", "eval/success_rate"),
    ("online success", "online/success_rate"),
    ("loss", "total_loss"),
    ("critic loss", "critic_loss"),
    ("BC loss", "bc_loss"),
    ("actor loss", "actor_loss"),
    ("Q", "q_mean"),
    ("TD error", "td_error_mean"),
    ("best-of-N gain", "best_of_n_gain"),
    ("diversity", "candidate_diversity"),
    ("policy gradient", "policy_grad_norm"),
    ("critic gradient", "critic_grad_norm"),
    ("samples/s", "timing/samples_per_s"),
)
_SHOWN_ANOMALIES = 4
# A run is called silent after this many times the usual pause between two lines, and not before this many seconds.
_SILENT_AFTER = 10
_SILENT_AFTER_S = 60.0


@dataclasses.dataclass(frozen=True)
class Frame:
    """What is known of a run at one moment."""

    name: str
    status: str
    is_over: bool
    total_steps: int | None
    offline_steps: int | None
    age_s: float | None  # of the last metrics
    memory: str | None
    anomalies: tuple[Anomaly, ...]
    newest_checkpoint: int | None


class RunWatcher:
    """One run under observation; `look` reads what is new and gives the state of things."""

    def __init__(self, directory: Path) -> None:
        self.directory = check_run_directory(directory)
        self.metrics = MetricsTail(self.directory / METRICS_FILE)

    def look(self) -> Frame:
        self.metrics.read()
        config = read_config(self.directory) if (self.directory / CONFIG_FILE).is_file() else {}
        summary = current_summary(self.directory, self.metrics.last_line.get("step", 0))
        offline, online = (config.get(f"training.{phase}_steps") for phase in ("offline", "online"))
        age = _age(self.directory / METRICS_FILE)
        steps = saved_steps(self.directory)
        return Frame(
            name=run_name(self.directory, config),
            status=str(summary.get("status") or self._status(age, config.get("training.log_frequency") or 1)),
            is_over="status" in summary,
            total_steps=None if offline is None else offline + (online or 0),
            offline_steps=offline,
            age_s=age,
            memory=_memory(self.metrics.last_line),
            anomalies=read_anomalies(self.directory / ANOMALIES_FILE),
            newest_checkpoint=steps[-1] if steps else None,
        )

    def _status(self, age: float | None, log_frequency: int) -> str:
        line = self.metrics.last_line
        if age is None or not line:
            started = (path.parent for path in self.directory.glob(f"{BASELINES}/*/{METRICS_FILE}"))
            first = next((baseline.name for baseline in started if not (baseline / SUMMARY_FILE).is_file()), None)
            return "waiting for the first metrics" + (f"; baseline {first} comes first" if first else "")
        rate = line.get("timing/steps_per_s")
        pause = log_frequency / rate if rate else 0.0
        if age > max(_SILENT_AFTER_S, _SILENT_AFTER * pause):
            return f"silent for {format_seconds(age)}: stopped, or busy with something else"
        return "running"


def watch(directory: Path, *, once: bool, interval_s: float, console: Console | None = None) -> int:
    """Shows the run until it is over or the user has seen enough."""
    console = console or Console()
    watcher = RunWatcher(directory)
    frame = watcher.look()
    try:
        if not once and console.is_terminal and not frame.is_over:
            with Live(render(watcher, frame, console.width), console=console, screen=True, auto_refresh=False) as live:
                while not frame.is_over:
                    time.sleep(interval_s)
                    frame = watcher.look()
                    live.update(render(watcher, frame, console.width), refresh=True)
    except KeyboardInterrupt:
        pass  # the last frame stays on the screen
    console.print(render(watcher, frame, console.width))
    return 0


# -- what it looks like --------------------------------------------------------------------------------------


def render(watcher: RunWatcher, frame: Frame, width: int) -> RenderableType:
    metrics = watcher.metrics
    parts: list[RenderableType] = [_head(metrics, frame)]
    if metrics.last_line:
        parts += ["", _curves(metrics, width)]
    if frame.anomalies:
        parts += ["", _anomalies(frame.anomalies)]
    style = "green" if frame.status == "finished" else "cyan" if frame.status == "running" else "yellow"
    # Texts, because a plain string with brackets in it would be read as markup.
    title, subtitle = Text(frame.name, style="bold"), Text(frame.status, style=style)
    return Panel(Group(*parts), title=title, subtitle=subtitle, padding=(1, 2))


def _head(metrics: MetricsTail, frame: Frame) -> RenderableType:
    """Phase, progress and the numbers of the last line."""
    line = metrics.last_line
    step = line.get("step", 0)
    table = Table.grid(padding=(0, 3))
    table.add_column(style="dim")
    table.add_column()
    progress = Table.grid(padding=(0, 2))
    total = frame.total_steps
    texts: list[RenderableType] = [Text(_phase(line, frame)), f"step {step:,}" + (f" of {total:,}" if total else "")]
    bar = ProgressBar(total=max(total, 1), completed=min(step, total), width=30) if total else ""
    progress.add_row(bar, *texts)
    table.add_row("progress", progress)
    for name, text in (
        ("time left", None if frame.is_over else time_left(metrics, frame.total_steps)),
        ("throughput", _throughput(line)),
        ("memory", frame.memory),
        ("evaluation", _evaluation(metrics.last_evaluation)),
        ("checkpoint", None if frame.newest_checkpoint is None else f"step {frame.newest_checkpoint:,}"),
        ("last metrics", None if frame.age_s is None else f"{format_seconds(frame.age_s)} ago"),
    ):
        if text:
            table.add_row(name, text)
    return table


def _phase(line: Mapping[str, Any], frame: Frame) -> str:
    """As the run says; before runs said it, from the step."""
    if isinstance(phase := line.get("phase"), str):
        return phase
    is_online = frame.offline_steps is not None and line.get("step", 0) > frame.offline_steps
    return "online" if is_online else "offline"


def time_left(metrics: MetricsTail, total_steps: int | None) -> str | None:
    """At the recent rate, in which checkpoints and evaluations are contained."""
    curve = metrics.curves.get("timing/steps_per_s")
    rates = [rate for rate in curve.points[-5:] if rate > 0] if curve else []
    if total_steps is None or not rates:
        return None
    seconds_per_step = sum(1 / rate for rate in rates) / len(rates)
    return format_seconds(max(total_steps - metrics.last_line["step"], 0) * seconds_per_step)


def _throughput(line: Mapping[str, Any]) -> str:
    samples, updates, mfu, wait = (
        line.get(f"timing/{name}") for name in ("samples_per_s", "steps_per_s", "mfu", "data_wait_s")
    )
    shown = (
        samples is not None and f"{short(samples, 4)} samples/s",
        updates is not None and f"{short(updates)} updates/s",
        mfu is not None and f"{mfu:.1%} MFU",
        wait is not None and f"{format_seconds(wait)} per update waiting for data",
    )
    return ", ".join(text for text in shown if text)


def _memory(line: Mapping[str, Any]) -> str | None:
    """Of the devices where they tell, and of the training process."""
    shown = (
        (line.get("memory/device_gib"), "device {}"),
        (line.get("memory/device_peak_gib"), "at most {}"),
        (line.get("memory/host_gib"), "host {}"),
    )
    return ", ".join(form.format(format_bytes(gib * 2**30)) for gib, form in shown if gib is not None) or None


def _evaluation(line: Mapping[str, Any]) -> str | None:
    rate = line.get("eval/success_rate")
    if rate is None:
        return None
    low, high = line.get("eval/success_rate_low"), line.get("eval/success_rate_high")
    interval = "" if low is None or high is None else f" (95 %: {100 * low:.0f} to {100 * high:.0f} %)"
    return f"{100 * rate:.0f} % success{interval} at step {line['step']:,}"


def _curves(metrics: MetricsTail, width: int) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    for label, name in _CURVES:
        curve = metrics.curves.get(name)
        finite = [point for point in curve.points if math.isfinite(point)] if curve else []
        if curve is None or (curve.last == 0 and not any(finite)):  # what is always 0 is not used
            continue
        last = Text("not finite", style="bold red") if curve.last is None else Text(short(curve.last, 4), style="bold")
        scale = f"{short(min(finite))} to {short(max(finite))}" if finite else ""
        table.add_row(label, last, sparkline(curve.points, max(10, min(60, width - 60))), scale)
    return table


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as blocks of eight heights; a gap where none is finite."""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        groups = [values[a:b] for a, b in itertools.pairwise(edges)]
    else:
        groups = [[value] for value in values]
    means = [_finite_mean(group) for group in groups]
    finite = [mean for mean in means if mean is not None]
    if not finite:
        return " " * len(means)
    low, span = min(finite), max(finite) - min(finite)
    heights = [None if mean is None else (mean - low) / span if span else 0.5 for mean in means]
    return "".join(" " if h is None else _BLOCKS[min(int(8 * h), 7)] for h in heights)


def _finite_mean(values: Sequence[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


def _anomalies(anomalies: Sequence[Anomaly]) -> Table:
    """The latest, those that last first."""
    table = Table.grid(padding=(0, 2))
    latest = sorted(anomalies, key=lambda a: (a.last_step is not None, -a.step))
    for anomaly in latest[:_SHOWN_ANOMALIES]:
        style = "bold red" if anomaly.severity == "error" else "yellow"
        when = (
            f"since step {anomaly.step:,}"
            if anomaly.last_step is None
            else f"{anomaly.step:,} to {anomaly.last_step:,}"
        )
        text = Text(anomaly.message)
        text.append(f"\n{anomaly.advice}", style="dim")
        table.add_row(Text(anomaly.kind.replace("_", " "), style=style), Text(when, style="dim"), text)
    if len(latest) > _SHOWN_ANOMALIES:
        table.add_row(Text(f"and {len(latest) - _SHOWN_ANOMALIES} more", style="dim"), "", "")
    return table


def _age(path: Path) -> float | None:
    """Seconds since the file was written; another machine's clock may be ahead."""
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except FileNotFoundError:
        return None
