"""What Orbax and tensorstore print about a save that fails, beside the error that they raise.

The writer reports a failed save once. The libraries print the same error with tracebacks, from several threads and for
every array, so that nobody would find the report.
"""

import logging
import re
import sys

_DETAILS = re.compile(r" \[(os_error_code|tensorstore_spec|source locations)=.*", re.DOTALL)


def quiet_libraries() -> None:
    """Lets the libraries print nothing; the errors that they raise stay as they are."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # arrays whose errors Orbax does not look at
    sys.unraisablehook = _print_unraisable


def _print_unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    """Leaves out arrays that tensorstore has written after the save has failed, when Orbax's event loop is closed."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def reason(error: BaseException) -> str:
    """The kind and the text of an error, without the pages of details that tensorstore adds."""
    return f"{type(error).__name__}: {_DETAILS.sub('', str(error))}"
