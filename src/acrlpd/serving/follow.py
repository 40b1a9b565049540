"""Serves newer checkpoints of a run as they appear; clients stay connected."""

import asyncio
import concurrent.futures
import logging
import pathlib
from collections.abc import Callable

from acrlpd.runs.directory import saved_steps
from acrlpd.serving.server import PolicyServer
from acrlpd.serving.serving_policy import ServingPolicy

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
RESTART_SECONDS = 30.0
# The metadata that must stay the same for as long as a client is connected.
_PROMISED = ("robot", "observation", "action_horizon", "best_of_n", "num_steps")


async def follow_run(
    server: PolicyServer,
    run: pathlib.Path,
    load: Callable[[pathlib.Path], ServingPolicy],
    *,
    poll_seconds: float = POLL_SECONDS,
    restart_seconds: float = RESTART_SECONDS,
) -> None:
    """Serves the newest checkpoint of the run, until it is cancelled.

    An error that nobody foresaw ends the search, not the server: the log, /metrics and /healthz tell of the error, and
    after a pause the search begins again.
    """
    while True:
        server.set_following(True)
        try:
            await _follow(server, run, load, poll_seconds)
        except Exception:  # a bug here must not leave robots with an old checkpoint in silence
            logger.exception("following %s ended by an error; it begins again in %g s", run, restart_seconds)
        server.set_following(False)
        server.metrics.follow_restarts.inc()
        await asyncio.sleep(restart_seconds)


async def _follow(
    server: PolicyServer, run: pathlib.Path, load: Callable[[pathlib.Path], ServingPolicy], poll_seconds: float
) -> None:
    """The search until an error.

    Where the served checkpoint is not of this run, every checkpoint of the run counts as newer, because steps of
    different runs do not compare. The newest checkpoint of a run may also have an earlier step than before: the run has
    gone back to this step. `load` reads a checkpoint and warms it up, in a thread of its own while clients are served.
    A checkpoint that cannot be served is reported once and not tried again.
    """
    old = server.policy
    is_of_run = old.directory is not None and old.directory.resolve().parent == run.resolve()
    newest = served = old.step if is_of_run else None
    is_readable = True
    loop = asyncio.get_running_loop()
    thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="acrlpd-reload")
    try:
        while True:
            before = newest
            try:
                newest = max(saved_steps(run), default=before)
                is_readable = True
            except OSError as error:  # a network drive may fail to answer for a moment
                if is_readable:
                    logger.warning("%s cannot be read (%s); looking again until it can", run, error)
                is_readable = False
            if newest not in (before, served):
                try:
                    policy = await loop.run_in_executor(thread, load, run / str(newest))
                    _check_same(server.policy, policy)
                except Exception as error:  # removed by the run meanwhile, or of another kind: the server goes on
                    server.metrics.reloads.labels("error").inc()
                    logger.error("step %d cannot be served: %s", newest, error)
                else:
                    server.policy, served = policy, newest
                    server.metrics.reloads.labels("ok").inc()
                    logger.info("now serving step %d", newest)
            await asyncio.sleep(poll_seconds)
    finally:
        thread.shutdown(wait=False)  # a checkpoint that is being read must not delay the end of the server


def _check_same(old: ServingPolicy, new: ServingPolicy) -> None:
    """Refuses a policy that does not fit the metadata that connected clients have received."""
    before, after = old.metadata(), new.metadata()
    different = [key for key in _PROMISED if before[key] != after[key]]
    if different:
        found = ", ".join(f"{key} {after[key]} instead of {before[key]}" for key in different)
        raise ValueError(f"it is not what connected clients were told: {found}")
