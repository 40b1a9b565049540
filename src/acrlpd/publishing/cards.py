"""The README of a repository: what it holds, what was measured, and how it is loaded."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from acrlpd.choice import kind_name
from acrlpd.config import RLTrainConfig
from acrlpd.data.tools.inspect import Report
from acrlpd.hub import HubAddress
from acrlpd.models.openpi_pytorch import WEIGHTS_FILE
from acrlpd.monitoring.report_facts import final_stages
from acrlpd.policies.checkpoint import Checkpoint
from acrlpd.policies.levels import describe_steps
from acrlpd.runs.record import Outcome, RunRecord, read_outcome
from acrlpd.serving.export_readme import OPENPI_STEPS, client_warning, openpi_section
from acrlpd.text import escape_markdown, markdown_table
from acrlpd.units import format_interval, format_percent

REPORT_FILE = "report.html"

_POLICY = """\
# {name}, step {step}

A `{policy}` policy for the robot `{robot}`, trained with acrlpd (`{improvement}`). The directory is a checkpoint of a \
run: `params/` and `assets/` are in openpi's layout, `critic/` holds the critics that choose among candidates.
{warning}
## Serve with openpi (one sample, {openpi_steps}, no critics)

{openpi}
"""
_USE = """\
## Use it from the hub

This command copies the repository to `THIS_DIRECTORY` and verifies the copy:

```
acrlpd pull {repo} --output THIS_DIRECTORY
```
"""
_DIRECTLY = """
acrlpd (with the extra `hub`) also takes the address itself, wherever a checkpoint is named:

```
acrlpd serve {address}
acrlpd eval {address}
acrlpd train --config YOUR_CONFIG --weight_loader.kind checkpoint --weight_loader.path {address}
```
"""
_DATASET = """\
# {name}

A LeRobot dataset ({format}) that was uploaded with acrlpd.

{facts}

## Use it

```
acrlpd data inspect {repo_id}
acrlpd train --config YOUR_CONFIG --data.repo_id {repo_id}
acrlpd pull {address} --output DIRECTORY
```
"""


def checkpoint_card(checkpoint: Checkpoint, record: RunRecord | None, address: HubAddress) -> str:
    """The card of a checkpoint of a run."""
    config = checkpoint.rl_config
    body = _POLICY.format(
        name=escape_markdown(config.name),
        step=checkpoint.step,
        policy=kind_name(config.model),
        robot=kind_name(config.data.robot),
        improvement=kind_name(config.improvement),
        warning=client_warning(config),
        openpi=openpi_section(checkpoint),
        openpi_steps=describe_steps(config.model, OPENPI_STEPS),
    )
    return "\n".join([_header(config), body, *_results(record, checkpoint.step), _use(address, directly=True)])


def export_card(
    readme: str, rl_config: RLTrainConfig, step: int | None, record: RunRecord | None, address: HubAddress
) -> str:
    """The card of an export: the README of the export, and what the hub adds to it."""
    is_for_pytorch = WEIGHTS_FILE in readme
    return "\n".join([_header(rl_config), readme, *_results(record, step), _use(address, directly=not is_for_pytorch)])


def dataset_card(report: Report, address: HubAddress) -> str:
    header = {
        "task_categories": ["robotics"],
        "tags": ["LeRobot", "robotics", "acrlpd"],
        "configs": [{"config_name": "default", "data_files": "data/*/*.parquet"}],
    }
    facts = {
        "episodes": f"{report.episodes:,}",
        "steps": f"{report.frames:,} at {report.fps:g} a second",
        "successes": "not known" if report.success_rate is None else format_percent(report.success_rate, 1),
        "cameras": ", ".join(f"`{camera}`" for camera in report.cameras) or "no cameras",
        "prompts": "; ".join(escape_markdown(prompt) for prompt in list(report.prompts)[:5]),
    }
    text = _DATASET.format(
        name=escape_markdown(address.repo_id),
        format=escape_markdown(report.format),
        facts=markdown_table(["", ""], facts.items()),
        repo_id=address.repo_id,
        address=address,
    )
    return f"{_front_matter(header)}\n{text}"


def _header(rl_config: RLTrainConfig) -> str:
    loaded_by = ["openpi"] if rl_config.model.in_openpi else []
    content: dict[str, Any] = {
        "library_name": "acrlpd",
        "pipeline_tag": "robotics",
        "tags": ["robotics", "reinforcement-learning", *loaded_by, kind_name(rl_config.model)],
    }
    repo_id = rl_config.data.repo_id
    if repo_id is not None and repo_id.count("/") == 1:
        content["datasets"] = [repo_id]
    return _front_matter(content)


def _front_matter(content: Mapping[str, Any]) -> str:
    return f"---\n{yaml.safe_dump(dict(content), sort_keys=False)}---\n"


def _results(record: RunRecord | None, step: int | None) -> Iterator[str]:
    yield "## Measured results\n"
    rows = [] if record is None else _outcomes(record, step)
    if not rows:
        yield "The success of this policy has not been measured, or the record of its run was not at hand.\n"
        return
    cells = (
        (
            title,
            "" if at_step is None else str(at_step),
            format_percent(outcome.success_rate, 1),
            format_interval(outcome.interval),
            outcome.counted,
        )
        for title, at_step, outcome in rows
    )
    yield markdown_table(["policy", "step", "success", "95 %", "episodes"], cells)
    assert record is not None
    environment = record.config.get("env.id")
    where = f" in `{environment}`" if environment else ""
    yield f"\nMeasured by the run itself{where}. [{REPORT_FILE}]({REPORT_FILE}) has more.\n"


def _outcomes(record: RunRecord, step: int | None) -> Sequence[tuple[str, int | None, Outcome]]:
    """The evaluation of this step, and the stages of the run."""
    rows: list[tuple[str, int | None, Outcome]] = []
    own = None if step is None else read_outcome(record.evaluations.get(step))
    if own is not None:
        rows.append(("**this policy**", step, own))
    rows += [(escape_markdown(stage.label), stage.outcome.step, stage.outcome) for stage in final_stages(record)]
    return rows


def _use(address: HubAddress, *, directly: bool) -> str:
    repo = str(address).removeprefix("hf://")
    return _USE.format(repo=repo) + (_DIRECTLY.format(address=address) if directly else "")
