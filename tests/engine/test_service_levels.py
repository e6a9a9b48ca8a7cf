from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_engine.events import CancelCause, Refused, StepReport
from tidegate_engine.policy_board import PolicyInForce
from tidegate_engine.service_levels import (
    SUB_WINDOWS,
    RequestPace,
    ServiceLevels,
    TenantWindow,
)
from tidegate_policies.attainment import NEVER, num_counted
from tidegate_policies.rules import ServiceRule, TenantRule
from tidegate_policies.wire import Attainment
from tidegate_testing.policies import a_snapshot, a_tenant

WINDOW = 60.0
RULE = ServiceRule(ttft_seconds=1.0, itl_seconds=0.1, itl_percentile=90, window_seconds=WINDOW)


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Watched:
    """The levels of the tenants of a policy, at a time that is set by hand."""

    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.never_began: list[str] = []
        self.levels = ServiceLevels(self.clock, on_no_token=self.never_began.append)
        self.use(a_tenant("acme", service=RULE), a_tenant("plain"))

    def use(self, *tenants: TenantRule) -> None:
        self.levels.use_policy(
            PolicyInForce(snapshot=a_snapshot(*tenants), revision=1, digest="", step=1, at=0.0)
        )

    @property
    def window(self) -> TenantWindow:
        window = self.levels.window("acme")
        assert window is not None
        return window

    def attainment(self) -> Attainment | None:
        self.window.check_invariants()
        return self.levels.attainments().get("acme")

    def serve(self, ttft: float, gaps: Iterable[float] = ()) -> RequestPace:
        pace = RequestPace()
        self.window.note_first_token(pace, ttft, self.clock.now)
        for gap in gaps:
            self.window.note_gap(pace, gap, self.clock.now)
        return pace

    def finish(self, pace: RequestPace, cause: CancelCause | None = None) -> None:
        self.levels.note_end("acme", pace, cause, has_begun=True)

    def cancel_before_first_token(self, cause: CancelCause) -> None:
        self.levels.note_end("acme", RequestPace(), cause, has_begun=False)

    def counts(self) -> tuple[int, int]:
        found = self.attainment()
        return (found.requests, found.met) if found else (0, 0)


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_without_traffic_there_is_no_attainment_and_no_miss(watched: Watched) -> None:
    assert watched.attainment() is None
    assert watched.levels.miss_ratios() == {("acme", "ttft"): 0.0, ("acme", "itl"): 0.0}


def test_a_request_meets_its_targets_when_its_first_token_and_enough_gaps_do(
    watched: Watched,
) -> None:
    watched.finish(watched.serve(1.0, [0.1] * 9 + [5.0]))
    assert watched.counts() == (1, 1)
    watched.finish(watched.serve(1.0, [0.1] * 8 + [5.0]))
    assert watched.counts() == (2, 1)
    watched.finish(watched.serve(1.001, [0.1]))
    assert watched.counts() == (3, 1)
    found = watched.attainment()
    assert found is not None
    assert found.ttft is not None
    assert found.itl is not None
    assert (found.ttft.met, num_counted(found.ttft), found.ttft.target_seconds) == (2, 3, 1.0)
    assert (found.itl.met, num_counted(found.itl), found.itl.target_seconds) == (18, 20, 0.1)
    assert watched.levels.miss_ratios() == {
        ("acme", "ttft"): pytest.approx(1 / 3),
        ("acme", "itl"): pytest.approx(0.1),
    }


@pytest.mark.parametrize(
    "cause",
    [
        CancelCause.QUEUE_TIMEOUT,
        CancelCause.REQUEST_TIMEOUT,
        CancelCause.ENGINE_FAILED,
        CancelCause.DRAIN,
    ],
)
def test_who_gets_an_error_for_an_answer_has_missed(watched: Watched, cause: CancelCause) -> None:
    watched.finish(watched.serve(0.1), cause)
    assert watched.counts() == (1, 0)
    watched.cancel_before_first_token(cause)
    found = watched.attainment()
    assert found is not None
    assert found.ttft is not None
    assert (found.requests, found.met) == (2, 0)
    assert (found.ttft.met, dict(found.ttft.buckets)[NEVER]) == (1, 1)
    assert watched.never_began == ["acme"]


@pytest.mark.parametrize(
    "cause",
    [
        CancelCause.DISCONNECT,
        CancelCause.DELETE,
        CancelCause.SLOW_READER,
        CancelCause.SIBLING_REFUSED,
        CancelCause.TENANT_STOPPED,
    ],
)
def test_who_leaves_before_the_first_token_does_not_count_and_later_by_what_it_got(
    watched: Watched, cause: CancelCause
) -> None:
    watched.cancel_before_first_token(cause)
    assert watched.attainment() is None
    watched.finish(watched.serve(0.1), cause)
    assert watched.counts() == (1, 1)
    watched.finish(watched.serve(2.0), cause)
    assert watched.counts() == (2, 1)


