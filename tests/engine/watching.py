"""A drafter that lets a test see what the engine's steps run on: the seam is `Engine(drafter=...)`."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from torch import Tensor

from mla_compile.batch import ForwardOutput
from mla_compile.caches import CacheSpec
from mla_compile.defaults import DrafterName
from mla_compile.engine import Request
from mla_compile.speculate import (
    DecodeState,
    Drafter,
    DrafterKind,
    DrafterSettings,
    PromptChunks,
    Verified,
)
from mla_compile.speculate.drafter import known_drafter

Change = Callable[[DecodeState, Verified, Tensor], Tensor]


class Watch:
    """Remembers the state of the last step, in eager engines whose `drafter` is `kind(...)`.

    change: what becomes of a step's drafts, `[rows, k]`; None leaves them.
    """

    def __init__(self, change: Change | None = None) -> None:
        self.state: DecodeState | None = None
        self.change = change

    def kind(self, name: DrafterName) -> DrafterKind:
        """The drafter of that name, watched."""
        kind = known_drafter(name)
        assert kind is not None
        return replace(kind, build=lambda settings: _Watched(self, kind.build, settings))

    def rows(self, requests: Iterable[Request]) -> Iterator[tuple[Request, int]]:
        """The state's row of each running request, identified by its pages, which no other row writes to."""
        assert self.state is not None
        tables = self.state.block_table.tolist()
        for request in requests:
            if request.is_running and request.pages and not request.has_ended:
                last = len(request.pages) - 1
                yield request, next(i for i, row in enumerate(tables) if row[last] == request.pages[last])


class _Watched:
    def __init__(
        self, watch: Watch, build: Callable[[DrafterSettings], Drafter], settings: DrafterSettings
    ) -> None:
        self._watch, self._drafter = watch, build(settings)

    def cache_specs(self) -> list[CacheSpec]:
        specs: list[CacheSpec] = getattr(self._drafter, "cache_specs", list)()
        return specs

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return getattr(self._drafter, "aux_layers", ())

    def fill(self, chunks: PromptChunks, output: ForwardOutput) -> None:
        self._drafter.fill(chunks, output)

    def draft(self, state: DecodeState, verified: Verified) -> Tensor:
        self._watch.state = state
        drafts = self._drafter.draft(state, verified)  # the real one writes latents
        return drafts if self._watch.change is None else self._watch.change(state, verified, drafts)
