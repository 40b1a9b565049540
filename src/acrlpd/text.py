"""Texts of others (names of runs, prompts, messages) where people see them: in a terminal, and in Markdown.

Every text that goes to a terminal passes `printable`. The ways to a terminal do this themselves, so that a new message
cannot forget it: `print` of this module, `acrlpd.console.Console`, `parse_arguments`, and the formatter of log
messages. `guard_terminal` covers what Python itself prints. `make lint` refuses the built-in `print`, rich's own
console and tyro's own `cli`.
"""

import contextlib
import logging
import re
import sys
import threading
import traceback
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, TextIO, TypeVar

# Categories of Unicode that a terminal obeys or does not show: control and format characters (escape sequences, marks
# that turn the direction of a line), surrogates (which no terminal can encode), and separators of lines.
_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
# Marks of Markdown, and the beginning of a list item or of a rule. An underscore between letters or digits is no mark.
_MARK = re.compile(r"[\\`*\[\]|~#$]|(?<![^\W_])_|_(?![^\W_])")
_LIST_ITEM = re.compile(r"^(\d*)([-+.)])(?=[-\s]|$)")
# Bold, dim, coloured, and plain again: what tyro writes between the texts of its messages.
_STYLE = re.compile(r"(\x1b\[(?:[012]|[39][0-7])(?:;(?:[12]|[39][0-7]))*m)")
_HTML = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


def printable(text: str) -> str:
    r"""The text with every hidden character other than a newline or a tab as an escape, for example \x1b."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in _HIDDEN:
        return character
    return character.encode("unicode_escape").decode()


def escape_markdown(text: str) -> str:
    """The text as one line of Markdown that shows the text as it is: no tag, no image, no table cell, no heading."""
    line = " ".join(printable(text).split())
    return _LIST_ITEM.sub(r"\1\\\2", _MARK.sub(r"\\\g<0>", line)).translate(_HTML)


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown. Its cells are Markdown, too: texts of others go through `escape_markdown` first."""
    lines = (titles, ["---"] * len(titles), *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def print(*values: object, sep: str = " ", end: str = "\n", file: TextIO | None = None) -> None:
    """The built-in `print` for a terminal: nothing in the values can move the cursor, hide text or change the title."""
    file = sys.stdout if file is None else file
    file.write(printable(sep.join(map(str, values))) + end)
    file.flush()


class PrintableFormatter(logging.Formatter):
    """Formats log messages for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


T = TypeVar("T")


def parse_arguments(options: Callable[..., T], **how: Any) -> T:
    """`tyro.cli`, whose help and errors repeat arguments and the values of config files."""
    import tyro

    with contextlib.redirect_stdout(_Guarded(sys.stdout)), contextlib.redirect_stderr(_Guarded(sys.stderr)):
        return tyro.cli(options, **how)  # noqa: TID251


class _Guarded:
    """A stream for messages that are styled already. A terminal obeys the styles and nothing else."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        parts = _STYLE.split(text) if self._stream.isatty() else [text]  # every other part is a style
        shown = (part if i % 2 else printable(part) for i, part in enumerate(parts))
        return int(self._stream.write("".join(shown)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def guard_terminal() -> None:
    """Does the same for what acrlpd does not print itself: others' log messages, warnings, and uncaught errors.

    A program that handles the errors of its threads in its own way goes on to do so.
    """
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PrintableFormatter())
    warnings.formatwarning = _format_warning
    sys.excepthook = _print_error
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = _print_thread_error


_plain_format_warning = warnings.formatwarning


def _format_warning(*args: Any, **options: Any) -> str:
    return printable(_plain_format_warning(*args, **options))


def _print_error(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    print("".join(traceback.format_exception(kind, error, trace)), end="", file=sys.stderr)


def _print_thread_error(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is not SystemExit:
        print(f"Exception in thread {args.thread.name if args.thread else 'unknown'}:", file=sys.stderr)
        _print_error(args.exc_type, args.exc_value, args.exc_traceback)
