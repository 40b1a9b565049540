"""For all tests, and for the processes they start."""

import gc
import importlib.metadata
import itertools
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator

import hypothesis
import pytest

# Tests compile much and compute little: code that is generated faster and runs slower saves half of the time. The
# passes that are left out only make a program faster, and take a quarter of the time of a compile.
_LEFT_OUT = (
    *("simplify-while-loops", "while-loop-invariant-code-motion", "while-loop-constant-sinking"),
    *("tree_reduction_rewriter", "reshape-mover", "simplify-conditional", "simplify-sorts"),
)
_FLAGS = ["--xla_backend_optimization_level=0", f"--xla_disable_hlo_passes={','.join(_LEFT_OUT)}"]
if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones do not have these flags
    # Both workers are busy, so a program that is split into parts for several threads only costs more.
    _FLAGS += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_FLAGS]).strip()

# Programs that several tests, or the processes of several tests, compile are compiled once: one cache for the session,
# which the workers and all processes that tests start have from the environment.
_IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if not _IS_WORKER:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="acrlpd-tests-xla-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

# The processes that tests start import the same modules again and again: the first one keeps their byte code.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# As the `acrlpd` command does: otherwise the search for garbage takes more than a tenth of the time of traces.
gc.set_threshold(50_000)


# Files after which the compiled programs are freed. After each file would cost time, because files share programs.
_FILES_BETWEEN = 10
_finished_files = itertools.count(1)


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> Iterator[None]:
    """Frees compiled programs now and then. Those of all files together fill several gigabytes."""
    yield
    if next(_finished_files) % _FILES_BETWEEN == 0 and "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
        gc.collect()


def pytest_unconfigure() -> None:
    if not _IS_WORKER:
        shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


# How long an example takes says nothing on a machine that two workers share. The examples are the same in every run, so
# that a change is judged by what it changes; `pytest --hypothesis-profile=random` looks for new examples.
hypothesis.settings.register_profile("random", deadline=None)
hypothesis.settings.register_profile("acrlpd", deadline=None, derandomize=True)
hypothesis.settings.load_profile("acrlpd")


# A shell starts background jobs with SIGINT ignored, and child processes inherit that: a test could not stop its
# child with Ctrl-C. A handler that does nothing keeps the tests as deaf as before, but children do not inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, lambda number, frame: None)


def pytest_configure(config: pytest.Config) -> None:
    """Lets pytest-xdist keep the order below. By default it sorts files by their number of tests."""
    config.option.loadscopereorder = False


# Directories and files with the tests that take longest.
_LONG = {"training", "serving", "test_extending.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest go first, or one worker would end with them while the other has nothing to do."""
    items.sort(key=lambda item: _LONG.isdisjoint(item.path.parts))
