import pytest

from tidegate_engine.executor.base import Executor
from tidegate_testing.scheduling import a_simulated_executor


@pytest.fixture(params=["simulated"])
def executor(request: pytest.FixtureRequest) -> Executor:
    return {"simulated": a_simulated_executor}[request.param]()
