"""The console in a real browser, on real engines, operator, API server and Redis."""

from __future__ import annotations

import json
import re
import socket
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, expect
from redis import Redis

from tidegate_devcluster.assets import Assets
from tidegate_devcluster.control_plane import ControlPlane
from tidegate_devcluster.kubectl import Kubectl
from tidegate_devcluster.redis_server import RedisServer
from tidegate_testing.browser import WatchedPage, a_page, running_browser
from tidegate_testing.console_process import ConsoleProcess, a_console
from tidegate_testing.control import Publisher
from tidegate_testing.engine_process import EngineProcess, an_engine_process
from tidegate_testing.engines import MODEL, key_of
from tidegate_testing.operator_process import (
    Manifest,
    OperatorSetup,
    a_key_secret,
    a_pod,
    a_policy,
    a_pool,
    apply,
    change_status,
    make_ready,
    running_operator,
    wait_for_conditions,
)

pytestmark = [pytest.mark.browser, pytest.mark.cluster]

ROOT = Path(__file__).parents[2]
PODS = ("engine-0", "engine-1")
ENGINE_TOKEN = "a token for the engines' admin API"
SOON_MS = 2000
"""How soon after a change the page shows it."""


@dataclass
class Serving:
    """A pool with two engines and two tenants, and the console that shows it."""

    namespace: str
    engines: list[EngineProcess]
    console: ConsoleProcess


def a_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def a_reachable_pod(name: str, admin_port: int) -> Manifest:
    pod = a_pod(name)
    pod["spec"]["containers"][0]["ports"] = [{"name": "admin", "containerPort": admin_port}]
    return pod


def a_tenants_policy(tenant: str, **spec: object) -> Manifest:
    return a_policy(
        tenant, tenant=tenant, apiKeySecretRefs=[{"name": "keys", "key": tenant}], **spec
    )


@pytest.fixture(scope="module")
def serving(
    crds_installed: None,  # noqa: ARG001
    control_plane: ControlPlane,
    kubectl: Kubectl,
    operator_setup: OperatorSetup,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Serving]:
    namespace = f"test-{uuid.uuid4().hex[:10]}"
    folder = tmp_path_factory.mktemp("console")
    kubectl("create", "namespace", namespace, check=True)
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
    ports = {pod: a_free_port() for pod in PODS}
    apply(
        kubectl,
        namespace,
        account,
        a_pool(),
        *(a_reachable_pod(pod, port) for pod, port in ports.items()),
        a_key_secret("keys", acme=key_of("acme"), zeta=key_of("zeta")),
        a_tenants_policy("acme", weight=300, serviceLevel={"ttft": {"target": "60s"}}),
        a_tenants_policy("zeta", kv={"nominalPercent": 10}),
    )
    setup = replace(
        operator_setup,
        kubeconfig=control_plane.kubeconfig,
        explain_port=a_free_port(),
        engine_token=ENGINE_TOKEN,
    )
    with ExitStack() as stack:
        stack.enter_context(running_operator(setup))
        pool = Publisher(setup.redis_url, pool=f"{namespace}/chat")
        engines = []
        for pod, port in ports.items():
            make_ready(kubectl, namespace, pod)
            address = {"op": "add", "path": "/status/podIP", "value": "127.0.0.1"}
            change_status(kubectl, "pod", pod, namespace, address)
            (folder / pod).mkdir()
            more = {
                "TIDEGATE_POD_NAME": pod,
                "TIDEGATE_VERIFY_KEY": setup.public_key,
                "TIDEGATE_ADMIN_PORT": str(port),
                "TIDEGATE_ADMIN_TOKEN": ENGINE_TOKEN,
            }
            engines.append(stack.enter_context(an_engine_process(pool, folder / pod, **more)))
        console = stack.enter_context(
            a_console(
                folder,
                *("--kubeconfig", str(control_plane.kubeconfig)),
                *("--redis-url", setup.redis_url),
                *("--namespace", namespace),
                *("--operator", f"http://127.0.0.1:{setup.explain_port}"),
            )
        )
        for engine in engines:
            engine.wait_until_ready()
        for tenant in ("acme", "zeta"):
            wait_for_conditions(kubectl, "tp", tenant, namespace, Programmed="Programmed")
        yield Serving(namespace, engines, console)
        assert console.stop() == 0
        assert "Traceback" not in console.log.read_text()


