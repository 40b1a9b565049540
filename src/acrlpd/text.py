"""Texts of others (names of runs, prompts, messages) where people see them: in a terminal, and in Markdown.

Every text that goes to a terminal passes `printable`. The ways to a terminal do this themselves, so that a new message
cannot forget it: `print` of this module, `acrlpd.console.Console`, and the formatter of log messages. `make lint`
refuses the built-in `print` and rich's own console.
"""

import logging
import re
import sys
import traceback
import unicodedata
from types import TracebackType
from typing import TextIO

# Categories of Unicode that a terminal obeys or does not show: control and format characters (escape sequences, marks
# that turn the direction of a line), surrogates (which no terminal can encode), and separators of lines.
_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
# Marks of Markdown (an underscore within a word is none), and the beginning of a list item or of a rule.
_MARK = re.compile(r"[\\`*\[\]|~#$]|(?<!\w)_|_(?!\w)")
_LIST_ITEM = re.compile(r"^(\d*)([-+.)])(?=[-\s]|$)")
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


def print(*values: object, sep: str = " ", end: str = "\n", file: TextIO | None = None) -> None:
    """The built-in `print` for a terminal: nothing in the values can move the cursor, hide text or change the title."""
    file = sys.stdout if file is None else file
    file.write(printable(sep.join(map(str, values))) + end)
    file.flush()


class PrintableFormatter(logging.Formatter):
    """Formats log messages for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def guard_terminal() -> None:
    """Does the same for what acrlpd does not print itself: log messages of other packages, and uncaught errors."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PrintableFormatter())
    sys.excepthook = _print_error


def _print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    print("".join(traceback.format_exception(kind, error, trace)), end="", file=sys.stderr)
