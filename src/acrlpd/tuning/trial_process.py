"""The process of a trial: `acrlpd train`, which ends when the tuner is gone.

A tuner that is killed cannot end its trials. A trial that went on alone would use the machine for a result that nobody
reads, and would be in the way of the same trial when the study goes on.

`python -m acrlpd.tuning.trial_process TUNER train --config ...` is the process; TUNER is the process id of the tuner.
"""

import os
import runpy
import sys
import threading
import time

_POLL_S = 1.0


def _end_with(tuner: int) -> None:
    while os.getppid() == tuner:
        time.sleep(_POLL_S)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with, args=(int(sys.argv[1]),), daemon=True).start()
    sys.argv = ["acrlpd", *sys.argv[2:]]
    # By name, because no room imports the command line: to a trial it is a program like any other.
    runpy.run_module("acrlpd.cli.main", run_name="__main__", alter_sys=True)
