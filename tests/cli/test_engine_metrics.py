import pytest

from tidegate_cli.engine_metrics import EngineMetrics, TenantTotals

TEXT = """\
# HELP tidegate_tokens_total Tokens.
# TYPE tidegate_tokens_total counter
tidegate_tokens_total{pool="p",tenant="gold",kind="prompt"} 10
tidegate_tokens_total{pool="p",tenant="gold",kind="output"} 20
tidegate_tokens_total{pool="p",tenant="batch",kind="output"} 5
# HELP tidegate_preemptions_total Preemptions.
# TYPE tidegate_preemptions_total counter
tidegate_preemptions_total{pool="p",tenant="gold",mode="recompute",cause="pressure"} 3
# HELP tidegate_policy_revision Revision.
# TYPE tidegate_policy_revision gauge
tidegate_policy_revision{pool="p"} 7
"""


def test_samples_are_found_by_name_and_labels() -> None:
    metrics = EngineMetrics(TEXT)

    assert metrics.value("tidegate_policy_revision") == 7
    assert metrics.value("tidegate_tokens_total", tenant="gold") == 30
    assert metrics.value("tidegate_tokens_total", tenant="nobody") == 0
    assert metrics.by_tenant("tidegate_tokens_total", kind="output") == {"gold": 20, "batch": 5}


def test_what_a_tenant_got_is_added_up_over_engines_with_output_at_double_cost() -> None:
    totals = TenantTotals([EngineMetrics(TEXT), EngineMetrics(TEXT)], "gold")

    assert (totals.prompt_tokens, totals.output_tokens, totals.preemptions) == (20, 40, 6)
    assert totals.service == 100


def test_what_is_no_exposition_is_refused() -> None:
    with pytest.raises(ValueError, match="html"):
        EngineMetrics("<html>not found</html>")
