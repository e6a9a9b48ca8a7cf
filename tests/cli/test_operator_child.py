import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidegate_cli.guard import guarded
from tidegate_cli.operator_child import OperatorChild
from tidegate_devcluster.errors import StartError
from tidegate_devcluster.processes import Lifeline


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[OperatorChild]:
    """An operator that ends at once, as it finds no kubeconfig."""
    with Lifeline() as lifeline:
        yield OperatorChild(
            kubeconfig=tmp_path / "missing",
            redis_url="redis://127.0.0.1:1",
            signing_key_file=tmp_path / "missing.pem",
            engine_token_file=tmp_path / "missing-token",
            log=tmp_path / "operator.log",
            lifeline=lifeline,
        )


async def test_an_operator_that_ends_by_itself_is_told_with_the_end_of_its_log(
    operator: OperatorChild,
) -> None:
    await operator.start()

    with pytest.raises(StartError, match=r"(?s)operator ended with status \d+; .*missing"):
        await guarded(asyncio.Event().wait(), operator.raise_if_ended)


async def test_a_stopped_operator_has_not_ended_by_itself(operator: OperatorChild) -> None:
    await operator.start()

    await operator.stop(kill=True)

    operator.raise_if_ended()
    assert operator.pid is None
