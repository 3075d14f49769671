"""Without progress bars, which transformers shows for every model that it loads."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def quiet_transformers() -> None:
    try:
        from transformers.utils import logging
    except ImportError:
        return
    logging.disable_progress_bar()