@pytest.fixture(scope="module")
def browser(assets: Assets) -> Iterator[Browser]:
    with running_browser(assets) as running:
        yield running


@pytest.fixture
def page(serving: Serving, browser: Browser) -> Iterator[WatchedPage]:
    """A page on the console, which may not complain at the end."""
    with a_page(browser, serving.console.url) as opened:
        yield opened
        assert opened.complaints == []


@contextmanager
def a_long_answer(engine: EngineProcess, tenant: str) -> Iterator[str]:
    """Begin to read an answer, and hang up at the end; gives the request's id."""
    stream = engine.openai(tenant).completions.create(
        model=MODEL,
        prompt="Hello " * 20,
        max_tokens=3000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    with stream:
        yield next(iter(stream)).id


def test_the_pools_page_follows_traffic_within_two_seconds(
    serving: Serving, page: WatchedPage
) -> None:
    page.open()
    running = page.page.locator(page.tile("running"))
    expect(page.page.locator("h2")).to_have_text(f"{serving.namespace}/chat")
    expect(running).to_have_text("0")
    expect(page.page.locator(".state")).to_have_text("Programmed")
    with a_long_answer(serving.engines[0], "acme"), a_long_answer(serving.engines[1], "zeta"):
        expect(running).to_have_text("2", timeout=SOON_MS)
        legend = page.page.locator(".chart").nth(1).locator("text")
        expect(legend.filter(has_text="acme")).to_be_visible(timeout=SOON_MS)
        expect(legend.filter(has_text="zeta")).to_be_visible(timeout=SOON_MS)
    expect(running).to_have_text("0", timeout=SOON_MS)
    rows = page.page.locator("tbody tr")
    expect(rows).to_have_count(2)
    # A mean over the last steps: there were some.
    expect(rows.first.locator("td").last).to_have_text(re.compile(r"[\d.]+\s(ms|s)"))


def test_a_new_policy_is_on_the_page_two_seconds_after_the_engines_obey_it(
    serving: Serving, page: WatchedPage, kubectl: Kubectl
) -> None:
    page.open()
    marks = page.page.locator(".chart").first.locator("text")
    expect(marks.filter(has_text="high 92 %")).to_be_visible()
    patch = {"spec": {"kv": {"watermarks": {"lowPercent": 60, "highPercent": 75}}}}
    where = ("-n", serving.namespace, "--type=merge", "-p", json.dumps(patch))
    kubectl("patch", "epool", "chat", *where, check=True)
    wait_for_conditions(kubectl, "epool", "chat", serving.namespace, Programmed="Programmed")
    expect(marks.filter(has_text="high 75 %")).to_be_visible(timeout=SOON_MS)
    revisions = page.page.locator('td[data-label="Revision"] .cell')
    expect(revisions.first).to_have_class("cell tone-good", timeout=SOON_MS)
    expect(revisions.last).to_have_class("cell tone-good", timeout=SOON_MS)


def test_tenants_are_found_and_shown_against_what_they_were_promised(
    serving: Serving, page: WatchedPage
) -> None:
    serving.engines[0].openai("acme").completions.create(model=MODEL, prompt="Hi", max_tokens=3)
    page.open()
    page.page.get_by_role("link", name="Tenants").click()
    rows = page.page.locator("tbody tr")
    expect(rows).to_have_count(2)
    acme = rows.filter(has_text="acme")
    expect(acme.locator('[data-label="First token"] .cell')).to_have_class("cell tone-good")
    expect(acme.locator('[data-label="First token"]')).to_contain_text("≤\N{NO-BREAK SPACE}60")
    expect(acme.locator('[data-label="State"]')).to_contain_text("Ready")
    expect(acme.locator('[data-label="Share of its tier"] .bar')).to_be_visible()
    page.page.get_by_label("Find a tenant, tier or pool").fill("ZET")
    expect(rows).to_have_count(1)
    expect(rows.locator('[data-label="KV of nominal"]')).to_contain_text("nominal 10")


def test_a_request_is_looked_up_and_told_decision_by_decision(
    serving: Serving, page: WatchedPage
) -> None:
    answer = (
        serving.engines[1].openai("zeta").completions.create(model=MODEL, prompt="Hi", max_tokens=2)
    )
    page.open("/request")
    page.page.get_by_label("Request id").fill(answer.id)
    page.page.keyboard.press("Enter")
    expect(page.page.locator("h2")).to_contain_text(answer.id.removeprefix("cmpl-"), timeout=10_000)
    expect(page.page.locator("dd", has_text="zeta")).to_be_visible()
    expect(page.page.locator("dd", has_text="engine-1")).to_be_visible()
    expect(page.page.locator('[data-label="What"]').first).to_contain_text("admitted")
    page.page.get_by_label("Request id").fill("nobody-knows-it")
    page.page.get_by_role("button", name="Look up").click()
    expect(page.page.get_by_role("status").filter(has_text="nobody-knows-it")).to_contain_text(
        "no engine", timeout=10_000
    )


@pytest.fixture
def viewer(serving: Serving, control_plane: ControlPlane, kubectl: Kubectl) -> Path:
    """Kubeconfig of somebody who may get and list what the console reads, and nothing else."""
    where = ("-n", serving.namespace)
    read = ("--verb=get,list", "--resource=enginepools.tidegate.io,tenantpolicies.tidegate.io,pods")
    kubectl("create", "role", "viewer", *read, *where, check=True)
    kubectl("create", "rolebinding", "viewer", "--role=viewer", "--user=viewer", *where, check=True)
    return control_plane.user_kubeconfig("viewer")


@pytest.fixture
def readable_redis(redis_server: RedisServer) -> str:
    """Redis, for one who may read and listen and nothing else."""
    with Redis.from_url(redis_server.url) as redis:
        page = (ROOT / "docs/console.md").read_text()
        (rules,) = re.findall(r"^user viewer on >PASSWORD (.*)$", page, re.MULTILINE)
        redis.execute_command("ACL", "SETUSER", "viewer", "on", ">word", *rules.split())
    return redis_server.url_for(username="viewer", password="word")


def test_a_console_that_may_only_read_shows_all_and_asks_engines_by_their_token(
    serving: Serving, browser: Browser, viewer: Path, readable_redis: str, tmp_path: Path
) -> None:
    answer = (
        serving.engines[0].openai("acme").completions.create(model=MODEL, prompt="Hi", max_tokens=2)
    )
    token = tmp_path / "token"
    token.write_text(ENGINE_TOKEN)
    options = (
        *("--kubeconfig", str(viewer)),
        *("--redis-url", readable_redis),
        *("--namespace", serving.namespace),
        *("--engine-token-file", str(token)),
    )
    with (
        a_console(tmp_path, *options) as console,
        a_page(browser, console.url) as page,
    ):
        page.open()
        expect(page.page.locator("h2")).to_have_text(f"{serving.namespace}/chat")
        expect(page.page.locator(".state")).to_have_text("Programmed")
        expect(page.page.locator("tbody tr")).to_have_count(2)
        expect(page.page.locator(".problems")).to_be_hidden()
        page.open("/tenants")
        expect(page.page.locator("tbody tr").filter(has_text="acme")).to_contain_text("Ready")
        page.open(f"/request?id={answer.id}")
        expect(page.page.locator("dd", has_text="acme")).to_be_visible(timeout=10_000)
        expect(page.page.locator("dd", has_text="engine-0")).to_be_visible()
        page.open("/request?id=nobody-knows-it")
        expect(page.page.get_by_role("status").filter(has_text="no engine")).to_be_visible(
            timeout=10_000
        )
        assert page.complaints == []


def test_the_keyboard_reaches_everything_and_changes_the_theme(page: WatchedPage) -> None:
    page.open("/tenants")
    reached = []
    for _ in range(6):
        page.page.keyboard.press("Tab")
        reached.append(page.focused)
    assert reached[:5] == ["Skip to content", "Pools", "Tenants", "Request", "Theme: auto"]
    assert reached[5] == "Find a tenant, tier or pool"
    body = page.page.locator("body")
    expect(body).to_have_class(re.compile("body--light"))
    theme = page.page.get_by_role("button", name="Theme: auto")
    theme.focus()
    for name in ("light", "dark"):
        page.page.keyboard.press("Enter")
        expect(page.page.get_by_role("button", name=f"Theme: {name}")).to_be_visible()
    expect(body).to_have_class(re.compile("body--dark"))
    page.page.wait_for_function("document.cookie.includes('=dark')")
    page.page.reload()
    expect(body).to_have_class(re.compile("body--dark"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_page_fits_wide_and_narrow_screens_and_can_be_read_in_light_and_dark(
    serving: Serving, browser: Browser, width: int, scheme: Literal["light", "dark"]
) -> None:
    done = (
        serving.engines[0].openai("acme").completions.create(model=MODEL, prompt="Hi", max_tokens=2)
    )
    shown = {
        "/": ("Pools", "h2"),
        "/tenants": ("Tenants", "h2"),
        "/request": ("Request", "form"),
        f"/request?id={done.id}": ("Request", "h2"),
        "/request?id=nobody-knows-it": ("Request", "form"),
    }
    with (
        a_long_answer(serving.engines[0], "acme"),
        a_page(browser, serving.console.url, width=width, scheme=scheme) as page,
    ):
        for path, (heading, content) in shown.items():
            page.open(path)
            expect(page.page.locator("h1")).to_have_text(heading)
            expect(page.page.locator("body")).to_have_class(re.compile(f"body--{scheme}"))
            expect(page.page.locator(content).first).to_be_visible(timeout=10_000)
            assert page.overhang == 0
            assert page.faint_texts == [], path
        assert page.complaints == []


def test_behind_a_token_and_without_cluster_and_redis_the_page_says_so_in_words(
    browser: Browser, tmp_path: Path
) -> None:
    nowhere, missing = f"127.0.0.1:{a_free_port()}", str(tmp_path / "no-kubeconfig")
    token = "a-token-of-enough-characters"
    options = ("--redis-url", f"redis://user:secret@{nowhere}/0", "--kubeconfig", missing)
    with a_console(tmp_path, *options, "--token", token) as console:
        with a_page(browser, console.url) as page:
            page.page.goto(console.url)
            expect(page.page.get_by_role("heading")).to_have_text("Tidegate console")
            page.page.get_by_label("Token").fill(token)
            page.page.keyboard.press("Enter")
            alert = page.page.locator(".problems")
            expect(alert).to_contain_text(f"No cluster: there is no file {missing}.")
            expect(alert).to_contain_text(f"Redis can't be reached at {nowhere}; trying again.")
            expect(page.page.get_by_text("There is no EnginePool yet.")).to_be_visible()
            page.open("/request?id=cmpl-1")
            expect(page.page.get_by_text("There is no pool whose engines")).to_be_visible()
            # The page that asks for the token says 401, and so does the browser.
            assert all("401" in complaint for complaint in page.complaints)
        assert console.stop() == 0
        log = console.log.read_text()
        assert "Traceback" not in log
        assert "secret" not in log
