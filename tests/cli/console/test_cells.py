"""What the tables say, in words and bars."""

from typing import Any

import pytest

from tidegate_cli.console.cells import ENGINE_COLUMNS, TENANT_COLUMNS, engine_rows, tenant_rows
from tidegate_cli.console.views import EngineView, LatencyView, PoolView, TenantView, Verdict
from tidegate_operator.usage import TenantActivity
from tidegate_policies.rules import WatermarkRule


def a_pool(*engines: EngineView) -> PoolView:
    return PoolView(
        name="serving/main",
        programmed=Verdict(is_good=True, word="Programmed"),
        ready="1/1",
        revision=7,
        watermarks=WatermarkRule(low_percent=80, high_percent=92),
        engines=engines,
        batch=(),
        queue=(),
        output_tokens_per_second=None,
    )


def a_tenant_view(**fields: Any) -> TenantView:
    base: dict[str, Any] = {
        "pool": "serving/main",
        "tenant": "acme",
        "tier": "gold",
        "weight": 300,
        "state": Verdict(is_good=True, word="Ready"),
        "ttft": None,
        "itl": None,
        "attained_percent": None,
        "share_percent": None,
        "due_percent": 75.0,
        "kv_percent": 30.0,
        "nominal_percent": 20,
        "activity": TenantActivity(kv_borrowed_blocks=10),
        "cost": 14_200.0,
    }
    return TenantView(**base | fields)


def plain(cell: dict[str, Any]) -> dict[str, Any]:
    return {
        k: v.replace("\N{NO-BREAK SPACE}", " ") if isinstance(v, str) else v
        for k, v in cell.items()
    }


@pytest.mark.parametrize(("used", "tone"), [(79, ""), (80, "warn"), (92, "bad")])
def test_kv_changes_its_tone_at_the_watermarks(used: int, tone: str) -> None:
    (row,) = engine_rows(a_pool(EngineView(pod="engine-0", kv_blocks=100, kv_used_blocks=used)))
    kv = plain(row["kv"])
    assert (kv["text"], kv["tone"], kv["bar"], kv["marks"]) == (f"{used} %", tone, used, "80 92")


def test_every_engine_has_a_cell_in_every_column() -> None:
    engines = (
        EngineView(pod="engine-0"),
        EngineView(pod="engine-1", is_silent=True, trouble="no report"),
    )
    for row in engine_rows(a_pool(*engines)):
        assert set(row) == {"key", *ENGINE_COLUMNS}
    assert row["engine"]["note"] == "no report"
    assert row["engine"]["tone"] == "bad"


def test_a_laggard_says_by_how_much() -> None:
    (row,) = engine_rows(a_pool(EngineView(pod="engine-0", revision=5, lag=2)))
    assert (row["revision"]["text"], row["revision"]["note"], row["revision"]["tone"]) == (
        "5",
        "2 behind",
        "warn",
    )


def test_a_latency_is_shown_with_its_target_and_how_many_kept_it() -> None:
    missed = LatencyView(target_seconds=0.5, percentile=99, seconds=0.75, is_met=False)
    (row,) = tenant_rows([a_tenant_view(ttft=missed, attained_percent=97)])
    assert set(row) == {"key", *TENANT_COLUMNS}
    ttft = plain(row["ttft"])
    assert (ttft["text"], ttft["note"], ttft["tone"]) == (
        "750 ms",
        "p99 ≤ 500 ms · 97 % kept",
        "bad",
    )
    assert plain(row["itl"])["note"] == "no target"


def test_a_share_is_a_bar_with_its_due_as_a_mark() -> None:
    (row,) = tenant_rows([a_tenant_view(share_percent=61.24)])
    share = plain(row["share"])
    assert (share["text"], share["bar"], share["marks"]) == ("61 %", 61.2, "75.0")
    assert share["note"] == "weight gives 75 %"
    (row,) = tenant_rows([a_tenant_view()])
    assert (row["share"]["text"], row["share"]["bar"]) == ("idle", None)


def test_kv_above_nominal_says_that_it_is_borrowed() -> None:
    (row,) = tenant_rows([a_tenant_view()])
    kv = plain(row["kv"])
    assert (kv["text"], kv["note"], kv["marks"]) == ("30 %", "nominal 20 % · borrows", "20")


def test_what_is_zero_is_left_out_of_notes() -> None:
    own = TenantActivity(running=2, waiting=1, output_tokens=30, prompt_tokens=500)
    (row,) = tenant_rows([a_tenant_view(activity=own)])
    assert plain(row["requests"])["note"] == "1 waiting"
    assert plain(row["tokens"])["note"] == "500 in"
    assert row["cost"]["text"] == "14.2k"
