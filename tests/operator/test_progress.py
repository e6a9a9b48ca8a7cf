import pytest

from tidegate_operator.progress import (
    Engines,
    Published,
    Stored,
    degraded,
    plan_revision,
    programmed,
)
from tidegate_policies.wire import EngineReport, Refusal
from tidegate_testing.objects import a_pod_view

POOL = "team/chat"


def a_report(pod: str, revision: int, **fields: object) -> EngineReport:
    values = {"pool": POOL, "pod": pod, "incarnation": "i", "sequence": 1, "revision": revision}
    return EngineReport(**{**values, **fields})  # type: ignore[arg-type]


def engines(
    *reports: EngineReport, ready: tuple[str, ...] = ("a", "b"), published: Published | None = None
) -> Engines:
    return Engines(
        published=published,
        pods=tuple(a_pod_view(name) for name in ready),
        reports={report.pod: report for report in reports},
    )


def test_all_ready_engines_at_the_revision_are_programmed() -> None:
    verdict = programmed(POOL, engines(a_report("a", 3), a_report("b", 4)), 3, was_programmed=False)
    assert (verdict.holds, verdict.reason) == (True, "Programmed")


def test_laggards_are_named_and_silent_ones_lag() -> None:
    verdict = programmed(POOL, engines(a_report("a", 3)), 3, was_programmed=False)
    assert (verdict.holds, verdict.reason) == (False, "EnginesLagging")
    assert verdict.message.endswith("not yet run by b")


def test_pods_that_are_not_ready_do_not_count() -> None:
    found = Engines(
        pods=(a_pod_view("a"), a_pod_view("b", is_ready=False)), reports={"a": a_report("a", 3)}
    )
    assert programmed(POOL, found, 3, was_programmed=False).holds
    assert (len(found.ready), found.total) == (1, 2)


def test_refusal_names_engine_and_reason() -> None:
    refused = Refusal(revision=3, reason="BadSignature", message="not the operator's")
    found = engines(a_report("a", 3), a_report("b", 2, refused=refused))
    verdict = programmed(POOL, found, 3, was_programmed=False)
    assert verdict.reason == "EngineRefused"
    assert "b refused revision 3: BadSignature" in verdict.message
    assert degraded(found, 3, is_redis_reachable=True).reason == "EngineRefused"


@pytest.mark.parametrize(("revision", "digest"), [(3, "other"), (4, "d")])
@pytest.mark.parametrize("was_programmed", [False, True])
def test_engine_that_runs_what_was_never_published_is_not_programmed(
    revision: int, digest: str, *, was_programmed: bool
) -> None:
    refused = Refusal(revision=3, reason="StaleRevision", message="old")
    published = Published(revision=3, digest="d", time="t")
    for reported in (refused, None):
        report = a_report("a", revision, digest=digest, refused=reported)
        found = engines(report, ready=("a",), published=published)
        verdict = programmed(POOL, found, 2, was_programmed=was_programmed)
        assert verdict.reason == ("EngineRefused" if reported else "EnginesLagging")
        assert degraded(found, 3, is_redis_reachable=True).holds is (reported is not None)


@pytest.mark.parametrize(("revision", "digest"), [(3, "d"), (2, "of what was before")])
def test_engine_that_runs_a_published_policy_is_programmed(revision: int, digest: str) -> None:
    published = Published(revision=3, digest="d", time="t")
    found = engines(a_report("a", revision, digest=digest), ready=("a",), published=published)
    assert programmed(POOL, found, 2, was_programmed=False).holds


def test_no_ready_engine_is_a_reason_of_its_own() -> None:
    verdict = programmed(POOL, engines(ready=()), 3, was_programmed=False)
    assert (verdict.holds, verdict.reason) == (False, "NoEngines")


@pytest.mark.parametrize(
    ("found", "holds"),
    [
        (engines(a_report("a", 3)), True),
        (engines(ready=()), True),
        (engines(a_report("a", 3), a_report("b", 2)), False),
    ],
    ids=["one silent", "none left", "one behind"],
)
def test_what_was_programmed_stays_so_unless_an_engine_runs_less(
    found: Engines, *, holds: bool
) -> None:
    assert programmed(POOL, found, 3, was_programmed=True).holds is holds


def test_many_laggards_are_cut_short() -> None:
    found = engines(ready=tuple(f"pod-{number:02}" for number in range(13)))
    assert programmed(POOL, found, 1, was_programmed=False).message.endswith("pod-09 and 3 more")


def test_degraded_says_what_is_cut_off() -> None:
    cut_off = engines(a_report("a", 3, degraded=True), a_report("b", 3))
    verdict = degraded(cut_off, 3, is_redis_reachable=True)
    assert (verdict.holds, verdict.reason) == (True, "RedisUnreachable")
    assert verdict.message.endswith(": a")
    assert degraded(engines(), 3, is_redis_reachable=False).holds


@pytest.mark.parametrize(
    ("stored", "seen", "revision"),
    [
        (None, {}, 1),
        ((4, "d", "uid"), {}, 4),
        ((4, "other", "uid"), {}, 5),
        ((4, "d", "uid of another pool"), {}, 5),
        (None, {"status": (7, "d")}, 7),
        (None, {"status": (7, "other")}, 8),
        ((4, "d", "uid"), {"engine": (9, "other")}, 10),
        ((4, "d", "uid"), {"engine": (9, "d")}, 9),
        ((4, "d", "uid"), {"engine": (4, "other")}, 5),
        ((4, "d", "uid"), {"engine": (0, "")}, 4),
    ],
)
def test_revision_is_used_again_only_for_what_everybody_knows_it_as(
    stored: tuple[int, str, str] | None, seen: dict[str, tuple[int, str]], revision: int
) -> None:
    found = Stored(revision=stored[0], digest=stored[1], pool_uid=stored[2]) if stored else None
    assert plan_revision("d", pool_uid="uid", stored=found, seen=seen) == revision
