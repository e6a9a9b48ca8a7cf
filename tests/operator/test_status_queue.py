from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tidegate_operator.planner import StatusUpdate
from tidegate_operator.resources import TenantPolicy
from tidegate_operator.status_queue import StatusQueue, WaitingStatus


def a_waiting_status(
    name: str, *, due: float = 0.0, order: int = 0, is_settled: bool = True, is_urgent: bool = True
) -> WaitingStatus:
    update = StatusUpdate(
        model=TenantPolicy, namespace="team", name=name, uid=name, status={}, is_settled=is_settled
    )
    return WaitingStatus(update=update, due=due, is_urgent=is_urgent, order=order)


def taken(queue: StatusQueue, now: float) -> Iterable[str]:
    while (found := queue.take(now, busy=())) is not None:
        yield found.update.name


def test_what_lasts_goes_first_then_conditions_then_the_oldest() -> None:
    queue = StatusQueue()
    queue.put(a_waiting_status("passing", order=1, is_settled=False))
    queue.put(a_waiting_status("usage", order=2, is_urgent=False))
    queue.put(a_waiting_status("newer", order=4))
    queue.put(a_waiting_status("older", order=3))

    assert list(taken(queue, 0.0)) == ["older", "newer", "usage", "passing"]


def test_what_is_replaced_for_ever_takes_a_bounded_place() -> None:
    queue = StatusQueue()
    for number in range(10_000):
        queue.put(a_waiting_status(f"{number % 10}", due=number % 3, order=number))
        queue.take(1.0, busy=[f"{one}" for one in range(10)])
        assert len(queue) <= 10
        assert queue.num_entries < 100


class WaitingStatuses(RuleBasedStateMachine):
    """Against a queue that looks at everything."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = StatusQueue()
        self.waiting: dict[str, WaitingStatus] = {}
        self.busy: set[str] = set()
        self.now = 0.0
        self.order = 0

    names = st.sampled_from("abcdef")

    @rule(name=names, delay=st.integers(0, 3), is_settled=st.booleans(), is_urgent=st.booleans())
    def put(self, name: str, delay: int, is_settled: bool, is_urgent: bool) -> None:  # noqa: FBT001
        self.order += 1
        one = a_waiting_status(
            name,
            due=self.now + delay,
            order=self.order,
            is_settled=is_settled,
            is_urgent=is_urgent,
        )
        self.queue.put(one)
        self.waiting[name] = one

    @rule(name=names)
    def drop(self, name: str) -> None:
        self.queue.drop(name)
        self.waiting.pop(name, None)

    @rule()
    def take(self) -> None:
        due = [
            one
            for one in self.waiting.values()
            if one.due <= self.now and one.update.uid not in self.busy
        ]
        first = min(due, key=lambda one: one.rank, default=None)
        assert self.queue.take(self.now, busy=self.busy) is first
        if first is not None:
            del self.waiting[first.update.uid]
            self.busy.add(first.update.uid)
            return
        later = [one.due for one in self.waiting.values() if one.due > self.now]
        due_at = self.queue.due_at()
        assert due_at is None or due_at > self.now
        assert not later or (due_at is not None and due_at <= min(later))

    @rule(name=names)
    def end_writing(self, name: str) -> None:
        self.busy.discard(name)
        if (waiting := self.queue.get(name)) is not None:
            self.queue.put(waiting)

    @rule(seconds=st.integers(0, 2))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds

    @invariant()
    def everything_waits_that_was_put_in(self) -> None:
        assert len(self.queue) == len(self.waiting)
        assert all(self.queue.get(name) is one for name, one in self.waiting.items())


TestWaitingStatuses = WaitingStatuses.TestCase
TestWaitingStatuses.settings = settings(max_examples=60, deadline=None)
