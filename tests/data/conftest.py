"""Fixtures of the tests of data: every kind of tokenizer, and a place for notes."""

import pytest

from lmtrain.data.tokenizer_file import Kind
from tests.data.helpers import KINDS


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    return kind


@pytest.fixture
def notes() -> list[str]:
    return []
