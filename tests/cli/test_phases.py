from tidegate_cli.engine_metrics import EngineMetrics, TenantTotals
from tidegate_cli.phases import Reading, phase_between
from tidegate_cli.report import Terms
from tidegate_cli.traffic import Call

TENANTS = ("gold", "silver", "batch")
TERMS = {tenant: Terms(tier="standard", weight=100) for tenant in TENANTS}


def reading(at: float, **output_tokens: int) -> Reading:
    lines = [
        "# TYPE tidegate_tokens_total counter",
        *(
            f'tidegate_tokens_total{{tenant="demo/{tenant}",kind="output"}} {count}'
            for tenant, count in output_tokens.items()
        ),
    ]
    engine = EngineMetrics("\n".join(lines) + "\n")
    return Reading(at=at, totals={t: TenantTotals([engine], f"demo/{t}") for t in TENANTS})


def test_a_phase_holds_what_was_added_between_its_readings() -> None:
    calls = [
        Call(tenant="gold", sent_at=9.0, token_times=[9.5], ended_at=9.5),
        Call(tenant="gold", sent_at=11.0, token_times=[11.5], ended_at=11.5),
    ]

    phase = phase_between(
        "before",
        reading(10.0, gold=100, silver=50),
        reading(20.0, gold=130, silver=60, batch=10),
        calls=calls,
        terms=TERMS,
    )

    assert phase.seconds == 10
    gold, silver, batch = phase.tenants
    assert [one.service.output_tokens for one in phase.tenants] == [30, 10, 10]
    assert [one.service.charged for one in phase.tenants] == [60, 20, 20]
    assert gold.calls.sent == gold.calls.finished == 1
    assert silver.calls.sent == batch.calls.sent == 0
