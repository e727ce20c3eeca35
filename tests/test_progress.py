"""Slow work is announced: by one warning, or by a bar on a terminal."""

import io
import logging
import re
import time

import pytest
import torch

from mla_compile import Engine, progress
from mla_compile.progress import announce_if_slow
from tests.models_for_tests import tiny_model


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 0.05)


def wait_for(condition) -> None:
    end = time.perf_counter() + 30
    while not condition() and time.perf_counter() < end:
        time.sleep(0.01)


def test_slow_work_is_one_warning(impatient, caplog):
    with announce_if_slow("working"):
        wait_for(lambda: caplog.records)
        time.sleep(0.2)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "working ...")
    ]
    assert caplog.records[0].name == "mla_compile.progress"


def test_quick_work_is_not_announced(caplog, capsys):
    for num_bytes in (0, 100):
        with announce_if_slow("working", num_bytes):
            pass
    assert not caplog.records and capsys.readouterr() == ("", "")


@pytest.mark.long
def test_a_compile_is_announced_once(impatient, caplog, monkeypatch):
    def slow(gm, example_inputs, settings):
        time.sleep(0.3)
        return gm.forward

    monkeypatch.setattr("mla_compile.backend.lower_with_inductor", slow)
    engine = Engine(tiny_model(torch.float32), num_speculative_tokens=1, max_rows=2, compile=True)
    with caplog.at_level(logging.WARNING, "mla_compile"):
        engine.generate([[1, 2, 3]] * 3, max_new_tokens=5)
    lines = [record.getMessage() for record in caplog.records if record.name == "mla_compile.progress"]
    assert len(lines) == 2 and all(re.match(r"compiling .*\b1\b.*\.\.\.$", line) for line in lines)
    assert "advance, greedy" in lines[0] and "verify" in lines[1], (
        "the first step has prompts, and runs them eagerly"
    )


@pytest.mark.parametrize("num_bytes", [0, 100])
def test_without_stderr_nothing_is_shown(impatient, monkeypatch, num_bytes):
    """A shell closes it with `2>&-`."""
    monkeypatch.setattr("sys.stderr", None)
    with announce_if_slow("working", num_bytes):
        time.sleep(0.1)


def test_a_terminal_gets_a_bar_of_bytes_once_it_is_long(impatient, monkeypatch, caplog):
    err = Terminal()
    monkeypatch.setattr("sys.stderr", err)
    with announce_if_slow("loading", 4_000_000_000) as advance:
        advance(1_000_000_000)
        assert not err.getvalue(), "it is quick so far"
        time.sleep(0.1)
        advance(1_000_000_000)
    assert "loading" in err.getvalue() and "2.0/4.0 GB" in err.getvalue()
    assert not caplog.records


def test_one_of_several_processes_announces(impatient, monkeypatch, caplog):
    err = Terminal()
    monkeypatch.setattr("sys.stderr", err)
    for num_bytes in (0, 100):
        with announce_if_slow("loading", num_bytes, is_shown=False) as advance:
            time.sleep(0.1)
            advance(50)
    assert not err.getvalue() and not caplog.records
