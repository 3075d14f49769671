"""All models here are tiny."""

import pytest


@pytest.fixture(autouse=True)
def tiny_models(one_thread: None) -> None:
    """One thread for every test."""
