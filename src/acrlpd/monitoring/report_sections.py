"""The sections of the report's page, each from the runs' records to HTML. Without something to show: empty."""

import base64
import io
import math
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image

from acrlpd.monitoring import report_facts as facts
from acrlpd.monitoring.charts import calibration_plot, outcome_bars, share_bars, timeline
from acrlpd.monitoring.report_curves import number
from acrlpd.monitoring.report_verdict import STAGE_NOTES, critic_sentences, judge
from acrlpd.monitoring.units import format_bytes, format_seconds
from acrlpd.runs.directory import CONFIG_FILE
from acrlpd.runs.record import EVALUATIONS, RunRecord

_MAX_EPISODES = 4  # per run
_DRAWN = {"seed", "chunk_steps", "rewards"}  # without these, as in another version's record, there is nothing to draw


def section(anchor: str, title: str, lead: str, content: str) -> str:
    if not content:
        return ""
    return f'<section id="{anchor}"><h2>{title}</h2><p class="lead">{lead}</p>{content}</section>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], class_: str = "") -> str:
    """Cells are HTML already; the first of a row is its name."""
    heads = "".join(f"<th>{cell}</th>" for cell in head)
    lines = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>' for row in rows
    )
    head_row, body = f"<thead><tr>{heads}</tr></thead>", f"<tbody>{lines}</tbody>"
    return f'<div class="scroll"><table class="{class_}">{head_row}{body}</table></div>'


def per_run(records: Sequence[RunRecord], contents: Sequence[str]) -> str:
    """One card per run that has something to show, with its name where there are several."""
    cards = []
    for record, content in zip(records, contents, strict=True):
        if content:
            name = f"<h3>{escape(record.name)}</h3>" if len(records) > 1 else ""
            cards.append(f'<div class="card pad">{name}{content}</div>')
    return "".join(cards) if len(cards) < 2 else f'<div class="columns">{"".join(cards)}</div>'


def header(records: Sequence[RunRecord]) -> str:
    if len(records) > 1:
        return f'<div class="head"><h1>{len(records)} runs side by side</h1>{_run_names(records)}</div>'
    record = records[0]
    items = "".join(
        f'<div class="fact"><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>'
        for name, value in facts.overview(record).items()
    )
    return (
        f'<div class="head"><h1>{escape(record.name)}</h1><div class="path mono">{escape(str(record.directory))}</div>'
        f'<dl class="facts">{items}</dl></div>'
    )


def _run_names(records: Sequence[RunRecord]) -> str:
    """The runs with their colours."""
    names = [
        f'<span class="legend-item"><span class="swatch c{i % 8}"></span>{escape(record.name)}</span>'
        for i, record in enumerate(records)
    ]
    return f'<div class="legend">{"".join(names)}</div>'


def verdicts(records: Sequence[RunRecord]) -> str:
    cards = []
    for record in records:
        verdict = judge(record)
        who = f'<div class="who">{escape(record.name)}</div>' if len(records) > 1 else ""
        lines = "".join(f"<li>{escape(sentence)}</li>" for sentence in (*verdict.sentences, *record.problems))
        cards.append(
            f'<div class="card verdict {verdict.tone}">{who}<p class="headline">{escape(verdict.headline)}</p>'
            f"<ul>{lines}</ul></div>"
        )
    return f'<div id="verdict">{"".join(cards)}</div>'


