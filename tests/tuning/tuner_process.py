"""A tuner in a process of its own, for tests that kill it: DIRECTORY PROGRAM."""

import pathlib
import sys

from study_helpers import run

if __name__ == "__main__":
    run(pathlib.Path(sys.argv[1]), batch_size=int(sys.argv[2]), trials=int(sys.argv[3]))
