"""Acting in environments by action chunks: one policy call for several environments, then a part of a chunk in each."""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from acrlpd.envs.env import Columns, EnvError
from acrlpd.envs.episodes import Executed, Rollout, check_filming, execute_chunk, stack, start_episode
from acrlpd.envs.pool import EnvFailure, EnvPool
from acrlpd.execution.base import ChunkExecution, ChunkPolicy, Chunks

logger = logging.getLogger(__name__)

# An episode that fails this often is left out.
_ATTEMPTS = 2
# The rollouts end after this many failures in a row, or two per environment where that is more.
_MAX_FAILURES_IN_A_ROW = 10


@dataclasses.dataclass(frozen=True)
class Plan:
    """The episodes of one run: one for each seed. The noise of the policy follows from `policy_seed` too."""

    seeds: Iterable[int]
    policy_seed: int = 0


class PolicyError(EnvError):
    """A policy whose actions nobody can execute."""

    def __init__(self, place: int) -> None:
        """`place` is the number of the plan whose policy it is."""
        super().__init__("the policy gives actions that are not finite: its weights may have diverged")
        self.place = place


@dataclasses.dataclass(frozen=True)
class _Planned:
    """An episode to play."""

    seed: int
    policy_seed: int
    film: bool
    attempt: int = 1


@dataclasses.dataclass
class _Episode:
    """An episode that a slot is playing."""

    planned: _Planned
    prompt: str
    observations: list[Columns]  # every observation, or the last one only
    video: list[np.ndarray]
    parts: list[Executed] = dataclasses.field(default_factory=list)
    values: list[dict[str, float]] = dataclasses.field(default_factory=list)
    noise: list[np.ndarray | None] = dataclasses.field(default_factory=list)  # of each turn
    left: Any = None  # what the execution remembers of the turn before


def rollouts(
    envs: EnvPool,
    policy: ChunkPolicy,
    seeds: Iterable[int],
    *,
    execution: ChunkExecution,
    policy_seed: int = 0,
    record: bool = False,
    films: int = 0,
) -> Iterator[Rollout]:
    """Plays one episode per seed and yields each as soon as it is over; ends when there are no more seeds.

    `execution` says how many steps of a chunk are executed before the policy is asked again. The policy sees half of
    the environments at a time while the other half steps (all at once if their number is odd). The number of
    observations in a call never changes, so the policy compiles once. With `record` the observation of every step is
    kept (and rendered), otherwise only the observations that the policy sees. The first `films` episodes are filmed.
    The noise of the policy in an episode follows from `policy_seed`, the episode's seed and the turn.

    An episode that is lost to a crash or a time-out is started again once and then left out. The episodes that were
    yielded before are not affected. `envs.failures` has the reasons.
    """
    plans = [Plan(seeds, policy_seed)]
    played = joint_rollouts(envs, policy, plans, execution=execution, record=record, films=films)
    return (rollout for _, rollout in played)


def joint_rollouts(
    envs: EnvPool,
    policy: ChunkPolicy,
    plans: Sequence[Plan | None],
    *,
    execution: ChunkExecution,
    record: bool = False,
    films: int = 0,
) -> Iterator[tuple[int, Rollout]]:
    """Plays the episodes of several runs, the members, at the same time; yields (member, episode) as `rollouts` does.

    Member i plays `plans[i]` in its own share of the environments: in the slots from i * k on, where k is the number
    of environments divided by the number of members. A member whose plan is None rests. Every policy call has the
    observations of all members, ordered by member, with the same number of rows for each. What happens in the
    episodes of a member does not depend on the other members, as long as the policy treats each row by itself. The
    first `films` episodes of each member are filmed.
    """
    if envs.num_envs % len(plans):
        raise EnvError(
            f"{len(plans)} runs share a pool in equal parts, but the pool of {envs.name!r} has {envs.num_envs} "
            "environments; make the pool with a multiple of the number of runs"
        )
    members = [_Member(iter(()) if plan is None else _planned(plan, films)) for plan in plans]
    return _Rollouts(envs, policy, execution, record, films > 0, members).play()


