"""Small engines for tests, by the seams that engines have."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from mla_compile import Engine
from mla_compile.engine import Request
from mla_compile.engine.caches import EngineCaches
from mla_compile.engine.pages import PagePool
from mla_compile.latents import FP8
from mla_compile.models import MLAForCausalLM
from mla_compile.speculate import SpeculativeDecoder
from tests.models_for_tests import one_layer_model, poison_caches

SIZES = {"max_rows": 4, "max_model_len": 64, "page_size": 4, "compile": False}


def engine(k: int = 3, model: MLAForCausalLM | None = None, **settings: object) -> Engine:
    """Of `SIZES` where `settings` say nothing else, with NaN in every page.

    k: drafts a step. model: without one, a `one_layer_model()` of its own.
    """
    served = one_layer_model() if model is None else model
    made = Engine(served, **{**SIZES, "num_speculative_tokens": k, **settings})
    for spec in made._caches.specs:  # of a drafter too
        if spec.dtype.is_floating_point:
            spec.cache.fill_(torch.nan)
        elif spec.dtype == FP8:
            spec.cache.fill_(0xFF)  # values, scales and rotary keys are NaN
    return made


def finish(of: Engine) -> None:
    while of.has_work():
        of.step()


def texts(requests: Iterable[Request]) -> list[list[int]]:
    return [request.completion.token_ids for request in requests]


def with_lag(of: Engine, lag: int) -> Engine:
    """The engine with the reports of `lag` launches held back, as on a GPU."""
    of.report_lag = lag
    return of


def pool_of(of: Engine) -> PagePool:
    """The private pool: leaked or shared pages show nowhere else."""
    return of._scheduler.pool


def references(pool: PagePool, page: int) -> int:
    """The number of references to a page; 0: it is free."""
    return pool._references[page]


def is_registered(pool: PagePool, page: int) -> bool:
    """Whether `match` can find a page, so that nothing may be written to it."""
    return pool._key_of[page] is not None


def with_new_caches(of: Engine, num_pages: int) -> Engine:
    """The engine on new caches of `num_pages` pages, filled with NaN; an engine allocates its private caches once."""
    config = replace(of.config, num_pages=num_pages)
    of._caches = EngineCaches(of.model, of._caches._drafter, config)
    poison_caches(of.model)
    return of


def watch_eager_calls(monkeypatch: pytest.MonkeyPatch, *parts: str) -> list[str]:
    """The names of those of these methods of decoders that run eagerly from now on."""
    calls: list[str] = []
    for name in parts:
        method = getattr(SpeculativeDecoder, name)

        def seen(self: SpeculativeDecoder, *args: object, _method=method) -> object:
            if not torch.compiler.is_dynamo_compiling():
                calls.append(_method.__name__)
            return _method(self, *args)

        monkeypatch.setattr(SpeculativeDecoder, name, seen)
    return calls
