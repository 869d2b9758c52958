"""What every test may ask for: servers of its own kind, and the record of acceptance criteria."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from handrail.embedded import EmbeddedValkey
from handrail.testing.services import EmbeddedPostgres
from tests.acceptance import AcceptanceRecord
from tests.live import BROKERS, Broker, broker_of
from tests.rabbit import Rabbit, must_be_there

# How long an example takes says how busy the machine is, and nothing about the program.
settings.register_profile("untimed", settings(), deadline=None)
settings.load_profile("untimed")

# What signs approvals, for this process and those that it starts: no test makes a key file where it
# happens to run.
os.environ.setdefault("HANDRAIL_APPROVAL_SECRET", "tests-only/" + "0123456789" * 3)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(AcceptanceRecord(config))


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Valkey server of this test process (under xdist: one a worker)."""
    with EmbeddedValkey(tmp_path_factory.mktemp("valkey")) as valkey:
        yield valkey.url


@pytest.fixture(scope="session")
def rabbit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rabbit]:
    """A RabbitMQ server of this test process."""
    must_be_there()
    server = Rabbit(tmp_path_factory.mktemp("rabbit"))
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture(params=BROKERS)
def broker(request: pytest.FixtureRequest) -> Broker:
    """Each kind of broker, one after the other."""
    return broker_of(request.param, request)


@pytest.fixture(scope="session")
def postgres() -> Iterator[EmbeddedPostgres]:
    """A PostgreSQL server of this test process, which may forget what it committed in a crash."""
    with EmbeddedPostgres(durable=False) as server:
        yield server


@pytest.fixture(scope="session")
def postgres_url(postgres: EmbeddedPostgres) -> str:
    """The address of an empty database of this test process."""
    return postgres.create_database("tests")
