"""What a process does with its messages and its files."""

import subprocess
import sys

LOG = """
import logging
from acrlpd.process import setup_logging
setup_logging()
logging.getLogger("acrlpd").warning("a message")
print("went on")
"""

FILES = """
import resource
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, most))
from acrlpd.process import setup_process
setup_process()
shards = [open("/dev/null") for _ in range(200)]
"""


def test_messages_that_find_no_space_do_not_end_the_run() -> None:
    """stderr is often a file beside the run, so a disk that is full for the run is full for its messages too."""
    with open("/dev/full", "w") as full:  # noqa: PTH123
        process = subprocess.run([sys.executable, "-c", LOG], stdout=subprocess.PIPE, stderr=full, text=True)
        assert process.stdout == "went on\n"
        command = [sys.executable, "-m", "acrlpd.cli.main", "configs", "show", "no_such_config"]
        assert subprocess.run(command, stderr=full).returncode == 2


def test_a_run_may_open_more_files_than_a_shell_allows() -> None:
    """Two readers of a large frame cache open about as many files as most shells allow, and each seed has two."""
    subprocess.run([sys.executable, "-c", FILES], check=True)
