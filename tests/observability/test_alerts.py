"""Alerts fire when they should, stay silent when they should, and say what to do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tidegate_devcluster.assets import Assets
from tidegate_testing.prometheus import promtool

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RULES = ROOT / "charts/tidegate/files/rules.yaml"
CASES = sorted(HERE.glob("alerts*.yaml"))
RUNBOOKS = ROOT / "docs/runbooks"

GROUPS = yaml.safe_load(RULES.read_text())["groups"]
ALERTS = {rule["alert"]: rule for group in GROUPS for rule in group["rules"] if "alert" in rule}
HEADINGS = ["What it means", "Who is hurt", "How to look", "How to stop it"]


@pytest.mark.parametrize("cases", CASES, ids=lambda path: path.stem)
def test_alerts_fire_and_are_silent_as_told(cases: Path, assets: Assets) -> None:
    done = promtool(assets, "test", "rules", cases)
    assert done.returncode == 0, done.stdout


def test_every_alert_is_seen_firing_and_silent() -> None:
    names = [case["name"] for path in CASES for case in yaml.safe_load(path.read_text())["tests"]]
    for alert in ALERTS:
        told = [name.removeprefix(alert) for name in names if name.split()[0] == alert]
        assert any(" fires " in text for text in told), alert
        assert any(" silent " in text for text in told), alert


@pytest.mark.parametrize("alert", ALERTS.values(), ids=ALERTS)
def test_an_alert_says_how_grave_it_is_and_where_to_read_on(alert: Any) -> None:  # noqa: ANN401
    assert alert["labels"]["severity"] in {"critical", "warning", "info"}
    annotations = alert["annotations"]
    assert annotations["summary"]
    assert annotations["description"].endswith(".")
    page = re.sub(r"(?<!^)(?=[A-Z])", "-", alert["alert"]).lower() + ".md"
    assert annotations["runbook_url"] == f"$RUNBOOKS/{page}"
    text = (RUNBOOKS / page).read_text()
    assert text.startswith(f"# {alert['alert']}\n")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == HEADINGS


def test_every_runbook_belongs_to_an_alert() -> None:
    pages = {path.name for path in RUNBOOKS.glob("tidegate-*.md")}
    told = {alert["annotations"]["runbook_url"].rsplit("/", 1)[1] for alert in ALERTS.values()}
    assert pages == told


def test_rules_and_runbooks_speak_of_series_that_exist() -> None:
    known = set(re.findall(r"^\| `([^`]*)`", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE))
    texts = [RULES.read_text(), *(path.read_text() for path in RUNBOOKS.glob("*.md"))]
    for text in texts:
        for name in re.findall(r"\btidegate_\w+", text):
            assert re.sub(r"_(count|sum|bucket)$", "", name) in known, name


@pytest.mark.cluster
def test_a_real_prometheus_evaluates_every_rule(watched: Any) -> None:  # noqa: ANN401
    rules = watched.prometheus.rules()
    assert len(rules) == sum(len(group["rules"]) for group in GROUPS)
    assert {rule["name"]: rule["lastError"] for rule in rules if rule.get("lastError")} == {}
