"""The toy environment lives with the tests of the environments, small checkpoints with those of the server."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "envs"))
sys.path.append(str(Path(__file__).parent.parent / "serving"))

import toy_env  # noqa: F401
