"""Every panel of every dashboard shows something of a pool under traffic."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tidegate_observability.generated import files

ROOT = Path(__file__).resolve().parents[2]
DASHBOARDS = sorted((ROOT / "charts/tidegate/files/dashboards").glob("*.json"))
VARIABLES = {"pool": ".*", "tenant": "team-gold/gold"}


def panels(dashboard: Any) -> Iterator[Any]:  # noqa: ANN401
    """Yield the panels that show something."""
    yield from (panel for panel in dashboard["panels"] if panel["type"] != "row")


ALL_PANELS = [
    pytest.param(panel, id=f"{path.stem}: {panel['title']}")
    for path in DASHBOARDS
    for panel in panels(json.loads(path.read_text()))
]


@pytest.mark.parametrize("path", [path for path, _ in files()], ids=str)
def test_generated_files_are_as_they_are_generated(path: Path) -> None:
    assert (ROOT / path).read_text() == dict(files())[path], "run `make generate`"


def test_no_dashboard_is_left_that_nobody_generates() -> None:
    assert {path.relative_to(ROOT) for path in DASHBOARDS} == {
        path for path, _ in files() if path.parent.name == "dashboards"
    }


@pytest.mark.parametrize("panel", ALL_PANELS)
def test_a_panel_can_be_read(panel: Any) -> None:  # noqa: ANN401
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"]["uid"] == "${datasource}"
    legends = [target["legendFormat"] for target in panel["targets"]]
    assert len(set(legends)) == len(legends)
    for target in panel["targets"]:
        shown = re.findall(r"{{(\w+)}}", target["legendFormat"])
        # A label that the expression sums away would be an empty legend.
        assert all(re.search(rf"\b{label}\b", target["expr"]) for label in shown)


def test_panels_fill_the_page_without_overlap() -> None:
    for path in DASHBOARDS:
        taken: set[tuple[int, int]] = set()
        for panel in json.loads(path.read_text())["panels"]:
            place = panel["gridPos"]
            cells = {
                (place["x"] + column, place["y"] + row)
                for column in range(place["w"])
                for row in range(place["h"])
            }
            assert place["x"] + place["w"] <= 24
            assert not taken & cells, panel["title"]
            taken |= cells


@pytest.mark.cluster
@pytest.mark.parametrize("panel", ALL_PANELS)
def test_a_panel_shows_data(panel: Any, watched: Any) -> None:  # noqa: ANN401
    for target in panel["targets"]:
        assert watched.data(target["expr"], VARIABLES), target["expr"]


@pytest.mark.cluster
def test_variables_offer_what_there_is(watched: Any) -> None:  # noqa: ANN401
    offered: dict[str, set[str]] = {}
    for path in DASHBOARDS:
        for variable in json.loads(path.read_text())["templating"]["list"]:
            if variable["type"] != "query":
                continue
            match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])
            assert match, variable["query"]
            series = match[1].replace("$tenant", VARIABLES["tenant"])
            values = watched.prometheus.label_values(match[2], series)
            offered.setdefault(variable["name"], set()).update(values)
    # A tenant that has gone is offered as long as Prometheus keeps what it had of it.
    offered["tenant"].discard("team-gold/guest")
    assert offered == {
        "pool": {"team-gold/chat"},
        "tenant": {"team-gold/gold", "team-gold/batch", "unknown"},
    }
