"""The toy environment and its agent live with the tests of the environments."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "envs"))

import toy_env  # noqa: F401
