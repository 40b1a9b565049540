import pathlib

import pytest


@pytest.fixture(scope="session")
def directory_of_docs() -> pathlib.Path:
    return pathlib.Path(__file__).parents[2] / "docs"
