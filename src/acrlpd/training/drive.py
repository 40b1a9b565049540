"""The driver: fulfils the wishes of one or several runs, and does together what several runs wish for.

Updates come first. A run that needs a round of episodes or an evaluation waits until no run can make updates, and then
all runs play or are judged together. Each run gets exactly what it would get alone: which runs share a call, and how
many updates the call makes, changes nothing else. So runs may be at different steps, as after an interruption.
"""

import collections
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from acrlpd.agents import Agent, Call
from acrlpd.envs.rollouts import PolicyError
from acrlpd.evaluation.protocol import EvaluationProtocol
from acrlpd.monitoring.run_monitor import device_memory
from acrlpd.process import messages_of_run
from acrlpd.runs.record import EVALUATIONS
from acrlpd.training.distributed import barrier
from acrlpd.training.learner import Learner
from acrlpd.training.online.records import Round
from acrlpd.training.online.rounds import SynchronousPlayer, play_jointly
from acrlpd.training.out_of_memory import answer_out_of_memory
from acrlpd.training.trainer import Trainer
from acrlpd.training.wishes import EvaluationMetrics, Made, NextRound, Updates, Wish, Wishes

logger = logging.getLogger(__name__)

EvalFn = Callable[[Agent, int], EvaluationMetrics]


@dataclasses.dataclass(frozen=True)
class Arena:
    """Where the runs of one environment are judged and play, together."""

    runs: tuple[int, ...]  # their numbers among all runs
    protocol: EvaluationProtocol | None = None
    eval_fn: EvalFn | None = None  # judges instead of the protocol

    def evaluate(self, trainers: Mapping[int, Trainer], step: int) -> Mapping[int, EvaluationMetrics]:
        """The metrics of the agents of some runs; the records of the evaluations go to the directories of the runs."""
        if self.eval_fn is not None:
            return {run: self.eval_fn(trainer.agent, step) for run, trainer in trainers.items()}
        assert self.protocol is not None, "a run without environment asks for no evaluation"
        placed = self._by_place(trainers)
        directories = {place: trainer.directory / EVALUATIONS for place, trainer in placed.items()}
        with _naming_the_policy(placed):
            agents = {place: trainer.agent for place, trainer in placed.items()}
            found = self.protocol.evaluate_at_step(agents, step, directories)
        return {self.runs[place]: metrics for place, metrics in found.items()}

    def play(self, trainers: Mapping[int, Trainer], numbers: Mapping[int, int]) -> dict[int, Round]:
        """The next rounds of some runs."""
        players = {run: trainer.online.player for run, trainer in trainers.items() if trainer.online is not None}
        if len(self.runs) == 1:
            return {run: player.round(numbers[run]) for run, player in players.items()}
        together = {run: player for run, player in players.items() if isinstance(player, SynchronousPlayer)}
        with _naming_the_policy(self._by_place(trainers)):
            played = play_jointly(self._by_place(together), self._by_place(numbers), len(self.runs))
        return {self.runs[place]: round_ for place, round_ in played.items()}

    def _by_place(self, of_runs: Mapping[int, Any]) -> dict[int, Any]:
        """What belongs to some runs, by the places of these runs in `self.runs`: protocol and pool know no others."""
        return {self.runs.index(run): value for run, value in of_runs.items()}


@contextlib.contextmanager
def _naming_the_policy(trainers: Mapping[int, Trainer]) -> Iterator[None]:
    """Says which of several runs, by their places, has a policy that cannot act."""
    try:
        yield
    except PolicyError as error:
        if len(trainers) > 1 and error.place in trainers:  # a place that rests repeats the policy of another place
            error.add_note(f"in the run {trainers[error.place].directory}")
        raise


def train(trainers: Sequence[Trainer], arenas: Sequence[Arena] = ()) -> None:
    """Trains the runs of one learner to their ends, or until a signal. The trainers are in the order of their runs."""
    with trainers[0].stop.listening():
        drive(trainers, [trainer.run() for trainer in trainers], arenas)


def compile_only(trainers: Sequence[Trainer]) -> None:
    """Compiles what `train` would compile for its first call, and makes no update."""
    _Driver(trainers, {}).compile([trainer.create_call(1) for trainer in trainers])


def drive(trainers: Sequence[Trainer], runs: Sequence[Wishes], arenas: Sequence[Arena] = ()) -> None:
    """Fulfils all wishes of the runs, until the last run has ended."""
    driver = _Driver(trainers, {run: arena for arena in arenas for run in arena.runs})
    wishes: dict[int, Wish] = {}
    answers: dict[int, Any] = dict.fromkeys(range(len(runs)))
    with contextlib.ExitStack() as stack:
        for ended in runs:
            stack.callback(ended.close)  # after an error elsewhere, a run that waits has bars and files to leave
        while True:
            for run, answer in answers.items():
                wishes.pop(run, None)
                with _named(trainers, run), contextlib.suppress(StopIteration):  # the run has ended
                    wishes[run] = runs[run].send(answer)
            if not wishes:
                return
            answers = driver.fulfil(wishes)


@contextlib.contextmanager
def _named(trainers: Sequence[Trainer], run: int) -> Iterator[None]:
    """Messages and errors of one of several runs say whose they are. An error ends all runs."""
    if len(trainers) == 1:
        yield
        return
    try:
        with messages_of_run(trainers[run].rl_config.exp_name):
            yield
    except Exception as error:
        error.add_note(f"in the run {trainers[run].directory}")
        raise


