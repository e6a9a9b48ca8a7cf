"""The engines' counters, read from the Prometheus text that they serve."""

from collections import defaultdict
from collections.abc import Iterable

from prometheus_client.parser import text_string_to_metric_families

from tidegate_policies.fairness import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST


class EngineMetrics:
    """All samples of one engine at one moment."""

    def __init__(self, text: str) -> None:
        """Parse a response of `/metrics`.

        Raises:
            ValueError: The text is no Prometheus exposition.
        """
        self._samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of the samples `name` that carry all of `labels`; 0 for none."""
        return sum(
            sample.value
            for sample in self._samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def label_values(self, name: str, label: str) -> set[str]:
        """Return the values that `label` has among the samples `name`."""
        return {
            sample.labels[label]
            for sample in self._samples
            if sample.name == name and label in sample.labels
        }

    def by_tenant(self, name: str, **labels: str) -> dict[str, float]:
        """Return the same sum for each tenant that has such samples."""
        sums: dict[str, float] = defaultdict(float)
        for sample in self._samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                sums[sample.labels["tenant"]] += sample.value
        return dict(sums)


class TenantTotals:
    """What one tenant has got of several engines, in totals that only grow."""

    def __init__(self, engines: Iterable[EngineMetrics], tenant: str) -> None:
        """Add up over the engines."""
        engines = tuple(engines)

        def total(name: str, **labels: str) -> float:
            return sum(engine.value(name, tenant=tenant, **labels) for engine in engines)

        self.prompt_tokens = total("tidegate_tokens_total", kind="prompt")
        self.output_tokens = total("tidegate_tokens_total", kind="output")
        self.preemptions = total("tidegate_preemptions_total")

    @property
    def service(self) -> float:
        """Charged service, in cost units."""
        return PROMPT_TOKEN_COST * self.prompt_tokens + OUTPUT_TOKEN_COST * self.output_tokens
