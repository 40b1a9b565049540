"""Makes the toy environment known to all tests here."""

import toy_env  # noqa: F401
