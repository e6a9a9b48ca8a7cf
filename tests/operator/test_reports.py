from tidegate_operator.reports import RETIRED_SECONDS, ReportBook
from tidegate_policies.wire import EngineReport, Refusal


def a_report(sequence: int = 1, incarnation: str = "i", **fields: object) -> EngineReport:
    values = {"pool": "p", "pod": "a", "incarnation": incarnation, "sequence": sequence}
    return EngineReport(**{**values, **fields})  # type: ignore[arg-type]


def test_acknowledgements_are_news_and_heartbeats_are_not() -> None:
    book = ReportBook()
    assert book.accept(a_report(1), now=0.0)
    assert not book.accept(a_report(2, running=5), now=1.0)
    assert book.accept(a_report(3, revision=1), now=2.0)
    refused = Refusal(revision=2, reason="BadSignature", message="")
    assert book.accept(a_report(4, revision=1, refused=refused), now=3.0)
    assert book.accept(a_report(5, revision=1, degraded=True), now=4.0)
    assert book.reports("p")["a"].sequence == 5


def test_capacity_is_news() -> None:
    book = ReportBook()
    book.accept(a_report(1, kv_blocks=100), now=0.0)
    assert book.accept(a_report(2, kv_blocks=100, host_blocks=50), now=1.0)
    assert book.accept(a_report(3, kv_blocks=90, host_blocks=50), now=2.0)
    assert not book.accept(a_report(4, kv_blocks=90, host_blocks=50, swapped=3), now=3.0)


def test_older_report_of_an_incarnation_changes_nothing() -> None:
    book = ReportBook()
    book.accept(a_report(5, revision=2), now=0.0)
    assert not book.accept(a_report(4, revision=1), now=1.0)
    assert book.reports("p")["a"].revision == 2


def test_replaced_incarnation_never_comes_back() -> None:
    book = ReportBook()
    book.accept(a_report(9, "old", revision=7), now=0.0)
    assert book.accept(a_report(1, "new", revision=1), now=1.0)
    assert not book.accept(a_report(10, "old", revision=8), now=2.0)
    assert book.reports("p")["a"].revision == 1


def test_replaced_incarnations_are_not_remembered_for_ever() -> None:
    book = ReportBook()
    for number in range(20):
        book.accept(a_report(1, f"{number}"), now=float(number))
    assert not book.accept(a_report(2, "18"), now=20.0)
    book.expire(now=20.0 + RETIRED_SECONDS)
    assert book.accept(a_report(2, "18"), now=21.0 + RETIRED_SECONDS)


def test_silent_engine_is_forgotten_after_a_while_and_its_return_is_news() -> None:
    book = ReportBook(silent_seconds=5.0)
    book.accept(a_report(1), now=0.0)
    assert book.expire(now=5.0) == frozenset()
    assert book.expire(now=5.1) == {"p"}
    assert book.reports("p") == {}
    assert book.accept(a_report(2), now=6.0)


def test_refresh_gives_everybody_time_to_speak() -> None:
    book = ReportBook(silent_seconds=5.0)
    book.accept(a_report(1), now=0.0)
    book.refresh(now=100.0)
    assert book.expire(now=104.0) == frozenset()
