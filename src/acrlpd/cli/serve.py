"""`acrlpd serve`: serves a policy on openpi's protocol."""

import dataclasses
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from annotated_types import Ge

from acrlpd.config.bounds import require_bounds
from acrlpd.config.command_line import Flag, find_config
from acrlpd.text import parse_arguments

if TYPE_CHECKING:
    from acrlpd.policies.checkpoint import Checkpoint
    from acrlpd.robots.base import Robot
    from acrlpd.serving.server import PolicyServer
    from acrlpd.serving.serving_policy import ServingPolicy

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """Serve a policy on openpi's protocol, with best-of-N under its critics."""

    # An exported directory, a run, a checkpoint of a run, or an openpi checkpoint (with --config).
    checkpoint: tyro.conf.Positional[Path]
    # Address to listen on. 0.0.0.0 lets other machines in: use an API key then.
    host: str = "127.0.0.1"
    # Port; 0: any free one.
    port: int = 8000
    # Candidates per action chunk, and the most that a request may ask for; default: the checkpoint's.
    best_of_n: Annotated[int | None, Ge(1)] = None
    # Guidance towards good actions, for policies that were trained with labels (recap); 1: the positive label alone.
    guidance: Annotated[float | None, Ge(0)] = None
    # Denoising steps; the first is the default, requests may ask for the others. Default: the checkpoint's.
    num_steps: Annotated[tuple[int, ...], Ge(1)] = ()
    # Most requests that share one call of the policy.
    max_batch_size: Annotated[int, Ge(1)] = 8
    # Longest time in milliseconds that a request waits for other requests to share a call with, or a fifth of a call
    # where a fifth is longer. 0: requests do not wait.
    max_wait_ms: float = 5.0
    # Load newer checkpoints of this run as they appear.
    follow: Path | None = None
    # Preset or YAML file that describes an openpi checkpoint.
    config: str | None = None
    # Act without norm statistics; by default missing or changed statistics are refused.
    no_norm_stats: Flag = False
    # File that holds the key that clients must send. Other users of the machine must not be able to read it.
    api_key_file: Path | None = None
    # Certificate for encrypted connections (wss://), a PEM file.
    tls_cert: Path | None = None
    # Private key of the certificate, a PEM file. Other users of the machine must not be able to read it.
    tls_key: Path | None = None
    # Largest message that is read, in MiB.
    max_message_mib: Annotated[int, Ge(1)] = 32
    # Most clients at a time.
    max_clients: int = 64
    # Most clients of one address. Behind a proxy all clients have the address of the proxy: use --max_clients then.
    max_clients_per_address: int = 16
    # Seconds without a request after which a client loses its connection.
    idle_timeout_s: float = 600.0
    # Most requests under way at a time; further requests are refused. Default: the robot's (DROID 4, ALOHA 2, LIBERO 8,
    # others one for each client).
    max_concurrent_requests: Annotated[int | None, Ge(1)] = None
    # Seconds for a request to be answered. Default: the robot's (DROID 30, ALOHA 45, LIBERO 15, others 30).
    request_timeout_s: float | None = None


def main(args: Sequence[str]) -> int:
    options = parse_arguments(ServeOptions, args=args, prog="acrlpd serve")
    serve(options)
    if options.follow is not None:
        # A thread may still read a newer checkpoint, for minutes or from a drive that does not answer, and Python would
        # wait for the thread. Every client has been answered and nothing is left to write.
        os._exit(0)
    return 0


def serve(options: ServeOptions) -> None:
    """Serves until SIGTERM or Ctrl-C."""
    require_bounds(options, "--")
    import asyncio

    from acrlpd.process import setup_logging
    from acrlpd.serving.secrets import create_tls_context, read_api_key
    from acrlpd.serving.server import PolicyServer, ServerOptions

    server_options = ServerOptions(
        host=options.host,
        port=options.port,
        api_key=None if options.api_key_file is None else read_api_key(options.api_key_file),
        tls=create_tls_context(options.tls_cert, options.tls_key),
        max_wait_ms=options.max_wait_ms,
        max_message_bytes=options.max_message_mib * 2**20,
        max_clients=options.max_clients,
        max_clients_per_address=options.max_clients_per_address,
        idle_timeout_s=options.idle_timeout_s,
    )
    server_options.check_address()
    checkpoint = _open(options)
    server_options = dataclasses.replace(server_options, **limits(options, checkpoint.rl_config.data.robot))
    if options.follow is not None and not options.follow.expanduser().is_dir():
        raise ValueError(f"--follow: {options.follow} is not a directory; give that of the run")
    setup_logging()
    logger.info(
        "loading %s, then compiling all that a request can ask for; a large policy takes minutes", checkpoint.directory
    )
    asyncio.run(_serve(PolicyServer(load_present(checkpoint, options), server_options), options))


