"""One pool, or some: what its engines do, and for whom."""

from tidegate_observability.description import (
    GOOD_IS_ZERO,
    TOKENS_PER_SECOND,
    Chart,
    Choice,
    Page,
    Query,
    Section,
    quantiles,
    rate,
    selector,
)

_TOP = 10


def _of(**labels: str) -> str:
    return selector(pool="~$pool", **labels)


_IN = _of()


def _tokens(kind: str) -> str:
    return f"sum(rate(tidegate_tokens_total{_of(kind=kind)}[$__rate_interval]))"


def _top(expr: str) -> str:
    return f"topk({_TOP}, {expr})"


_REQUESTS = Section(
    title="Requests",
    charts=(
        Chart(
            title="Requests by state",
            description="Swapped: their KV is in the host's memory.",
            unit="short",
            queries=(Query(f"sum by (state) (tidegate_requests{_IN})", "{{state}}"),),
            kind="stacked",
        ),
        Chart(
            title="Time to first token",
            description="From arrival, all tenants.",
            unit="s",
            queries=quantiles("tidegate_pool_ttft_seconds", _IN),
        ),
        Chart(
            title="Time between tokens",
            description="Of one request, all tenants.",
            unit="s",
            queries=quantiles("tidegate_pool_itl_seconds", _IN),
        ),
        Chart(
            title="Time in the queue",
            description="From arrival to the first admission, all tenants.",
            unit="s",
            queries=quantiles("tidegate_pool_queue_seconds", _IN),
        ),
        Chart(
            title="Time to the last token",
            description="From arrival, all tenants.",
            unit="s",
            queries=quantiles("tidegate_pool_e2e_seconds", _IN),
        ),
        Chart(
            title="Refused by reason",
            description="Requests per second that were refused at arrival.",
            unit="reqps",
            queries=(Query(rate(f"tidegate_shed_total{_IN}", "reason"), "{{reason}}"),),
        ),
    ),
)

_ENGINES = Section(
    title="Engines",
    charts=(
        Chart(
            title="Tokens by kind",
            description="Computed prompt tokens, those found in the prefix cache, output tokens,"
            " and those computed again after a preemption.",
            unit=TOKENS_PER_SECOND,
            queries=(Query(rate(f"tidegate_tokens_total{_IN}", "kind"), "{{kind}}"),),
        ),
        Chart(
            title="Prefix cache hits",
            description="Share of the prompt tokens that needn't be computed.",
            unit="percentunit",
            queries=(
                Query(f"{_tokens('cached')} / ({_tokens('cached')} + {_tokens('prompt')})", "hits"),
            ),
            maximum=1,
        ),
        Chart(
            title="Batch size",
            description="Requests in a step, mean of each engine.",
            unit="short",
            queries=(
                Query(
                    f"{rate(f'tidegate_step_batch_size_sum{_IN}', 'instance')}"
                    f" / {rate(f'tidegate_step_batch_size_count{_IN}', 'instance')}",
                    "{{instance}}",
                ),
            ),
        ),
        Chart(
            title="Time of a step",
            description="Computing one step, all engines. The time between tokens can't be less.",
            unit="s",
            queries=quantiles("tidegate_step_seconds", _IN),
        ),
        Chart(
            title="Tokens of a step",
            description="Mean of a step: prompt tokens (prefill) beside newest output tokens"
            " (decode).",
            unit="short",
            queries=(
                Query(
                    f"{rate(f'tidegate_step_tokens_sum{_IN}', 'kind')}"
                    f" / {rate(f'tidegate_step_tokens_count{_IN}', 'kind')}",
                    "{{kind}}",
                ),
            ),
        ),
        Chart(
            title="Cost of scheduling",
            description="Time planning and committing over time computing.",
            unit="percentunit",
            queries=(
                Query(
                    f"{rate(f'tidegate_scheduler_seconds_sum{_IN}', 'instance')}"
                    f" / {rate(f'tidegate_step_seconds_sum{_IN}', 'instance')}",
                    "{{instance}}",
                ),
            ),
        ),
    ),
)

_MEMORY = Section(
    title="KV memory",
    charts=(
        Chart(
            title="KV against watermarks",
            description="Share of the KV blocks in use of each engine. Above the high watermark"
            " borrowers are taken out until usage is below the low one.",
            unit="percentunit",
            queries=(
                Query(
                    f"sum by (instance) (tidegate_kv_blocks{_of(state='used')})"
                    f" / sum by (instance) (tidegate_kv_blocks{_of(state='~used|cached|free')})",
                    "{{instance}}",
                ),
                Query(
                    f"max by (level) (tidegate_kv_watermark_ratio{_IN})",
                    "{{level}} watermark",
                    is_limit=True,
                ),
            ),
            maximum=1,
        ),
        Chart(
            title="KV blocks by state",
            description="Used: held by requests. Cached: kept for prompts that begin alike, given"
            " up as soon as they are needed.",
            unit="short",
            queries=(
                Query(
                    f"sum by (state) (tidegate_kv_blocks{_of(state='~used|cached|free')})",
                    "{{state}}",
                ),
            ),
            kind="stacked",
        ),
        Chart(
            title="Watermark by engine",
            description="Yellow: nothing is lent any more. Red: borrowers are taken out.",
            unit="short",
            queries=(Query(f"max by (instance) (tidegate_watermark_state{_IN})", "{{instance}}"),),
            kind="states",
            states=((0, "green", "green"), (1, "yellow", "yellow"), (2, "red", "red")),
        ),
        Chart(
            title="Preemptions by cause",
            description="Displaced: for a higher tier. Reclaimed: lent KV taken back. Pressure: KV"
            " ran out, or the watermark was red.",
            unit="ops",
            queries=(
                Query(
                    rate(f"tidegate_preemptions_total{_IN}", "cause, mode"), "{{cause}}, {{mode}}"
                ),
            ),
        ),
        Chart(
            title="Swapping",
            description="KV moved between device and host.",
            unit="Bps",
            queries=(Query(rate(f"tidegate_swap_bytes_total{_IN}", "direction"), "{{direction}}"),),
        ),
        Chart(
            title="Host memory in use",
            description="Share of the host's KV blocks. When it is full, preempted requests are"
            " computed again.",
            unit="percentunit",
            queries=(
                Query(
                    f"sum by (instance) (tidegate_kv_blocks{_of(state='host_used')})"
                    f" / sum by (instance) (tidegate_kv_blocks{_of(state='~host_used|host_free')})",
                    "{{instance}}",
                ),
            ),
            maximum=1,
        ),
    ),
)

