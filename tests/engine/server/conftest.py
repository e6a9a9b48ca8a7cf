from collections.abc import Iterator

import pytest

from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.engines import RunningEngine, a_keyed_tenant, a_running_engine
from tidegate_testing.policies import a_snapshot


@pytest.fixture(scope="package")
def shared_engine() -> Iterator[RunningEngine]:
    """One engine for all tests that leave it as they find it."""
    with a_running_engine(the_policy()) as running:
        yield running


@pytest.fixture
def engine(shared_engine: RunningEngine) -> Iterator[RunningEngine]:
    """The shared engine, idle before and after the test."""
    yield shared_engine
    assert shared_engine.is_idle()


def the_policy() -> PolicySnapshot:
    """The policy of `shared_engine`."""
    return a_snapshot(a_keyed_tenant("acme"), a_keyed_tenant("zeta"))
