import pytest

from tidegate_policies.wire import EngineReport, Refusal, ReportError, TenantCounters

REPORT = EngineReport(
    pool="serving/main",
    pod="engine-0",
    incarnation="one",
    sequence=3,
    revision=7,
    step=41,
    block_size=16,
    waiting_tokens=5,
    queue_times=((3, 2), (217, 1)),
    refused=Refusal(revision=8, reason="BadSignature", message="not ours"),
    tenants=(TenantCounters(tenant="acme", output_tokens=5),),
)


def test_a_report_survives_its_text() -> None:
    assert EngineReport.from_json(REPORT.to_json()) == REPORT


def test_a_bad_report_is_refused_by_the_name_of_its_field() -> None:
    with pytest.raises(ReportError, match="sequence"):
        EngineReport.from_json(REPORT.to_json().replace('"sequence":3', '"sequence":-3'))
