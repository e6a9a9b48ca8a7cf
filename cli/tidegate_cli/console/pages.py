"""The pages: pools, tenants, a request."""

from urllib.parse import quote

from nicegui import ui
from nicegui.elements.mixins.text_element import TextElement
from starlette.requests import Request

from tidegate_cli.cluster_access import ClusterError
from tidegate_cli.console.cells import (
    ENGINE_COLUMNS,
    TENANT_COLUMNS,
    engine_rows,
    kv_tone,
    tenant_rows,
    verdict_cell,
)
from tidegate_cli.console.charts import (
    Options,
    batch_chart,
    charted_tenants,
    kv_chart,
    queue_chart,
    step_chart,
)
from tidegate_cli.console.explain import Explain
from tidegate_cli.console.frame import cell_table, page_frame, refresh_with, set_rows, text
from tidegate_cli.console.requests import DECISION_COLUMNS, RequestView, request_view
from tidegate_cli.console.views import PoolView
from tidegate_cli.console.watch import FleetWatch
from tidegate_cli.console.words import NOTHING, count_text, percent_text, seconds_text

TENANTS_PER_PAGE = 50
UNITS = (
    "Shares and rates are of the last 30 seconds; tokens, refusals and cost since the engines"
    " started. Cost counts 1 for each computed prompt token and 2 for each output token."
)
REQUEST_SECONDS = 2.0
NO_POOLS = (
    "There is no EnginePool yet. Apply one, and engines that name it will appear here within"
    " seconds."
)
NO_TENANTS = (
    "No pool has a policy with tenants yet. Apply a TenantPolicy, and its tenant will appear here."
)


def build_pages(watch: FleetWatch, explain: Explain) -> None:
    """Register the pages with NiceGUI.

    Args:
        watch: What pools and tenants are shown from.
        explain: Where requests are looked up.
    """

    @ui.page("/", title="Pools · Tidegate")
    def pools(request: Request) -> None:
        with page_frame("/", request, watch):
            empty = text("p", NO_POOLS).classes("empty")
            place = ui.element("div")
        panels: dict[str, PoolPanel] = {}

        def show() -> None:
            found = {pool.name: pool for pool in watch.pools()}
            empty.set_visibility(not found)
            if list(panels) != list(found):
                place.clear()
                panels.clear()
                with place:
                    panels.update({name: PoolPanel(name) for name in found})
            for name, pool in found.items():
                panels[name].show(pool, watch)

        refresh_with(watch, show)

    @ui.page("/tenants", title="Tenants · Tidegate")
    def tenants(request: Request) -> None:
        with page_frame("/tenants", request, watch):
            _tenants_page(watch)

    @ui.page("/request", title="Request · Tidegate")
    def request_page(request: Request, id: str = "") -> None:  # noqa: A002 - name in the URL
        with page_frame("/request", request, watch):
            _RequestPage(explain, id.strip())


class PoolPanel:
    """One pool on the page."""

    def __init__(self, name: str) -> None:
        with ui.element("section").classes("panel").props(f'aria-label="Pool {name}"'):
            with ui.element("div").classes("panel-head"):
                text("h2", name)
                self._state = text("span").classes("cell-text")
                self._note = text("span").classes("note")
            with ui.element("div").classes("tiles"):
                self._tiles = {
                    key: _tile(heading)
                    for key, heading in {
                        "kv": "KV in use",
                        "running": "running",
                        "waiting": "waiting",
                        "swapped": "swapped out",
                        "rate": "output tokens/s",
                        "step": "slowest step",
                    }.items()
                }
            with ui.element("div").classes("charts"):
                self._kv = _chart("KV in use, against the watermarks")
                self._batch = _chart("Batch: requests running, by tenant")
                self._queue = _chart("Queue: requests waiting, by tier and tenant")
                self._steps = _chart("Time of a step")
            text("h3", "Engines")
            self._engines = cell_table(ENGINE_COLUMNS, label=f"Engines of {name}")

    def show(self, pool: PoolView, watch: FleetWatch) -> None:
        """Bring everything up to date."""
        verdict = verdict_cell(pool.programmed)
        self._state.text = verdict.text
        self._state.classes(replace=f"cell-text state tone-{verdict.tone}")
        self._note.text = _headline(pool)
        for key, value in _figures(pool).items():
            self._tiles[key].text = value
        self._tiles["kv"].classes(replace=f"value tone-{kv_tone(pool.kv_percent, pool)}")
        samples = watch.history(pool.name)
        tenants = charted_tenants(pool, samples)
        _redraw(self._kv, kv_chart(pool, samples))
        _redraw(self._batch, batch_chart(samples, tenants))
        _redraw(self._queue, queue_chart(pool, tenants))
        _redraw(self._steps, step_chart(samples))
        set_rows(self._engines, engine_rows(pool))


