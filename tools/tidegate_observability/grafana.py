"""From the description of a page to Grafana's JSON."""

import json
from itertools import count

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import stat, statetimeline, timeseries
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard

from tidegate_observability.description import Chart, Choice, Page, Query, Step

_DATASOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")
_HEIGHT = 8
_NUMBER_HEIGHT = 4
_TAG = "tidegate"

_Panel = timeseries.Panel | stat.Panel | statetimeline.Panel


def page_json(page: Page) -> str:
    """Return the text of a dashboard's file."""
    return json.dumps(_build(page).build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def _build(page: Page) -> builders.Dashboard:
    built = (
        builders.Dashboard(page.title)
        .uid(page.uid)
        .description(page.description)
        .tags([_TAG])
        .timezone("browser")
        .time("now-1h", "now")
        .refresh("30s")
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .readonly()
        .with_variable(builders.DatasourceVariable("datasource").label("Source").type("prometheus"))
        .link(
            builders.DashboardLink("Tidegate")
            .type(dashboard.DashboardLinkType.DASHBOARDS)
            .tags([_TAG])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
    )
    for choice in page.choices:
        built.with_variable(_variable(choice))
    ids = count(1)
    for section in page.sections:
        built.with_row(builders.Row(section.title).id(next(ids)))
        for chart in section.charts:
            built.with_panel(_panel(chart).id(next(ids)))
    return built


def _variable(choice: Choice) -> builders.QueryVariable:
    built = (
        builders.QueryVariable(choice.name)
        .label(choice.label)
        .datasource(_DATASOURCE)
        .query(f"label_values({choice.series}, {choice.name})")
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
    )
    if choice.is_single:
        return built
    everything = dashboard.VariableOption(selected=True, text="All", value="$__all")
    return built.multi(True).include_all(True).all_value(".*").current(everything)


def _panel(chart: Chart) -> _Panel:
    panel: _Panel
    match chart.kind:
        case "number":
            panel = _number()
        case "states":
            panel = _states(chart)
        case _:
            panel = _lines(chart)
    panel.title(chart.title).description(chart.description).datasource(_DATASOURCE)
    panel.unit(chart.unit).span(chart.width)
    panel.height(_NUMBER_HEIGHT if chart.kind == "number" else _HEIGHT)
    if chart.maximum is not None:
        panel.max(chart.maximum)
    # Without any, Grafana paints everything from 80 on red.
    panel.thresholds(_thresholds(chart.steps or (Step(value=None, color="green"),)))
    legends = {query.legend for query in chart.queries}
    links = [_link(name) for name in ("pool", "tenant") if f"{{{{{name}}}}}" in legends]
    if links:
        panel.data_links(links)
    for number, query in enumerate(chart.queries):
        panel.with_target(_target(query, chr(ord("A") + number)))
    return panel


def _link(name: str) -> Builder[dashboard.DashboardLink]:
    """Lead from a series of a pool or a tenant to its dashboard, at the same time."""
    url = f"/d/tidegate-{name}?var-{name}=${{__field.labels.{name}}}&${{__url_time_range}}"
    return builders.DashboardLink(f"This {name}").type(dashboard.DashboardLinkType.LINK).url(url)


def _number() -> stat.Panel:
    newest = common_builders.ReduceDataOptions().calcs(["lastNotNull"]).values(False)
    return (
        stat.Panel()
        .reduce_options(newest)
        .color_mode(common.BigValueColorMode.VALUE)
        .graph_mode(common.BigValueGraphMode.AREA)
        .min(0)
    )


def _states(chart: Chart) -> statetimeline.Panel:
    options = {
        str(value): dashboard.ValueMappingResult(text=text, color=color, index=value)
        for value, text, color in chart.states
    }
    return (
        statetimeline.Panel()
        .mappings([dashboard.ValueMap(options=options)])
        .merge_values(True)
        .show_value(common.VisibilityMode.NEVER)
        .row_height(0.8)
    )


def _lines(chart: Chart) -> timeseries.Panel:
    panel = (
        timeseries.Panel()
        .min(0)
        .line_width(1)
        .show_points(common.VisibilityMode.NEVER)
        .tooltip(
            common_builders.VizTooltipOptions()
            .mode(common.TooltipDisplayMode.MULTI)
            .sort(common.SortOrder.DESCENDING)
        )
        .legend(
            common_builders.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.TABLE)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs(["lastNotNull", "max"])
        )
    )
    if chart.kind == "stacked":
        panel.fill_opacity(40).stacking(
            common_builders.StackingConfig().mode(common.StackingMode.NORMAL)
        )
    if chart.steps:
        panel.thresholds_style(
            common_builders.GraphThresholdsStyleConfig().mode(
                common.GraphThresholdsStyleMode.DASHED
            )
        )
    for number, query in enumerate(chart.queries):
        if query.is_limit:
            panel.override_by_query(chr(ord("A") + number), _dashed())
    return panel


def _dashed() -> list[dashboard.DynamicConfigValue]:
    style = {"fill": "dash", "dash": [8, 6]}
    color = {"mode": "fixed", "fixedColor": "red"}
    return [
        dashboard.DynamicConfigValue(id_val="custom.lineStyle", value=style),
        dashboard.DynamicConfigValue(id_val="color", value=color),
    ]


def _thresholds(steps: tuple[Step, ...]) -> builders.ThresholdsConfig:
    return (
        builders.ThresholdsConfig()
        .mode(dashboard.ThresholdsMode.ABSOLUTE)
        .steps([dashboard.Threshold(value=step.value, color=step.color) for step in steps])
    )


def _target(query: Query, ref_id: str) -> Dataquery:
    return (
        Dataquery()
        .expr(query.expr)
        .legend_format(query.legend or "__auto")
        .ref_id(ref_id)
        .datasource(_DATASOURCE)
        .range()
    )
