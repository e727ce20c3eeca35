"""What takes long is told of: by a warning, by the command on stderr."""

import io
import logging
import time

import pytest
import torch

from mla_compile import Engine, progress
from mla_compile.progress import announce_if_slow, shown_by
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


def test_what_takes_long_is_one_warning(impatient, caplog):
    with announce_if_slow("working"):
        wait_for(lambda: caplog.records)
        time.sleep(0.2)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "working ...")
    ]
    assert caplog.records[0].name == "mla_compile.progress"


def test_what_is_quick_says_nothing(caplog, capsys):
    for show in (progress.in_program, progress.in_command):
        with shown_by(show), announce_if_slow("working"):
            pass
    assert not caplog.records and capsys.readouterr() == ("", "")


@pytest.mark.long
def test_a_compile_is_told_of_once(impatient, caplog, monkeypatch):
    def slow(gm, example_inputs, settings):
        time.sleep(0.3)
        return gm.forward

    monkeypatch.setattr("mla_compile.backend.lower_with_inductor", slow)
    engine = Engine(tiny_model(torch.float32), num_speculative_tokens=1, max_rows=2)
    with caplog.at_level(logging.WARNING, "mla_compile"):
        engine.generate([[1, 2, 3]] * 3, max_new_tokens=5)
    lines = [record.getMessage() for record in caplog.records if record.name == "mla_compile.progress"]
    assert lines == [
        "compiling the step (greedy, drafts: 1), a minute or two if it is new to this machine ..."
    ]


def test_the_command_shows_lines_of_their_own_where_stderr_is_no_terminal(
    impatient, monkeypatch, capsys, caplog
):
    monkeypatch.setattr(progress, "INTERVAL", 0.05)
    with shown_by(progress.in_command), announce_if_slow("working"):
        time.sleep(0.3)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 2 and set(lines) == {"working ... 0 s"}
    assert not caplog.records


def test_a_terminal_gets_one_line_that_counts(monkeypatch):
    err = Terminal()
    monkeypatch.setattr("sys.stderr", err)
    with progress.in_command("working"):
        wait_for(err.getvalue)
    text = err.getvalue()
    assert "working ... 0 s" in text and "\r" in text
    assert text.endswith("\n") and text.count("\n") == 1


def test_a_brief_line_is_for_a_terminal_alone_and_does_not_stay(monkeypatch, capsys):
    monkeypatch.setattr(progress, "PATIENCE", 0.1)
    with progress.importing():
        time.sleep(0.4)
    assert capsys.readouterr() == ("", "")
    err = Terminal()
    monkeypatch.setattr("sys.stderr", err)
    with progress.importing():
        pass
    assert not err.getvalue(), "it was quick"
    with progress.importing():
        wait_for(err.getvalue)
    text = err.getvalue()
    assert "importing torch ... 0 s" in text and "\n" not in text
    assert text.endswith("\r\x1b[K"), "erased"


@pytest.mark.parametrize("brief", [False, True])
def test_without_stderr_nothing_is_shown(impatient, monkeypatch, brief):
    """As where a shell closed it: `2>&-`."""
    monkeypatch.setattr("sys.stderr", None)
    with progress.in_command("working", brief=brief):
        time.sleep(0.1)


def test_of_waits_inside_each_other_the_innermost_is_shown(impatient, monkeypatch, capsys):
    monkeypatch.setattr(progress, "INTERVAL", 0.05)
    with progress.in_command("all of it"):
        with progress.in_command("a part"):
            time.sleep(0.3)
        within = capsys.readouterr().err
        time.sleep(0.3)
    assert {line.split(" ... ")[0] for line in within.splitlines()} == {"a part"}
    assert {line.split(" ... ")[0] for line in capsys.readouterr().err.splitlines()} == {"all of it"}


def test_a_program_on_a_terminal_gets_a_bar_of_bytes_once_it_is_long(impatient, monkeypatch, caplog):
    err = Terminal()
    monkeypatch.setattr("sys.stderr", err)
    with announce_if_slow("loading", 4_000_000_000) as advance:
        advance(1_000_000_000)
        assert not err.getvalue(), "it is quick so far"
        time.sleep(0.1)
        advance(1_000_000_000)
    assert "loading" in err.getvalue() and "2.0/4.0 GB" in err.getvalue()
    assert not caplog.records


def test_of_several_processes_the_others_say_nothing(impatient, monkeypatch, caplog):
    err = Terminal()
    monkeypatch.setattr("sys.stderr", err)
    for num_bytes in (0, 100):
        with announce_if_slow("loading", num_bytes, is_shown=False) as advance:
            time.sleep(0.1)
            advance(50)
    assert not err.getvalue() and not caplog.records


@pytest.mark.parametrize(("stream", "words"), [(Terminal, "1.0/4.0 GB"), (io.StringIO, "1.0 of 4.0 GB, 0 s")])
def test_the_command_says_how_many_bytes_are_done(stream, words, impatient, monkeypatch):
    err = stream()
    monkeypatch.setattr("sys.stderr", err)
    with shown_by(progress.in_command), announce_if_slow("loading", 4_000_000_000) as advance:
        advance(1_000_000_000)
        wait_for(err.getvalue)
    assert words in err.getvalue()
