"""The same arrivals give the same plans, in every run and every process."""

import subprocess
import sys

from tidegate_engine.core.decisions import Reason
from tidegate_testing.mixed_load import run_mixed_load

SEEDS = (14, 17, 23)
_PROGRAM = f"""
from tidegate_testing.mixed_load import run_mixed_load
print(*(run_mixed_load(seed)[1] for seed in {SEEDS}))
"""


def digests_in_a_process_of_its_own(hash_seed: str) -> list[str]:
    """Return the digests that a fresh interpreter computes, with other hashes of strings."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.split()


def test_the_same_arrivals_give_the_same_plans_in_every_run_and_every_process() -> None:
    runs = [run_mixed_load(seed) for seed in SEEDS]
    causes = {decision.reason for engine, _ in runs for decision in engine.preempted()}
    assert causes == {Reason.PRESSURE, Reason.RECLAIMED, Reason.DISPLACED}
    for engine, _ in runs:
        assert any(plan.swap_in for plan in engine.plans)
        assert any(plan.copies for plan in engine.plans)
        assert any(plan.expired for plan in engine.plans)
    digests = [digest for _, digest in runs]
    assert run_mixed_load(SEEDS[0])[1] == digests[0]
    for hash_seed in ("0", "1"):
        assert digests_in_a_process_of_its_own(hash_seed) == digests


def test_other_arrivals_give_other_plans() -> None:
    assert run_mixed_load(1, steps=20)[1] != run_mixed_load(2, steps=20)[1]
