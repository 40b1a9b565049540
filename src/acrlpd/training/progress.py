"""What a person sees of a run while it trains, where the run's time goes, and how this compares with the plan."""

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import jax
import rich.progress

from acrlpd.config import RLTrainConfig
from acrlpd.config.plan.accelerators import find_accelerator, is_on_cpu
from acrlpd.config.plan.cost import predict_step_seconds
from acrlpd.config.plan.flops import step_flops
from acrlpd.config.plan.memory import estimate_memory
from acrlpd.console import Console
from acrlpd.evaluation.statistics import wilson_interval
from acrlpd.runs.metrics_log import EVALUATION, ONLINE, TIMING, VALIDATION, describe_validation
from acrlpd.units import format_interval, format_percent

logger = logging.getLogger(__name__)

# The bar is drawn so often per second: enough for the eye, and little work for the interpreter.
_REFRESH_RATE = 2.0
_ACTIVITIES = ("data_wait", "checkpoint", "evaluation", "rollouts")


class ProgressBars(rich.progress.Progress):
    """The bars of all runs that train together, on a terminal; a terminal can show one such object at a time."""

    def __init__(self, *, enabled: bool) -> None:
        """Without `enabled`, on processes that do not log, nothing is shown."""
        console = Console(stderr=True)
        self.logs = enabled and not console.is_terminal
        super().__init__(
            rich.progress.TextColumn("{task.description}", markup=False),
            rich.progress.BarColumn(bar_width=20),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TextColumn("{task.fields[text]}", markup=False),
            console=console,
            refresh_per_second=_REFRESH_RATE,
            disable=self.logs or not enabled,
        )


class Progress:
    """The progress of one phase of a run: a bar on a terminal, elsewhere one log message per line of metrics."""

    def __init__(
        self, bars: ProgressBars, phase: str, first_step: int, last_step: int, *, run: str | None = None
    ) -> None:
        """`run` is the name of the run on its bar; the driver puts it before messages."""
        self._bars = bars
        self._phase, self._last_step = phase, last_step
        title = phase if run is None else f"{run} {phase}"
        self._bar = bars.add_task(title, total=last_step, completed=first_step, text="")

    def __enter__(self) -> Self:
        self._bars.start()  # nothing happens if another run has started the bars
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop_task(self._bar)
        if all(task.stop_time is not None for task in self._bars.tasks):
            self._bars.stop()
            for task in self._bars.task_ids:  # the bars of the next phase come below
                self._bars.remove_task(task)

    def advance_to(self, step: int) -> None:
        if not self._bars.disable:
            self._bars.update(self._bar, completed=step)

    def show(self, line: Mapping[str, Any]) -> None:
        """Shows the numbers of a new line of metrics that matter most, as far as the line has them."""
        shown = (
            ("loss", line.get("total_loss"), "{:.4g}"),
            ("Q", line.get("q_mean"), "{:.4g}"),
            ("samples/s", line.get(f"{TIMING}samples_per_s"), "{:.1f}"),
            ("MFU", line.get(f"{TIMING}mfu"), "{:.1%}"),
        )
        text = "  ".join(f"{name} {form.format(value)}" for name, value, form in shown if value is not None)
        if rate := line.get(f"{TIMING}steps_per_s"):  # The rate includes checkpoints and evaluations.
            seconds = int((self._last_step - line["step"]) / rate)
            text += f"  eta {seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
        self._bars.update(self._bar, completed=line["step"], text=text)
        if self._bars.logs:
            logger.info("%s %d/%d  %s", self._phase, line["step"], self._last_step, text)


def describe_metrics(step: int, kind: str, metrics: Mapping[str, float]) -> str:
    """One line about an evaluation, a validation or a round of episodes, for the console."""
    found = ", ".join(_facts(kind, metrics))
    if kind == ONLINE:
        return f"episodes before step {step:,}: {found}"
    return f"{'evaluation' if kind == EVALUATION else 'validation'} at step {step:,}: {found}"


def describe_outcome(result: Mapping[str, Any] | None) -> list[str]:
    """What the last evaluation of a run found, in a few words; empty if there was no evaluation."""
    if result is None:
        return []
    success = result.get("success_rate")
    if success is not None:
        return [_describe_success(success, result.get("interval"))]
    ratio = result.get(f"{VALIDATION}relative_action_error")
    return [] if ratio is None else [f"held-out action error {format_percent(ratio)} of the mean action's"]


