"""What an engine wants of whatever decides its steps."""

from collections.abc import Iterable, Mapping
from math import inf
from typing import Protocol

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.plan import StepPlan, StepResult
from tidegate_engine.core.request import Rejection, Request, SchedulerStats, TokenOutput
from tidegate_engine.core.sequence import Phase
from tidegate_engine.core.standings import StandingBook
from tidegate_policies.snapshot import PolicySnapshot


class StepScheduler(Protocol):
    """Continuous batching, or one of the baselines that it is compared with."""

    @property
    def revision(self) -> int:
        """The policy in force; 0 = none yet."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether any request is alive, or a copy in flight."""
        ...

    @property
    def standings(self) -> StandingBook:
        """Where the requests stand."""
        ...

    @property
    def step_costs(self) -> ExecutorCosts:
        """What steps are taken to cost."""
        ...

    def submit(self, request: Request, now: float) -> Rejection | None:
        """Queue a request, or say why not."""
        ...

    def cancel(self, request_id: str, now: float) -> Phase | None:
        """Take a request out; returns the phase it was in, None when it wasn't alive."""
        ...

    def finish(self, request_id: str, now: float) -> bool:
        """End a request as finished; returns whether it was alive."""
        ...

    def apply_policy(self, snapshot: PolicySnapshot, revision: int, *, at: float = inf) -> None:
        """Put a policy in force with the next plan; `at` is when it came, if before that."""
        ...

    def note_elsewhere(self, service: Mapping[str, float], active: Iterable[str]) -> None:
        """Count what other engines of the pool gave each tenant, and who has work there."""
        ...

    def plan_step(self, now: float) -> StepPlan:
        """Decide the next step."""
        ...

    def commit_step(
        self, plan: StepPlan, result: StepResult, now: float
    ) -> tuple[TokenOutput, ...]:
        """Account for the step just executed."""
        ...

    def abandon_step(self, plan: StepPlan, now: float) -> tuple[str, ...]:
        """Drop the requests of a step that could not be executed; returns them."""
        ...

    def stats(self) -> SchedulerStats:
        """Return the numbers at this step boundary."""
        ...
