"""Did RL work? The answer in plain words, from the evaluations that a run has."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from acrlpd.monitoring.report_validation import judge_validation
from acrlpd.runs.directory import FINISHED
from acrlpd.runs.record import STAGES, Outcome, RunRecord
from acrlpd.units import format_percent


@dataclasses.dataclass(frozen=True)
class Difference:
    """The difference of two success rates, with a 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def is_clear(self) -> bool:
        """Whether zero is outside of the interval."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        return f"{points(self.value)} points (95 %: {points(self.low)} to {points(self.high)})"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The conclusion that the report draws."""

    tone: str  # "good", "bad", "unclear" or "none"
    headline: str
    sentences: tuple[str, ...]


def difference(first: Outcome, second: Outcome) -> Difference:
    """first - second. Newcombe's interval, made of the two Wilson intervals: honest near 0 and 1.

    The interval treats the episodes as independent. All policies get the same seeds, which makes it cautious.
    """
    value = first.success_rate - second.success_rate
    low = math.hypot(first.success_rate - first.interval[0], second.interval[1] - second.success_rate)
    high = math.hypot(first.interval[1] - first.success_rate, second.success_rate - second.interval[0])
    return Difference(value, max(-1.0, value - low), min(1.0, value + high))


def judge(record: RunRecord) -> Verdict:
    """The verdict on one run."""
    stages = record.stages
    final = "online" if "online" in stages else "offline"
    if not record.is_imitation and "bc" in stages and final in stages:
        return _against_imitation(record, final)
    return _over_steps(record)


def _against_imitation(record: RunRecord, final: str) -> Verdict:
    stages = record.stages
    gain = difference(stages[final], stages["bc"])
    rates = f"{format_percent(stages[final].success_rate)} against {format_percent(stages['bc'].success_rate)}"
    if gain.is_clear and gain.value > 0:
        tone, headline = "good", f"RL beat imitation by {abs(100 * gain.value):.0f} points: {rates}"
        if rival := _rival(stages, final):
            tone, headline = "unclear", f"{headline}, but {rival}"
    elif gain.is_clear:
        tone, headline = "bad", f"RL did worse than imitation by {abs(100 * gain.value):.0f} points: {rates}"
    else:
        tone, headline = "unclear", f"No clear difference between RL and imitation: {rates}"
    counts = sorted({stages[final].episodes, stages["bc"].episodes})
    episodes = f"{counts[0]} episodes each" if len(counts) == 1 else f"{counts[0]} and {counts[1]} episodes"
    sentences = [f"{STAGES[final]} minus imitation: {gain}, over {episodes}."]
    if all(outcome.success_rate == 0 for outcome in stages.values()):
        sentences.append("No policy ever succeeded: there is nothing to compare yet. Train longer, or on better data.")
    elif not gain.is_clear:
        sentences.append("So few episodes cannot tell such a difference from chance; evaluate with more of them.")
    if final == "online" and "offline" in stages:
        offline, online = difference(stages["offline"], stages["bc"]), difference(stages["online"], stages["offline"])
        sentences.append(f"Offline RL brought {offline} over imitation, the online phase {online} on top of it.")
    sentences += _control_sentences(stages, final, explain=gain.is_clear and gain.value > 0)
    return Verdict(tone, headline, (*sentences, *_validation_troubles(record), *_health_sentences(record)))


def _rival(stages: dict[str, Outcome], final: str) -> str | None:
    """What speaks against RL although it beat imitation: imitating only the successes may do as well without RL."""
    if "bc_success_only" not in stages:
        return None
    gap = difference(stages[final], stages["bc_success_only"])
    if gap.is_clear:
        return None if gap.value > 0 else "imitating only the successes does better"
    return "imitating only the successes may do as well"


def _control_sentences(stages: dict[str, Outcome], final: str, explain: bool) -> list[str]:
    """How the result compares with simpler methods; `explain`: say whether a simpler method explains the gain."""
    controls = [("bc_success_only", "imitating only the successes reaches", "filtering the data")]
    if final == "online":
        controls.append(("offline_continued", "as many updates without the environment reach", "training longer"))
    sentences = []
    for stage, reaches, simpler in controls:
        if stage in stages:
            gap = difference(stages[final], stages[stage])
            ending = ""
            if explain and not gap.is_clear:
                ending = f", not clearly different: {simpler} might do as well"
            elif explain:
                ending = f": {simpler} does not explain the gain" if gap.value > 0 else f": {simpler} does better"
            rate = format_percent(stages[stage].success_rate)
            sentences.append(f"Control: {reaches} {rate}. RL minus that: {gap}{ending}.")
    return sentences


