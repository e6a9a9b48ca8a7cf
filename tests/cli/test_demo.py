from tidegate_cli.demo import unmet_expectations
from tidegate_cli.report import Phase, Service, TenantPhase, Terms
from tidegate_cli.traffic import CallFigures

NO_CALLS = CallFigures(sent=0, finished=0, failed=0, ttft_p50=None, ttft_p99=None, itl_p99=None)


def phase(name: str, *, gold: int = 100, silver: int = 100, batch: int = 100) -> Phase:
    tiers = {"gold": "premium", "silver": "standard", "batch": "standard"}
    tokens = {"gold": gold, "silver": silver, "batch": batch}
    return Phase(
        name=name,
        seconds=10.0,
        tenants=tuple(
            TenantPhase(
                tenant=tenant,
                terms=Terms(tier=tiers[tenant], weight=100),
                calls=NO_CALLS,
                service=Service(output_tokens=count, charged=2.0 * count, preemptions=0),
            )
            for tenant, count in tokens.items()
        ),
    )


def test_a_raised_weight_that_raises_the_share_is_as_expected() -> None:
    assert unmet_expectations(phase("before"), phase("after", silver=300)) == []


def test_a_share_that_stays_is_told() -> None:
    (sentence,) = unmet_expectations(phase("before"), phase("after", silver=110))

    assert sentence.startswith("silver's share of its tier rose by 2.4 points")


def test_a_tenant_without_any_token_is_told() -> None:
    unmet = unmet_expectations(phase("before", gold=0), phase("after", silver=300))

    assert unmet == ["gold got no token before the change"]
