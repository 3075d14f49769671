"""A hub on the loopback interface, and children that download from it, one set for each file of tests."""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.data.hub_children import TOKEN, Client, prepare
from tests.data.hub_server import Hub, serve


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serve() as server:
        yield server


@pytest.fixture(scope="module")
def start(home: Path) -> Iterator[Callable[..., Client]]:
    pools: list[ProcessPoolExecutor] = []

    def client(**environment: str) -> Client:
        environment = {"HF_HOME": str(home), "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", **environment}
        pools.append(ProcessPoolExecutor(1, get_context("spawn"), initializer=prepare, initargs=(environment,)))
        return Client(pools[-1], home / "data")

    yield client
    for pool in pools:
        pool.shutdown()


@pytest.fixture(scope="module")
def online(hub: Hub, start: Callable[..., Client]) -> Client:
    return start(HF_ENDPOINT=hub.url)


@pytest.fixture(scope="module")
def offline(hub: Hub, start: Callable[..., Client]) -> Client:
    return start(HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1")
