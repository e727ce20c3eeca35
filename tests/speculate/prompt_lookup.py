"""What an n-gram drafter proposes, in plain Python: look at every earlier place, count the tokens that agree."""

from collections.abc import Sequence


def prompt_lookup(text: Sequence[int], k: int, max_ngram: int = 4) -> list[int]:
    """The k tokens after the latest of the places where most of the last tokens, `max_ngram` at most, stood before.

    text: at least two tokens.
    """
    longest, following = 0, [text[-1]]
    for end in range(1, len(text)):
        agree = 0
        while agree < min(max_ngram, end) and text[end - 1 - agree] == text[-1 - agree]:
            agree += 1
        if agree and agree >= longest:
            longest, following = agree, list(text[end:])
    return [following[j % len(following)] for j in range(k)]
