from pathlib import Path

import pytest
import yaml

from tidegate_cli.catalog import CatalogError, policies_folder
from tidegate_operator.resources import KINDS, Resource, TenantPolicy

MODELS = {kind.__name__: kind for kind in KINDS}
FOLDER = policies_folder("gold-silver-batch")
FILES = sorted(FOLDER.rglob("*.yaml"))


def objects_of(*paths: Path) -> list[Resource]:
    documents = [doc for path in paths for doc in yaml.safe_load_all(path.read_text())]
    return [MODELS[doc["kind"]].model_validate(doc) for doc in documents]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_field_of_a_ready_made_policy_is_one_that_the_model_knows(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        model = MODELS[document["kind"]].model_validate(document)

        assert model.as_json()["spec"] == document["spec"]


def test_the_set_has_a_pool_three_tiers_and_three_tenants() -> None:
    kinds = [type(one).__name__ for one in objects_of(*FOLDER.glob("*.yaml"))]

    assert sorted(kinds) == ["EnginePool", *["PriorityTier"] * 3, *["TenantPolicy"] * 3]


def test_the_change_alters_a_tier_and_a_weight_and_nothing_else() -> None:
    before = {one.metadata.name: one for one in objects_of(FOLDER / "tenants.yaml")}
    changed = objects_of(FOLDER / "changes" / "gold-first.yaml")

    differences = set()
    for after in changed:
        assert isinstance(after, TenantPolicy)
        old = before[after.metadata.name].as_json()["spec"]
        new = after.as_json()["spec"]
        differences |= {(after.metadata.name, key) for key in new if old[key] != new[key]}
    assert differences == {("gold", "priorityTier"), ("silver", "weight")}


def test_a_set_that_does_not_exist_is_named() -> None:
    with pytest.raises(CatalogError, match="'no-such-set'; there are: chat-and-batch, fair"):
        policies_folder("no-such-set")
