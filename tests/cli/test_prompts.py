import random

import pytest

from tidegate_cli.prompts import prompt_of


@pytest.mark.parametrize("num_tokens", [1, 2, 9, 250])
def test_a_prompt_has_as_many_words_as_tokens_are_wanted(num_tokens: int) -> None:
    assert len(prompt_of(num_tokens, random.Random(1)).split()) == num_tokens


def test_the_same_seed_makes_the_same_prompt() -> None:
    assert prompt_of(50, random.Random(3)) == prompt_of(50, random.Random(3))
    assert prompt_of(50, random.Random(3)) != prompt_of(50, random.Random(4))
