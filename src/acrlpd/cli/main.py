"""The `acrlpd` command: finds the subcommand, and turns a user's error into one message and exit code 2.

A subcommand is imported when it runs, so that `acrlpd --help` is instant.
"""

import contextlib
import functools
import gc
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from acrlpd.choice import hint
from acrlpd.installation import describe_version, install_command_of
from acrlpd.text import guard_terminal, parse_arguments, print

# A wrong value, a wrong path or a missing package is the user's error. Any other exception is a bug of ours and shows
# its traceback.
USER_ERRORS = (ValueError, OSError, ImportError)

# After how many new objects Python looks for garbage. Modules and traced programs are many objects that stay, and with
# Python's own 700 the search takes more than a tenth of the time of imports and traces.
_GARBAGE_THRESHOLD = 50_000

# XLA writes to stderr from this level on: errors. Its remarks and warnings, with absl's remark about them, are for the
# authors of XLA. JAX reads the variable when it is imported, and a value that the user sets stays.
_XLA_LOG_LEVEL = "2"

# Name -> what the command does. The module of this name in acrlpd.cli holds a function `main(args) -> exit code`, or a
# dict COMMANDS of typed functions, which become subcommands. Subcommands whose names are in the
# CONFIG_COMMANDS of the module read their arguments themselves, as a `main` does.
COMMANDS = {
    "train": "train a policy: offline, then online",
    "recap": "train in rounds: RECAP on the policy's own episodes",
    "tune": "search for better settings of a config",
    "configs": "list, show and compare configs, or make one for a dataset",
    "data": "look at, label, convert and prepare datasets",
    "demos": "collect demonstrations with scripted experts",
    "eval": "judge checkpoints in their environment",
    "export": "export a policy for openpi and for serving",
    "push": "upload a policy or a dataset to the Hugging Face hub",
    "pull": "download a policy or a dataset from the hub, and verify it",
    "serve": "serve a policy on openpi's protocol",
    "report": "a run's report: one HTML file, and Markdown",
    "watch": "follow a run in the terminal",
    "runs": "check the files of runs, or take parts out of checkpoints",
    "regress": "compare trainings with recorded baselines",
    "plan": "memory, FLOPs and step time of a config, before it runs",
    "doctor": "check this machine and installation",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    guard_terminal()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", _XLA_LOG_LEVEL)
    gc.set_threshold(_GARBAGE_THRESHOLD)
    debug = "--debug" in args
    args = [arg for arg in args if arg != "--debug"]
    try:
        return _run(args, debug)
    except KeyboardInterrupt:
        print("acrlpd: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # The reader of our output, such as `head`, has gone.
        sys.stderr.close()
        return 1
    except USER_ERRORS as error:
        with contextlib.suppress(OSError):  # stderr may be a file on the disk that is full
            text = traceback.format_exc().rstrip() if debug else f"acrlpd: {_message(error)}"
            print(text, file=sys.stderr)
        return 2


def _run(args: list[str], debug: bool) -> int:
    if args[:1] == ["--version"]:
        print(f"acrlpd {describe_version()}")
        return 0
    name = _choose("acrlpd", "Reinforcement learning for pi0-family robot policies.", COMMANDS, args)
    if name is None:
        return 0 if args else 2
    module = importlib.import_module(f"acrlpd.cli.{name}")
    rest = args[1:] + (["--logging.debug"] if debug and name == "train" else [])
    if hasattr(module, "COMMANDS"):
        return _run_group(f"acrlpd {name}", COMMANDS[name].capitalize() + ".", module, rest)
    return int(module.main(rest))


def _run_group(prog: str, description: str, module: ModuleType, args: list[str]) -> int:
    """Runs one of several typed functions; the signature of the function is its command line."""
    functions: Mapping[str, Callable[..., Any]] = module.COMMANDS
    summaries = {name: (function.__doc__ or "").strip().partition("\n")[0] for name, function in functions.items()}
    name = _choose(prog, description, summaries, args)
    if name is None:
        return 0 if args else 2
    function = functions[name]
    if name in getattr(module, "CONFIG_COMMANDS", ()):
        return int(function(args[1:]))

    @functools.wraps(function)  # with the signature, which becomes the command line
    def bind(*values: Any, **named: Any) -> Callable[[], Any]:
        return functools.partial(function, *values, **named)

    result = parse_arguments(bind, args=args[1:], prog=f"{prog} {name}")()
    return result if isinstance(result, int) else 0


def _choose(prog: str, description: str, summaries: Mapping[str, str], args: list[str]) -> str | None:
    """The command that the first argument names; None, after help was printed, if help is all that is wanted."""
    if args and args[0] in summaries:
        return args[0]
    if args and args[0] not in ("-h", "--help"):
        known = ", ".join(summaries)
        raise ValueError(f"unknown command {args[0]!r}{hint(args[0], summaries)}\n{prog} has: {known}")
    width = max(map(len, summaries))
    print(f"usage: {prog} COMMAND [OPTIONS]\n\n{description}\n\ncommands:")
    for name, summary in summaries.items():
        print(f"  {name:<{width}}  {summary}")
    print(f"\n`{prog} COMMAND --help` says more. `--debug` shows the traceback of an error.")
    return None


def _message(error: Exception) -> str:
    """What went wrong, and the notes of the places that the error came through. JAX adds a note about tracebacks."""
    notes = (note for note in getattr(error, "__notes__", ()) if not note.startswith("---"))
    text = "\n".join([str(error) or type(error).__name__, *notes])
    if isinstance(error, ModuleNotFoundError) and (fix := install_command_of(error.name or "")) and fix not in text:
        return f"{text}: {fix}"
    return text


if __name__ == "__main__":
    sys.exit(main())