def test_refusals_for_overload_have_missed_and_those_by_own_limits_do_not_count(
    watched: Watched,
) -> None:
    for reason in ("tenant_queue_full", "rate_limited", "prompt_too_long", "tenant_stopped"):
        watched.levels.note_refusal("acme", reason)
    assert watched.attainment() is None
    watched.levels.note_refusal("acme", "engine_overloaded")
    watched.levels.take_step(
        StepReport(
            step=1,
            revision=1,
            watermark="green",
            planned_at=0.0,
            committed_at=0.0,
            refused=(
                Refused("1", "acme", "shed", 0.0),
                Refused("2", "acme", "queue_full", 0.0),
                Refused("3", "plain", "shed", 0.0),
                Refused("4", "nobody", "shed", 0.0),
            ),
        )
    )
    assert watched.counts() == (3, 0)
    assert watched.never_began == ["acme"] * 3
    assert watched.levels.miss_ratios()["acme", "ttft"] == 1.0
    assert list(watched.levels.attainments()) == ["acme"]


def test_tenants_without_targets_are_not_watched(watched: Watched) -> None:
    assert watched.levels.window("plain") is None
    assert watched.levels.window("nobody") is None
    watched.levels.note_end("plain", RequestPace(), None, has_begun=True)
    assert watched.levels.attainments() == {}


def test_of_one_target_alone_the_other_is_not_counted(watched: Watched) -> None:
    watched.use(a_tenant("acme", service=ServiceRule(itl_seconds=0.1)))
    watched.finish(watched.serve(99.0, [0.1]))
    watched.levels.note_refusal("acme", "shed")
    found = watched.attainment()
    assert found is not None
    assert found.ttft is None
    assert (found.requests, found.met) == (2, 1)
    assert list(watched.levels.miss_ratios()) == [("acme", "itl")]


def test_what_is_older_than_the_window_is_gone_and_what_is_younger_is_not(
    watched: Watched,
) -> None:
    watched.finish(watched.serve(2.0))
    watched.clock.now += WINDOW
    watched.finish(watched.serve(0.5))
    assert watched.counts() == (2, 1)
    watched.clock.now += WINDOW / SUB_WINDOWS
    assert watched.counts() == (1, 1)
    watched.clock.now += WINDOW
    assert watched.attainment() is None
    watched.clock.now += 1000 * WINDOW
    watched.finish(watched.serve(0.5))
    assert watched.counts() == (1, 1)


def test_new_targets_begin_anew_and_everything_else_goes_on(watched: Watched) -> None:
    watched.finish(watched.serve(0.5))
    same = replace(RULE, sheds=True, ttft_percentile=50)
    watched.use(a_tenant("acme", service=same, weight=3))
    assert watched.counts() == (1, 1)
    watched.use(a_tenant("acme", service=ServiceRule(ttft_seconds=0.2)))
    assert watched.attainment() is None
    watched.finish(watched.serve(0.5))
    assert watched.counts() == (1, 0)
    watched.use(a_tenant("plain"))
    assert watched.levels.attainments() == {}
    assert watched.levels.miss_ratios() == {}


def test_a_silent_tenants_window_takes_no_memory(watched: Watched) -> None:
    watched.finish(watched.serve(0.5))
    watched.clock.now += 2 * WINDOW
    watched.levels.attainments()
    assert not watched.levels._windows


events = st.lists(
    st.tuples(st.floats(0, 25), st.sampled_from(["good", "late", "gone", "refused"])), max_size=60
)


@given(events)
def test_a_window_holds_what_happened_in_it_and_at_most_one_part_more(
    happened: list[tuple[float, str]],
) -> None:
    watched = Watched()
    window, ends, bounds = TenantWindow(RULE, on_no_token=lambda: None), [], WINDOW / SUB_WINDOWS
    for pause, what in happened:
        watched.clock.now += pause
        now = watched.clock.now
        pace = RequestPace()
        if what == "refused":
            window.note_refusal(now)
        elif what == "gone":
            window.note_end(pace, CancelCause.QUEUE_TIMEOUT, now, has_begun=False)
        else:
            window.note_first_token(pace, 0.5 if what == "good" else 2.0, now)
            window.note_gap(pace, 0.05, now)
            window.note_end(pace, None, now, has_begun=True)
        ends.append((now, what))
        window.check_invariants()
        found = window.attainment(now)
        assert found is not None
        assert found.ttft is not None

        def number(reach: float, *kinds: str) -> int:
            return sum(at > now - reach and kind in kinds for at, kind in ends)  # noqa: B023

        kinds = ("good", "late", "gone", "refused")
        assert number(WINDOW, *kinds) <= found.requests <= number(WINDOW + bounds + 1e-6, *kinds)
        assert number(WINDOW, "good") <= found.met <= number(WINDOW + bounds + 1e-6, "good")
        assert num_counted(found.ttft) == found.requests
        assert found.ttft.met == found.met
