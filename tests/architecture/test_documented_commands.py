"""Every command of README, CONTRIBUTING and docs/ is run by a test, or it is said here why not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidegate_testing.helm import DISASTER_PAGE, INSTALL_PAGE, written_commands

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND = re.compile(r"^(\s*)(?:\$ )?((?:kubectl|helm|tidegate|make|docker) \S.*)$")

FIRST_POLICY = (
    "tests/cluster/test_first_policy.py"
    "::test_commands_of_the_page_make_a_policy_ready_change_it_and_show_it"
)
INSTALL = (
    "tests/charts/test_install.py"
    "::test_release_is_installed_upgraded_rolled_back_and_removed_and_no_policy_is_lost"
)
DISASTER = (
    "tests/charts/test_disaster.py::test_what_was_lost_comes_back_and_engines_serve_all_the_time"
)
SCALING = "tests/cluster/test_scaler.py::test_the_pool_and_the_commands_of_the_page_work"
UP = "tests/cli/test_up.py::test_what_is_printed_works_and_ctrl_c_stops_everything"
EXPLAIN = (
    "tests/cluster/test_explanations.py"
    "::test_a_waiting_request_is_explained_from_its_pools_namespace"
)
CONSOLE = "tests/cluster/test_console.py::test_the_pools_page_follows_traffic_within_two_seconds"
SERVICE_LEVELS = (
    "tests/cluster/test_service_levels.py"
    "::test_a_service_level_is_met_then_missed_and_gone_without_traffic"
)

RUN_BY = {
    ("docs/first-policy.md", r"kubectl .*"): FIRST_POLICY,
    ("README.md", r"kubectl (apply -f silver.yaml|wait tenantpolicy/silver .*)"): FIRST_POLICY,
    ("docs/install.md", r"(kubectl|helm) .*"): INSTALL,
    ("docs/disaster.md", r"(kubectl|helm) .*"): DISASTER,
    ("docs/scaling.md", r"kubectl .*"): SCALING,
    ("README.md", r"make run ARGS=up"): UP,
    ("docs/cli.md", r"tidegate explain .*"): EXPLAIN,
    ("docs/console.md", r"tidegate console .*"): CONSOLE,
    ("docs/service-levels.md", r"kubectl get tp"): SERVICE_LEVELS,
}
"""Page and commands, and the test that runs them or the same with other names."""

NOT_RUN = {
    ("docs/install.md", r"docker build .*"): "needs a container engine; test_images runs the steps",
    ("docs/console.md", r"kubectl .* port-forward .*"): "pods have no kubelet that forwards",
    ("docs/console.md", r"kubectl .* get secret .*"): "test_install reads the Secret as an object",
    ("docs/benchmarks.md", r"make run ARGS=\"bench .*"): "measures for minutes",
    ("README.md", r"make (demo|test)\b.*"): "is what runs the tests, or needs the machine alone",
    (
        "CONTRIBUTING.md",
        r"make (setup|check|test|soak|format|generate)\b.*",
    ): "is what runs the tests",
}
"""Page and commands, and why no test can run them."""


def documented() -> Iterator[tuple[str, str]]:
    """Page and command, of indented and fenced blocks."""
    for page in PAGES:
        fenced = False
        for line in page.read_text().splitlines():
            fenced ^= line.startswith("```")
            found = COMMAND.match(line)
            if found and (fenced or len(found[1]) >= 4):
                yield str(page.relative_to(ROOT)), found[2]


@pytest.mark.parametrize(("page", "command"), list(documented()))
def test_a_documented_command_is_run_by_a_test_or_said_not_to_be(page: str, command: str) -> None:
    told = [key for key in (*RUN_BY, *NOT_RUN) if key[0] == page and re.fullmatch(key[1], command)]
    assert len(told) == 1, f"{page}: {command}"


@pytest.mark.parametrize("key", [*RUN_BY, *NOT_RUN], ids=" ".join)
def test_every_entry_stands_for_a_command_that_is_there(key: tuple[str, str]) -> None:
    assert any(page == key[0] and re.fullmatch(key[1], command) for page, command in documented())


@pytest.mark.parametrize("node", sorted(set(RUN_BY.values())))
def test_the_named_test_exists(node: str) -> None:
    path, _, name = node.partition("::")
    assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    ("page", "sections"),
    [
        (INSTALL_PAGE, ("Prepare", "Install", "Upgrade", "Roll back", "Uninstall")),
        (
            DISASTER_PAGE,
            ("Keep a copy", "See what is gone", "The operator is gone", "The objects are gone"),
        ),
    ],
    ids=["install", "disaster"],
)
def test_commands_of_a_page_are_in_the_sections_that_its_test_follows(
    page: Path, sections: tuple[str, ...]
) -> None:
    followed = {command for section in sections for command in written_commands(section, page)}
    name = str(page.relative_to(ROOT))
    written = {command for where, command in documented() if where == name}
    assert {one for one in written if not one.startswith("docker ")} <= followed
