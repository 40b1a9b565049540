"""Environments in other processes: their answers, and what happens when a process fails."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pool_time import TIMEOUT_S, WAIT_S, use_pool_time, wait_for_file
from toy_env import Toy, ToyEnv, make_toy

from acrlpd.envs import EnvError, EnvFailure, EnvPool, pool, register_env
from acrlpd.envs.env import Env
from acrlpd.envs.episodes import execute_chunk, start_episode

RIGHT = np.tile(np.array([1.0, 0.0], np.float32), (4, 1))


def process_id(env: Env) -> int:
    return os.getpid()


def imported_modules(env: Env) -> list[str]:
    return list(sys.modules)


def test_the_process_of_an_environment_does_not_import_jax() -> None:
    with EnvPool("toy", 1, num_workers=1, cameras=()) as envs:
        modules = envs.run({0: (imported_modules,)})[0]
    assert "acrlpd.envs.worker" in modules
    assert not {"jax", "jaxlib", "flax"} & set(modules)


def test_slots_are_spread_over_processes_and_keep_their_state() -> None:
    with EnvPool("toy", 4, num_workers=2, cameras=()) as envs:
        ids = envs.run(dict.fromkeys(range(4), (process_id,)))
        assert ids[0] == ids[2] != ids[1] == ids[3] != os.getpid()
        starts = envs.run({slot: (start_episode, 10 + slot, False) for slot in range(4)})
        ends = envs.run(dict.fromkeys((3, 0), (execute_chunk, RIGHT[:2], False, False)))
    for slot in (0, 3):
        _, [first], _ = starts[slot]
        moved = ends[slot].observations[-1]["observation.state"] - first["observation.state"]
        np.testing.assert_allclose(moved, [0.4, 2.0, 0.0], atol=1e-6)
    assert envs.spec.features["observation.state"].shape == (3,)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_environment_that_raises_loses_its_own_episode_only(num_workers: int) -> None:
    with EnvPool("toy-raise-1", 2, num_workers=num_workers, cameras=()) as envs:
        envs.run({0: (start_episode, 0, False), 1: (start_episode, 1, False)})
        results = envs.run(dict.fromkeys(range(2), (execute_chunk, RIGHT, False, False)))
        assert len(results[0].rewards) == 4
        assert isinstance(results[1], EnvFailure) and "physics exploded" in results[1].reason
        assert envs.failures == [results[1]]
        prompt, *_ = envs.run({1: (start_episode, 2, False)})[1]
        assert prompt == "go right"


class ToyThatDoesNotEndWell(Toy):
    def close(self) -> None:
        if self.seed == 1:
            raise RuntimeError("no context")


def make_badly_ending(name: str, **options: Any) -> Env:
    return ToyEnv(ToyThatDoesNotEndWell("toy-raise-1"), name=name, prompt="", fps=10, cameras=())


register_env("badly-ending-toy", make_badly_ending)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_environment_that_fails_again_at_its_end_loses_its_own_episode_only(num_workers: int) -> None:
    with EnvPool("badly-ending-toy", 2, num_workers=num_workers) as envs:
        envs.run({0: (start_episode, 0, False), 1: (start_episode, 1, False)})
        results = envs.run({1: (execute_chunk, RIGHT, False, False)})
        assert isinstance(results[1], EnvFailure)
        assert results[1].reason.endswith("physics exploded. Then its close raised RuntimeError: no context")
        assert len(envs.run({0: (execute_chunk, RIGHT, False, False)})[0].rewards) == 4
        envs.run({1: (start_episode, 0, False)})


def test_a_dead_process_is_restarted_and_reported() -> None:
    with EnvPool("toy-crash-1", 2, num_workers=2, cameras=()) as envs:
        envs.run({0: (start_episode, 0, False), 1: (start_episode, 1, False)})
        results = envs.run(dict.fromkeys(range(2), (execute_chunk, RIGHT, False, False)))
        assert len(results[0].rewards) == 4
        assert isinstance(results[1], EnvFailure) and "died (exit code 7)" in results[1].reason
        prompt, *_ = envs.run({1: (start_episode, 2, False)})[1]
        assert prompt == "go right"


def test_a_hanging_process_is_killed_and_all_of_its_slots_lose_their_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_pool_time(monkeypatch, tmp_path)
    with EnvPool("toy-hang-1", 2, num_workers=1, cameras=(), timeout_s=TIMEOUT_S) as envs:
        envs.run({0: (start_episode, 0, False), 1: (start_episode, 1, False)})
        results = envs.run(dict.fromkeys(range(2), (execute_chunk, RIGHT, False, False)))
        assert len(results[0].rewards) == 4  # slot 0 answered before slot 1 began to hang
        assert isinstance(results[1], EnvFailure) and "no answer for 0.2 s" in results[1].reason
        lost = envs.run({0: (execute_chunk, RIGHT, False, False)})[0]
        assert isinstance(lost, EnvFailure) and "no answer for 0.2 s" in lost.reason


def make_slow(name: str, **options: Any) -> Env:
    """The environment of a process that starts again is ready when another process has given an answer."""
    files = Path(os.environ["TOY_FAULTS"])
    if (files / "died").exists():
        (files / "starting-again").touch()
        wait_for_file(files / "answered")
    return make_toy("toy", **options)


def die(env: Env) -> None:
    (Path(os.environ["TOY_FAULTS"]) / "died").touch()
    os._exit(3)


def answer_during_the_restart(env: Env) -> str:
    wait_for_file(Path(os.environ["TOY_FAULTS"]) / "starting-again")
    return "done"


def say_that_the_call_before_was_answered(env: Env) -> str:
    (Path(os.environ["TOY_FAULTS"]) / "answered").touch()
    return "done"


register_env("slow-start-toy", make_slow)


def test_an_answer_that_comes_while_another_process_restarts_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart takes longer here than `timeout_s`. Slots 1 and 3 share a process, which answers them in turn."""
    monkeypatch.setenv("TOY_FAULTS", str(tmp_path))
    restart_s = 100 * TIMEOUT_S
    clock = SimpleNamespace(monotonic=lambda: restart_s * (tmp_path / "starting-again").exists())
    monkeypatch.setattr(pool, "time", clock)
    with EnvPool("slow-start-toy", 4, num_workers=2, cameras=(), timeout_s=TIMEOUT_S) as envs:
        results = envs.run({0: (die,), 1: (answer_during_the_restart,), 3: (say_that_the_call_before_was_answered,)})
    assert isinstance(results[0], EnvFailure)
    assert (results[1], results[3]) == ("done", "done")


