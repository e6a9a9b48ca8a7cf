import pytest

from tidegate_operator.resources import LabelSelector
from tidegate_operator.selectors import SelectorError, parse_selector, selector_text


@pytest.mark.parametrize(
    ("selector", "text"),
    [
        ({"matchLabels": {"b": "2", "a": "1"}}, "a=1,b=2"),
        (
            {"matchExpressions": [{"key": "a", "operator": "In", "values": ["x", "y"]}]},
            "a in (x,y)",
        ),
        ({"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["x"]}]}, "a notin (x)"),
        ({"matchExpressions": [{"key": "a", "operator": "Exists"}]}, "a"),
        ({"matchExpressions": [{"key": "a", "operator": "DoesNotExist"}]}, "!a"),
    ],
)
def test_selector_is_written_as_the_api_server_reads_it(selector: object, text: str) -> None:
    assert selector_text(LabelSelector.model_validate(selector)) == text


LABELS = {"pool_name": "chat", "team": "a"}


@pytest.mark.parametrize(
    ("text", "is_chosen"),
    [
        ("", True),
        ("pool_name=chat", True),
        ("pool_name==chat,team=a", True),
        ("pool_name=chat,team=b", False),
        ("team != a", False),
        ("other!=a", True),
        (" pool_name in (chat, batch) ,team", True),
        ("pool_name notin (chat)", False),
        ("!team", False),
        ("! other , team", True),
        ("team=", False),
    ],
)
def test_selector_chooses_what_kubernetes_would(text: str, *, is_chosen: bool) -> None:
    assert parse_selector(text).matches(LABELS) is is_chosen


@pytest.mark.parametrize(
    "text", ["=", "a=b,", "a in b", "a in (b", "a=b c", "a=%", "a,,b", "!", "a>1"]
)
def test_what_is_no_selector_is_refused(text: str) -> None:
    with pytest.raises(SelectorError, match="label selector"):
        parse_selector(text)