def _facts(kind: str, metrics: Mapping[str, float]) -> Iterator[str]:
    """The numbers that matter most, as far as they are known."""
    episodes = metrics.get("episodes")
    if (success := metrics.get("success_rate")) is not None:
        interval = None
        if "success_rate_low" in metrics:
            interval = metrics["success_rate_low"], metrics["success_rate_high"]
        elif kind == ONLINE and episodes:
            interval = wilson_interval(round(success * episodes), round(episodes))
        yield _describe_success(success, interval)
    if episodes is not None:
        yield f"{episodes:.0f} episodes"
    if lost := metrics.get("lost_episodes"):
        yield f"{lost:.0f} lost"
    if kind == ONLINE:
        yield f"{metrics['env_steps']:,.0f} environment steps in {metrics['total_episodes']:,.0f} episodes so far"
    if kind == VALIDATION:
        yield from describe_validation(metrics.get)


def _describe_success(rate: float, interval: Sequence[float] | None) -> str:
    return f"success {format_percent(rate)}" + (f" ({format_interval(interval)})" if interval else "")


class Clock:
    """Adds up the seconds of named activities; the rest of the time belongs to the updates."""

    def __init__(self) -> None:
        self._totals = dict.fromkeys((*_ACTIVITIES, "step"), 0.0)
        self.restart()

    def restart(self) -> None:
        """Forgets the time and the steps since the last reading."""
        self._start = time.perf_counter()
        self._spent = dict.fromkeys(_ACTIVITIES, 0.0)
        self._num_steps = 0

    @contextlib.contextmanager
    def measure(self, activity: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with jax.profiler.TraceAnnotation(activity):  # A profile shows the activities by these names.
                yield
        finally:
            self._spent[activity] += time.perf_counter() - start

    def count_steps(self, count: int) -> None:
        self._num_steps += count

    def read(self) -> dict[str, float]:
        """The rate of updates since the last reading, seconds per update, and seconds of the other activities.

        The result is empty if there was no update.
        """
        if not self._num_steps:
            return {}
        elapsed = max(time.perf_counter() - self._start, 1e-9)
        spent, num_steps = self._spent | {"step": elapsed - sum(self._spent.values())}, self._num_steps
        self._totals = {name: total + spent[name] for name, total in self._totals.items()}
        self.restart()
        return {
            "steps_per_s": num_steps / elapsed,
            "step_s": spent["step"] / num_steps,
            "data_wait_s": spent["data_wait"] / num_steps,
            "checkpoint_s": spent["checkpoint"],
            "evaluation_s": spent["evaluation"],
            "rollouts_s": spent["rollouts"],
        }

    def totals(self) -> dict[str, float]:
        """Seconds per activity in this process; the seconds of updates up to the last reading."""
        return {name: round(total + self._spent.get(name, 0.0), 3) for name, total in self._totals.items()}


def planned_costs(rl_config: RLTrainConfig) -> dict[str, float | None]:
    """What the plan predicts for an update on these devices, to compare with what is measured."""
    accelerator = find_accelerator()
    devices = jax.device_count()
    memory = estimate_memory(rl_config, devices, on_cpu=is_on_cpu())
    step_s = None
    if accelerator is not None:
        step_s = predict_step_seconds(rl_config, memory, step_flops(rl_config), accelerator, devices)
    return {"peak_bytes": memory.peak, "step_s": step_s}


def update_flops(rl_config: RLTrainConfig) -> float:
    """FLOPs of one update over the whole batch; what is computed twice to save memory counts once."""
    flops = step_flops(rl_config)
    return (flops.total - flops.recompute) * rl_config.batch_size


def model_flops_utilization(rl_config: RLTrainConfig, steps_per_s: float) -> float | None:
    """Share of the peak of all devices that the arithmetic of an update uses; None if the peak is unknown (CPUs)."""
    accelerator = find_accelerator()
    if accelerator is None:
        return None
    return update_flops(rl_config) * steps_per_s / (accelerator.bf16_tflops * 1e12 * jax.device_count())
