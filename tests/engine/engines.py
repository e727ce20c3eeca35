"""Small engines for tests, and every place inside an engine that a test looks at or changes."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from mla_compile import Engine
from mla_compile.engine import Generation
from mla_compile.engine.draft_length import DraftLength
from mla_compile.engine.launch import Launched
from mla_compile.engine.pages import PagePool
from mla_compile.models import MLAForCausalLM
from mla_compile.speculate import DecodeState, SpeculativeDecoder
from tests.models_for_tests import one_layer_model, poison_caches

SIZES = {"max_rows": 4, "max_model_len": 64, "page_size": 4, "compile": False}


def engine(k: int = 3, model: MLAForCausalLM | None = None, **settings: object) -> Engine:
    """Of `SIZES` where `settings` say nothing else, with NaN in every page.

    k: drafts a step. model: without one, a `one_layer_model()` of its own.
    """
    served = one_layer_model() if model is None else model
    made = Engine(served, **{**SIZES, "num_speculative_tokens": k, **settings})
    poison_caches(served)
    return made


def finish(of: Engine) -> None:
    while of.has_work():
        of.step()


def texts(generations: Iterable[Generation]) -> list[list[int]]:
    return [generation.completion.token_ids for generation in generations]


def with_policy(of: Engine, policy: DraftLength) -> Engine:
    """The engine, in which `policy` says how many drafts each step makes."""
    of._launcher.draft_length = policy
    return of


def policy_of(of: Engine) -> DraftLength:
    return of._launcher.draft_length


def with_lag(of: Engine, lag: int) -> Engine:
    """The engine, in which so many launches' reports are held back, as on a device."""
    of._reports.lag = lag
    return of


def decoders_of(of: Engine) -> Collection[SpeculativeDecoder]:
    return of._launcher._decoders.values()


def pool_of(of: Engine) -> PagePool:
    return of._pool


def blank_pages(of: Engine) -> list[int]:
    """Those that are free and that no prompt can find."""
    return of._pool._blank


def generations_of(of: Engine) -> Collection[Generation]:
    """What the engine remembers of requests that have not ended."""
    return of._generations.values()


def live_rows(of: Engine) -> list[tuple[int, Generation]]:
    """The rows of the current state that requests have, and whose they are."""
    rows = of._launcher.rows
    return [(row, rows._live[slot]) for slot, row in rows._row_of.items()]


def state_of(of: Engine) -> DecodeState:
    """What the last step ran on."""
    state = of._launcher.rows._state
    assert state is not None
    return state


def with_new_caches(of: Engine, num_pages: int) -> Engine:
    """The engine on caches of so many pages with NaN in them, made after its own."""
    of.model.allocate_cache(num_pages, of.page_size)
    of._caches = of.model.caches()
    poison_caches(of.model)
    return of


def rows_of_states(of: Engine, num_stop_ids: int) -> list[int]:
    """Of the states that the engine has made for so many stop ids."""
    return sorted(rows for rows, width, *_ in of._launcher._states if width == num_stop_ids)


def watch_launches(of: Engine, see: Callable[[Any, Launched], Launched]) -> None:
    """Have `see` look at each plan and what was launched for it, and say what the engine is told of that."""
    launch = of._launcher.launch

    def watched(plan: Any, *args: Any) -> Launched:
        return see(plan, launch(plan, *args))

    of._launcher.launch = watched  # type: ignore[method-assign]


def watch_reports(of: Engine, see: Callable[[], None]) -> None:
    """Call `see` after each report that the engine has read."""
    collect = of._collect

    def watched() -> None:
        collect()
        see()

    of._collect = watched  # type: ignore[method-assign]


def padding_prompts(of: Engine) -> Sequence[int]:
    """Pad prompts as where mixed steps are captured; the list that is returned gets each step's number of tokens."""
    launcher, sizes = of._launcher, []
    launcher._pads_prompts, mixed = True, launcher._mixed

    def spied(*kind: Any) -> Any:
        return lambda state, chunks: (sizes.append(len(chunks.token_ids)), mixed(*kind)(state, chunks))

    launcher._mixed = spied  # type: ignore[method-assign]
    return sizes
