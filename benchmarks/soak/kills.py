"""kill -9 at random moments of a whole run, offline and online, as often as `--trials` says.

Each process of a run is killed at a moment that is drawn from the length of an uninterrupted run. Then the run is
resumed, until a process reaches the end. Without --async the result must be that of the uninterrupted run to the last
bit. With --async the learner or its actor is killed, and nothing that was on disk may be lost.
"""

import contextlib
import os
import pathlib
import signal
import time
from collections.abc import Iterator

import numpy as np
from harness import Process, Run, Trial, check, check_same_run, last_step, soak_trial
from training_helpers import arrays_of, metrics_of, online_config

from acrlpd.config import RLTrainConfig
from acrlpd.runs.directory import read_summary
from acrlpd.training.online.records import REPLAY, read_rounds

OFFLINE, ONLINE, LOG_FREQUENCY = 300, 300, 7
LAST = OFFLINE + ONLINE
# With --async, most of a run is the part that has files to lose.
ASYNC_OFFLINE, ASYNC_ONLINE = 50, 1500
ASYNC_LAST = ASYNC_OFFLINE + ASYNC_ONLINE
START_STEPS, UPDATE_TO_DATA = 60, 0.5
# With --async, this share of the kills hits the actor instead of the learner, if there is an actor.
ACTOR_SHARE = 0.4


def config_of(trial: Trial, name: str, is_async: bool) -> RLTrainConfig:
    # Lines of metrics, evaluations, checkpoints and phases end at different steps.
    return online_config(
        trial.directory / "runs",
        exp_name=name,
        env__id="async_toy:slow-toy",
        offline_steps=ASYNC_OFFLINE if is_async else OFFLINE,
        online_steps=ASYNC_ONLINE if is_async else ONLINE,
        online__start_steps=START_STEPS,
        online__update_to_data_ratio=UPDATE_TO_DATA,
        online__async_actor=is_async,
        online__actor_refresh_steps=20,
        eval_frequency=90,
        save_frequency=25,
        log_frequency=LOG_FREQUENCY,
        checkpoints__max_to_keep=2,
    )


def uninterrupted(trial: Trial, is_async: bool) -> tuple[Run, float]:
    """A run that nobody kills, and the seconds that it took; a run before it fills the compilation cache."""
    for name in ("first", "straight"):
        run = Run(trial, config_of(trial, f"{name}-async" if is_async else name, is_async))
        start = time.monotonic()
        run.finish()
        seconds = time.monotonic() - start
        trial.say(f"an uninterrupted run took {seconds:.0f} s")
    return run, seconds


def kill_to_the_end(trial: Trial, run: Run, whole_s: float, most: int) -> Iterator[str]:
    """Starts the run, kills and resumes it until a process reaches the end; yields who was killed, `most` times."""
    process, kills = run.start(), 0
    while kills < most and is_alive_after(process, trial.rng.uniform(0, whole_s)):
        actor = actor_of(process) if trial.rng.random() < ACTOR_SHARE else None
        if actor is None:
            process.kill()
            yield "learner"
            process = run.start()
        else:  # the learner starts another actor
            with contextlib.suppress(ProcessLookupError):
                os.kill(actor, signal.SIGKILL)
            yield "actor"
        kills += 1
    code = process.wait()
    check(code == 0, f"a process that was not killed ended with {code}; {run.log} ends with:\n{process.said[-3000:]}")


