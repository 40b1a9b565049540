"""Evaluations as tables in a terminal."""

from collections.abc import Iterator, Mapping

from rich.table import Table

from acrlpd.console import Console
from acrlpd.evaluation.protocol import Evaluation
from acrlpd.evaluation.statistics import Calibration, Summary
from acrlpd.units import format_interval, format_percent

_DISTURBANCES = {
    "obs_noise": "observation noise",
    "action_noise": "action noise",
    "best_of": "best of",
}


def print_evaluations(evaluations: Mapping[str, Evaluation], console: Console | None = None) -> None:
    """One table of all policies, then the tasks, the robustness and the critics of each policy."""
    console = console or Console()
    calibrations = {name: e.calibration for name, e in evaluations.items() if e.calibration is not None}
    console.print(summary_table("policy", {name: e.summary for name, e in evaluations.items()}, calibrations))
    for name, evaluation in evaluations.items():
        if len(evaluation.tasks) > 1:
            console.print(summary_table(f"{name}: task", evaluation.tasks))
        if evaluation.robustness:
            rows = {
                f"{_DISTURBANCES[kind]} {level}": summary
                for kind, levels in evaluation.robustness.items()
                for level, summary in levels.items()
            }
            console.print(summary_table(f"{name}: robustness", {"undisturbed": evaluation.summary, **rows}))
        for line in _critic_lines(evaluation):
            console.print(f"{name}: {line}")
        for video in evaluation.videos:
            console.print(f"{name}: {video}")


def summary_table(
    title: str, summaries: Mapping[str, Summary], calibrations: Mapping[str, Calibration] | None = None
) -> Table:
    """One row per name; lost episodes, and how good the critics are, have columns only if there are any."""
    lost, calibrations = any(summary.lost_episodes for summary in summaries.values()), calibrations or {}
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(title)
    columns = ["success", "95 %", "episodes", "return", "length", *(["lost"] if lost else [])]
    for column in (*columns, *(["Q rank", "Q rmse"] if calibrations else [])):
        table.add_column(column, justify="right")
    for name, summary in summaries.items():
        table.add_row(
            name,
            format_percent(summary.success_rate, 1),
            format_interval(summary.interval),
            f"{summary.successes}/{summary.episodes}",
            f"{summary.mean_return:.1f} ± {summary.std_return:.1f}",
            f"{summary.mean_length:.0f}",
            *([str(summary.lost_episodes)] if lost else []),
            *(_calibration_cells(calibrations.get(name)) if calibrations else []),
        )
    return table


def _calibration_cells(calibration: Calibration | None) -> tuple[str, str]:
    """Rank correlation and rmse of the critics' values; a policy without known values has neither."""
    if calibration is None:
        return "-", "-"
    rank = calibration.rank_correlation
    return "-" if rank is None else f"{rank:.2f}", f"{calibration.rmse:.3g}"


def _critic_lines(evaluation: Evaluation) -> Iterator[str]:
    if (effect := evaluation.best_of_n) is not None and effect.value_spread > 0:
        yield (
            f"best-of-N raises the critic's value by {effect.value_gain:.3g} over the candidates' mean "
            f"(spread {effect.value_spread:.3g}, actions {effect.action_spread:.3g})"
        )
    if (calibration := evaluation.calibration) is not None:
        correlation = "" if calibration.correlation is None else f", correlation {calibration.correlation:.2f}"
        yield (
            f"critic against realised return: bias {calibration.bias:+.3g}, rmse {calibration.rmse:.3g}"
            f"{correlation} over {calibration.chunks} chunks of episodes that ended by themselves"
        )
        if calibration.success_auc is not None:
            yield f"value at the start tells success from failure with probability {calibration.success_auc:.2f}"
