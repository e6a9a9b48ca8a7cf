from dataclasses import replace

import pytest

from tidegate_operator.compiler import compile_pool
from tidegate_operator.pools import PoolRecord, Pools
from tidegate_operator.progress import Published
from tidegate_operator.reports import ReportBook
from tidegate_policies.wire import EngineReport
from tidegate_testing.objects import a_pod_view, a_view, an_engine_pool

POOL = "team/chat"


def pools_of(*reports: EngineReport, published: int | None = 2, is_ready: bool = True) -> Pools:
    """Build a pool of the engines one and two, and what they have reported."""
    book = ReportBook()
    for report in reports:
        book.accept(report, now=0.0)
    pools = Pools(book)
    pools.view = a_view(
        an_engine_pool(), a_pod_view("one", is_ready=is_ready), a_pod_view("two", is_ready=is_ready)
    )
    record = PoolRecord(compile_pool(pools.view, pools.view.pools[POOL]))
    if published is not None:
        record.published = Published(revision=published, digest="new", time="")
    pools.records[POOL] = record
    return pools


def a_report(pod: str, revision: int) -> EngineReport:
    digest = "new" if revision == 2 else "old"
    return EngineReport(
        pool=POOL, pod=pod, incarnation="first", sequence=1, revision=revision, digest=digest
    )


NEW, OLD = a_report("one", 2), a_report("two", 1)


def test_a_revision_is_on_its_way_while_an_engine_runs_an_older_one() -> None:
    assert pools_of(NEW, OLD).is_on_its_way(POOL)
    assert not pools_of(NEW, replace(NEW, pod="two")).is_on_its_way(POOL)


@pytest.mark.parametrize(
    "pools",
    [
        pytest.param(pools_of(NEW), id="silent"),
        pytest.param(pools_of(NEW, OLD, is_ready=False), id="not ready"),
        pytest.param(pools_of(NEW, OLD, published=None), id="nothing published"),
    ],
)
def test_nobody_waits_for_an_engine_that_can_not_answer(pools: Pools) -> None:
    assert not pools.is_on_its_way(POOL)


def test_nothing_is_on_its_way_to_a_pool_that_is_gone() -> None:
    assert not Pools(ReportBook()).is_on_its_way(POOL)
