"""One tenant: what it was promised, what it gets, and what that costs."""

from tidegate_observability.description import (
    INTERVAL,
    OUTPUT_COST,
    PROMPT_COST,
    TOKENS_PER_SECOND,
    Chart,
    Choice,
    Page,
    Query,
    Section,
    Step,
    quantiles,
    rate,
    selector,
)


def _of(**labels: str) -> str:
    return selector(pool="~$pool", tenant="$tenant", **labels)


_OWN = _of()


def _service() -> str:
    """Return charged service per second by pool and tenant, of all tenants of the pools."""
    prompt, output = (
        rate(f"tidegate_tokens_total{selector(pool='~$pool', kind=kind)}", "pool, tenant")
        for kind in ("prompt", "output")
    )
    return f"({PROMPT_COST} * {prompt} + {OUTPUT_COST} * {output})"


_WEIGHTS = 'max by (pool, tenant, tier) (tidegate_tenant_weight{pool=~"$pool"})'
_TIERED = f"({_service()} * on (pool, tenant) group_right () ({_WEIGHTS} >= bool 0))"
_ACTIVE = f"({_WEIGHTS} and on (pool, tenant) ({_service()} > 0))"


def _share_of_tier(expr: str) -> str:
    """Return the tenant's part of what the tenants of its tier have together."""
    whole = f"sum by (pool, tier) ({expr})"
    mine = f"sum by (pool, tier) ({expr} and on (pool, tenant) tidegate_tenant_weight{_OWN})"
    return f"{mine} / {whole}"


def _target(objective: str) -> Query:
    return Query(
        f"max by (objective) (tidegate_slo_target_seconds{_of(objective=objective)})",
        "target",
        is_limit=True,
    )


def _burn(window: str) -> str:
    missed, observed, objective = (
        f"sum by (objective) (rate(tidegate_slo_missed_total{_OWN}[{window}]))",
        f"sum by (objective) (rate(tidegate_slo_observed_total{_OWN}[{window}]))",
        f"max by (objective) (tidegate_slo_objective_ratio{_OWN})",
    )
    return f"({missed} / {observed}) / (1 - {objective})"


_SERVICE_LEVEL = Section(
    title="Service level",
    charts=(
        Chart(
            title="Time to first token",
            description="From arrival to the first token, against the target.",
            unit="s",
            queries=(*quantiles("tidegate_ttft_seconds", _OWN), _target("ttft")),
        ),
        Chart(
            title="Time between tokens",
            description="Between two tokens of a request, against the target.",
            unit="s",
            queries=(*quantiles("tidegate_itl_seconds", _OWN), _target("itl")),
        ),
        Chart(
            title="Targets missed",
            description="Share that missed its target, in the window of the service level, against"
            " what that allows.",
            unit="percentunit",
            queries=(
                Query(f"max by (objective) (tidegate_slo_miss_ratio{_OWN})", "{{objective}}"),
                Query(
                    f"1 - max by (objective) (tidegate_slo_objective_ratio{_OWN})",
                    "{{objective}} allowed",
                    is_limit=True,
                ),
            ),
            maximum=1,
        ),
        Chart(
            title="Burn rate",
            description="Misses over what is allowed: at 1 the budget is used up just in time, at"
            " 14 within two days of a month.",
            unit="short",
            queries=(Query(_burn(INTERVAL), "{{objective}}"),),
            steps=(
                Step(value=None, color="green"),
                Step(value=1, color="orange"),
                Step(value=14.4, color="red"),
            ),
        ),
        Chart(
            title="Time in the queue",
            description="From arrival to the first admission.",
            unit="s",
            queries=quantiles("tidegate_queue_seconds", _OWN),
        ),
        Chart(
            title="Time to the last token",
            description="From arrival.",
            unit="s",
            queries=quantiles("tidegate_e2e_seconds", _OWN),
        ),
    ),
)