def side_by_side(records: Sequence[RunRecord]) -> str:
    """A column per run: its facts, its evaluations, and where the configs differ."""
    if len(records) < 2:
        return ""
    overviews = [facts.overview(record) for record in records]
    names = dict.fromkeys(name for overview in overviews for name in overview)
    rows = [[escape(name), *(escape(overview.get(name, facts.UNKNOWN)) for overview in overviews)] for name in names]
    outcomes = [facts.final_outcomes(record) for record in records]
    for label in dict.fromkeys(label for found in outcomes for label in found):
        cells = [
            f"<b>{100 * o.success_rate:.1f} %</b> ({100 * o.interval[0]:.0f} to {100 * o.interval[1]:.0f} %)"
            if (o := found.get(label))
            else facts.UNKNOWN
            for found in outcomes
        ]
        rows.append([f"success: {escape(label)}", *cells])
    head = ["", *(f'<span class="c{i % 8}">●</span> {escape(record.name)}' for i, record in enumerate(records))]
    differences = [
        [f"<code>{escape(name)}</code>", *(f"<code>{escape(facts.format_value(value))}</code>" for value in values)]
        for name, values in facts.config_differences(records).items()
    ]
    content = f'<div class="card pad">{table(head, rows)}</div>'
    if differences:
        content += f'<h3>Configs differ in</h3><div class="card pad">{table(head, differences)}</div>'
    return section("runs", "Side by side", "The same numbers of every run.", content)


def evaluation(records: Sequence[RunRecord]) -> str:
    contents = []
    for record in records:
        outcomes = facts.final_outcomes(record)
        stages = list(facts.shown_stages(record))
        notes = [STAGE_NOTES[stage] for stage in stages] or [""] * len(outcomes)
        controls = ("bc_success_only", "offline_continued")
        colors = [8 if stage in ("bc", *controls) else 0 for stage in stages] or [0] * len(outcomes)
        rows = [(label, note, outcome) for (label, outcome), note in zip(outcomes.items(), notes, strict=True)]
        contents.append(outcome_bars(rows, colors) if rows else "")
    lead = "Share of episodes that succeed, with the same seeds for every policy. The whiskers are 95 % intervals."
    content = "".join(
        f'<div class="card pad spaced">{_run_title(records, record)}<div class="scroll">{html}</div></div>'
        for record, html in zip(records, contents, strict=True)
        if html
    )
    return section("evaluation", "Evaluation", lead, content)


def _run_title(records: Sequence[RunRecord], record: RunRecord) -> str:
    return f"<h3>{escape(record.name)}</h3>" if len(records) > 1 else ""


# -- episodes ------------------------------------------------------------------------------------------------


def episodes(records: Sequence[RunRecord], output: Path) -> tuple[str, list[dict[str, Any]]]:
    """The section, and what the script draws into it."""
    content = ""
    drawn: list[dict[str, Any]] = []
    for record in records:
        shown = facts.shown_evaluation(record)
        if shown is None:
            continue
        label, step = shown
        filmed = False
        found, directory = record.evaluations[step], record.directory / EVALUATIONS / str(step)
        parts = _critic(found, f"{record.name}, {label}" if len(records) > 1 else label)
        traces = [trace for trace in found.get("traces") or [] if trace.keys() >= _DRAWN]
        for trace in traces[:_MAX_EPISODES]:
            parts += _episode_card(trace, directory, output, len(drawn))
            drawn.append(episode_data(trace, directory))
            filmed = filmed or "strip" in drawn[-1]
        content += f'<div class="episodes{"" if filmed else " paired"}">{parts}</div>' if parts else ""
    lead = (
        "Where the critic thinks an episode is won or lost. Q is its value of the chosen chunk at every decision; the "
        "band goes from the worst to the best candidate; the advantage is what the choice gains over the candidates' "
        "mean."
    )
    return section("episodes", "Through the critic's eyes", lead, content), drawn


def _critic(found: dict[str, Any], title: str) -> str:
    sentences = critic_sentences(found)
    if not sentences:
        return ""
    bins = [
        bin_
        for bin_ in (found.get("calibration") or {}).get("bins") or []
        if math.isfinite(bin_["predicted"]) and math.isfinite(bin_["realised"])
    ]
    plot = calibration_plot(bins) if len(bins) > 1 else ""
    lines = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)
    text = f'<div class="critic-text"><h3>{escape(title)}: what the critic knows</h3>{lines}</div>'
    return f'<div class="card pad whole"><div class="{"critic" if plot else ""}">{plot}{text}</div></div>'


