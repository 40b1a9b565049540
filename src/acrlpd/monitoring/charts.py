"""Charts that need no script: bars with intervals, shares, a time line, a calibration plot. All as HTML.

Positions are percentages of a track, so text keeps its size on every screen.
"""

from collections.abc import Mapping, Sequence
from html import escape

from acrlpd.monitoring.units import format_seconds
from acrlpd.runs.record import Anomaly, Outcome, Phase


def outcome_bars(rows: Sequence[tuple[str, str, Outcome]], colors: Sequence[int]) -> str:
    """A table whose cells are bars: (label, note, outcome) and the colour of each."""
    lines = []
    has_return = any(outcome.mean_return is not None for _, _, outcome in rows)
    has_length = any(outcome.mean_length is not None for _, _, outcome in rows)
    for (label, note, outcome), color in zip(rows, colors, strict=True):
        low, high = outcome.interval
        title = f"{100 * outcome.success_rate:.1f} %, 95 % interval {100 * low:.1f} to {100 * high:.1f} %"
        bar = (
            f'<div class="bar" title="{title}">'
            f'<div class="fill c{color}" style="width:{100 * outcome.success_rate:.2f}%"></div>'
            f'<div class="whisker" style="left:{100 * low:.2f}%;width:{100 * (high - low):.2f}%"></div></div>'
        )
        cells = [
            f'<th scope="row">{escape(label)}<small>{escape(note)}</small></th>',
            f'<td class="wide">{bar}</td>',
            f'<td class="num strong">{100 * outcome.success_rate:.1f} %</td>',
            f'<td class="num">{100 * low:.0f} to {100 * high:.0f} %</td>',
            f'<td class="num">{outcome.counted}</td>',
        ]
        if has_return:
            cells.append(f'<td class="num">{_optional(outcome.mean_return, ".1f")}</td>')
        if has_length:
            cells.append(f'<td class="num">{_optional(outcome.mean_length, ".0f")}</td>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    axis = '<div class="axis"><span>0</span><span>25</span><span>50</span><span>75</span><span>100 %</span></div>'
    heads = ["", axis, "success", "95 % interval", "episodes"]
    heads += ["return"] * has_return + ["length"] * has_length
    head = "".join(
        f'<th class="{"wide" if i == 1 else "num" if i else ""}">{text}</th>' for i, text in enumerate(heads)
    )
    return f'<table class="outcomes"><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def share_bars(parts: Mapping[str, float], unit: str) -> str:
    """Parts of a whole, largest first."""
    total = sum(parts.values()) or 1.0
    rows = []
    for name, value in sorted(parts.items(), key=lambda item: -item[1]):
        share = 100 * value / total
        rows.append(
            f'<tr><th scope="row">{escape(name)}</th><td class="wide"><div class="bar thin">'
            f'<div class="fill c0" style="width:{share:.2f}%"></div></div></td>'
            f'<td class="num strong">{share:.1f} %</td><td class="num">{escape(format_seconds(value))}{unit}</td></tr>'
        )
    return f'<table class="outcomes shares"><tbody>{"".join(rows)}</tbody></table>'


def timeline(anomalies: Sequence[Anomaly], phases: Sequence[Phase], last_step: int) -> str:
    """One track per kind of trouble along the run's steps, under a track of its phases."""
    span = max(last_step, 1)
    tracks = []
    if phases:
        marks = []
        previous = 0
        for i, phase in enumerate(phases):
            left, width = 100 * previous / span, 100 * (phase.last_step - previous) / span
            marks.append(
                f'<div class="phase p{i % 2}" style="left:{left:.2f}%;width:{width:.2f}%">{escape(phase.name)}</div>'
            )
            previous = phase.last_step
        tracks.append(_track("phase", "".join(marks)))
    for kind in dict.fromkeys(anomaly.kind for anomaly in anomalies):
        marks = []
        for anomaly in anomalies:
            if anomaly.kind != kind:
                continue
            end = last_step if anomaly.last_step is None else anomaly.last_step
            left, width = 100 * anomaly.step / span, 100 * max(end - anomaly.step, 0) / span
            title = escape(f"step {anomaly.step:,} to {end:,}: {anomaly.message}", quote=True)
            style = f"left:{left:.2f}%;width:{width:.2f}%"
            marks.append(f'<div class="mark {anomaly.severity}" style="{style}" title="{title}"></div>')
        tracks.append(_track(kind.replace("_", " "), "".join(marks)))
    ticks = "".join(f"<span>{round(span * i / 4):,}</span>" for i in range(5))
    axis = f'<div class="track-row"><div></div><div class="axis">{ticks}</div></div>'
    return f'<div class="timeline">{"".join(tracks)}{axis}</div>'


def _track(label: str, marks: str) -> str:
    return (
        f'<div class="track-row"><div class="track-label">{escape(label)}</div><div class="track">{marks}</div></div>'
    )


def calibration_plot(bins: Sequence[Mapping[str, float]]) -> str:
    """Predicted against realised value of chunks; on the diagonal the critic is right."""
    values = [bin_[key] for bin_ in bins for key in ("predicted", "realised")]
    low, high = min(values), max(values)
    margin = 0.08 * (high - low) or 1.0
    low, high = low - margin, high + margin
    left, top, size = 62, 10, 210

    def place(value: float) -> float:
        return size * (value - low) / (high - low)

    def text(x: float, y: float, content: str, anchor: str = "middle") -> str:
        return f'<text class="tick" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{content}</text>'

    dots = ""
    for b in bins:
        title = f"{b['chunks']} chunks: predicted {b['predicted']:.3g}, realised {b['realised']:.3g}"
        x, y = left + place(b["predicted"]), top + size - place(b["realised"])
        dots += f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{title}</title></circle>'
    labels = text(left + size / 2, top + size + 34, "predicted by the critic")
    labels += f'<g transform="translate(12 {top + size / 2}) rotate(-90)">{text(0, 0, "realised")}</g>'
    for value in (low + margin, (low + high) / 2, high - margin):
        labels += text(left + place(value), top + size + 16, f"{value:.3g}")
        labels += text(left - 6, top + size - place(value) + 4, f"{value:.3g}", "end")
    return (
        f'<svg class="calibration" width="{left + size + 14}" height="{top + size + 40}" role="img" '
        f'aria-label="Calibration of the critic">'
        f'<rect class="frame" x="{left}" y="{top}" width="{size}" height="{size}"/>'
        f'<line class="diagonal" x1="{left}" y1="{top + size}" x2="{left + size}" y2="{top}"/>{dots}{labels}</svg>'
    )


def _optional(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
