"""A tenant's key is replaced while it is being served."""

from tidegate_testing.engines import a_keyed_tenant, a_running_engine, digest_of
from tidegate_testing.policies import a_snapshot
from tidegate_testing.raw_requests import a_raw_request, read_events


def test_what_runs_goes_on_under_a_new_key_and_the_old_one_is_nobodys_at_once() -> None:
    with a_running_engine(step_seconds=0.001) as engine:
        with a_raw_request(engine.port, stream=True, max_tokens=300) as reader:
            assert reader.recv(1)
            engine.apply(a_snapshot(a_keyed_tenant("acme", key_digests=(digest_of("sk-new"),))))
            refused = engine.http("acme").get("/v1/models")
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                401,
                "invalid_api_key",
            )
            assert engine.http("new").get("/v1/models").status_code == 200
            events = read_events(reader)
        assert b"[DONE]" in events
        assert events.count(b'"finish_reason":"length"') == 1
