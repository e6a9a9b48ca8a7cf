"""The fleet on one page: is anything wrong, and in which pool."""

from tidegate_observability.description import (
    GOOD_IS_ZERO,
    LEGEND_POOL,
    TOKENS_PER_SECOND,
    Chart,
    Page,
    Query,
    Section,
    Step,
    quantile,
    rate,
)

_OUTPUT = 'tidegate_tokens_total{kind="output"}'
# Policies change rarely: over less there would mostly be nothing to show.
_HOUR = "1h"
_KV = 'sum by (pool) (tidegate_kv_blocks{{state=~"{states}"}})'


def _number(title: str, expr: str, description: str, unit: str, *steps: Step) -> Chart:
    return Chart(
        title=title,
        description=description,
        unit=unit,
        queries=(Query(expr),),
        kind="number",
        steps=steps,
        width=4,
    )


_NOW = Section(
    title="Now",
    charts=(
        _number(
            "Engines ready",
            'sum(tidegate_engines{state="ready"})',
            "Ready engine pods of all pools, as the operator sees them.",
            "short",
            Step(value=None, color="red"),
            Step(value=1, color="green"),
        ),
        _number(
            "Engines lagging",
            'sum(tidegate_engines{state="lagging"})',
            "Ready engines that don't run the newest policy of their pool.",
            "short",
            *GOOD_IS_ZERO,
        ),
        _number(
            "Output",
            f"sum(rate({_OUTPUT}[$__rate_interval]))",
            "Output tokens per second of all pools.",
            TOKENS_PER_SECOND,
        ),
        _number(
            "Running",
            'sum(tidegate_requests{state="running"})',
            "Requests in a batch.",
            "short",
        ),
        _number(
            "Waiting",
            'sum(tidegate_requests{state=~"waiting|swapped"})',
            "Requests that are in an engine, but not in its batch.",
            "short",
        ),
        _number(
            "Tenants below target",
            "count(count by (tenant) (tidegate_slo_miss_ratio > on (pool, tenant, objective)"
            " group_left () (1 - max by (pool, tenant, objective) (tidegate_slo_objective_ratio))))"
            " or on () (0 * count(tidegate_slo_miss_ratio))",
            "Tenants that miss a target more often than their service level allows, in the window"
            " of that service level.",
            "short",
            *GOOD_IS_ZERO,
        ),
    ),
)

_POOLS = Section(
    title="Pools",
    charts=(
        Chart(
            title="Output by pool",
            description="Output tokens per second.",
            unit=TOKENS_PER_SECOND,
            queries=(Query(rate(_OUTPUT, "pool"), LEGEND_POOL),),
            kind="stacked",
        ),
        Chart(
            title="Waiting by pool",
            description="Requests that are in an engine, but not in its batch. It grows without end"
            " where more arrives than is served.",
            unit="short",
            queries=(
                Query('sum by (pool) (tidegate_requests{state=~"waiting|swapped"})', LEGEND_POOL),
            ),
        ),
        Chart(
            title="KV in use by pool",
            description="Share of the KV blocks that requests hold, mean of the pool's engines.",
            unit="percentunit",
            queries=(
                Query(
                    f"{_KV.format(states='used')} / {_KV.format(states='used|cached|free')}",
                    LEGEND_POOL,
                ),
            ),
            maximum=1,
        ),
        Chart(
            title="Time to first token, p99",
            description="From arrival to the first token, all tenants of the pool.",
            unit="s",
            queries=(Query(quantile(0.99, "tidegate_pool_ttft_seconds", "", "pool"), LEGEND_POOL),),
        ),
        Chart(
            title="Time between tokens, p99",
            description="Between two tokens of a request, all tenants of the pool.",
            unit="s",
            queries=(Query(quantile(0.99, "tidegate_pool_itl_seconds", "", "pool"), LEGEND_POOL),),
        ),
        Chart(
            title="Refused by pool",
            description="Requests per second that were refused at arrival, for whatever reason.",
            unit="reqps",
            queries=(Query(rate("tidegate_shed_total", "pool"), LEGEND_POOL),),
        ),
        Chart(
            title="Preemptions by pool",
            description="Running requests per second that were taken out of the batch.",
            unit="ops",
            queries=(Query(rate("tidegate_preemptions_total", "pool"), LEGEND_POOL),),
        ),
        Chart(
            title="Watermark",
            description="The worst engine of each pool. Yellow: nothing is lent any more. Red:"
            " borrowers are taken out.",
            unit="short",
            queries=(Query("max by (pool) (tidegate_watermark_state)", LEGEND_POOL),),
            kind="states",
            states=((0, "green", "green"), (1, "yellow", "yellow"), (2, "red", "red")),
        ),
        Chart(
            title="Tokens after cancel",
            description="Tokens computed for requests whose cancel had taken effect before. More"
            " than 0 is a defect.",
            unit="short",
            queries=(Query("sum by (pool) (tidegate_tokens_after_cancel_total)", LEGEND_POOL),),
            steps=GOOD_IS_ZERO,
        ),
    ),
)

_CONTROL_PLANE = Section(
    title="Control plane",
    charts=(
        Chart(
            title="Engines by state",
            description="Ready engines; of these, the ones that run the newest policy, the ones"
            " that don't, and the ones that have lost Redis.",
            unit="short",
            queries=(Query("sum by (state) (tidegate_engines)", "{{state}}"),),
        ),
        Chart(
            title="Policy propagation",
            description="From the first change seen to the last ready engine that runs it, over"
            " the last hour.",
            unit="s",
            queries=(
                Query(quantile(0.5, "tidegate_propagation_seconds", "", "", over=_HOUR), "p50"),
                Query(quantile(0.99, "tidegate_propagation_seconds", "", "", over=_HOUR), "p99"),
            ),
        ),
        Chart(
            title="Compiling a pool",
            description="Time to turn all objects of one pool into its policy, over the last hour.",
            unit="s",
            queries=(
                Query(quantile(0.5, "tidegate_compile_seconds", "", "", over=_HOUR), "p50"),
                Query(quantile(0.99, "tidegate_compile_seconds", "", "", over=_HOUR), "p99"),
            ),
        ),
        Chart(
            title="Status writes",
            description="Requests to the API server that wrote a status. A settled cluster gets"
            " none; anything but `ok` deserves a look into the operator's log.",
            unit="wps",
            queries=(
                Query(rate("tidegate_status_writes_total", "kind, result"), "{{kind}} {{result}}"),
            ),
        ),
        Chart(
            title="Age of the watch",
            description="Time since the API server last told of an object or listed all of them."
            " It stays below the interval of the lists.",
            unit="s",
            queries=(Query("max(tidegate_watch_age_seconds)", "age"),),
        ),
        Chart(
            title="Policies stored",
            description="Policy revisions that were stored for the engines, per hour.",
            unit="short",
            queries=(
                Query(
                    "sum(rate(tidegate_policies_published_total[$__rate_interval])) * 3600",
                    "per hour",
                ),
            ),
        ),
    ),
)

FLEET = Page(
    uid="tidegate-fleet",
    title="Tidegate / Fleet",
    description="All pools: whether anything is wrong, and where.",
    choices=(),
    sections=(_NOW, _POOLS, _CONTROL_PLANE),
)