@dataclasses.dataclass(frozen=True)
class _Driver:
    trainers: Sequence[Trainer]
    arenas: Mapping[int, Arena]  # by run

    @property
    def learner(self) -> Learner:
        return self.trainers[0].learner

    def fulfil(self, wishes: Mapping[int, Wish]) -> dict[int, Any]:
        """Fulfils as many wishes as can be fulfilled together; the other runs go on waiting."""
        updates = {run: wish for run, wish in wishes.items() if isinstance(wish, Updates)}
        rounds = {run: wish.number for run, wish in wishes.items() if isinstance(wish, NextRound)}
        if updates:
            return self._update(updates)
        if rounds:
            # A run that waited for its round when the signal came saves without the round.
            return dict.fromkeys(rounds) if self.trainers[0].stop.is_requested else self._play(rounds)
        return self._evaluate(wishes)

    def _play(self, numbers: Mapping[int, int]) -> dict[int, Round]:
        played: dict[int, Round] = {}
        for arena, runs in self._by_arena(numbers):
            played |= arena.play({run: self.trainers[run] for run in runs}, {run: numbers[run] for run in runs})
        return played

    def _evaluate(self, judged: Iterable[int]) -> dict[int, EvaluationMetrics]:
        """Evaluates these runs, those of one step and one environment together."""
        found: dict[int, EvaluationMetrics] = {}
        by_step = collections.defaultdict(list)
        for run in judged:
            by_step[self.trainers[run].step].append(run)
        for step, runs_of_step in by_step.items():
            for arena, runs in self._by_arena(runs_of_step):
                found |= arena.evaluate({run: self.trainers[run] for run in runs}, step)
        return found

    def _by_arena(self, runs: Iterable[int]) -> list[tuple[Arena, list[int]]]:
        found: dict[int, list[int]] = collections.defaultdict(list)
        for run in runs:
            found[id(self.arenas[run])].append(run)
        return [(self.arenas[group[0]], group) for group in found.values()]

    def _update(self, wishes: Mapping[int, Updates]) -> dict[int, Made]:
        """One call for all runs that make the same kind of updates now."""
        kind = next(iter(wishes.values())).update_policy
        chosen = {run: self.trainers[run] for run, wish in wishes.items() if wish.update_policy == kind}
        num_updates = min(wishes[run].num_updates for run in chosen)
        chosen, num_updates = self._catch_up(chosen, num_updates)
        is_first = not self.learner.programs
        with answer_out_of_memory(self.trainers[0].rl_config, is_first):
            calls = self._create_calls(chosen, num_updates)
            compiles = not self.learner.is_compiled_for(calls)
            if compiles:  # at the start, or because a replay has outgrown its place
                self.compile(calls)
            for run, trainer in chosen.items():
                trainer.before_call(calls[run])
            metrics = self.learner.update(calls, chosen, num_updates, update_policy=kind)
            if compiles:
                jax.block_until_ready(metrics)
        if is_first:
            waited = time.monotonic() - self.trainers[0].started
            logger.info("first step %.1f s after the run was started; %s", waited, device_memory())
        return {run: Made(num_updates, metrics, has_compiled=compiles) for run in chosen}

    def _catch_up(self, trainers: dict[int, Trainer], num_updates: int) -> tuple[dict[int, Trainer], int]:
        """The runs that may share a call: of runs with one leader, those that are furthest behind.

        After a kill, runs may go on from different steps. Those behind make updates until they have caught up.
        """
        chosen: dict[int, Trainer] = {}
        groups = collections.defaultdict(list)
        for run in trainers:
            groups[self.learner.leader(run)].append(run)
        for group in groups.values():
            first, *later = sorted({trainers[run].step for run in group})
            chosen |= {run: trainers[run] for run in group if trainers[run].step == first}
            num_updates = min([num_updates, *(step - first for step in later)])
        return chosen, num_updates

    def _create_calls(self, active: Mapping[int, Trainer], num_updates: int) -> list[Call]:
        """A call for each run, also for those that wait or have ended."""
        calls: dict[int, Call] = {}
        for run, trainer in active.items():
            with _named(self.trainers, run):
                calls[run] = trainer.create_call(num_updates)
        for run in active:  # a leader that waits computes the policy of the runs that it leads
            calls.setdefault(self.learner.leader(run), calls[run])
        any_call = next(iter(calls.values()))
        return [calls.get(run) or trainer.create_idle_call() or any_call for run, trainer in enumerate(self.trainers)]

    def compile(self, calls: Sequence[Call]) -> None:
        """Compiles everything that the runs need."""
        logger.info("compiling the train step: minutes for a large policy the first time, later it is in the cache")
        for trainer in self.trainers:
            trainer.prepare_to_compile()
        self.learner.compile(calls, {kind for trainer in self.trainers for kind in trainer.kinds_ahead()})
        # One process may find its program in the cache while another compiles for minutes. A collective would give up
        # waiting for that process; a barrier waits.
        accumulation = self.trainers[0].rl_config.training.gradient_accumulation_steps
        barrier(f"compiled with {accumulation} micro-batches")