def _episode_card(trace: dict[str, Any], directory: Path, output: Path, index: int) -> str:
    success = bool(trace.get("success"))
    chip = f'<span class="chip {"good" if success else "bad"}">{"success" if success else "failure"}</span>'
    video = ""
    if trace.get("video") and (directory / trace["video"]).is_file():
        target = os.path.relpath(directory / trace["video"], output.parent)
        video = f'<a href="{escape(target, quote=True)}">video</a>'
    task = f'<span class="chart-note">{escape(str(trace.get("task") or ""))}</span>'
    return (
        f'<div class="card episode"><div class="episode-head"><span class="chart-title">Episode {trace["seed"]}</span>'
        f'{chip}<span class="chart-note">{len(trace["rewards"])} steps</span>{task}{video}</div>'
        f'<div data-episode="{index}"></div></div>'
    )


def episode_data(trace: dict[str, Any], directory: Path) -> dict[str, Any]:
    """One episode for the script: numbers short, the film strip inside."""
    values = {name: _short(found) for name, found in (trace.get("values") or {}).items()}
    q, mean = values.get("q", []), values.get("q_mean")
    data: dict[str, Any] = {
        "seed": trace["seed"],
        "chunk_steps": trace["chunk_steps"],
        "q": q,
        "rewards": _short(trace["rewards"]),
        "returns": _short(trace["returns"]) if trace.get("returns") else None,
        "q_mean": mean,
        "q_low": values.get("q_min"),
        "q_high": values.get("q_max"),
    }
    if mean is not None:
        data["advantage"] = [None if a is None or b is None else number(a - b) for a, b in zip(q, mean, strict=True)]
    if trace.get("film_strip") and (directory / trace["film_strip"]).is_file():
        data["strip"] = _embed(directory / trace["film_strip"])
    return data


def _short(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else number(value) for value in values]


