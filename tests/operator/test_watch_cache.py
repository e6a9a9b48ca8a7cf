import base64
import hashlib
from typing import Any

import pytest

from tidegate_operator.kube import (
    API_KEYS_LABEL,
    NAMESPACES,
    PODS,
    POOLS,
    SECRETS,
    WATCHED,
    Watched,
)
from tidegate_operator.resources import (
    PreemptionPolicy,
    PriorityTier,
    ServiceLevel,
    TenantPolicy,
)
from tidegate_operator.watch_cache import WatchCache, key_digest

POLICIES = next(watched for watched in WATCHED if watched.model is TenantPolicy)
TIERS = next(watched for watched in WATCHED if watched.model is PriorityTier)
PREEMPTION_POLICIES = next(watched for watched in WATCHED if watched.model is PreemptionPolicy)
SERVICE_LEVELS = next(watched for watched in WATCHED if watched.model is ServiceLevel)


def a_raw(
    name: str, namespace: str = "team", *, version: int = 1, generation: int = 1, **parts: Any
) -> dict[str, Any]:
    metadata = {
        "name": name,
        "namespace": namespace,
        "uid": f"uid-{namespace}-{name}",
        "generation": generation,
        "resourceVersion": str(version),
        **parts.pop("metadata", {}),
    }
    return {"metadata": {k: v for k, v in metadata.items() if v}, **parts}


def a_raw_policy(name: str = "acme", *, weight: int = 1, **parts: Any) -> dict[str, Any]:
    spec = {"poolRefs": [{"name": parts.pop("pool", "chat")}], "weight": weight}
    return a_raw(name, spec=spec, **parts)


def a_raw_pool(name: str = "chat", **parts: Any) -> dict[str, Any]:
    return a_raw(name, spec={"selector": {"matchLabels": {"app": "engine"}}}, **parts)


def a_raw_pod(*, ready: str = "True", version: int = 1, **metadata: Any) -> dict[str, Any]:
    return a_raw(
        "engine-0",
        version=version,
        metadata={"labels": {"app": "engine"}, **metadata},
        status={"conditions": [{"type": "Ready", "status": ready}]},
    )


@pytest.fixture
def cache() -> WatchCache:
    cache = WatchCache()
    cache.put(POOLS, a_raw_pool())
    cache.put(POOLS, a_raw_pool("code"))
    cache.put(POLICIES, a_raw_policy())
    return cache


def test_status_writes_affect_nothing(cache: WatchCache) -> None:
    view = cache.view()
    changed = a_raw_policy(version=2, status={"tenant": "team/acme"})
    assert cache.put(POLICIES, changed) is None
    assert cache.view() is view


def test_new_generation_affects_old_and_new_pool(cache: WatchCache) -> None:
    changed = a_raw_policy(version=2, generation=2, weight=9, pool="code")
    assert cache.put(POLICIES, changed) == frozenset({"team/chat", "team/code"})
    assert cache.view().policies["team/acme"].spec.weight == 9


def test_older_version_of_an_object_is_ignored(cache: WatchCache) -> None:
    cache.put(POLICIES, a_raw_policy(version=20, generation=2, weight=9))
    assert cache.put(POLICIES, a_raw_policy(version=3, generation=1)) is None
    assert cache.view().policies["team/acme"].spec.weight == 9


def test_recreated_object_is_another_one(cache: WatchCache) -> None:
    recreated = a_raw_policy(version=9, weight=5, metadata={"uid": "new"})
    cache.put(POLICIES, recreated)
    assert cache.remove(POLICIES, "uid-team-acme") == frozenset({"team/chat"})
    assert cache.view().policies["team/acme"].metadata.uid == "new"


def test_object_that_cannot_be_read_is_kept_as_invalid(cache: WatchCache) -> None:
    cache.put(POLICIES, a_raw_policy("bad", weight=-1))
    (invalid,) = cache.view().invalid
    assert (invalid.metadata.name, "spec.weight" in invalid.problem) == ("bad", True)
    assert list(cache.view().policies) == ["team/acme"]


def test_object_without_a_spec_is_invalid(cache: WatchCache) -> None:
    cache.put(POLICIES, a_raw("bare"))
    assert [invalid.metadata.name for invalid in cache.view().invalid] == ["bare"]


@pytest.mark.parametrize(
    ("watched", "raw", "affected"),
    [
        (TIERS, a_raw("gold", "", spec={}), {"team/chat", "team/code"}),
        (NAMESPACES, a_raw("team", "", metadata={"labels": {"a": "b"}}), {"team/chat"}),
        (NAMESPACES, a_raw("other", ""), set()),
        (SECRETS, a_raw("keys"), {"team/chat"}),
        (PREEMPTION_POLICIES, a_raw("gentle", spec={}), {"team/chat"}),
        (PREEMPTION_POLICIES, a_raw("gentle", "other", spec={}), set()),
        (PREEMPTION_POLICIES, a_raw("unreadable"), {"team/chat"}),
        (SERVICE_LEVELS, a_raw("interactive", spec={}), {"team/chat"}),
        (SERVICE_LEVELS, a_raw("interactive", "other", spec={}), set()),
        (PODS, a_raw_pod(), {"team/chat", "team/code"}),
    ],
)
def test_change_affects_the_pools_that_may_depend_on_it(
    cache: WatchCache, watched: Watched, raw: dict[str, Any], affected: set[str]
) -> None:
    assert cache.put(watched, raw) == frozenset(affected)
    assert cache.remove(watched, raw["metadata"]["uid"]) == frozenset(affected)
    assert cache.remove(watched, raw["metadata"]["uid"]) is None


