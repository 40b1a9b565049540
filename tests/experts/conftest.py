"""The toy environment lives with the tests of the environments."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "envs"))

import toy_env  # noqa: F401
import toy_expert  # noqa: F401
