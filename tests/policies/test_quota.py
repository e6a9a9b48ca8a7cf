from hypothesis import given
from hypothesis import strategies as st

from tidegate_policies.quota import KvLedger


def test_nobody_takes_anothers_unused_nominal() -> None:
    ledger = KvLedger(100)
    ledger.set_nominal({"gold": 30})
    assert ledger.can_take("batch", 70, free=100)
    assert not ledger.can_take("batch", 71, free=100)
    assert ledger.cap("batch") == 70
    ledger.take("batch", 70)
    assert ledger.can_take("gold", 30, free=30)


def test_a_tenant_above_its_nominal_borrows() -> None:
    ledger = KvLedger(100)
    ledger.set_nominal({"gold": 30})
    ledger.take("gold", 34)
    assert (ledger.borrowed("gold"), ledger.fits_nominal("gold", 0)) == (4, False)
    assert ledger.can_take("batch", 66, free=66)  # gold's nominal is used up: nothing to keep


def test_a_raised_nominal_is_reached_as_soon_as_blocks_exist() -> None:
    ledger = KvLedger(10)
    ledger.take("batch", 8)
    ledger.set_nominal({"gold": 80})
    assert ledger.can_take("gold", 2, free=2)
    assert not ledger.can_take("batch", 1, free=2)


TENANTS = ["a", "b", "c"]


@given(
    st.fixed_dictionaries({t: st.integers(0, 30) for t in TENANTS}),
    st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(-6, 6)), max_size=60),
)
def test_nominal_can_always_be_reached(
    nominal: dict[str, int], moves: list[tuple[str, int]]
) -> None:
    ledger = KvLedger(100)
    ledger.set_nominal(nominal)
    used = dict.fromkeys(TENANTS, 0)
    for tenant, blocks in moves:
        free = 100 - sum(used.values())
        if blocks > 0 and ledger.can_take(tenant, blocks, free=free):
            ledger.take(tenant, blocks)
            used[tenant] += blocks
        elif blocks < 0 and used[tenant] >= -blocks:
            ledger.give_back(tenant, -blocks)
            used[tenant] += blocks
        ledger.check_invariants(used)
        free = 100 - sum(used.values())
        missing = {t: max(0, ledger.nominal(t) - used[t]) for t in TENANTS}
        assert sum(missing.values()) <= free
        assert all(ledger.can_take(t, n, free=free) for t, n in missing.items())
