"""What a process does with its messages."""

import subprocess
import sys

LOG = """
import logging
from acrlpd.process import setup_logging
setup_logging()
logging.getLogger("acrlpd").warning("a message")
print("went on")
"""


def test_messages_that_find_no_space_do_not_end_the_run() -> None:
    """stderr is often a file beside the run, so a disk that is full for the run is full for its messages too."""
    with open("/dev/full", "w") as full:  # noqa: PTH123
        process = subprocess.run([sys.executable, "-c", LOG], stdout=subprocess.PIPE, stderr=full, text=True)
        assert process.stdout == "went on\n"
        command = [sys.executable, "-m", "acrlpd.cli.main", "configs", "show", "no_such_config"]
        assert subprocess.run(command, stderr=full).returncode == 2
