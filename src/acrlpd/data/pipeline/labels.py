"""Labels: what people, or a rule, say about how episodes ended.

Most robot datasets do not say which episodes worked. `acrlpd data label` writes this into a JSON file next to, never
inside, the dataset.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from acrlpd.data.sources.source import DatasetError, EpisodeSource
from acrlpd.files import write_text_atomically

_FORMAT = "acrlpd episode labels"


@dataclasses.dataclass(frozen=True)
class Label:
    """What is known about one episode."""

    success: bool
    length: int  # steps of the episode when it was labelled; reveals labels of another dataset
    reward: float | None = None  # of the last step; None: the reward follows from success


class Outcomes(NamedTuple):
    """Numbers of episodes by how they ended."""

    successes: int
    failures: int
    neither: int  # without a label, or cut before the episode could succeed or fail

    def __str__(self) -> str:
        return f"successes: {self.successes}, failures: {self.failures}, neither: {self.neither}"


@dataclasses.dataclass(frozen=True)
class Labels:
    """The labels file of a dataset; keys are the dataset's own episode numbers."""

    path: Path
    episodes: dict[int, Label]

    def outcomes(self, source: EpisodeSource) -> "Outcomes":
        """How many of the source's episodes have which label."""
        known = [self.episodes[index].success for index in source.indices if index in self.episodes]
        return Outcomes(sum(known), len(known) - sum(known), len(source) - len(known))

    def updated(self, episodes: dict[int, Label]) -> "Labels":
        return dataclasses.replace(self, episodes={**self.episodes, **episodes})

    def save(self) -> None:
        entries = {
            str(index): {k: v for k, v in dataclasses.asdict(label).items() if v is not None}
            for index, label in sorted(self.episodes.items())
        }
        write_text_atomically(self.path, json.dumps({"format": _FORMAT, "episodes": entries}, indent=1) + "\n")


def labels_path(dataset: Path) -> Path:
    """`<dataset>.labels.json` next to the dataset."""
    root = dataset.resolve()
    return root.with_name(root.name + ".labels.json")


def load_labels(path: Path, source: EpisodeSource) -> Labels | None:
    """The labels at `path`; None if there is no file. Refuses labels of another dataset."""
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text())
        if content.get("format") != _FORMAT:
            raise ValueError(f"its format is {content.get('format')!r}, expected {_FORMAT!r}")
        episodes = {int(index): _parse_label(index, entry) for index, entry in content["episodes"].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DatasetError(f"{path} is not a labels file: {error}") from error
    for index, length in zip(source.indices, source.lengths, strict=True):
        label = episodes.get(index)
        if label is not None and label.length != length:
            raise DatasetError(
                f"{path} labels an episode {index} of {label.length} steps, but in {source.root} it has "
                f"{length}: the labels belong to another dataset. Move the file away and label again"
            )
    return Labels(path, episodes)


def _parse_label(index: str, entry: Mapping[str, Any]) -> Label:
    """A label from the file. People edit the file, and the text "false" would count as a success."""
    label = Label(**entry)
    if not isinstance(label.success, bool):
        raise ValueError(f"success of episode {index} is {label.success!r}, expected true or false")
    if label.reward is not None and (isinstance(label.reward, bool) or not isinstance(label.reward, int | float)):
        raise ValueError(f"reward of episode {index} is {label.reward!r}, expected a number")
    return label
