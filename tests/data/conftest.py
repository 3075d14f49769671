"""The fixture of the tests of data: every kind of tokenizer."""

import pytest

from lmtrain.data.tokenizer_file import Kind
from tests.data.helpers import KINDS


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    return kind
