"""Runs of one config with several seeds: what the seeds reach together."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from acrlpd.evaluation.statistics import RATES, MeanOverSeeds, mean_over_seeds
from acrlpd.runs.record import STAGES, Outcome, RunRecord

# Fields in which the configs of a group differ.
_PER_SEED = ("seed", "exp_name")

# What a reader has to know of the table of `compare_seeds`.
SEEDS_NOTE = (
    "Each seed counts once. The interval is the 95 % interval of the mean over seeds (Student's t), not the interval "
    "of one seed's episodes. A seed that has not reached a stage does not count in the mean of the stage."
)


@dataclasses.dataclass(frozen=True)
class SeedGroup:
    """Runs of a report whose configs differ in nothing but seed and exp_name."""

    name: str  # of the runs, without their seeds
    places: dict[str, int]  # seed -> place of its run among the runs of the report
    repeated: tuple[str, ...]  # names of further runs of these seeds: the first run of a seed counts

    @property
    def title(self) -> str:
        return f"{self.name}, seeds {', '.join(self.places)}"


@dataclasses.dataclass(frozen=True)
class SeedRow:
    """The success rates of one stage."""

    label: str
    rates: tuple[float | None, ...]  # one for each seed; None: the seed has not reached the stage
    over_seeds: MeanOverSeeds  # over the seeds that have reached the stage


def find_seed_groups(records: Sequence[RunRecord]) -> list[SeedGroup]:
    """The groups of two and more seeds, in the order of their first runs."""
    found: list[tuple[dict[str, Any], list[int]]] = []
    for place, record in enumerate(records):
        config = {name: value for name, value in record.config.items() if name not in _PER_SEED}
        places = next((places for other, places in found if other == config), None)
        if places is None:
            found.append((config, [place]))
        else:
            places.append(place)
    groups = [_create_group(records, places) for _, places in found]
    return [group for group in groups if len(group.places) > 1]


def _create_group(records: Sequence[RunRecord], members: Sequence[int]) -> SeedGroup:
    places: dict[str, int] = {}
    for place in members:
        places.setdefault(str(records[place].config.get("seed")), place)
    # `acrlpd train --seeds` ends the names of its runs with their seeds; other runs are all named.
    names = dict.fromkeys(records[place].name.removesuffix(f"-seed{seed}") for seed, place in places.items())
    repeated = tuple(records[place].name for place in members if place not in places.values())
    return SeedGroup(", ".join(names), places, repeated)


def compare_seeds(group: SeedGroup, outcomes: Sequence[Mapping[str, Outcome]]) -> list[SeedRow]:
    """A row for each stage that a seed has reached. `outcomes` holds the stages of every run of the report by label."""
    tables = [outcomes[place] for place in group.places.values()]
    labels = dict.fromkeys([*STAGES.values(), *(label for table in tables for label in table)])
    rows = []
    for label in labels:
        rates = tuple(table[label].success_rate if label in table else None for table in tables)
        known = [rate for rate in rates if rate is not None]
        if known:
            rows.append(SeedRow(label, rates, mean_over_seeds(known, RATES)))
    return rows


def average_metric(seeds: Sequence[RunRecord], name: str, limits: tuple[float, float]) -> dict[int, MeanOverSeeds]:
    """The mean of a metric over seeds, by step, at the steps for which all seeds have a finite value."""
    tables = []
    for record in seeds:
        series = record.series.get(name)
        points = () if series is None else zip(series.steps.tolist(), series.values.tolist(), strict=True)
        tables.append({step: value for step, value in points if math.isfinite(value)})
    steps = sorted(set.intersection(*map(set, tables)))
    return {step: mean_over_seeds([table[step] for table in tables], limits) for step in steps}


def choose_colors(num_runs: int, groups: Sequence[SeedGroup]) -> list[int]:
    """A colour for each run: one for all seeds of a group, unless the report shows the seeds of one group alone."""
    owners = list(range(num_runs))
    for group in groups:
        for place in group.places.values():
            owners[place] = min(group.places.values())
    shown = list(dict.fromkeys(owners))
    return list(range(num_runs)) if len(shown) == 1 else [shown.index(owner) for owner in owners]