def _planned(plan: Plan, films: int) -> Iterator[_Planned]:
    return (_Planned(int(seed), plan.policy_seed, i < films) for i, seed in enumerate(plan.seeds))


@dataclasses.dataclass
class _Member:
    """The episodes that one run has not started yet."""

    planned: Iterator[_Planned]
    again: list[_Planned] = dataclasses.field(default_factory=list)  # episodes that failed

    def next_planned(self) -> _Planned | None:
        return self.again.pop(0) if self.again else next(self.planned, None)


@dataclasses.dataclass
class _Rollouts:
    """The rollouts under way, slot by slot."""

    envs: EnvPool
    policy: ChunkPolicy
    execution: ChunkExecution
    record: bool
    films: bool
    members: list[_Member]
    active: dict[int, _Episode] = dataclasses.field(default_factory=dict)
    running: set[int] = dataclasses.field(default_factory=set)  # slots that have a call to answer
    # Answers that were received before they were asked for, by slot.
    results: dict[int, Any] = dataclasses.field(default_factory=dict)
    finished: list[tuple[int, Rollout]] = dataclasses.field(default_factory=list)  # member and episode, to be yielded
    failures_in_a_row: int = 0

    def play(self) -> Iterator[tuple[int, Rollout]]:
        groups = self._groups()
        if self.films and isinstance(failure := self.envs.run({0: (check_filming,)})[0], EnvFailure):
            raise EnvError(failure.reason)
        try:
            while True:
                for group in groups:
                    try:
                        self._receive(group)
                        self._start(group)
                        self._act(group)
                    finally:  # Episodes that are over are not lost when something else ends the rollouts.
                        finished, self.finished = self.finished, []
                        yield from finished
                if not self.active and not any(member.again for member in self.members):
                    return
        finally:  # the next user of the pool must not receive the answers to these calls
            while self.running:
                self.running.discard(self.envs.next_result()[0])

    def _groups(self) -> list[list[int]]:
        """Two groups take turns: one group steps while the policy looks at the other.

        A group has one half of the slots of each member. The groups do not depend on the number of processes, so the
        result does not depend on the machine.
        """
        half, odd = divmod(self._share, 2)
        parts = [range(self._share)] if odd else [range(half), range(half, self._share)]
        firsts = range(0, self.envs.num_envs, self._share)
        return [[first + i for first in firsts for i in part] for part in parts]

    @property
    def _share(self) -> int:
        """How many slots a member has."""
        return self.envs.num_envs // len(self.members)

    def _member(self, slot: int) -> int:
        return slot // self._share

    def _start(self, group: Sequence[int]) -> None:
        """Starts an episode in every idle slot of a group; a start that fails is tried again like any failure."""
        while True:
            idle = [slot for slot in group if slot not in self.active]
            starting = {slot: planned for slot in idle if (planned := self._next_planned(slot)) is not None}
            if not starting:
                return
            for slot, planned in starting.items():
                self._submit(slot, start_episode, planned.seed, planned.film)
            for slot, planned in starting.items():
                result = self._result(slot)
                if isinstance(result, EnvFailure):
                    self._failed(slot, result, planned)
                else:
                    self.active[slot] = _Episode(planned, *result)

    def _act(self, group: Sequence[int]) -> None:
        """Asks the policy and sends the actions of a turn into every active slot of the group."""
        active = [slot for slot in group if slot in self.active]
        if not active:
            return
        # An idle slot repeats an active one, so that shapes never change: of its own member, or else of any member.
        repeated = {self._member(slot): slot for slot in reversed(active)}
        sources = [slot if slot in self.active else repeated.get(self._member(slot), active[0]) for slot in group]
        episodes = [self.active[slot] for slot in sources]
        turns = self.execution.act(
            self._checked_policy,
            stack([episode.observations[-1] for episode in episodes]),
            [episode.prompt for episode in episodes],
            [self._noise_seed(episode) for episode in episodes],
            [episode.left for episode in episodes],
        )
        if not all(len(turn.actions) for turn in turns):
            raise EnvError(f"{self.execution} executes no step of a chunk; a turn has at least one action")
        for slot, episode, turn in zip(group, episodes, turns, strict=True):
            if slot in self.active:
                episode.values.append(turn.values)
                episode.noise.append(turn.noise)
                episode.left = turn.left
                self._submit(slot, execute_chunk, turn.actions, self.record, episode.planned.film)

    def _receive(self, group: Sequence[int]) -> None:
        """Waits until a group has executed its turns; episodes that are over are finished."""
        for slot in [slot for slot in group if slot in self.active]:
            result = self._result(slot)
            episode = self.active[slot]
            if isinstance(result, EnvFailure):
                del self.active[slot]
                self._failed(slot, result, episode.planned)
                continue
            self.failures_in_a_row = 0
            episode.parts.append(result)
            episode.video += result.video
            kept = episode.observations if self.record else []
            episode.observations = kept + result.observations
            if result.done:
                self.finished.append((self._member(slot), _finish(self.active.pop(slot), self.record)))

    def _noise_seed(self, episode: _Episode) -> int:
        """One seed per observation, so that its noise does not depend on the other environments."""
        source = [episode.planned.policy_seed, episode.planned.seed, len(episode.parts)]
        return int(np.random.SeedSequence(source).generate_state(1)[0])

    def _checked_policy(self, observations: Columns, prompts: Sequence[str], seeds: Sequence[int]) -> Chunks:
        chunks = self.policy(observations, prompts, seeds)
        found, action_dim = chunks.actions.shape, self.envs.spec.action_dim
        least = self.execution.replan_steps or 1
        if len(found) != 3 or (found[0], found[2]) != (len(prompts), action_dim) or found[1] < least:
            raise EnvError(
                f"the policy must give chunks [{len(prompts)}, {least} or more, {action_dim}] for environment "
                f"{self.envs.name!r}; found {list(found)}"
            )
        is_finite = np.isfinite(chunks.actions).all(axis=(1, 2))
        if not is_finite.all():
            raise PolicyError(place=int(np.argmin(is_finite)) * len(self.members) // len(is_finite))
        return chunks

    def _submit(self, slot: int, function: Callable[..., Any], *args: Any) -> None:
        self.running.add(slot)
        self.envs.submit(slot, function, *args)

    def _result(self, slot: int) -> Any:
        """Waits for the answer of a slot and keeps the answers of other slots that come first."""
        while slot not in self.results:
            answered, result = self.envs.next_result()
            self.running.discard(answered)
            self.results[answered] = result
        return self.results.pop(slot)

    def _next_planned(self, slot: int) -> _Planned | None:
        return self.members[self._member(slot)].next_planned()

    def _failed(self, slot: int, failure: EnvFailure, planned: _Planned) -> None:
        self.failures_in_a_row += 1
        # When the processes of all environments are killed together, every environment fails once or twice.
        if self.failures_in_a_row >= max(_MAX_FAILURES_IN_A_ROW, 2 * self.envs.num_envs):
            raise EnvError(
                f"environment {self.envs.name!r} failed {self.failures_in_a_row} times in a row; the last "
                f"time: {failure.reason}"
            )
        if planned.attempt < _ATTEMPTS:
            self.members[self._member(slot)].again.append(dataclasses.replace(planned, attempt=planned.attempt + 1))
        else:
            logger.warning("%s: the episode with seed %d is left out", self.envs.name, planned.seed)


def _finish(episode: _Episode, record: bool) -> Rollout:
    lengths = [len(part.rewards) for part in episode.parts]
    names = episode.values[0]
    noise = [np.broadcast_to(z, (n, len(z))) for n, z in zip(lengths, episode.noise, strict=True) if z is not None]
    return Rollout(
        seed=episode.planned.seed,
        prompt=episode.prompt,
        actions=np.concatenate([part.actions for part in episode.parts]),
        rewards=np.concatenate([part.rewards for part in episode.parts]),
        success=np.concatenate([part.success for part in episode.parts]),
        terminated=episode.parts[-1].terminated,
        observations=stack(episode.observations) if record else {},
        chunk_steps=np.concatenate([[0], np.cumsum(lengths[:-1])]).astype(np.int64),
        values={name: np.array([values[name] for values in episode.values]) for name in names},
        noise=np.concatenate(noise) if noise else None,
        video=episode.video,
    )
