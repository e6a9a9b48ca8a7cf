import dataclasses

import pytest

from tidegate_engine.model.config import ModelConfigError
from tidegate_testing.models import TINY


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_layers", 0), ("hidden_size", -1), ("num_kv_heads", 3), ("head_size", 7)],
)
def test_sizes_that_do_not_fit_are_refused_by_name(field: str, value: int) -> None:
    with pytest.raises(ModelConfigError, match=field) as caught:
        dataclasses.replace(TINY, **{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field


def test_sizes_of_all_heads_follow_from_one_head() -> None:
    assert (TINY.query_size, TINY.kv_size) == (32, 16)
