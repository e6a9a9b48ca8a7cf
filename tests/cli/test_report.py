import io

import pytest
from rich.console import Console, RenderableType

from tidegate_cli.report import (
    TABLE_WIDTH,
    Phase,
    Service,
    TenantPhase,
    Terms,
    latency_text,
    lengths_table,
    memory_table,
    phases_table,
)
from tidegate_cli.traces import arena_trace, summarize_lengths
from tidegate_cli.traffic import CallFigures, Latency

NO_CALLS = CallFigures(sent=0, finished=0, failed=0, ttft_p50=None, ttft_p99=None, itl_p99=None)


def tenant_phase(
    tenant: str, *, tier: str = "standard", weight: int = 100, charged: float = 0.0
) -> TenantPhase:
    return TenantPhase(
        tenant=tenant,
        terms=Terms(tier=tier, weight=weight),
        calls=NO_CALLS,
        service=Service(output_tokens=int(charged / 2), charged=charged, preemptions=4),
    )


def phase_of(*tenants: TenantPhase, name: str = "before") -> Phase:
    return Phase(name=name, seconds=10.0, tenants=tenants)


def text_of(renderable: RenderableType, *, width: int = 180) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(renderable)
    return file.getvalue()


def test_shares_are_compared_with_weights_inside_a_tier() -> None:
    phase = phase_of(
        tenant_phase("gold", tier="premium", charged=600),
        tenant_phase("silver", weight=300, charged=280),
        tenant_phase("batch", weight=100, charged=120),
    )

    assert phase.tier_shares() == {
        "gold": (100, 100),
        "silver": (pytest.approx(70), pytest.approx(75)),
        "batch": (pytest.approx(30), pytest.approx(25)),
    }
    assert phase.total_shares() == {"gold": 60, "silver": 28, "batch": 12}


def test_a_tier_that_got_nothing_has_no_shares_to_divide() -> None:
    assert phase_of(tenant_phase("gold")).tier_shares() == {"gold": (0, 100)}


def test_each_tenant_stands_before_and_after_in_neighbouring_rows() -> None:
    text = text_of(
        phases_table(
            [
                phase_of(tenant_phase("gold"), tenant_phase("batch")),
                phase_of(tenant_phase("gold", tier="premium"), tenant_phase("batch"), name="after"),
            ]
        )
    )

    rows = [line.split()[:3] for line in text.splitlines() if " gold " in line or "batch" in line]
    assert rows == [
        ["gold", "before", "standard"],
        ["gold", "after", "premium"],
        ["batch", "before", "standard"],
        ["batch", "after", "standard"],
    ]


def test_nothing_of_the_widest_row_is_cut_off() -> None:
    waiting = Latency(123.4, at_least=True)
    calls = CallFigures(
        sent=1000, finished=1000, failed=0, ttft_p50=waiting, ttft_p99=waiting, itl_p99=waiting
    )
    widest = TenantPhase(
        tenant="silver",
        terms=Terms(tier="background", weight=1_000_000),
        calls=calls,
        service=Service(output_tokens=100_000, charged=200_000, preemptions=1000),
    )

    text = text_of(phases_table([phase_of(widest)]), width=TABLE_WIDTH)

    assert "…" not in text
    assert text.count(">=123.4 s") == 3


def test_the_lengths_of_the_traffic_are_printed() -> None:
    text = text_of(lengths_table({"all": summarize_lengths(arena_trace())}))

    (row,) = [line for line in text.splitlines() if "all" in line]
    assert "713" in row
    assert "172" in row


def test_memory_is_summed_up() -> None:
    text = text_of(memory_table({"etcd": 40.4, "engine 1": 700.0}))

    assert any("all" in line and "740" in line for line in text.splitlines())


@pytest.mark.parametrize(
    ("latency", "text"),
    [
        (None, "-"),
        (Latency(0.0354), "35 ms"),
        (Latency(0.9996), "1.00 s"),
        (Latency(12.34), "12.3 s"),
        (Latency(8.0, at_least=True), ">=8.00 s"),
    ],
)
def test_a_latency_reads_well_at_every_size(latency: Latency | None, text: str) -> None:
    assert latency_text(latency) == text
