"""Prompts of a wanted length: plain text of short, common words.

Each of the words is one token in the vocabularies of today's models, so that words count tokens
well enough to replay recorded lengths; engines report the exact numbers.
"""

import random

_SUBJECTS = ("the river", "a child", "my friend", "the city", "a teacher", "our team", "the train")
_VERBS = ("found", "saw", "made", "took", "kept", "moved", "gave", "left", "held", "sent")
_OBJECTS = ("the book", "a small house", "the old road", "some water", "the last word", "a plan")
_ENDINGS = ("in the morning", "with great care", "for a long time", "near the sea", "after that")


def prompt_of(num_tokens: int, rng: random.Random) -> str:
    """Return a text of `num_tokens` words, which are about as many tokens."""
    words: list[str] = []
    while len(words) < num_tokens:
        parts = (rng.choice(part) for part in (_SUBJECTS, _VERBS, _OBJECTS, _ENDINGS))
        words += [*" ".join(parts).split(), "and"]
    return " ".join(words[:num_tokens])