_TENANTS = Section(
    title="Tenants",
    charts=(
        Chart(
            title="Output by tenant",
            description=f"Output tokens per second of the {_TOP} largest.",
            unit=TOKENS_PER_SECOND,
            queries=(
                Query(
                    _top(rate(f"tidegate_tokens_total{_of(kind='output')}", "tenant")),
                    "{{tenant}}",
                ),
            ),
        ),
        Chart(
            title="Running by tenant",
            description=f"Who makes up the batches: the {_TOP} largest.",
            unit="short",
            queries=(
                Query(
                    _top(f"sum by (tenant) (tidegate_requests{_of(state='running')})"),
                    "{{tenant}}",
                ),
            ),
        ),
        Chart(
            title="KV by tenant",
            description=f"Share of the pool's KV blocks that the {_TOP} largest hold.",
            unit="percentunit",
            queries=(
                Query(
                    _top(
                        f"sum by (tenant) (tidegate_tenant_kv_blocks{_of(state='used')})"
                        f" / scalar(sum(tidegate_kv_blocks{_of(state='~used|cached|free')}))"
                    ),
                    "{{tenant}}",
                ),
            ),
        ),
        Chart(
            title="Targets missed by tenant",
            description="Share that missed its target, in the window of the service level: the"
            f" {_TOP} worst.",
            unit="percentunit",
            queries=(
                Query(
                    _top(f"max by (tenant, objective) (tidegate_slo_miss_ratio{_IN})"),
                    "{{tenant}} {{objective}}",
                ),
            ),
            maximum=1,
        ),
        Chart(
            title="Refused by tenant",
            description=f"Requests per second refused at arrival, of the {_TOP} with the most.",
            unit="reqps",
            queries=(Query(_top(rate(f"tidegate_shed_total{_IN}", "tenant")), "{{tenant}}"),),
        ),
        Chart(
            title="Cancelled by cause",
            description="Requests per second that were taken out before their end.",
            unit="reqps",
            queries=(Query(rate(f"tidegate_cancelled_total{_IN}", "cause"), "{{cause}}"),),
        ),
    ),
)

_POLICY = Section(
    title="Policy and traffic",
    charts=(
        Chart(
            title="Revision by engine",
            description="The policy in force. Lines that stay apart: engines that lag.",
            unit="short",
            queries=(Query(f"max by (instance) (tidegate_policy_revision{_IN})", "{{instance}}"),),
        ),
        Chart(
            title="Time to take effect",
            description="From a policy's arrival in an engine to the first step under it.",
            unit="s",
            queries=(
                Query(
                    f"sum by (instance) (tidegate_policy_apply_seconds_sum{_IN})"
                    f" / sum by (instance) (tidegate_policy_apply_seconds_count{_IN})",
                    "{{instance}}, mean",
                ),
            ),
        ),
        Chart(
            title="Without Redis",
            description="Engines that can't ask Redis: they keep their policy, and divide rate"
            " limits by their number.",
            unit="short",
            queries=(Query(f"sum by (pool) (tidegate_rate_limits_divided{_IN})", "{{pool}}"),),
            steps=GOOD_IS_ZERO,
        ),
        Chart(
            title="Tokens after cancel",
            description="More than 0 is a defect.",
            unit="short",
            queries=(
                Query(
                    f"sum by (instance) (tidegate_tokens_after_cancel_total{_IN})", "{{instance}}"
                ),
            ),
            steps=GOOD_IS_ZERO,
        ),
        Chart(
            title="Spread of lengths, 5 minutes over the day",
            description="Variance of prompt and output lengths, of the last 5 minutes over that of"
            " the day. Far from 1: the traffic is another one than what limits were made for.",
            unit="short",
            queries=(
                Query(
                    f"avg by (kind) (tidegate_length_variance{_of(window='5m')})"
                    f" / avg by (kind) (tidegate_length_variance{_of(window='1d')})",
                    "{{kind}}",
                ),
            ),
        ),
        Chart(
            title="Spread of queue times, 5 minutes over the day",
            description="The same of the time in the queue, of the tenants with most change.",
            unit="short",
            queries=(
                Query(
                    _top(
                        f"avg by (tenant) (tidegate_queue_time_variance{_of(window='5m')})"
                        f" / avg by (tenant) (tidegate_queue_time_variance{_of(window='1d')})"
                    ),
                    "{{tenant}}",
                ),
            ),
        ),
    ),
)

POOL = Page(
    uid="tidegate-pool",
    title="Tidegate / Pool",
    description="What the engines of a pool do, and for whom.",
    choices=(Choice(name="pool", label="Pool", series="tidegate_policy_revision"),),
    sections=(_REQUESTS, _ENGINES, _MEMORY, _TENANTS, _POLICY),
)
