from tidegate_engine.events import PolicyApplied
from tidegate_engine.policy_board import PolicyBoard, PolicyInForce
from tidegate_testing.policies import a_snapshot, a_tenant

FIRST, SECOND = a_snapshot(), a_snapshot(a_tenant("zeta"))


def applied(revision: int, *, step: int = 1) -> PolicyApplied:
    return PolicyApplied(revision=revision, step=step, at=0.0, seconds=0.0)


def in_force(board: PolicyBoard) -> PolicyInForce | None:
    return board.in_force


def test_a_policy_is_in_force_only_once_it_was_applied() -> None:
    handed: list[int] = []
    board = PolicyBoard(lambda _, revision: handed.append(revision))
    board.offer(FIRST, revision=3, digest="d3")
    assert handed == [3]
    assert in_force(board) is None
    assert (board.newest_revision, board.newest_digest) == (3, "d3")
    board.applied(applied(3, step=9))
    assert board.in_force is not None
    assert (board.in_force.revision, board.in_force.step, board.in_force.digest) == (3, 9, "d3")
    assert board.in_force.snapshot is FIRST
    assert (board.newest_revision, board.newest_digest) == (3, "d3")


def test_an_overtaken_policy_is_forgotten() -> None:
    board = PolicyBoard(lambda _snapshot, _revision: None)
    changes: list[int] = []
    board.on_change.append(lambda policy: changes.append(policy.revision))
    board.offer(FIRST, revision=1, digest="d1")
    board.offer(SECOND, revision=2, digest="d2")
    board.applied(applied(2))
    assert changes == [2]
    assert board.in_force is not None
    assert board.in_force.snapshot is SECOND


def test_a_newer_policy_stays_on_its_way_while_an_older_one_is_applied() -> None:
    board = PolicyBoard(lambda _snapshot, _revision: None)
    board.offer(FIRST, revision=1, digest="d1")
    board.offer(SECOND, revision=2, digest="d2")
    board.applied(applied(1))
    assert (board.newest_revision, board.newest_digest) == (2, "d2")
    board.applied(applied(2))
    assert board.in_force is not None
    assert board.in_force.revision == 2
