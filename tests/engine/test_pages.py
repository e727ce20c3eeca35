"""The page pool: references, prefixes, eviction; `test_scheduling_traces.py` checks what the pages hold."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mla_compile import MLAError
from mla_compile.engine.pages import PagePool
from tests.engine.engines import is_registered, references


def pool(num_pages: int = 9, *, has_drafter: bool = False) -> PagePool:
    return PagePool(num_pages, 2, lookahead=int(has_drafter))


def held(of: PagePool, token_ids: list[int]) -> list[int]:
    """Pages for these tokens, all of them cached and final."""
    pages = of.allocate(of.pages_for(len(token_ids)))
    assert pages is not None
    of.commit(pages, token_ids, len(token_ids))
    return pages


def test_a_text_shorter_than_what_its_first_page_depends_on_registers_nothing() -> None:
    of = PagePool(9, 2, lookahead=5)
    pages = of.allocate(1)
    of.commit(pages, [1, 2, 3], 2)
    assert not is_registered(of, pages[0])


def test_it_allocates_all_or_nothing_and_never_the_dummy_page() -> None:
    of = pool(5)
    assert of.allocate(5) is None
    assert of.num_free == 4
    assert sorted(of.allocate(4) or []) == [1, 2, 3, 4]
    assert of.allocate(0) == []
    assert of.allocate(1) is None


def test_a_match_ends_where_the_texts_differ() -> None:
    of = pool()
    pages = held(of, [1, 2, 3, 4, 5])
    assert of.match([1, 2, 3, 4, 9]) == pages[:2]
    assert of.match([1, 2, 9, 4, 9]) == pages[:1]
    assert of.match([9, 2, 3, 4, 9]) == []
    assert of.match([3, 4, 9]) == []  # the same tokens after another text
    assert [references(of, page) for page in pages] == [3, 2, 1]


@pytest.mark.parametrize("has_drafter", [False, True])
def test_a_match_leaves_a_token_to_run(has_drafter: bool) -> None:
    of = pool(has_drafter=has_drafter)
    pages = held(of, [1, 2, 3, 4, 5])
    assert of.match([1, 2, 3, 4, 5]) == pages[:2]
    assert of.match([1, 2, 3, 4]) == pages[:1]
    assert of.match([1, 2, 3]) == pages[:1]
    assert of.match([1, 2]) == of.match([1]) == []


def test_with_a_drafter_the_token_after_a_page_belongs_to_its_key() -> None:
    of = pool(has_drafter=True)
    pages = held(of, [1, 2, 3, 4])  # what follows the second page is not known yet
    assert of.match([1, 2, 9]) == []
    assert of.match([1, 2, 3, 4, 5]) == pages[:1]
    of.commit(pages, [1, 2, 3, 4, 5], 4)
    assert of.match([1, 2, 3, 4, 5]) == pages
    assert of.match([1, 2, 3, 4, 6]) == pages[:1]


def test_pages_are_registered_once_they_are_full() -> None:
    of = pool()
    pages = of.allocate(2)
    assert pages is not None
    of.commit(pages, [1, 2, 3, 4, 5], 1)
    assert of.match([1, 2, 3, 4, 5]) == []
    of.commit(pages, [1, 2, 3, 4, 5], 3)
    assert of.match([1, 2, 3, 4, 5]) == pages[:1]
    assert [is_registered(of, page) for page in pages] == [True, False]


def test_equal_pages_are_registered_once_and_texts_behind_either_are_found() -> None:
    of = pool()
    first, second = held(of, [1, 2]), held(of, [1, 2, 3, 4])
    assert of.match([1, 2, 3, 4, 5]) == [first[0], second[1]]
    of.release(second)
    assert of.num_free == 8 - 2  # the double at once; the other one has a reference more


def test_pages_without_a_text_are_used_first_then_the_least_recently_used_from_their_ends() -> None:
    of = pool(8)
    old, new = held(of, [1, 2, 3, 4]), held(of, [5, 6, 7, 8])
    of.release(old)
    of.release(new)
    of.release(of.match([1, 2, 9]))  # used again: only its second page is old now
    assert of.num_free == 7
    assert not set(of.allocate(3) or []) & {*old, *new}
    assert of.allocate(3) == [old[1], new[1], new[0]]
    assert of.match([1, 2, 3, 4, 5]) == old[:1]


def test_a_text_whose_beginning_was_evicted_is_no_longer_found_nor_confused() -> None:
    of = pool(4)
    first, second = held(of, [1, 2]), held(of, [1, 2, 3, 4])
    of.release(first)
    assert held(of, [9, 9]) == first  # the same page, for another text
    assert of.match([9, 9, 3, 4, 5]) == first
    assert of.match([1, 2, 3, 4, 5]) == []
    of.release(second[:1])
    again = held(of, [1, 2])
    assert of.match([1, 2, 3, 4, 5]) == again  # a new beginning: the old second page is not behind it


@pytest.mark.parametrize("pages", [[0], [-1], [9], [3], [1, 1], [1, 3]])
def test_wrong_releases_are_refused_before_anything_changes(pages: list[int]) -> None:
    of = pool()
    assert of.allocate(2) == [1, 2]
    with pytest.raises(MLAError, match="pages"):
        of.release(pages)
    assert of.num_free == 6
    of.release([1, 2])
    with pytest.raises(MLAError, match=r"^pages: .*reference"):
        of.release([1])


def test_wrong_commits_are_refused() -> None:
    of = pool()
    with pytest.raises(MLAError, match=r"^pages: .*reference"):
        of.commit([1], [1, 2], 2)
    with pytest.raises(MLAError, match="at least 2"):
        of.commit([1], [1, 2, 3, 4], 4)


class PagePoolMachine(RuleBasedStateMachine):
    """Against a list of what each page holds: rows of random texts come, grow by themselves, and go."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(7, 2, lookahead=1)
        self.rows: list[tuple[list[int], list[int]]] = []
        self.content: dict[
            int, list[int]
        ] = {}  # of a registered page: the text with it, and the token after it

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=11), known=st.integers(0, 1))
    def come(self, tokens: list[int], known: int) -> None:
        before = self.pool.num_free
        pages = self.pool.match(tokens)
        for i, page in enumerate(pages):
            assert self.content[page] == tokens[: 2 * i + 3]
        more = self.pool.allocate(self.pool.pages_for(len(tokens)) - len(pages))
        if more is None:
            self.pool.release(pages)
            assert self.pool.num_free == before
            return
        for page in more:
            self.content.pop(page, None)
        pages = pages + more
        self.pool.commit(pages, tokens, len(tokens) - known)
        for i, page in enumerate(pages):
            if is_registered(self.pool, page):
                assert len(tokens[: 2 * i + 3]) == 2 * i + 3
                assert self.content.setdefault(page, tokens[: 2 * i + 3]) == tokens[: 2 * i + 3]
        self.rows.append((tokens, pages))

    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        if self.rows:
            _, pages = self.rows.pop(data.draw(st.integers(0, len(self.rows) - 1)))
            self.pool.release(pages)

    @invariant()
    def every_reference_is_a_row_s(self) -> None:
        holders = [page for _, pages in self.rows for page in pages]
        assert all(references(self.pool, page) == holders.count(page) for page in range(7))
        assert self.pool.num_free == 6 - len(set(holders))


TestPagePoolMachine = PagePoolMachine.TestCase
TestPagePoolMachine.settings = settings(max_examples=100, stateful_step_count=20)
