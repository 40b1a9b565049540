"""The commands of `acrlpd runs`: typed functions whose signatures become the command line."""

import json
from pathlib import Path
from typing import Annotated

import tyro
from rich.progress import DownloadColumn
from rich.table import Table
from rich.text import Text

from acrlpd.cli.data import JsonFlag
from acrlpd.console import Console, progress
from acrlpd.text import print
from acrlpd.units import format_bytes


def verify(
    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")], json_: JsonFlag = False
) -> int:
    """Check that every file of a run, a checkpoint or an export is as it was written; exit code 1 if one is not.

    Args:
        directory: A run, one of its checkpoints, or an export.
    """
    from acrlpd.training.verification import parts_to_verify

    parts = parts_to_verify(directory)
    found: dict[str, list[str]] = {}
    with progress(DownloadColumn(), transient=True) as bar:
        task, checked = bar.add_task("", total=sum(part.num_bytes for part in parts)), 0
        for part in parts:
            bar.update(task, description=part.name, completed=checked)
            found[part.name] = list(part.problems(lambda size: bar.advance(task, size)))
            checked += part.num_bytes
    problems = [" ".join(problem.split()) for part in parts for problem in found[part.name]]
    if json_:
        print(json.dumps({"checked": {part.name: part.num_bytes for part in parts}, "problems": problems}, indent=2))
        return 1 if problems else 0
    table = Table(box=None, show_header=False)
    for part in parts:
        count = len(found[part.name])
        result = Text(f"{count} problem{'s' if count > 1 else ''}", "red") if count else Text("ok", "green")
        table.add_row(part.name, format_bytes(part.num_bytes) if part.num_bytes else "", result)
    console = Console()
    console.print(table)
    for problem in problems:
        console.print(Text.assemble(("damaged", "red"), f" {problem}"), soft_wrap=True)
    console.print(f"{directory}: {len(parts)} parts checked; problems: {len(problems)}", soft_wrap=True)
    return 1 if problems else 0


def extract(
    checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")], *, parts: str, output: Path
) -> int:
    """Copy the policy or the critics of a checkpoint to a directory of their own, for `acrlpd train --load`.

    Args:
        checkpoint: A run (its newest checkpoint is taken), or one of its checkpoints.
        parts: policy, critics, or both with a comma between them.
        output: Directory to make.
    """
    from acrlpd.config.command_line import parse_parts
    from acrlpd.runs.parts import extract_parts

    names = parse_parts(parts, "--parts")
    taken = extract_parts(checkpoint, names, output)
    print(
        f"{' and '.join(names)} of {taken} are in {output}; `acrlpd train --load {','.join(names)} {output}` loads them"
    )
    return 0


COMMANDS = {"verify": verify, "extract": extract}
