"""For tests with transformers: no progress bars, and the code of exported models copied to a temporary folder."""

from collections.abc import Iterator

import pytest
from transformers import dynamic_module_utils
from transformers.utils import logging


@pytest.fixture(scope="session", autouse=True)
def transformers_apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        logging.disable_progress_bar()
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield
