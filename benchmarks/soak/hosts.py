"""Two processes train as one run, as on two hosts, and one of them is killed at a random step.

The other process has to end by itself within a minute, with an exit code that is not 0 and a message that says what
happened and what to do. Then both are started again with --resume, and the run must end where an uninterrupted one
ends.
"""

import re
import socket
import time

from harness import PATIENCE_S, Process, Run, Trial, check, check_same_run, soak_trial
from training_helpers import metrics_of, state_config

from acrlpd.config import RLTrainConfig

STEPS = 60
MOST_SECONDS = 60.0


def config_of(trial: Trial, name: str) -> RLTrainConfig:
    return state_config(
        trial.directory / "runs",
        exp_name=name,
        model__hidden_dims=(512, 512),  # large enough for both processes to write a part of each checkpoint
        fsdp_devices=2,
        fsdp__min_size_mib=1e-3,
        offline_steps=STEPS,
        save_frequency=7,
        log_frequency=1,
    )


def start_both(run: Run) -> list[Process]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    options = ["--coordinator", coordinator, "--num_processes", 2]
    logs = [run.log.with_suffix(f".process{i}.log") for i in range(2)]
    commands = [run.arguments(*options, "--process_id", i) for i in range(2)]  # the same for both, before they start
    return [run.start_with(command, log) for command, log in zip(commands, logs, strict=True)]


def finish_both(run: Run) -> None:
    both = start_both(run)
    for process in both:
        check(process.wait() == 0, f"a process did not end well; {process.log} ends with:\n{process.said[-3000:]}")


def kill_one(trial: Trial, run: Run, victim: int, step: int) -> float:
    """Kills a process when the run has made `step` updates; the seconds until the other process has ended."""
    both = start_both(run)
    deadline = time.monotonic() + PATIENCE_S
    while len(metrics_of(run.directory)) < step:
        check(time.monotonic() < deadline, f"{run.directory}: no {step} updates within {PATIENCE_S:.0f} s")
        ended = [process.said[-3000:] for process in both if process.poll() is not None]
        check(not ended, f"{run.directory}: a process ended before step {step}:\n{''.join(ended)}")
        time.sleep(0.01)
    time.sleep(trial.rng.uniform(0, 0.2))
    both[victim].kill()
    start, survivor = time.monotonic(), both[1 - victim]
    code = survivor.wait(MOST_SECONDS)
    seconds = time.monotonic() - start
    last = survivor.said.strip().splitlines()[-1]
    check(code == 1, f"the survivor ended with {code}; {survivor.log} ends with:\n{survivor.said[-3000:]}")
    explained = re.search(rf"process {1 - victim} of 2 ends .* another process died .* --resume", last)
    check(explained, f"the last line of {survivor.log} does not say what happened:\n{survivor.said[-3000:]}")
    return seconds


def main() -> None:
    with soak_trial("hosts", __doc__, trials=20) as trial:
        straight = Run(trial, config_of(trial, "straight"))
        finish_both(straight)
        trial.say("the uninterrupted run has ended")
        longest, victims = 0.0, []
        for number in range(trial.options.trials):
            run = Run(trial, config_of(trial, f"killed-{number}"))
            victim, step = trial.rng.randrange(2), trial.rng.randrange(1, STEPS - 5)
            victims.append(victim)
            seconds = kill_one(trial, run, victim, step)
            longest = max(longest, seconds)
            finish_both(run)
            check_same_run(run, straight, STEPS)
            done = f"trial {number + 1} of {trial.options.trials}: process {victim} killed after step {step}"
            trial.say(f"{done}; the other ended after {seconds:.1f} s; resumed, bit-equal")
        trial.held(
            "two processes as one run on loopback, one killed at a random step, then both with `--resume`",
            f"{len(victims)} of {len(victims)} ({victims.count(0)} times the coordinator)",
            f"the other says what happened and ends with exit code 1, after at most {longest:.0f} s; "
            "resumed to the same bits",
        )


if __name__ == "__main__":
    main()
