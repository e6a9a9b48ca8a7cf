"""Tables of pools and tenants, cell by cell; pure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tidegate_cli.console.views import EngineView, LatencyView, PoolView, TenantView, Verdict
from tidegate_cli.console.words import NOTHING, count_text, counted, percent_text, seconds_text

Tone = Literal["", "good", "warn", "bad", "quiet"]

Row = dict[str, Any]
"""One row for the page: `key`, and a cell as JSON by the name of its column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What one cell shows; tones are told by a sign as well as by colour.

    Attributes:
        note: Smaller, below.
        bar: A bar so long, in percent of the cell's width; None = none.
        marks: Lines across the bar, in percent.
    """

    text: str
    note: str = ""
    tone: Tone = ""
    bar: float | None = None
    marks: tuple[float, ...] = ()


ENGINE_COLUMNS = {
    "engine": "Engine",
    "revision": "Revision",
    "kv": "KV in use",
    "running": "Running",
    "waiting": "Waiting",
    "swapped": "Swapped",
    "step": "Step",
}

TENANT_COLUMNS = {
    "tenant": "Tenant",
    "state": "State",
    "ttft": "First token",
    "itl": "Between tokens",
    "share": "Share of its tier",
    "kv": "KV of nominal",
    "requests": "Requests",
    "shed": "Refused",
    "tokens": "Tokens",
    "cost": "Cost",
}


def engine_rows(pool: PoolView) -> list[Row]:
    """Return one row for each engine of a pool."""
    return [row_of(engine.pod, _engine_cells(engine, pool)) for engine in pool.engines]


def tenant_rows(views: Sequence[TenantView]) -> list[Row]:
    """Return one row for each tenant."""
    return [row_of(f"{view.pool} {view.tenant}", _tenant_cells(view)) for view in views]


def verdict_cell(verdict: Verdict) -> Cell:
    """Show a verdict; its message goes below where there is something to explain."""
    if verdict.is_good is None:
        return Cell(text=verdict.word, tone="quiet")
    note = "" if verdict.is_good else verdict.message
    return Cell(text=verdict.word, note=note, tone="good" if verdict.is_good else "bad")


def kv_tone(percent: float, pool: PoolView) -> Tone:
    """Tell where a KV fill stands against the watermarks."""
    if percent >= pool.watermarks.high_percent:
        return "bad"
    return "warn" if percent >= pool.watermarks.low_percent else ""


def row_of(key: str, cells: dict[str, Cell]) -> Row:
    """Return a row as the page takes it: marks as one text, as its tables bear no lists."""
    cell = {name: {**asdict(c), "marks": " ".join(map(str, c.marks))} for name, c in cells.items()}
    return {"key": key, **cell}


def _engine_cells(engine: EngineView, pool: PoolView) -> dict[str, Cell]:
    if engine.is_silent:
        silent = Cell(text=NOTHING, tone="quiet")
        first = Cell(text=engine.pod, note=engine.trouble, tone="bad")
        return {**dict.fromkeys(ENGINE_COLUMNS, silent), "engine": first}
    marks = pool.watermarks
    return {
        "engine": Cell(text=engine.pod, note=engine.trouble, tone="bad" if engine.trouble else ""),
        "revision": Cell(
            text=str(engine.revision),
            note=f"{engine.lag} behind" if engine.lag else "",
            tone="warn" if engine.lag else "good",
        ),
        "kv": Cell(
            text=percent_text(engine.kv_percent),
            note=f"{engine.kv_used_blocks} of {engine.kv_blocks} blocks",
            tone=kv_tone(engine.kv_percent, pool),
            bar=round(engine.kv_percent, 1),
            marks=(marks.low_percent, marks.high_percent),
        ),
        "running": Cell(text=count_text(engine.running)),
        "waiting": Cell(text=count_text(engine.waiting)),
        "swapped": Cell(text=count_text(engine.swapped)),
        "step": _step_cell(engine.step_seconds),
    }


def _step_cell(seconds: float | None) -> Cell:
    if seconds is None:
        return Cell(text=NOTHING, tone="quiet")
    return Cell(text=seconds_text(seconds))


def _tenant_cells(view: TenantView) -> dict[str, Cell]:
    own = view.activity
    return {
        "tenant": Cell(text=view.tenant, note=f"{view.tier} · weight {view.weight}"),
        "state": verdict_cell(view.state),
        "ttft": _latency_cell(view.ttft, view.attained_percent),
        "itl": _latency_cell(view.itl, None),
        "share": _share_cell(view),
        "kv": _kv_cell(view),
        "requests": Cell(
            text=counted(own.running, "running"),
            note=_listed((own.waiting, "waiting"), (own.swapped, "swapped")),
        ),
        "shed": Cell(
            text=count_text(own.shed),
            note=_listed((own.preempted, "preempted"), (own.cancelled, "cancelled")),
            tone="warn" if own.shed_in_window else "",
        ),
        "tokens": Cell(
            text=counted(own.output_tokens, "out"),
            note=_listed(
                (own.prompt_tokens, "in"),
                (own.cached_tokens, "cached"),
                (own.recomputed_tokens, "recomputed"),
            ),
        ),
        "cost": Cell(
            text=count_text(view.cost),
            note=counted(own.output_tokens_per_second, "tokens/s"),
        ),
    }


def _listed(*counts: tuple[float, str]) -> str:
    """Write the numbers that aren't 0."""
    return " · ".join(counted(count, noun) for count, noun in counts if count)


def _latency_cell(latency: LatencyView | None, attained: int | None) -> Cell:
    if latency is None:
        return Cell(text=NOTHING, note="no target", tone="quiet")
    target = f"p{latency.percentile} ≤\N{NO-BREAK SPACE}{seconds_text(latency.target_seconds)}"
    if latency.seconds is None:
        return Cell(text="no traffic", note=target, tone="quiet")
    kept = "" if attained is None else f" · {percent_text(attained)} kept"
    tone: Tone = "good" if latency.is_met else "bad"
    return Cell(text=seconds_text(latency.seconds), note=target + kept, tone=tone)


def _share_cell(view: TenantView) -> Cell:
    due = "" if view.due_percent is None else f"weight gives {percent_text(view.due_percent)}"
    if view.share_percent is None:
        return Cell(text="idle", note=due, tone="quiet")
    marks = () if view.due_percent is None else (round(view.due_percent, 1),)
    return Cell(
        text=percent_text(view.share_percent),
        note=due,
        bar=round(view.share_percent, 1),
        marks=marks,
    )


def _kv_cell(view: TenantView) -> Cell:
    borrowed = view.kv_percent > view.nominal_percent and view.activity.kv_borrowed_blocks > 0
    nominal = f"nominal {percent_text(view.nominal_percent)}"
    return Cell(
        text=percent_text(view.kv_percent),
        note=f"{nominal} · borrows" if borrowed else nominal,
        bar=round(view.kv_percent, 1),
        marks=(view.nominal_percent,) if view.nominal_percent else (),
    )
