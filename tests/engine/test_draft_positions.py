"""Which of a step's drafts each token was, and requests that have fewer drafts than the engine makes."""

import pytest

from mla_compile import Engine, SamplingParams
from mla_compile.errors import MLAError
from tests.models_for_tests import tiny_model

PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [5, 6, 5, 6, 5, 6], [9, 8, 7]]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny_model(), num_speculative_tokens=3, drafter="ngram", max_rows=4, compile=False)


def steps_of(positions: list[int]) -> list[list[int]]:
    """Cut behind each 0, which ends a step."""
    steps: list[list[int]] = [[]]
    for position in positions:
        steps[-1].append(position)
        if position == 0:
            steps.append([])
    assert not steps.pop()
    return steps


def test_a_steps_tokens_are_its_first_drafts_and_the_models_own(engine: Engine) -> None:
    for completion in engine.generate(PROMPTS, max_new_tokens=40):
        assert len(completion.draft_positions) == len(completion.token_ids) == 40
        steps = steps_of(completion.draft_positions)
        assert all(step == [*range(1, len(step)), 0] for step in steps)
        assert len(steps) == completion.num_steps + completion.num_prefills
        assert max(map(len, steps)) > 1, "no draft was ever accepted"


@pytest.mark.long
@pytest.mark.parametrize("most", [0, 1, 2, 3, 7])
def test_a_request_has_at_most_its_own_number_of_drafts(engine: Engine, most: int) -> None:
    params = SamplingParams(max_tokens=30)
    expected = engine.generate(PROMPTS, params)
    free = engine.add(PROMPTS[1], params)
    limited = engine.add(PROMPTS[0], params, max_drafts=most)
    while engine.has_work():
        engine.step()
    assert limited.completion.token_ids == expected[0].token_ids
    assert free.completion == expected[1], "its neighbour has as many drafts as ever"
    assert max(limited.completion.draft_positions) == min(most, max(expected[0].draft_positions))


@pytest.mark.parametrize("most", [-1, True, 1.0, "2"])
def test_what_is_no_number_of_drafts_is_refused(engine: Engine, most: object) -> None:
    with pytest.raises(MLAError, match=r"max_drafts: expected an integer >= 0 or None"):
        engine.add([1], max_drafts=most)  # type: ignore[arg-type]
    assert not engine.has_work()
