"""Names of the sides that `tidegate bench isolation` compares."""

from enum import StrEnum


class SideName(StrEnum):
    """How everybody is served.

    TIDEGATE: by tiers, weights and targets, with shedding and preemption. FCFS: everybody is one
    tenant, in order of arrival. PRIORITY: a tenant for each tier, after all higher ones, in order
    of arrival; nobody is ever taken out.
    """

    TIDEGATE = "tidegate"
    FCFS = "fcfs"
    PRIORITY = "priority"


TIDEGATE, FCFS, PRIORITY = SideName