class _RequestPage:
    """Looks a request up, and again every other second."""

    def __init__(self, explain: Explain, request_id: str) -> None:
        self._explain = explain
        self._request_id = request_id
        with ui.element("form").classes("find").on("submit.prevent", self._go):
            self._wanted = ui.input("Request id", value=request_id).props("outlined dense")
            ui.button("Look up").props("type=submit unelevated no-caps")
        self._said = text("p").classes("empty").props('role="status"')
        self._place = ui.element("div")
        self._shown: list[RequestView] | None = None
        if request_id:
            self._said.text = f"Looking for {request_id} …"
            ui.timer(REQUEST_SECONDS, self._look, immediate=True)
        else:
            self._said.text = (
                "The id is in the answer's x-request-id header and in the id of each response;"
                " what a client sent as x-request-id works, too."
            )

    def _go(self) -> None:
        ui.navigate.to(f"/request?id={quote((self._wanted.value or '').strip())}")

    async def _look(self) -> None:
        try:
            found = [request_view(one) for one in await self._explain(self._request_id)]
        except ClusterError as error:
            self._said.text = str(error)
            return
        self._said.text = "" if found else f"No engine knows a request {self._request_id}."
        if found == self._shown:
            return
        self._shown = found
        self._place.clear()
        with self._place:
            for view in found:
                _request_panel(view)


def _tenants_page(watch: FleetWatch) -> None:
    empty = text("p", NO_TENANTS).classes("empty")
    with ui.element("div").classes("find"):
        wanted = ui.input("Find a tenant, tier or pool").props("outlined dense clearable")
    place = ui.element("div")
    tables: dict[str, ui.table] = {}

    def show() -> None:
        word = (wanted.value or "").strip().lower()
        views = watch.tenants()
        found = {
            pool: [
                view
                for view in views
                if view.pool == pool and word in f"{view.pool} {view.tenant} {view.tier}".lower()
            ]
            for pool in dict.fromkeys(view.pool for view in views)
        }
        empty.set_visibility(not found)
        if list(tables) != list(found):
            place.clear()
            tables.clear()
            with place:
                tables.update({pool: _tenant_panel(pool) for pool in found})
        for pool, own in found.items():
            set_rows(tables[pool], tenant_rows(own))

    wanted.on_value_change(show)
    refresh_with(watch, show)


def _tenant_panel(pool: str) -> ui.table:
    with ui.element("section").classes("panel").props(f'aria-label="Tenants of {pool}"'):
        with ui.element("div").classes("panel-head"):
            text("h2", pool)
        table = cell_table(
            TENANT_COLUMNS, label=f"Tenants of {pool}", rows_per_page=TENANTS_PER_PAGE
        )
        text("p", UNITS).classes("aside")
    return table


def _request_panel(view: RequestView) -> None:
    with ui.element("section").classes("panel").props(f'aria-label="Request {view.request_id}"'):
        with ui.element("div").classes("panel-head"):
            text("h2", view.request_id)
        with ui.element("dl").classes("figures"):
            for name, value in view.facts:
                text("dt", name)
                text("dd", value)
        text("h3", "Decisions")
        set_rows(cell_table(DECISION_COLUMNS, label="Decisions, the oldest first"), view.rows)


def _tile(heading: str) -> TextElement:
    with ui.element("div").classes("tile"):
        value = text("div").classes("value")
        text("div", heading).classes("name")
    return value


def _chart(heading: str) -> ui.echart:
    with ui.element("div"):
        text("h3", heading)
        chart = ui.echart({}, renderer="svg").classes("chart")
        return chart.props(f'role="img" aria-label="{heading}"')


def _redraw(chart: ui.echart, options: Options) -> None:
    if chart.options != options:
        chart.options.clear()
        chart.options.update(options)
        chart.update()


def _headline(pool: PoolView) -> str:
    parts = [f"{pool.ready} engines ready" if pool.ready else "", f"revision {pool.revision}"]
    if pool.laggards:
        parts.append(f"behind: {', '.join(pool.laggards)}")
    if pool.programmed.is_good is False:
        parts.append(pool.programmed.message)
    return " · ".join(part for part in parts if part)


def _figures(pool: PoolView) -> dict[str, str]:
    engines, rate, step = pool.engines, pool.output_tokens_per_second, pool.step_seconds
    return {
        "kv": percent_text(pool.kv_percent),
        "running": count_text(sum(engine.running for engine in engines)),
        "waiting": count_text(sum(engine.waiting for engine in engines)),
        "swapped": count_text(sum(engine.swapped for engine in engines)),
        "rate": NOTHING if rate is None else count_text(rate),
        "step": NOTHING if step is None else seconds_text(step),
    }
