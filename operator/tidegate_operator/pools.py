"""What is remembered of the pools between one round of work and the next."""

from dataclasses import dataclass, field

from tidegate_operator.cluster import ClusterView
from tidegate_operator.compiler import CompiledPool
from tidegate_operator.planner import PoolState
from tidegate_operator.progress import Engines, Published
from tidegate_operator.reports import ReportBook
from tidegate_operator.usage import PoolActivity, UsageMeter
from tidegate_operator.verdicts import Flaw


@dataclass(slots=True)
class PoolRecord:
    """One pool.

    Attributes:
        published: The newest revision known to be in Redis, or that was when it was last seen.
        is_refused: Redis can be reached, but doesn't take this pool's policy.
        changed_at: Loop time of the first change that not every ready engine runs yet.
        behind: Policies in force that not every ready engine was seen to run.
        looked_at: Revisions, published and of the slowest engine, at the last look at `behind`.
        held_revision: The newest revision that a policy which is not behind counts on.
        scale_flaws: What keeps its workload from being scaled.
        scale_missing: The workload, where there is none.
        autoscaler_flaws: What keeps its autoscaler from being written.
    """

    compiled: CompiledPool
    published: Published | None = None
    activity: PoolActivity | None = None
    meter: UsageMeter = field(default_factory=UsageMeter)
    is_refused: bool = False
    changed_at: float | None = None
    behind: set[str] = field(default_factory=set)
    looked_at: tuple[int, int] = (0, 0)
    held_revision: int = 0
    scale_flaws: tuple[Flaw, ...] = ()
    scale_missing: tuple[Flaw, ...] = ()
    autoscaler_flaws: tuple[Flaw, ...] = ()


class Pools:
    """All pools, and the view of the cluster that they were last compiled from.

    A status must never speak of a generation that the compiled policy doesn't hold: that is why
    the view here is not the newest one.

    Attributes:
        is_listening: Whether engines can be heard.
        is_storing: Whether the last attempt to publish succeeded.
    """

    def __init__(self, book: ReportBook) -> None:
        self.view = ClusterView()
        self.records: dict[str, PoolRecord] = {}
        self.is_listening = True
        self.is_storing = True
        self._book = book

    def state(self, key: str) -> PoolState | None:
        """Return everything known of a pool; None where it doesn't exist or isn't compiled."""
        pool, record = self.view.pools.get(key), self.records.get(key)
        if pool is None or record is None:
            return None
        return PoolState(
            pool=pool,
            compiled=record.compiled,
            engines=Engines(
                pods=self.view.pods_of(pool),
                reports=self._book.reports(key),
                published=record.published,
            ),
            is_redis_reachable=self.is_listening and self.is_storing and not record.is_refused,
            activity=record.activity,
            flaws=(*record.scale_flaws, *record.autoscaler_flaws),
            missing=record.scale_missing,
        )

    def is_on_its_way(self, key: str) -> bool:
        """Tell whether ready engines that can be heard don't run the published revision yet."""
        state = self.state(key)
        if state is None or state.published is None:
            return False
        return bool(state.engines.heard_lagging(state.published.revision))