def is_alive_after(process: Process, seconds: float) -> bool:
    """Waits so long, or until the process ends; returns whether the process still runs."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    return process.poll() is None


def actor_of(process: Process) -> int | None:
    """The actor process that a learner has started; None if there is no actor now."""
    for child in pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        with contextlib.suppress(OSError):  # the child has ended since
            if b"acrlpd.training.online.actor" in pathlib.Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
                return int(child)
    return None


def kill_bit_equal(trial: Trial) -> None:
    straight, whole_s = uninterrupted(trial, is_async=False)
    kills = runs = 0
    while kills < trial.options.trials:
        run = Run(trial, config_of(trial, f"killed-{runs}", is_async=False))
        for _ in kill_to_the_end(trial, run, whole_s, trial.options.trials - kills):
            kills += 1
            trial.say(f"kill {kills} of {trial.options.trials}, in run {runs} after step {last_step(run)}")
        check_same_run(run, straight, LAST)
        runs += 1
        trial.say(f"{runs} runs were bit-equal")
    what = f"`kill -9` at random moments of a run of {OFFLINE} offline and {ONLINE} online updates, then `--resume`"
    result = "arrays, metrics apart from times, replay and outcome equal the uninterrupted run's to the last bit"
    trial.held(what, f"{kills} of {kills} kills, in {runs} runs", result)


def kill_without_loss(trial: Trial) -> None:
    _, whole_s = uninterrupted(trial, is_async=True)
    victims: list[str] = []
    with_files = 0
    runs = 0
    while len(victims) < trial.options.trials:
        run = Run(trial, config_of(trial, f"async-{runs}", is_async=True))
        on_disk: dict[str, bytes] = {}
        for victim in kill_to_the_end(trial, run, whole_s, trial.options.trials - len(victims)):
            victims.append(victim)
            on_disk |= run.replay
            with_files += bool(on_disk)
            where = f"in run {runs} after step {last_step(run)}, with {len(on_disk)} files of replay"
            trial.say(f"kill {len(victims)} of {trial.options.trials} ({victim}), {where}")
        check_nothing_lost(run, on_disk)
        runs += 1
        trial.say(f"{runs} runs lost nothing")
    kills = len(victims)
    trial.held(
        f"the same with `--async`, {ASYNC_OFFLINE} offline and {ASYNC_ONLINE} online updates: the learner or its actor",
        f"{kills} of {kills} kills ({victims.count('actor')} of the actor, {with_files} with files in the replay), in "
        f"{runs} runs",
        "what was in the replay at a kill stays as it was; every round is learned from once; all updates are made",
    )


def check_nothing_lost(run: Run, on_disk: dict[str, bytes]) -> None:
    """`on_disk` are the files that the replay had after the kills."""
    found = run.replay
    changed = [name for name, content in on_disk.items() if found.get(name) != content]
    check(not changed, f"{run.directory}: these files of the replay were lost or changed: {changed}")
    lines, rounds = metrics_of(run.directory), read_rounds(run.directory / REPLAY, 0)
    steps = [line["step"] for line in lines if "phase" in line]
    wanted = sorted({*range(LOG_FREQUENCY, ASYNC_LAST + 1, LOG_FREQUENCY), ASYNC_OFFLINE, ASYNC_LAST})
    check(steps == wanted, f"{run.directory}: lines of metrics at steps {steps}, expected {wanted}")
    events = [(line["online/policy_step"], line["online/env_steps"]) for line in lines if "online/env_steps" in line]
    taken = [(played.policy_step, sum(r.env_steps for r in rounds[: i + 1])) for i, played in enumerate(rounds)]
    check(events == taken[: len(events)], f"{run.directory}: rounds {taken} were played, {events} were learned from")
    check(
        events[-1][1] >= START_STEPS + (ASYNC_ONLINE - 1) / UPDATE_TO_DATA,
        f"{run.directory}: too few environment steps",
    )
    summary, arrays = read_summary(run.directory), arrays_of(run.directory / str(ASYNC_LAST))
    check((summary["status"], summary["final_step"]) == ("finished", ASYNC_LAST), f"{run.directory}: {summary}")
    broken = [name for name, array in arrays.items() if not np.isfinite(array).all()]
    check(arrays[".step"] == ASYNC_LAST and not broken, f"{run.directory}: the last checkpoint is wrong: {broken}")


if __name__ == "__main__":
    with soak_trial("kills", __doc__, trials=20) as trial:
        kill_bit_equal(trial)
        kill_without_loss(trial)
