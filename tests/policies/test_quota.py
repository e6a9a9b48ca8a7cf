from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_policies.quota import BlocksNotHeldError, KvLedger, KvQuota

POOL = 100


def ledger_of(used: Mapping[str, int] | None = None, **quotas: KvQuota) -> KvLedger:
    ledger = KvLedger(POOL)
    ledger.set_quotas(quotas)
    for tenant, blocks in (used or {}).items():
        ledger.take(tenant, blocks)
    return ledger


def test_a_nominal_that_is_not_lendable_stays_free_of_borrowers() -> None:
    ledger = ledger_of(gold=KvQuota(nominal_percent=30, lendable_percent=0))
    assert ledger.available("batch", 100) == 70
    assert ledger.can_take("batch", 70, free=100)
    assert not ledger.can_take("batch", 71, free=100)
    assert ledger.cap("batch") == 70
    ledger.take("batch", 70)
    assert ledger.can_take("gold", 30, free=30)


def test_an_unused_nominal_is_lent_up_to_its_lendable_part_and_not_beyond() -> None:
    ledger = ledger_of({"gold": 9}, gold=KvQuota(nominal_percent=30, lendable_percent=50))
    assert ledger.kept_from("batch") == 11  # of 21 unused blocks 10.5 are lendable: 10
    assert ledger.available("batch", 91) == 80
    assert ledger.cap("batch") == 85  # were gold idle


def test_an_unused_nominal_is_lent_whole_by_default() -> None:
    ledger = ledger_of(gold=KvQuota(nominal_percent=30))
    assert ledger.available("batch", 100) == ledger.cap("batch") == 100
    ledger.take("batch", 100)
    assert (ledger.num_borrowed, ledger.has_borrowers) == (100, True)


def test_a_tenant_borrows_no_more_than_its_limit() -> None:
    ledger = ledger_of(gold=KvQuota(nominal_percent=30, borrowing_limit_percent=10))
    assert ledger.cap("gold") == 40
    assert ledger.available("gold", 100) == 40
    assert ledger.can_take("gold", 40, free=100)
    assert not ledger.can_take("gold", 41, free=100)
    assert ledger_of(gold=KvQuota(nominal_percent=30, borrowing_limit_percent=0)).cap("gold") == 30


def test_a_tenants_own_kept_blocks_are_not_kept_from_itself() -> None:
    kept = KvQuota(nominal_percent=30, lendable_percent=0)
    ledger = ledger_of(gold=kept, silver=kept)
    assert ledger.kept_from("gold") == 30
    assert ledger.available("gold", 100) == 70
    assert ledger.can_take("gold", 70, free=100)
    assert not ledger.can_take("gold", 71, free=100)


def test_within_its_nominal_a_tenant_takes_no_free_blocks_that_are_kept_for_another() -> None:
    ledger = ledger_of(
        {"batch": 70},
        gold=KvQuota(nominal_percent=30),
        silver=KvQuota(nominal_percent=30, lendable_percent=0),
    )
    # What was lent out is gold's; the free blocks are silver's, who lends nothing.
    assert ledger.available("gold", 30) == 0
    assert ledger.available("silver", 30) == 30
    ledger.give_back("batch", 10)
    assert ledger.available("gold", 40) == 10
    assert ledger.fits_nominal("gold", 30)
    assert not ledger.fits_nominal("gold", 31)


def test_a_cap_is_a_tenants_own_only_where_its_limit_is_less_than_what_others_leave() -> None:
    ledger = ledger_of(
        {},
        gold=KvQuota(nominal_percent=30, lendable_percent=0),
        small=KvQuota(borrowing_limit_percent=60),
        large=KvQuota(borrowing_limit_percent=70),
    )
    assert [ledger.has_own_limit(t) for t in ("small", "large", "gold", "none")] == [
        True,
        False,
        False,
        False,
    ]


def test_new_quotas_leave_what_is_held_and_count_it_anew() -> None:
    ledger = ledger_of({"batch": 80})
    ledger.set_quotas({"gold": KvQuota(nominal_percent=80, lendable_percent=0)})
    assert (ledger.used("batch"), ledger.cap("batch")) == (80, 20)
    assert ledger.available("batch", 20) == 0
    assert ledger.can_take("batch", 0, free=20)
    assert ledger.available("gold", 20) == 20
    ledger.set_quotas({"batch": KvQuota(nominal_percent=50)})
    assert (ledger.nominal("batch"), ledger.borrowed("batch"), ledger.num_borrowed) == (50, 30, 30)
    assert (ledger.nominal("gold"), ledger.kept_from("batch")) == (0, 0)


def test_percentages_are_rounded_down_to_blocks() -> None:
    ledger = KvLedger(19)
    ledger.set_quotas({"gold": KvQuota(nominal_percent=30, borrowing_limit_percent=10)})
    assert (ledger.nominal("gold"), ledger.cap("gold")) == (5, 6)


