"""The actor of an asynchronous online phase: a process that plays rounds while the learner trains.

Learner and actor share files and nothing else. The learner publishes the part of the agent that acts; the actor writes
rounds into the replay. An actor whose learner is gone ends. A learner whose actor dies starts another one, and gives
up when actors keep dying.

`python -m acrlpd.training.online.actor RUN LEARNER` is the actor; LEARNER is the process id of the trainer.
"""

import contextlib
import dataclasses
import fcntl
import logging
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import flax.serialization
import jax
import numpy as np

from acrlpd.agents import Agent
from acrlpd.config import RLTrainConfig, load_config
from acrlpd.data.pipeline.config_norm_stats import load_config_norm_stats
from acrlpd.data.pipeline.norm_stats import NormStats
from acrlpd.data.pipeline.replay import Replay
from acrlpd.envs import ChunkPolicy, Chunks, EnvError
from acrlpd.envs.create import create_env_pool
from acrlpd.execution.base import Columns
from acrlpd.policies.acting_model import ActingModel, acting_model
from acrlpd.policies.policy import Policy
from acrlpd.process import enable_compilation_cache
from acrlpd.runs.directory import CONFIG_FILE
from acrlpd.training.online.records import Round, read_rounds
from acrlpd.training.online.rounds import Player, RoundPlayer, create_online_policy, open_replay

logger = logging.getLogger(__name__)

POLICY_FILE = "actor_policy.msgpack"
LOG_FILE = "actor.log"
LOCK_FILE = "actor.lock"
_POLL_S = 0.1
MAX_STARTS_IN_A_ROW = 3


class ActorProcess(Player):
    """The learner's side: publishes the policy, starts the actor and takes its rounds."""

    def __init__(self, rl_config: RLTrainConfig, directory: pathlib.Path, replay: Replay) -> None:
        self._directory = directory
        self._replay = replay
        self._rl_config = rl_config
        self._published: int | None = None  # the step of the newest published policy
        self._process: subprocess.Popen[bytes] | None = None
        self._starts_in_a_row = 0

    def update_policy(self, agent: Agent, step: int) -> None:
        if self._published is None or step - self._published >= self._rl_config.online.actor_refresh_steps:
            publish(self._directory, acting_model(agent, average=self._rl_config.acts_with_average), step)
            self._published = step
        self._keep_alive()

    def updates_with_one_policy(self, step: int) -> int:
        published = step if self._published is None else self._published
        return max(1, published + self._rl_config.online.actor_refresh_steps - step)

    def round(self, number: int) -> Round:
        while not (played := self.finished_rounds(number)):
            self._keep_alive()
            time.sleep(_POLL_S)
        return played[0]

    def finished_rounds(self, first: int) -> list[Round]:
        found = read_rounds(self._replay.root, first)
        if found:
            self._replay.scan()
            self._starts_in_a_row = 0
        return found

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def _keep_alive(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        log = self._directory / LOG_FILE
        if self._process is not None:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            message = f"the actor process ended with exit code {self._process.returncode}; {log} ends with:\n{tail}"
            if self._starts_in_a_row >= MAX_STARTS_IN_A_ROW:
                raise EnvError(f"{message}\nNo actor finished a round in {MAX_STARTS_IN_A_ROW} starts: giving up")
            logger.warning("%s\nStarting it again", message)
        self._starts_in_a_row += 1
        command = [sys.executable, "-m", "acrlpd.training.online.actor", str(self._directory), str(os.getpid())]
        # Learner and actor share a GPU, so the actor must not reserve most of its memory at the start.
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        with log.open("ab") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)


def publish(directory: pathlib.Path, model: ActingModel, step: int) -> None:
    """Makes a policy known to the actor, which reads either this policy or the policy before."""
    leaves = jax.device_get(jax.tree.leaves(model))
    named = {f"{i:06d}": np.asarray(leaf) for i, leaf in enumerate(leaves)}  # sorts in the order of the leaves
    path = directory / POLICY_FILE
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(flax.serialization.msgpack_serialize({"step": step, "leaves": named}))
        temporary.replace(path)  # without the fsync of `files`: the file need not survive a crash of the machine
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise EnvError(
            f"{path}, the policy for the actor process, could not be written: {error}. The run can go on with --resume "
            "when the disk has room"
        ) from error


class PublishedPolicy:
    """The actor's side: the policy that the learner publishes."""

    def __init__(
        self, directory: pathlib.Path, rl_config: RLTrainConfig, norm_stats: Mapping[str, NormStats] | None
    ) -> None:
        self._file = directory / POLICY_FILE
        self._policy = create_online_policy(rl_config, norm_stats)
        self._step = 0
        self._read_at: int | None = None  # time stamp of the file that was read

    def newest(self) -> tuple[Policy, int]:
        """The newest policy and its step; reads the file only if it has changed."""
        written_at = self._file.stat().st_mtime_ns
        if written_at != self._read_at:
            content = flax.serialization.msgpack_restore(self._file.read_bytes())
            leaves = [content["leaves"][name] for name in sorted(content["leaves"])]
            model = jax.device_put(jax.tree.unflatten(jax.tree.structure(self._policy.model), leaves))
            self._policy = dataclasses.replace(self._policy, model=model)
            self._step, self._read_at = int(content["step"]), written_at
        return self._policy, self._step


def _ends_with(learner: int, policy: ChunkPolicy) -> ChunkPolicy:
    """The policy; once the learner is gone, a call of the policy ends this process."""

    def act(observations: Columns, prompts: Sequence[str], seeds: Sequence[int]) -> Chunks:
        if os.getppid() != learner:
            sys.exit("the learner is gone")
        return policy(observations, prompts, seeds)

    return act


def main(directory: pathlib.Path, learner: int) -> None:
    """Plays round after round with the newest published policy, until the learner is gone."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the learner answers an interrupt and ends this process
    enable_compilation_cache()
    rl_config = load_config(directory / CONFIG_FILE)
    with contextlib.ExitStack() as stack:
        # The actor of a learner that was killed may still be executing its last chunk.
        lock = stack.enter_context((directory / LOCK_FILE).open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        envs = stack.enter_context(create_env_pool(rl_config))
        player = RoundPlayer(rl_config, envs, open_replay(directory, rl_config, envs.spec))
        published = PublishedPolicy(directory, rl_config, load_config_norm_stats(rl_config.data))
        number = 0
        while os.getppid() == learner:
            policy, step = published.newest()
            player.play(number, _ends_with(learner, policy), step)
            number += 1


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
