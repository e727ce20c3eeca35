"""Cache pages: which are free, who holds which, and which full ones a new prompt can share.

A page that has become full with final tokens is registered under a key: the prefix before it and its own tokens. When
its last holder lets go of it, it stays registered until it is needed for something else, least recently used first.
"""

import itertools
from collections import OrderedDict
from collections.abc import Sequence

from mla_compile.errors import MLAError

DUMMY_PAGE = 0
"""Serves the synthetic inputs of captures; no row ever owns it."""

NO_PREFIX = 0
"""The number of the empty prefix, and of what a page holds that is not known to be final."""

Key = tuple[int, tuple[int, ...]]
"""The number of the prefix before a page, and the page's tokens, with as many after them as its latents depend on."""


class PagePool:
    """Allocates the pages of one engine's caches; every layer uses the same page numbers.

    Keys hold tokens, not hashes of them, so equal keys mean equal text. Prefixes are numbered as they are registered,
    and no number is used again: a page whose predecessor was evicted is no longer found, and is evicted in its turn.

    A drafter's latents may depend on tokens after the page: the MTP layer's at a page's last position depends on one.
    So these `lookahead` tokens are part of the key, and a page is registered only once they are known. A match loses
    nothing by one such token: it leaves at least one token of the prompt to be run, so the token after every page that
    it may return is in the prompt.

    Args:
        num_pages: of a cache, the dummy page included, >= 2.
        page_size: tokens per page, >= 1.
        lookahead: tokens after a page on which the latents in it depend.
        keeps_prefixes: False registers nothing, so that no page is ever shared.
    """

    def __init__(
        self, num_pages: int, page_size: int, *, lookahead: int = 0, keeps_prefixes: bool = True
    ) -> None:
        self.num_pages, self.page_size, self.lookahead = num_pages, page_size, lookahead
        self.keeps_prefixes = keeps_prefixes
        self._references = [0] * num_pages
        self._blank = list(range(num_pages - 1, DUMMY_PAGE, -1))  # free, found by no key; used from its end
        self._reusable: OrderedDict[int, None] = (
            OrderedDict()
        )  # free, found by key, least recently used first
        self._page_of: dict[Key, int] = {}
        self._key_of: list[Key | None] = [None] * num_pages
        self._prefix = [NO_PREFIX] * num_pages  # the number of the text that ends with a page
        self._numbers = itertools.count(NO_PREFIX + 1)

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can hand out, those that are kept for later matches included."""
        return len(self._blank) + len(self._reusable)

    def references(self, page: int) -> int:
        """How many hold a page; 0: it is free."""
        return self._references[page]

    def is_registered(self, page: int) -> bool:
        """Whether `match` can find a page, so that nothing may be written to it."""
        return self._key_of[page] is not None

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold so many tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one reference each; None, and nothing has changed, where fewer are free."""
        if count > self.num_free:
            return None
        pages = [self._blank.pop() if self._blank else self._evict() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
            self._prefix[page] = NO_PREFIX
        return pages

    def match(self, token_ids: Sequence[int]) -> list[int]:
        """The pages of the longest registered prefix, with a reference to each; at least one token is left to run."""
        pages: list[int] = []
        prefix = NO_PREFIX
        for index in range((len(token_ids) - 1) // self.page_size):
            page = self._page_of.get(self._key(prefix, token_ids, index))
            if page is None:
                break
            pages.append(page)
            prefix = self._prefix[page]
        for page in pages:
            self._references[page] += 1
            self._reusable.pop(page, None)
        return pages

    def commit(self, pages: Sequence[int], token_ids: Sequence[int], num_cached: int) -> None:
        """Register a row's pages that are full with final tokens; those that were before cost nothing.

        Where an equal page is registered already, that one stays, and the row keeps its own unregistered.

        pages: the row's, in order.
        token_ids: its tokens as far as they are known.
        num_cached: how many of them are in the caches, what depends on tokens behind them included as far as known.

        Raises:
            MLAError: a page to be registered that nobody holds, or fewer pages than full ones; nothing has changed.
        """
        if not self.keeps_prefixes:
            return
        full = max(0, min(num_cached, len(token_ids) - self.lookahead)) // self.page_size
        if full > len(pages):
            raise MLAError("pages", f"at least {full} for {num_cached} cached tokens", len(pages))
        first = full
        while first > 0 and self._prefix[pages[first - 1]] == NO_PREFIX:
            first -= 1
            self._check_held(pages[first])
        prefix = self._prefix[pages[first - 1]] if first else NO_PREFIX
        for index in range(first, full):
            key, page = self._key(prefix, token_ids, index), pages[index]
            equal = self._page_of.setdefault(key, page)
            if equal == page:
                self._key_of[page] = key
                self._prefix[page] = next(self._numbers)
            prefix = self._prefix[page] = self._prefix[equal]

    def release(self, pages: Sequence[int]) -> None:
        """Give up one reference to each page of a row, given in the row's order.

        Raises:
            MLAError: a page that nobody holds or that is named twice; nothing has changed.
        """
        for page in pages:
            self._check_held(page)
        if len(set(pages)) != len(pages):
            raise MLAError("pages", "each page once", list(pages))
        # The last one first: it is then evicted first, and what remains can still be found from the start.
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page] == 0:
                if self._key_of[page] is None:
                    self._blank.append(page)
                else:
                    self._reusable[page] = None

    def forget(self) -> None:
        """Let `match` find nothing that was registered by now. Pages that are held stay so."""
        self._blank += self._reusable
        self._reusable.clear()
        self._page_of.clear()
        self._key_of = [None] * self.num_pages
        self._prefix = [NO_PREFIX] * self.num_pages

    def _evict(self) -> int:
        page, _ = self._reusable.popitem(last=False)
        key = self._key_of[page]
        assert key is not None
        del self._page_of[key]
        self._key_of[page] = None
        return page

    def _key(self, prefix: int, token_ids: Sequence[int], index: int) -> Key:
        start = index * self.page_size
        return prefix, tuple(token_ids[start : start + self.page_size + self.lookahead])

    def _check_held(self, page: int) -> None:
        if not DUMMY_PAGE < page < self.num_pages or self._references[page] == 0:
            raise MLAError("pages", "pages that are held", page)