def _over_steps(record: RunRecord) -> Verdict:
    """The verdict on a run without a comparison, from the evaluations along the run."""
    rates = record.series.get("eval/success_rate")
    health = _health_sentences(record)
    if rates is None or not len(rates.steps):
        return _without_environment(record, health)
    first, last, best = rates.values[0], rates.values[-1], rates.values.max()
    headline = f"Success {format_percent(last)} at step {rates.steps[-1]:,}"
    told = ["This run trains no critic: it is imitation."]
    if not record.is_imitation and "bc" in record.stages:
        reached = format_percent(record.stages["bc"].success_rate)
        told = [f"Imitation reached {reached}; whether RL beats it is judged at the end of the run."]
    elif not record.is_imitation:
        told = ["There is no imitation baseline in this run, so this does not say whether RL beat it."]
    if len(rates.steps) > 1:
        headline += f", from {format_percent(first)} at step {rates.steps[0]:,}"
        where = rates.steps[int(rates.values.argmax())]
        told.insert(0, f"The best evaluation was {format_percent(best)} at step {where:,}.")
    return Verdict("none", headline, (*told, *_validation_troubles(record), *health))


def _without_environment(record: RunRecord, health: tuple[str, ...]) -> Verdict:
    """The verdict on a run that was not evaluated in an environment: what the held-out episodes say."""
    found = judge_validation(record)
    if found is not None:
        limits = "Held-out episodes show over-fitting, a blind policy and useless critics; success shows on the robot."
        return Verdict(found.tone, found.headline, (*found.troubles, *found.findings, limits, *health))
    share = record.config.get("data.validation_share")
    if record.config.get("env.id") is not None:
        advice = (
            "Only an evaluation can say whether RL worked: set training.eval_frequency, or judge a checkpoint with "
            "`acrlpd eval`."
        )
    elif share:
        advice = (
            "This run has no environment, and no validation so far. If its log says that "
            f"data.validation_share={share} holds no episode out, the dataset has fewer than ten episodes: 0.25 holds "
            "one out of three episodes."
        )
    else:
        advice = (
            "This run has no environment and held no episodes out: set data.validation_share, for example to 0.05, and "
            "each evaluation compares the policy and its critics with episodes that they have not seen."
        )
    return Verdict("none", "This run was not evaluated", (advice, *health))


def _validation_troubles(record: RunRecord) -> tuple[str, ...]:
    found = judge_validation(record)
    return () if found is None else found.troubles


def _health_sentences(record: RunRecord) -> tuple[str, ...]:
    """Whether the numbers above come from a run that went well."""
    sentences = []
    if not record.summary:
        sentences.append(
            f"The run is under way or was cut off: the last line of metrics is of step {record.last_step:,}."
        )
    elif not record.status.startswith(FINISHED):
        sentences.append(f"The run is not complete: {record.status} at step {record.last_step:,}.")
    errors = [anomaly for anomaly in record.anomalies if anomaly.severity == "error"]
    if record.anomalies:
        kinds = ", ".join(dict.fromkeys(anomaly.kind.replace("_", " ") for anomaly in errors or record.anomalies))
        grave = f", {len(errors)} of them grave" if errors else ""
        sentences.append(f"Anomalies: {len(record.anomalies)}{grave} ({kinds}).")
    return tuple(sentences)


def critic_sentences(evaluation: Mapping[str, Any]) -> tuple[str, ...]:
    """What an evaluation says about the critic: why best-of-N helped, or why it could not."""
    sentences = []
    effect, calibration = evaluation.get("best_of_n") or {}, evaluation.get("calibration") or {}
    if effect.get("value_spread"):
        sentences.append(
            f"Choosing among the candidates raises the critic's value by {effect['value_gain']:.3g} over their mean; "
            f"their values spread by {effect['value_spread']:.3g}."
        )
    elif effect:
        sentences.append("There was one candidate per chunk, or all were the same: the critic had no choice to make.")
    if calibration.get("correlation") is not None and {"bias", "chunks"} <= calibration.keys():
        bias = calibration["bias"]
        side = "too high" if bias > 0 else "too low"
        sentences.append(
            f"Its values are {abs(bias):.3g} {side} on average and correlate {calibration['correlation']:.2f} with the "
            f"returns that followed, over {calibration['chunks']} chunks."
        )
    if (auc := calibration.get("success_auc")) is not None:
        sentences.append(
            f"From the first observation alone it ranks a success above a failure with probability {auc:.2f} "
            f"(chance: 0.50)."
        )
    return tuple(sentences)


def points(value: float) -> str:
    """In percentage points; with one more digit where rounding would hide the side of zero."""
    if value == 0:
        return "0"
    return f"{100 * value:+.1f}" if 0 < abs(value) < 0.01 else f"{100 * value:+.0f}"
