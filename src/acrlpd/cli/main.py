"""The `acrlpd` command: finds the subcommand, turns user errors into one message and exit code 2.

Subcommands live in their own modules and are imported when they run, so that `acrlpd --help` is instant.
"""

import dataclasses
import difflib
import importlib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# A wrong value, path or missing package of the user: everything else is our bug and shows its traceback.
USER_ERRORS = (ValueError, OSError, ImportError)


@dataclasses.dataclass(frozen=True)
class Command:
    """One subcommand: what it does, and where it lives.

    The target is either `main(args) -> exit code or None`, or a dict of typed functions, which become
    subcommands of their own.
    """

    summary: str
    module: str
    attribute: str = "main"

    def load(self) -> Callable[[Sequence[str]], int | None] | Mapping[str, Callable[..., Any]]:
        return getattr(importlib.import_module(self.module), self.attribute)


COMMANDS = {
    "train": Command("train a policy: offline, then online", "acrlpd.cli.train"),
    "configs": Command("list, show and compare configs", "acrlpd.cli.configs", "COMMANDS"),
    "data": Command("look at, label, convert and prepare datasets", "acrlpd.cli.data", "COMMANDS"),
    "demos": Command("collect demonstrations with scripted experts", "acrlpd.cli.demos", "COMMANDS"),
    "eval": Command("judge checkpoints in their environment", "acrlpd.cli.eval"),
    "export": Command("export a policy for openpi and for serving", "acrlpd.cli.serve", "export_main"),
    "serve": Command("serve a policy on openpi's protocol", "acrlpd.cli.serve", "serve_main"),
    "report": Command("a run's report: one HTML file, and Markdown", "acrlpd.cli.report", "report_main"),
    "watch": Command("follow a run in the terminal", "acrlpd.cli.report", "watch_main"),
    "plan": Command("memory, FLOPs and step time of a config, before it runs", "acrlpd.cli.plan"),
    "doctor": Command("check this machine and installation", "acrlpd.cli.doctor"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args
    args = [arg for arg in args if arg != "--debug"]
    try:
        return _run(args, debug)
    except KeyboardInterrupt:
        print("acrlpd: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output, such as `head`, has gone
        sys.stderr.close()
        return 1
    except USER_ERRORS as error:
        if debug:
            traceback.print_exc()
        else:
            print(f"acrlpd: {_message(error)}", file=sys.stderr)
        return 2


def _run(args: list[str], debug: bool) -> int:
    if not args or args[0] in ("-h", "--help"):
        summaries = {name: command.summary for name, command in COMMANDS.items()}
        _print_commands("acrlpd", "Reinforcement learning for pi0-family robot policies.", summaries)
        return 0 if args else 2
    if args[0] == "--version":
        from importlib.metadata import version

        print(f"acrlpd {version('acrlpd')}")
        return 0
    name, rest = args[0], args[1:]
    if name not in COMMANDS:
        raise ValueError(_unknown_command("acrlpd", name, COMMANDS))
    if debug and name == "train":
        rest.append("--logging.debug")
    target = COMMANDS[name].load()
    if isinstance(target, Mapping):
        return _run_group(f"acrlpd {name}", COMMANDS[name].summary, target, rest)
    return target(rest) or 0


def _run_group(prog: str, summary: str, functions: Mapping[str, Callable[..., Any]], args: Sequence[str]) -> int:
    """Runs one of several typed functions, with its command line made from its signature."""
    import tyro

    if not args or args[0] in ("-h", "--help"):
        summaries = {name: (function.__doc__ or "").strip().partition("\n")[0] for name, function in functions.items()}
        _print_commands(prog, summary[0].upper() + summary[1:] + ".", summaries)
        return 0 if args else 2
    if args[0] not in functions:
        raise ValueError(_unknown_command(prog, args[0], functions))
    result = tyro.cli(functions[args[0]], args=list(args[1:]), prog=f"{prog} {args[0]}")
    return result if isinstance(result, int) else 0


def _print_commands(prog: str, description: str, summaries: Mapping[str, str]) -> None:
    width = max(map(len, summaries))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in summaries.items()]
    footer = "--debug shows the traceback of an error." if prog == "acrlpd" else ""
    print(f"usage: {prog} COMMAND [OPTIONS]\n\n{description}\n\ncommands:")
    print("\n".join(lines))
    print(f"\n`{prog} COMMAND --help` says more. {footer}".rstrip())


def _unknown_command(prog: str, name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    guess = f"; did you mean {close[0]!r}?" if close else ""
    return f"unknown command {name!r}{guess}\n{prog} has: {', '.join(known)}"


def _message(error: Exception) -> str:
    text = str(error) or type(error).__name__
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("acrlpd"):
        return f"{text}. It may belong to an extra: pip install 'acrlpd[sim]', [hub], [wandb] or [serve]"
    return text


if __name__ == "__main__":
    sys.exit(main())