def _embed(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    with Image.open(io.BytesIO(content)) as image:
        width, height = image.size
    return {"source": f"data:image/jpeg;base64,{base64.b64encode(content).decode()}", "width": width, "height": height}


# -- how it ran ----------------------------------------------------------------------------------------------


def curves(records: Sequence[RunRecord], constants: dict[str, float]) -> str:
    fixed = ", ".join(f"<code>{escape(name)}</code> {value:.6g}" for name, value in constants.items())
    note = f'<p class="lead" style="margin-top:16px">Never changed: {fixed}.</p>' if fixed else ""
    toolbar = (
        f'<div class="card toolbar">{_run_names(records) if len(records) > 1 else ""}'
        '<label>smoothing <input type="range" id="smoothing" min="0" max="0.99" step="0.01" value="0">'
        '<span id="smoothing-value">0.00</span></label>'
        '<label><input type="checkbox" id="log-scale"> logarithmic</label>'
        '<button id="reset-zoom" disabled>all steps</button>'
        '<span class="hint">drag to zoom, double click to go back, hover to read</span></div>'
    )
    lead = (
        "Over updates. Where several lines of metrics were put together, a band shows their range; shaded stretches "
        "are anomalies, dotted lines begin a phase."
    )
    return section("learning", "Learning curves", lead, f'{toolbar}<div id="curves"></div>{note}')


def anomalies(records: Sequence[RunRecord]) -> str:
    contents = []
    for record in records:
        if not record.anomalies and not record.phases:
            contents.append("")
            continue
        parts = timeline(record.anomalies, record.phases, record.last_step)
        if not record.anomalies:
            parts += "<p>No anomaly was found.</p>"
        for anomaly in record.anomalies:
            until = "to the end" if anomaly.last_step is None else f"to {anomaly.last_step:,}"
            parts += (
                f'<div class="trouble"><b>{escape(anomaly.kind.replace("_", " "))}</b> '
                f'<span class="chip {anomaly.severity}">{anomaly.severity}</span> '
                f'<span class="chart-note">steps {anomaly.step:,} {until}</span>'
                f'<p>{escape(anomaly.message)}</p><p class="advice">{escape(anomaly.advice)}</p></div>'
            )
        contents.append(parts)
    lead = "Phases and trouble along the run; every trouble is reported once, from its beginning to its end."
    return section("anomalies", "Time line and anomalies", lead, per_run(records, contents))


def cost(records: Sequence[RunRecord]) -> str:
    contents = []
    for record in records:
        parts = ""
        if rows := facts.plan_comparison(record):
            cells = [[row.what, row.planned, f"<b>{row.measured}</b>", row.ratio] for row in rows]
            parts += "<h3>Plan against measurement</h3>" + table(["", "planned", "measured", "ratio"], cells)
        times = record.summary.get("time_s")
        if isinstance(times, dict):
            named = {name.replace("_", " "): float(seconds) for name, seconds in times.items()}
            parts += "<h3>Where the run's time went</h3>" + share_bars(named, "")
        parts += _profile(record)
        contents.append(parts)
    lead = "Memory and time as planned before the run and as measured in it."
    return section("cost", "Memory and time", lead, per_run(records, contents))


def _profile(record: RunRecord) -> str:
    profile = record.profile or {}
    parts = profile.get("parts")
    if not isinstance(parts, dict) or not parts:
        return ""
    first, last = profile.get("steps") or (None, None)
    total = format_seconds(sum(parts.values()))
    trace = f" The trace is in <code>{escape(str(profile['trace']))}</code>." if profile.get("trace") else ""
    note = f'<p class="chart-note">Profiled steps {first} to {last}, {total} each.{trace}</p>'
    return f"<h3>Where an update's time goes</h3>{share_bars(parts, ' per update')}{note}"


def checkpoints(records: Sequence[RunRecord]) -> str:
    contents = []
    for record in records:
        best = record.summary.get("best_evaluation")
        rows = []
        for checkpoint in reversed(record.checkpoints):
            is_best = isinstance(best, dict) and best.get("step") == checkpoint.step
            mark = ' <span class="chip good">best evaluation</span>' if is_best else ""
            rows.append(
                [
                    f"{checkpoint.step:,}{mark}",
                    format_bytes(checkpoint.num_bytes),
                    facts.format_time(checkpoint.modified),
                    f"<code>{escape(str(record.directory / str(checkpoint.step)))}</code>",
                ]
            )
        failed = record.summary.get("failed_saves") or 0
        note = f"<p>{failed} saves failed.</p>" if failed else ""
        contents.append((table(["step", "size", "written", "path"], rows) if rows else "") + note)
    lead = "Complete ones that are on disk now; stock openpi loads each of them."
    return section("checkpoints", "Checkpoints", lead, per_run(records, contents))


def configs(records: Sequence[RunRecord]) -> str:
    contents = []
    for record in records:
        name = escape(str(record.config.get("name")))
        if record.preset_diff is None:
            parts = f"<p>There is no preset called <code>{name}</code> to compare with.</p>"
        elif not record.preset_diff:
            parts = f"<p>Exactly the preset <code>{name}</code>.</p>"
        else:
            rows = [
                [
                    f"<code>{escape(key)}</code>",
                    *(f"<code>{escape(facts.format_value(value))}</code>" for value in pair),
                ]
                for key, pair in record.preset_diff.items()
            ]
            parts = table(["field", f"preset {name}", "this run"], rows, "changed")
        text = (record.directory / CONFIG_FILE).read_text(encoding="utf-8")
        parts += f"<details><summary>All fields</summary><pre>{escape(text)}</pre></details>"
        contents.append(parts)
    return section("config", "Config", "What differs from the preset, and everything.", per_run(records, contents))
