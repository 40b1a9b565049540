"""How episodes get their labels: from lists, by a rule over the columns, or from a person who sees two frames."""

import dataclasses
import itertools
import math
import operator
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

import numpy as np
from PIL import Image
from rich.text import Text

from acrlpd.console import Console
from acrlpd.data.pipeline.labels import Label, Labels
from acrlpd.data.sources.source import EpisodeSource

_PREVIEW_WIDTH = 64  # characters per frame, where the terminal has so many

_REDUCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "first": lambda column: column[0],
    "last": lambda column: column[-1],
    "max": lambda column: column.max(axis=0),
    "mean": lambda column: column.mean(axis=0),
    "min": lambda column: column.min(axis=0),
    "sum": lambda column: column.sum(axis=0),
}
_COMPARISONS = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_RULE = re.compile(
    r"\s*(?:(?P<length>length)"
    r"|(?P<reduction>first|last|max|mean|min|sum)\(\s*(?P<column>[^()\[\]\s]+)\s*(?:\[(?P<dim>\d+)\])?\s*\))"
    r"\s*(?P<comparison><=|>=|==|!=|<|>)\s*(?P<value>[-+]?[\d.]+(?:[eE][-+]?\d+)?)\s*"
)


def label_list(source: EpisodeSource, successes: Iterable[int], failures: Iterable[int]) -> dict[int, Label]:
    """Labels from lists of the dataset's own episode numbers."""
    lengths = dict(zip(source.indices, source.lengths.tolist(), strict=True))
    successes, failures = set(successes), set(failures)
    both = sorted(successes & failures)
    if both:
        raise ValueError(f"episodes {both} are listed as success and as failure")
    unknown = sorted((successes | failures) - lengths.keys())
    if unknown:
        shown = ", ".join(map(str, unknown[:5])) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
        raise ValueError(f"{source.root} has no episodes {shown}; it has {len(lengths)}, up to {max(lengths)}")
    return {index: Label(index in successes, lengths[index]) for index in (*successes, *failures)}