def test_secret_affects_the_pools_that_policies_of_its_namespace_still_refer_to(
    cache: WatchCache,
) -> None:
    cache.put(POLICIES, a_raw_policy("second"))
    cache.put(POLICIES, a_raw_policy("third", pool="code"))
    cache.put(POLICIES, a_raw_policy(version=2, generation=2, pool="code"))
    assert cache.put(SECRETS, a_raw("keys")) == frozenset({"team/chat", "team/code"})

    cache.remove(POLICIES, "uid-team-second")
    assert cache.put(SECRETS, a_raw("more-keys")) == frozenset({"team/code"})

    cache.put(POLICIES, a_raw("third", version=2, generation=2, spec={"poolRefs": "none"}))
    assert cache.put(SECRETS, a_raw("still-more")) == frozenset({"team/code"})

    cache.remove(POLICIES, "uid-team-acme")
    assert cache.put(SECRETS, a_raw("last-keys")) == frozenset()


def test_tier_affects_policies_whose_pool_does_not_exist(cache: WatchCache) -> None:
    cache.put(POLICIES, a_raw_policy("early", pool="absent"))
    affected = cache.put(TIERS, a_raw("gold", "", spec={}))
    assert affected == frozenset({"team/chat", "team/code", "team/absent"})


def test_new_generation_of_what_is_referred_to_affects_those_who_may_refer(
    cache: WatchCache,
) -> None:
    cache.put(SERVICE_LEVELS, a_raw("fast", spec={"queueTimeout": "1s"}))
    changed = a_raw("fast", version=2, generation=2, spec={"queueTimeout": "2s"})
    assert cache.put(SERVICE_LEVELS, changed) == frozenset({"team/chat"})
    assert cache.view().service_levels["team/fast"].spec.queue_timeout == "2s"


def test_pod_matters_only_when_its_readiness_changes(cache: WatchCache) -> None:
    cache.put(PODS, a_raw_pod())
    assert cache.put(PODS, a_raw_pod(version=2)) is None
    assert cache.put(PODS, a_raw_pod(version=3, ready="False")) == frozenset(
        {"team/chat", "team/code"}
    )
    cache.put(PODS, a_raw_pod(version=4, deletionTimestamp="2026-01-01T00:00:00Z"))
    (pod,) = cache.view().pods.values()
    assert (pod.is_ready, pod.is_terminating) == (False, True)


def test_secret_is_kept_as_digests_and_only_with_its_label(cache: WatchCache) -> None:
    encoded = base64.b64encode(b"swordfish\n").decode()
    raw = a_raw("keys", metadata={"labels": {"tidegate.io/api-keys": "true"}})
    cache.put(SECRETS, raw | {"data": {"first": encoded, "empty": "", "broken": "%"}})
    digest = hashlib.sha256(b"swordfish").hexdigest()
    assert cache.view().secrets["team/keys"] == {"first": digest, "empty": None, "broken": None}
    assert key_digest(b" \n") is None
    cache.put(SECRETS, a_raw("keys", version=2) | {"data": {"first": encoded}})
    assert cache.view().secrets["team/keys"] == {}


def test_what_has_the_known_version_is_not_read_again(cache: WatchCache) -> None:
    encoded = base64.b64encode(b"key").decode()
    labels = {"labels": {API_KEYS_LABEL: "true"}}
    cache.put(SECRETS, a_raw("keys", version=2, metadata=labels) | {"data": {"first": encoded}})
    view, before = cache.view(), cache.begin_sweep(SECRETS)
    # Nothing but the version is looked at.
    listed = [a_raw("keys", version=2, metadata=labels)]
    assert cache.end_sweep(SECRETS, before, listed) is None
    assert cache.view() is view


def test_sweep_finds_what_no_watch_told_of(cache: WatchCache) -> None:
    before = cache.begin_sweep(POLICIES)
    listed = [a_raw_policy("new", version=5, pool="code")]
    assert cache.end_sweep(POLICIES, before, listed) == frozenset({"team/chat", "team/code"})
    assert list(cache.view().policies) == ["team/new"]


def test_sweep_that_finds_no_difference_affects_nothing(cache: WatchCache) -> None:
    before = cache.begin_sweep(POLICIES)
    assert cache.end_sweep(POLICIES, before, [a_raw_policy(version=7)]) is None


def test_restored_cluster_is_taken_from_the_list_though_it_is_older(cache: WatchCache) -> None:
    cache.put(POLICIES, a_raw_policy(version=900, weight=9))
    before = cache.begin_sweep(POLICIES)
    listed = [a_raw_policy(version=20, weight=2)]
    assert cache.end_sweep(POLICIES, before, listed) == frozenset({"team/chat"})
    assert cache.view().policies["team/acme"].spec.weight == 2


def test_change_during_a_sweep_outlives_its_list(cache: WatchCache) -> None:
    before = cache.begin_sweep(POLICIES)
    cache.put(POLICIES, a_raw_policy(version=8, generation=2, weight=9))
    assert cache.end_sweep(POLICIES, before, [a_raw_policy(version=1)]) is None
    assert cache.view().policies["team/acme"].spec.weight == 9


def test_events_during_a_sweep_are_newer_than_its_list(cache: WatchCache) -> None:
    before = cache.begin_sweep(POLICIES)
    cache.put(POLICIES, a_raw_policy("appeared", version=8))
    cache.remove(POLICIES, "uid-team-acme")
    cache.end_sweep(POLICIES, before, [a_raw_policy(version=1)])
    assert list(cache.view().policies) == ["team/appeared"]
