"""The report as a short Markdown text: for a pull request, a message, a terminal."""

from collections.abc import Sequence

from acrlpd.monitoring import report_facts as facts
from acrlpd.monitoring.report_verdict import critic_sentences, judge
from acrlpd.monitoring.units import format_bytes, format_seconds
from acrlpd.runs.record import RunRecord


def create_summary(records: Sequence[RunRecord], page_name: str, made: str) -> str:
    parts = []
    if len(records) > 1:
        parts.append(f"# {len(records)} runs side by side\n\n{_side_by_side(records)}")
    parts += [_run(record, "##" if len(records) > 1 else "#") for record in records]
    parts.append(f"Curves, episodes and the whole config are in [{page_name}]({page_name}). Made {made}.\n")
    return "\n".join(parts)


def _run(record: RunRecord, level: str) -> str:
    verdict = judge(record)
    lines = [f"{level} {record.name}", "", f"**{verdict.headline}**", ""]
    lines += [f"- {sentence}" for sentence in (*verdict.sentences, *record.problems)]
    for title, content in (
        ("", _table(["", ""], [[name, value] for name, value in facts.overview(record).items()])),
        ("Evaluation", _evaluation(record)),
        ("What the critic knows", _critic(record)),
        ("Anomalies", _anomalies(record)),
        ("Plan against measurement", _plan(record)),
        ("Where an update's time goes", _profile(record)),
        ("Checkpoints", _checkpoints(record)),
        ("Changes to the preset", _changes(record)),
    ):
        if content:
            lines += ["", *([f"{level}# {title}", ""] if title else []), content]
    return "\n".join(lines) + "\n"


def _side_by_side(records: Sequence[RunRecord]) -> str:
    overviews = [facts.overview(record) for record in records]
    names = dict.fromkeys(name for overview in overviews for name in overview)
    rows = [[name, *(overview.get(name, facts.UNKNOWN) for overview in overviews)] for name in names]
    outcomes = [facts.final_outcomes(record) for record in records]
    for label in dict.fromkeys(label for found in outcomes for label in found):
        rates = [f"{100 * found[label].success_rate:.1f} %" if label in found else facts.UNKNOWN for found in outcomes]
        rows.append([f"success: {label}", *rates])
    rows += [
        [f"`{name}`", *(facts.format_value(value) for value in values)]
        for name, values in facts.config_differences(records).items()
    ]
    return _table(["", *(record.name for record in records)], rows)


def _evaluation(record: RunRecord) -> str:
    rows = [
        [
            label,
            f"{100 * outcome.success_rate:.1f} %",
            f"{100 * outcome.interval[0]:.0f} to {100 * outcome.interval[1]:.0f} %",
            outcome.counted,
        ]
        for label, outcome in facts.final_outcomes(record).items()
    ]
    return _table(["policy", "success", "95 % interval", "episodes"], rows)


def _critic(record: RunRecord) -> str:
    shown = facts.shown_evaluation(record)
    if shown is None:
        return ""
    return "\n".join(f"- {sentence}" for sentence in critic_sentences(record.evaluations[shown[1]]))


def _anomalies(record: RunRecord) -> str:
    rows = [
        [
            anomaly.kind.replace("_", " "),
            anomaly.severity,
            f"{anomaly.step:,} to {'the end' if anomaly.last_step is None else f'{anomaly.last_step:,}'}",
            anomaly.message,
            anomaly.advice,
        ]
        for anomaly in record.anomalies
    ]
    return _table(["kind", "severity", "steps", "what was seen", "advice"], rows)


def _plan(record: RunRecord) -> str:
    rows = [[row.what, row.planned, row.measured, row.ratio] for row in facts.plan_comparison(record)]
    return _table(["", "planned", "measured", "ratio"], rows)


def _profile(record: RunRecord) -> str:
    parts = (record.profile or {}).get("parts") or {}
    rows = [[name, format_seconds(seconds)] for name, seconds in sorted(parts.items(), key=lambda item: -item[1])]
    return _table(["part", "time per update"], rows)


def _checkpoints(record: RunRecord) -> str:
    rows = [[f"{c.step:,}", format_bytes(c.num_bytes), facts.format_time(c.modified)] for c in record.checkpoints]
    return _table(["step", "size", "written"], rows)


def _changes(record: RunRecord) -> str:
    rows = [
        [f"`{name}`", *(facts.format_value(value) for value in pair)]
        for name, pair in (record.preset_diff or {}).items()
    ]
    return _table(["field", "preset", "this run"], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