_SHARE = Section(
    title="Share",
    charts=(
        Chart(
            title="Requests by state",
            description="Swapped: preempted, their KV is in the host's memory.",
            unit="short",
            queries=(Query(f"sum by (state) (tidegate_requests{_OWN})", "{{state}}"),),
            kind="stacked",
        ),
        Chart(
            title="Share of the tier against weight",
            description="Charged service of the tenant over that of all tenants of its tier, and"
            " what its weight entitles it to beside those that are active. Less than that is fine"
            " for a tenant that wants no more.",
            unit="percentunit",
            queries=(
                Query(_share_of_tier(_TIERED), "{{tier}}: share"),
                Query(_share_of_tier(_ACTIVE), "{{tier}}: by weight", is_limit=True),
            ),
            maximum=1,
        ),
        Chart(
            title="KV against nominal",
            description="KV blocks in all engines. Above its nominal the tenant borrows, and may be"
            " asked back.",
            unit="short",
            queries=(
                Query(f"sum(tidegate_tenant_kv_blocks{_of(state='used')})", "used"),
                Query(f"sum(tidegate_tenant_kv_blocks{_of(state='borrowed')})", "borrowed"),
                Query(
                    f"sum(tidegate_tenant_kv_blocks{_of(state='nominal')})",
                    "nominal",
                    is_limit=True,
                ),
            ),
        ),
        Chart(
            title="Refused by reason",
            description="Requests per second that were refused at arrival.",
            unit="reqps",
            queries=(Query(rate(f"tidegate_shed_total{_OWN}", "reason"), "{{reason}}"),),
        ),
        Chart(
            title="Cancelled by cause",
            description="Requests per second that were taken out before their end.",
            unit="reqps",
            queries=(Query(rate(f"tidegate_cancelled_total{_OWN}", "cause"), "{{cause}}"),),
        ),
        Chart(
            title="Preemptions by cause",
            description="Displaced: for a higher tier. Reclaimed: lent KV taken back. Pressure: KV"
            " ran out, or the watermark was red.",
            unit="ops",
            queries=(Query(rate(f"tidegate_preemptions_total{_OWN}", "cause"), "{{cause}}"),),
        ),
        Chart(
            title="Deferred decodes",
            description="Output tokens per second that came a step later, for the prompts of a"
            " higher tier or its ITL target.",
            unit="ops",
            queries=(
                Query(f"sum(rate(tidegate_deferred_decodes_total{_OWN}[{INTERVAL}]))", "tokens"),
            ),
        ),
    ),
)


def _number(title: str, description: str, expr: str, unit: str) -> Chart:
    return Chart(
        title=title,
        description=description,
        unit=unit,
        queries=(Query(expr),),
        kind="number",
        width=4,
    )


def _total(kind: str) -> str:
    return f"sum(increase(tidegate_tokens_total{_of(kind=kind)}[$__range]))"


_COST = Section(
    title="Cost",
    charts=(
        _number("Prompt tokens", "Computed, in the time shown.", _total("prompt"), "short"),
        _number(
            "Cached tokens",
            "Prompt tokens found in the prefix cache, in the time shown; not charged.",
            _total("cached"),
            "short",
        ),
        _number("Output tokens", "In the time shown.", _total("output"), "short"),
        _number(
            "Recomputed tokens",
            "Computed again after preemptions, in the time shown; not charged.",
            _total("recomputed"),
            "short",
        ),
        _number(
            "Charged service",
            f"In cost units, in the time shown: {PROMPT_COST} for a computed prompt token,"
            f" {OUTPUT_COST} for an output token.",
            f"{PROMPT_COST} * {_total('prompt')} + {OUTPUT_COST} * {_total('output')}",
            "short",
        ),
        _number(
            "KV block seconds",
            "KV blocks times the time that they were held, in the time shown.",
            f"sum(increase(tidegate_kv_seconds_total{_OWN}[$__range]))",
            "short",
        ),
        Chart(
            title="Tokens by kind",
            description="Per second.",
            unit=TOKENS_PER_SECOND,
            queries=(Query(rate(f"tidegate_tokens_total{_OWN}", "kind"), "{{kind}}"),),
            width=12,
        ),
        Chart(
            title="KV blocks held",
            description="On average: what KV block seconds grow by in a second.",
            unit="short",
            queries=(Query(rate(f"tidegate_kv_seconds_total{_OWN}", "pool"), "{{pool}}"),),
            width=12,
        ),
    ),
)

TENANT = Page(
    uid="tidegate-tenant",
    title="Tidegate / Tenant",
    description="What a tenant was promised, what it gets, and what that costs.",
    choices=(
        Choice(name="tenant", label="Tenant", series="tidegate_requests", is_single=True),
        Choice(name="pool", label="Pool", series='tidegate_requests{tenant="$tenant"}'),
    ),
    sections=(_SERVICE_LEVEL, _SHARE, _COST),
)