class ClosingToy(Toy):
    def close(self) -> None:
        (Path(os.environ["TOY_FAULTS"]) / "closed").touch()


def make_closing(name: str, **options: Any) -> Env:
    return ToyEnv(ClosingToy("toy"), name=name, prompt="", fps=10, cameras=())


def wait_for_the_end_of_another(env: Env) -> None:
    wait_for_file(Path(os.environ["TOY_FAULTS"]) / "closed")
    (Path(os.environ["TOY_FAULTS"]) / "answered").touch()


register_env("closing-toy", make_closing)


def test_the_end_of_a_pool_does_not_wait_for_calls_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the end of a collection, when the episodes that other processes still play are not wanted any more."""
    monkeypatch.setenv("TOY_FAULTS", str(tmp_path))
    with EnvPool("closing-toy", 2, num_workers=2) as envs:
        envs.submit(0, wait_for_the_end_of_another)
    assert (tmp_path / "closed").exists()  # by the idle process
    assert not (tmp_path / "answered").exists()


def test_an_environment_that_cannot_be_made_says_why_in_the_parent() -> None:
    with pytest.raises(EnvError, match="its model file is missing"):
        EnvPool("toy-broken", 2, num_workers=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_envs": 0}, "at least one environment"),
        ({"num_workers": -2}, "num_workers must be at least 0, which means this process; found -2"),
        ({"timeout_s": 0.0}, "above 0 seconds; found 0"),
        ({"timeout_s": float("nan")}, "above 0 seconds; found nan"),
        ({"max_episode_steps": -5}, "max_episode_steps must be at least 1; found -5"),
        ({"image_size": (0, 0)}, r"image_size must be height and width in pixels, at least 1; found \[0, 0\]"),
    ],
)
def test_options_outside_of_their_bounds_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(EnvError, match=words):
        EnvPool("toy", **({"num_envs": 2} | options))


def test_a_function_that_another_process_cannot_import_is_refused() -> None:
    register_env("local", lambda name, **options: make_toy("toy", **options))
    with pytest.raises(EnvError, match="at the top level of a module, or use num_workers 0"):
        EnvPool("local", 1, num_workers=1)
    with EnvPool("local", 1, num_workers=0) as envs:
        prompt, *_ = envs.run({0: (start_episode, 0, False)})[0]
        assert prompt == "go right"


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_no_process_outlives_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        f"import sys, time\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import toy_env\nfrom test_env_pool import process_id\nfrom acrlpd.envs import EnvPool\n"
        "if __name__ == '__main__':\n"
        "    envs = EnvPool('toy', 1, num_workers=1, cameras=())\n"
        "    print(envs.run({0: (process_id,)})[0], flush=True)\n"
        "    time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + WAIT_S
    while _alive(child) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _alive(child)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False