def test_a_tenant_never_gives_back_more_than_it_holds() -> None:
    ledger = ledger_of({"gold": 3})
    with pytest.raises(BlocksNotHeldError, match="'gold' can't give back 4 KV blocks: it holds 3"):
        ledger.give_back("gold", 4)
    with pytest.raises(BlocksNotHeldError):
        ledger.what_if({"gold": 4})
    ledger.check_invariants({"gold": 3})


def test_a_simulated_release_leaves_the_ledger_alone_and_is_left_alone_by_it() -> None:
    ledger = ledger_of(
        {"batch": 60, "gold": 10}, gold=KvQuota(nominal_percent=40, lendable_percent=0)
    )
    after = ledger.what_if({"batch": 25, "gold": 10})
    assert (after.used("batch"), after.used("gold"), after.num_borrowed) == (35, 0, 35)
    assert (ledger.kept_from("batch"), after.kept_from("batch")) == (30, 40)
    ledger.take("gold", 30)
    after.take("batch", 5)
    ledger.check_invariants({"batch": 60, "gold": 40})
    after.check_invariants({"batch": 40})


@pytest.mark.parametrize("attribute", ["_used", "_num_borrowed", "_num_kept"])
def test_books_that_are_wrong_are_found(attribute: str) -> None:
    ledger = ledger_of({"batch": 5}, gold=KvQuota(nominal_percent=40, lendable_percent=0))
    ledger.check_invariants({"batch": 5, "idle": 0})
    setattr(ledger, attribute, {"batch": 4} if attribute == "_used" else 4)
    with pytest.raises(AssertionError):
        ledger.check_invariants({"batch": 5})


TENANTS = ["a", "b", "c", "unlisted"]

quotas_of_all = st.fixed_dictionaries(
    {
        tenant: st.builds(
            KvQuota,
            nominal_percent=st.integers(0, 30),
            borrowing_limit_percent=st.none() | st.integers(0, 100),
            lendable_percent=st.integers(0, 100),
        )
        for tenant in TENANTS[:-1]
    }
)


class NaiveBooks:
    """The rules as design states them, summed up anew at every question (pool of 100)."""

    def __init__(self, quotas: Mapping[str, KvQuota]) -> None:
        self.quotas = {tenant: quotas.get(tenant, KvQuota()) for tenant in TENANTS}
        self.used = dict.fromkeys(TENANTS, 0)

    @property
    def free(self) -> int:
        return POOL - sum(self.used.values())

    def unused(self, tenant: str) -> int:
        return max(0, self.quotas[tenant].nominal_percent - self.used[tenant])

    def borrowed(self, tenant: str) -> int:
        return max(0, self.used[tenant] - self.quotas[tenant].nominal_percent)

    def kept_from(self, tenant: str) -> int:
        return sum(
            self.unused(other) - self.unused(other) * self.quotas[other].lendable_percent // 100
            for other in TENANTS
            if other != tenant
        )

    def can_take(self, tenant: str, blocks: int, cap: int) -> bool:
        return self.used[tenant] + blocks <= cap and self.free - blocks >= self.kept_from(tenant)


@given(
    quotas_of_all,
    quotas_of_all,
    st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(-40, 40)), max_size=60),
)
def test_the_ledger_agrees_with_a_naive_recomputation(
    quotas: dict[str, KvQuota], later: dict[str, KvQuota], moves: list[tuple[str, int]]
) -> None:
    ledger = ledger_of(None, **quotas)
    naive = NaiveBooks(quotas)
    for position, (tenant, blocks) in enumerate(moves):
        if position == 30:
            ledger.set_quotas(later)
            naive.quotas |= later
        if blocks > 0:
            can_take = ledger.can_take(tenant, blocks, free=naive.free)
            assert can_take == naive.can_take(tenant, blocks, ledger.cap(tenant))
            assert can_take == (blocks <= ledger.available(tenant, naive.free))
            if can_take:
                ledger.take(tenant, blocks)
                naive.used[tenant] += blocks
                assert naive.used[tenant] <= ledger.cap(tenant)
        elif naive.used[tenant] >= -blocks:
            ledger.give_back(tenant, -blocks)
            naive.used[tenant] += blocks
        ledger.check_invariants(naive.used)
        assert ledger.num_borrowed == sum(naive.borrowed(t) for t in TENANTS)
        for each in TENANTS:
            assert ledger.can_take(each, 0, free=naive.free)
            assert ledger.kept_from(each) == naive.kept_from(each)
            assert ledger.borrowed(each) == naive.borrowed(each)
            # What is lacking of a nominal is free or borrowed: reclaiming always helps.
            assert naive.unused(each) <= naive.free + ledger.num_borrowed
        if not ledger.has_borrowers:
            assert all(ledger.can_take(t, naive.unused(t), free=naive.free) for t in TENANTS)


@given(quotas_of_all, st.sampled_from(TENANTS))
def test_the_cap_is_what_a_tenant_reaches_alone_in_the_pool(
    quotas: dict[str, KvQuota], tenant: str
) -> None:
    ledger = ledger_of(None, **quotas)
    assert ledger.available(tenant, POOL) == ledger.cap(tenant)