def parse_indices(text: str) -> list[int]:
    """Episode numbers from "0-9,12": ranges include both ends."""
    indices: list[int] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise ValueError(f"expected episode numbers like 0-9,12; found {part!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"the range {part!r} ends before it begins; expected {last}-{first}")
        indices.extend(range(first, last + 1))
    return indices


def format_indices(indices: Sequence[int]) -> str:
    """Ascending episode numbers as `parse_indices` reads them: ranges where numbers follow each other."""
    starts = [i for i, index in enumerate(indices) if i == 0 or indices[i - 1] != index - 1]
    runs = [indices[start:end] for start, end in itertools.pairwise((*starts, len(indices)))]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def label_rewards(known: Mapping[int, Label], rewards: Mapping[int, float]) -> dict[int, Label]:
    """Labels that give the last step of an episode a reward of its own; the episode must have a label already."""
    unknown = sorted(rewards.keys() - known.keys())
    if unknown:
        raise ValueError(f"episodes {unknown} have no label yet: say with --success or --failure how they ended")
    return {index: dataclasses.replace(known[index], reward=reward) for index, reward in rewards.items()}


def parse_rewards(text: str) -> dict[int, float]:
    """Rewards of episodes from "0-9=1,12=0.5"."""
    rewards: dict[int, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        indices, separator, value = part.partition("=")
        try:
            reward = float(value)
        except ValueError:
            separator = ""
        if not separator or not math.isfinite(reward):
            raise ValueError(f"expected episodes and their rewards like 0-9=1,12=0.5; found {part!r}")
        rewards.update(dict.fromkeys(parse_indices(indices), reward))
    return rewards


def label_rule(source: EpisodeSource, rule: str) -> dict[int, Label]:
    """Labels an episode as a success if the rule holds for it, otherwise as a failure.

    A rule compares a number to `length` (steps of the episode) or to a reduction of a column over the
    episode: "length < 300", "sum(next.reward) >= 1", "max(observation.state[6]) > 0.5".
    """
    match = _RULE.fullmatch(rule)
    if match is None:
        raise ValueError(
            f"cannot read the rule {rule!r}; expected for example 'length < 300', 'sum(next.reward) >= 1' or "
            f"'last(observation.state[6]) > 0.5' with {', '.join(_REDUCTIONS)} and {' '.join(_COMPARISONS)}"
        )
    values = source.lengths if match["length"] else _reduce(source, match)
    holds = _COMPARISONS[match["comparison"]](values, float(match["value"]))
    return {
        index: Label(bool(success), int(length))
        for index, success, length in zip(source.indices, holds, source.lengths, strict=True)
    }


def _reduce(source: EpisodeSource, match: re.Match[str]) -> np.ndarray:
    """One number per episode."""
    name, dim = match["column"], match["dim"]
    if name not in source.column_names:
        raise ValueError(f"{source.root} has no column {name!r}; it has {', '.join(sorted(source.column_names))}")
    table = source.read_columns([name])
    column = table.columns[name]
    if (column.ndim == 1) != (dim is None) or (dim is not None and int(dim) >= column.shape[1]):
        if column.ndim == 1:
            raise ValueError(f"column {name!r} has one value per step; leave the [{dim}] out")
        raise ValueError(f"column {name!r} has dims 0..{column.shape[1] - 1}, choose one: {name}[0]")
    if dim is not None:
        column = column[:, int(dim)]
    reduce = _REDUCTIONS[match["reduction"]]
    return np.array([reduce(column[table.rows(i)].astype(np.float64)) for i in range(len(source))])


def require_kept(before: Labels, after: Labels) -> None:
    """Refuses to change labels that exist, because they may be the work of hours. A reward may be added to a label."""

    def is_changed(old: Label, new: Label) -> bool:
        return old.success != new.success or old.reward not in (None, new.reward)

    changed = [index for index, label in before.episodes.items() if is_changed(label, after.episodes[index])]
    if changed:
        shown = ", ".join(map(str, changed[:10])) + (", ..." if len(changed) > 10 else "")
        raise ValueError(
            f"{before.path} has {len(before.episodes)} labels, and {len(changed)} of them would change (episodes "
            f"{shown}); nothing was written. --overwrite changes them"
        )


def label_interactively(
    source: EpisodeSource, labelled: Container[int], camera: str, console: Console
) -> Iterator[tuple[int, Label]]:
    """Shows the first and the last frame of each episode without a label, and yields what the person answers.

    The caller saves after each answer, so that stopping at any moment loses nothing.
    """
    todo = [i for i, index in enumerate(source.indices) if index not in labelled]
    for count, i in enumerate(todo):
        episode = source.episode(i)
        console.print(_preview(episode.frames(camera, [0, episode.length - 1]), console.width))
        seconds = episode.length / source.fps
        console.print(
            f"episode {episode.index} ({count + 1} of {len(todo)}): {episode.length} steps, {seconds:.1f} s, "
            f"{camera}, first and last frame; task: {episode.prompt or 'none'}"
        )
        answer = _answer(console)
        if answer == "q":
            return
        if answer != "s":
            yield episode.index, Label(answer == "y", episode.length)


def _answer(console: Console) -> str:
    while True:
        try:
            answer = console.input("success? (y)es, (n)o, (s)kip, (q)uit: ").strip().lower()[:1]
        except EOFError:  # Ctrl-D, or the end of answers that came through a pipe
            return "q"
        if answer in ("y", "n", "s", "q"):
            return answer


def _preview(images: np.ndarray, terminal_width: int) -> Text:
    """Images [n, h, w, 3] side by side in the terminal: each character shows two pixels, one above the other."""
    width = max(1, min(_PREVIEW_WIDTH, terminal_width // len(images)))
    height = max(2, round(images.shape[1] / images.shape[2] * width) // 2 * 2)
    small = [np.asarray(Image.fromarray(image).resize((width, height))) for image in images]
    pixels = np.concatenate(small, axis=1)
    lines = []
    for upper, lower in zip(pixels[::2], pixels[1::2], strict=True):
        cells = zip(upper.tolist(), lower.tolist(), strict=True)
        lines.append("".join(f"[rgb({a},{b},{c}) on rgb({d},{e},{f})]▀[/]" for (a, b, c), (d, e, f) in cells))
    return Text.from_markup("\n".join(lines))
