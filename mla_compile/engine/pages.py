"""The pool of cache pages: free pages, reference counts, and the full pages that a new prompt can share.

A page that is full of final tokens is registered under a key: the prefix before it and its own tokens. When its last
reference is released, it stays registered until the pool needs it, least recently used first.
"""

import itertools
from collections import OrderedDict
from collections.abc import Sequence

from mla_compile.errors import MLAError

DUMMY_PAGE = 0
"""For the synthetic inputs of captures; no row ever owns it."""

NO_PREFIX = 0
"""The number of the empty prefix, and of a page whose contents are not known to be final."""

Key = tuple[int, tuple[int, ...]]
"""The number of the prefix before a page, and the page's tokens with the `lookahead` tokens after them."""


class PagePool:
    """Allocates the pages of one engine's caches; every layer uses the same page numbers.

    Keys hold tokens, not hashes of them, so equal keys mean equal text. Prefixes are numbered as they are registered,
    and no number is used again: a page whose predecessor was evicted is no longer found, and is evicted later.

    A drafter's latents may depend on tokens after the page: the MTP layer's at a page's last position depends on one.
    So these `lookahead` tokens are part of the key, and a page is registered only once they are known. A lookahead of
    one token costs no matches: a match leaves at least one token of the prompt to run, so the prompt has the token
    after every page that the match may return.

    Args:
        num_pages: of a cache, the dummy page included, >= 2.
        page_size: tokens per page, >= 1.
        lookahead: number of tokens after a page that its latents depend on.
        keeps_prefixes: False registers nothing, so no page is ever shared.
    """

    def __init__(
        self, num_pages: int, page_size: int, *, lookahead: int = 0, keeps_prefixes: bool = True
    ) -> None:
        self.num_pages, self.page_size, self.lookahead = num_pages, page_size, lookahead
        self.keeps_prefixes = keeps_prefixes
        self._references = [0] * num_pages
        self._blank = list(range(num_pages - 1, DUMMY_PAGE, -1))  # free and unregistered; used from the end
        # Free and registered, least recently used first.
        self._reusable: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[Key, int] = {}
        self._key_of: list[Key | None] = [None] * num_pages
        self._prefix = [NO_PREFIX] * num_pages  # the number of the text that ends with a page
        self._numbers = itertools.count(NO_PREFIX + 1)

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can hand out, including those kept for later matches."""
        return len(self._blank) + len(self._reusable)

    def pages_for(self, num_tokens: int) -> int:
        """The number of pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one reference each; None, without any change, if fewer are free."""
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
        """Register a row's pages that are full of final tokens; pages registered before cost nothing.

        If an equal page is registered already, that one stays, and the row's own stays unregistered.

        pages: the row's, in order.
        token_ids: its known tokens.
        num_cached: the number of them in the caches, including latents that depend on the known tokens after them.

        Raises:
            MLAError: a page to register is free, or `pages` has fewer pages than full ones; nothing has changed.
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
        """Release one reference to each page of a row, given in the row's order.

        Raises:
            MLAError: a page is free or given twice; nothing has changed.
        """
        for page in pages:
            self._check_held(page)
        if len(set(pages)) != len(pages):
            raise MLAError("pages", "each page once", list(pages))
        # The last one first: it is then evicted first, and the remaining prefix can still be found.
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page] == 0:
                if self._key_of[page] is None:
                    self._blank.append(page)
                else:
                    self._reusable[page] = None

    def forget(self) -> None:
        """Unregister all pages. Pages with references keep them."""
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
            raise MLAError("pages", "pages with a reference", page)
