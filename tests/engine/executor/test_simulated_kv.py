from hypothesis import given
from hypothesis import strategies as st

from tidegate_engine.core.plan import PlanRow
from tidegate_engine.executor import simulated_kv
from tidegate_engine.executor.simulated_kv import SimulatedKv
from tidegate_testing.sampling import a_context

NUM_BLOCKS, BLOCK_SIZE = 6, 2

tables = st.sampled_from([[0, 1, 2, 3], [0, 1, 4, 5], [2, 3, 0, 1]])
writes = st.tuples(st.just("write"), tables, st.integers(0, 6), st.integers(1, 2))
reads = st.tuples(st.just("read"), st.sampled_from("abc"), tables, st.integers(1, 8))
puts = st.tuples(st.just("put"), st.integers(0, NUM_BLOCKS - 1), st.integers(0, 2))


def row(block_ids: list[int], start: int, count: int, request_id: str = "w") -> PlanRow:
    tokens = [3] * count
    return PlanRow(request_id, start, tokens, block_ids, samples=True, sampling=a_context())


@given(st.lists(st.one_of(writes, reads, reads, puts), max_size=40))
def test_what_is_read_is_what_is_there(actions: list[tuple]) -> None:  # type: ignore[type-arg]
    kv = SimulatedKv(NUM_BLOCKS, BLOCK_SIZE)
    for i, (what, *arguments) in enumerate(actions):
        if what == "write":
            kv.write(row(*arguments))
        elif what == "put":
            block, fingerprint = arguments
            kv.put(block, (fingerprint,) * BLOCK_SIZE)
        else:
            request_id, table, count = arguments
            fresh = SimulatedKv(NUM_BLOCKS, BLOCK_SIZE)
            for block in range(NUM_BLOCKS):
                fresh.put(block, kv.content(block))
            known, anew = row(table, 0, count, request_id), row(table, 0, count, f"n{i}")
            assert kv.read(known) == fresh.read(anew)


def test_requests_that_ended_are_forgotten() -> None:
    kv = SimulatedKv(NUM_BLOCKS, BLOCK_SIZE)
    first = kv.read(row([0, 1], 0, 4, "r0"))
    for i in range(1, 3 * simulated_kv._MAX_PREFIXES):
        assert kv.read(row([0, 1], 0, 4, f"r{i}")) == first
    assert len(kv._prefixes) <= simulated_kv._MAX_PREFIXES
    assert len(kv._readers[0]) <= simulated_kv._MAX_PREFIXES