def limits(options: ServeOptions, robot: "Robot") -> dict[str, Any]:
    """How many requests are under way at a time and how long: as the command line says, else as the robot says."""
    of_robot = dataclasses.asdict(robot.serving_limits)
    return {name: limit if (given := getattr(options, name)) is None else given for name, limit in of_robot.items()}


async def _serve(server: "PolicyServer", options: ServeOptions) -> None:
    """Serves until SIGTERM or Ctrl-C; requests that have arrived are answered first."""
    import asyncio
    import signal

    from acrlpd.policies.checkpoint import open_checkpoint
    from acrlpd.serving.follow import follow_run

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await server.start()
    is_encrypted = options.tls_cert is not None
    scheme = "wss" if is_encrypted else "ws"
    logger.info("serving on %s://%s:%d (/healthz, /metrics)", scheme, options.host, server.port)
    if (most := server.options.max_concurrent_requests) is not None:
        logger.info("at most %d requests at a time (--max_concurrent_requests)", most)
    if options.host not in ("127.0.0.1", "localhost", "::1"):
        if options.api_key_file is None:
            logger.warning(
                "everybody who reaches %s can use this server; --api_key_file keeps others out", options.host
            )
        elif not is_encrypted:
            logger.warning("the key and all messages travel unencrypted; --tls_cert and --tls_key encrypt them")
    follower = None
    if options.follow is not None:
        run = options.follow.expanduser().absolute()
        served = server.policy  # later checkpoints must keep what clients were told
        same = dataclasses.replace(options, best_of_n=served.policy.best_of_n, num_steps=served.num_steps)

        def load(path: Path) -> "ServingPolicy":
            newer = open_checkpoint(path, no_norm_stats=options.no_norm_stats)
            return _load(newer.with_guidance(options.guidance), same)

        follower = asyncio.create_task(follow_run(server, run, load))
    await stop.wait()
    logger.info("stopping: answering the requests that have arrived")
    if follower is not None:
        follower.cancel()
    await server.drain()


def _open(options: ServeOptions) -> "Checkpoint":
    from acrlpd.policies.checkpoint import open_checkpoints

    config = None if options.config is None else find_config(options.config)
    [checkpoint] = open_checkpoints([options.checkpoint], config, no_norm_stats=options.no_norm_stats)
    return checkpoint.with_guidance(options.guidance)


def load_present(checkpoint: "Checkpoint", options: ServeOptions) -> "ServingPolicy":
    """Loads a checkpoint, or its successor: a run that trains removes older checkpoints, even while they are read."""
    try:
        return _load(checkpoint, options)
    except Exception as error:  # reading a directory that disappears can fail in any way
        old, newest = checkpoint.directory, _open(options)
        if newest.directory == old:
            raise
        logger.warning("%s was replaced while it was read (%s); loading %s", old, error, newest.directory)
    return load_present(newest, options)


def _load(checkpoint: "Checkpoint", options: ServeOptions) -> "ServingPolicy":
    """Reads and compiles the policy, and logs what will be served."""
    import time

    from acrlpd.policies.levels import describe_steps
    from acrlpd.serving.serving_policy import load_serving_policy

    best_of_n, start = options.best_of_n, time.perf_counter()
    if not checkpoint.has_critics:
        impossible = "" if best_of_n in (None, 1) else f" (--best_of_n {best_of_n} is not possible)"
        logger.warning("%s has no critics: one candidate per chunk, no best-of-N%s", checkpoint.directory, impossible)
        best_of_n = 1
    policy = load_serving_policy(
        checkpoint, best_of_n=best_of_n, num_steps=options.num_steps, max_batch_size=options.max_batch_size
    )
    loaded = time.perf_counter()
    policy.warm_up()
    logger.info(
        "%s: best of %d, %s; loaded in %.1f s, compiled in %.1f s",
        checkpoint.directory,
        policy.policy.best_of_n,
        describe_steps(checkpoint.rl_config.model, *policy.num_steps),
        loaded - start,
        time.perf_counter() - loaded,
    )
    return policy
