"""What the held-out episodes say about a run: sentences, the table of errors, and the chunks that the page draws."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from acrlpd.monitoring.report_curves import round_numbers
from acrlpd.runs.metrics_log import VALIDATION, Series
from acrlpd.runs.record import RunRecord
from acrlpd.units import format_percent

# By how much the held-out loss must have risen above its lowest value before the report speaks of over-fitting.
_CLEAR_RISE = 0.05
# From this share of the mean action's error on, a policy is called blind.
BLIND = 0.95
# Critics below both of these do not rank: Spearman's correlation, and the probability of ranking a success higher.
_RANKS, _RANKS_SUCCESS = 0.1, 0.6
# Below this correlation critics rank weakly.
_RANKS_CLEARLY = 0.4
# With fewer held-out episodes, the ranking of the critics is mostly chance: windows of one episode are much alike.
_MIN_EPISODES = 3
# Lines of metrics whose mean is the training loss at a step.
_LINES = 10


@dataclasses.dataclass(frozen=True)
class ValidationVerdict:
    """What the validations of a run say."""

    tone: str  # as that of a `Verdict`
    headline: str
    troubles: tuple[str, ...]  # what is wrong, with advice
    findings: tuple[str, ...]  # the other sentences


def judge_validation(record: RunRecord) -> ValidationVerdict | None:
    """The verdict of the newest validation; None if the run has no validation."""
    ratio, loss = _latest(record, "relative_action_error"), _latest(record, "flow_loss")
    found = {name: _latest(record, name) for name in ("q_rank_correlation", "success_auc", "relative_best_of_n_error")}
    if ratio is None and loss is None and not any(value is not None for value in found.values()):
        return None
    of_policy = [*_overfitting(record), *_blindness(ratio)]
    ranks = found["q_rank_correlation"], found["success_auc"]
    of_critics, praise = list(_critics_that_do_not_rank(*ranks)), list(_critics_that_rank(*ranks))
    episodes = None if record.validation is None else record.validation[1]["episodes"]
    if episodes is not None and episodes < _MIN_EPISODES and (of_critics or praise):
        of_critics, praise = [], [_too_few_to_rank(episodes)]
    of_actions = _actions(ratio, found["relative_best_of_n_error"])
    step = max(int(s.steps[-1]) for name, s in record.series.items() if name.startswith(VALIDATION))
    headline = f"Judged by held-out episodes at step {step:,}"
    if ratio is not None:
        headline = f"Held-out episodes: action error {format_percent(ratio)} of the mean action's, at step {step:,}"
    tone = "bad" if of_policy else "unclear" if of_critics else "none"
    return ValidationVerdict(tone, headline, (*of_policy, *of_critics), (*of_actions, *praise))


def _actions(ratio: float | None, relative_best_of_n_error: float | None) -> Iterator[str]:
    if ratio is not None and ratio < BLIND:
        yield (
            f"The policy's chunks are off by {format_percent(ratio)} of what the mean action of the data is off, "
            "averaged over the action dims: the policy uses what it sees."
        )
    if relative_best_of_n_error is not None and ratio is not None:
        yield (
            f"With best-of-N the error is {format_percent(relative_best_of_n_error)} of the mean action's. Critics may "
            "have good reasons to choose another action than the logged one."
        )


def _critics_that_rank(correlation: float | None, auc: float | None) -> Iterator[str]:
    if correlation is not None and correlation >= _RANKS:
        ranks = "ranks" if correlation >= _RANKS_CLEARLY else "weakly ranks"
        yield f"Q at logged chunks {ranks} as the returns that followed: rank correlation {correlation:.2f}."
    if auc is not None and auc >= _RANKS_SUCCESS:
        yield (
            f"Q is higher on the way to a success than in an episode without success with probability {auc:.2f} "
            "(chance: 0.50)."
        )


def _too_few_to_rank(episodes: int) -> str:
    held_out = "1 episode is" if episodes == 1 else f"{episodes} episodes are"
    return (
        f"Whether the critics rank is not judged: {held_out} held out, and at least {_MIN_EPISODES} are needed. Raise "
        "data.validation_share or record more episodes."
    )


def _overfitting(record: RunRecord) -> Iterator[str]:
    """Whether the held-out loss rises while the training loss falls.

    Only the offline phase counts. Online the policy learns from its own episodes, and leaves the demonstrations.
    """
    held_out = record.series.get(f"{VALIDATION}flow_loss")
    # A policy that learns from labelled prompts is cloned by the improvement, and has no other loss of cloning.
    training = record.series.get("bc_loss", record.series.get("actor_loss"))
    if held_out is None or training is None:
        return
    offline = held_out.steps <= _offline_end(record)
    steps, losses = held_out.steps[offline], held_out.values[offline]
    if not len(steps) or not np.isfinite(losses).all():
        return
    best = int(losses.argmin())
    step, low, high = int(steps[best]), losses[best], losses[-1]
    before, now = _around(training, step), _around(training, int(steps[-1]))
    if low > 0 and high / low - 1 > _CLEAR_RISE and now < before:
        yield (
            f"Over-fitting: the flow loss on held-out episodes was lowest at step {step:,} ({low:.3g}) and has risen "
            f"to {high:.3g}, while the loss on the training data fell from {before:.3g} to {now:.3g}. Take a "
            f"checkpoint near step {step:,}, train for fewer updates, or record more episodes."
        )


def _offline_end(record: RunRecord) -> float:
    """The last step of the offline phase, which may end before the step that the config says."""
    online = [phase.first_step - 1 for phase in record.phases if phase.name == "online"]
    return min([record.config.get("training.offline_steps", np.inf), *online])


def _blindness(ratio: float | None) -> Iterator[str]:
    if ratio is not None and ratio >= BLIND:
        yield (
            f"A blind policy: its error on held-out episodes is {format_percent(ratio)} of that of the mean action, so "
            "what the policy sees does not help it. Train for more updates; if that does not help, check cameras, "
            "state and norm statistics with `acrlpd data inspect` and `--debug`. Data in which many different actions "
            "are right at the same place looks like this, too."
        )


def _critics_that_do_not_rank(correlation: float | None, auc: float | None) -> Iterator[str]:
    known = [(correlation, _RANKS), (auc, _RANKS_SUCCESS)]
    if any(value is not None for value, _ in known) and all(value is None or value < limit for value, limit in known):
        numbers = [
            *([] if correlation is None else [f"rank correlation of Q and return {correlation:.2f}"]),
            *([] if auc is None else [f"a success above a failure with probability {auc:.2f} (chance: 0.50)"]),
        ]
        yield (
            f"Critics that do not rank: {', '.join(numbers)}. Best-of-N has little to choose by; serve with "
            "`--best_of_n 1`, train the critics longer, or check rewards and labels."
        )


def _latest(record: RunRecord, name: str) -> float | None:
    return record.latest(f"{VALIDATION}{name}")


def _around(series: Series, step: int) -> float:
    """The mean of the last lines up to a step."""
    end = int(np.searchsorted(series.steps, step, side="right"))
    return float(np.nanmean(series.values[max(0, end - _LINES) : max(end, 1)]))


def validation_view(record: RunRecord) -> dict[str, Any] | None:
    """Sentences, table and plots of the newest validation; None if the run has no record of a validation."""
    verdict = judge_validation(record)
    if verdict is None or record.validation is None:
        return None
    step, content = record.validation
    chunks, dims = content.get("chunks") or [], content.get("dims") or []
    sentences = [*verdict.troubles, *verdict.findings]
    if content.get("best_of_n_gain") is not None and content["candidates"] > 1:
        sentences.append(
            f"As the critics see it, the best of {content['candidates']} candidates is worth "
            f"{content['best_of_n_gain']:.3g} more than their mean."
        )
    return {
        "step": step,
        "episodes": content["episodes"],
        "windows": content["windows"],
        "sentences": sentences,
        "record": content,
        "dims": dims,
        "has_best": any(dim["best_of_n"] is not None for dim in dims),
        "plots": [[_panel(chunk, dim) for chunk in chunks] for dim in range(len(dims) if chunks else 0)],
    }


def _panel(chunk: Mapping[str, Any], dim: int) -> dict[str, Any]:
    """One dim of one chunk, for the page's script."""

    def values(kind: str) -> list[float | None] | None:
        return None if chunk[kind] is None else round_numbers(action[dim] for action in chunk[kind])

    return {
        "title": f"episode {chunk['episode']}, step {chunk['step']}",
        "logged": values("logged"),
        "sample": values("sample"),
        "best_of_n": values("best_of_n"),
    }
