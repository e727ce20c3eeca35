"""`mla-compile demo`, which is `make demo`."""

import pytest
import torch

from mla_compile.cli.demo import PROMPTS
from mla_compile.speculate import SpeculativeDecoder


@pytest.fixture
def demo(run, checkpoint):
    num_threads = torch.get_num_threads()
    yield lambda: run("demo", "--no-compile", "--model", checkpoint, "--max-new-tokens", 12)
    torch.set_num_threads(num_threads)


@pytest.mark.long
def test_the_demo_shows_each_text_twice_and_compares(demo):
    result = demo()
    assert result.exit_code == 0
    for prompt in PROMPTS:
        assert result.stdout.count(prompt) == 2
    assert "identical tokens: yes" in result.stdout
    for row in ("tokens/s", "acceptance length"):
        assert row in result.stdout


def test_the_demo_runs_on_one_thread_so_that_a_busy_core_does_not_slow_it(demo):
    torch.set_num_threads(2)
    assert demo().exit_code == 0
    assert torch.get_num_threads() == 1


def test_the_demo_fails_if_a_wrong_draft_is_accepted(demo, monkeypatch):
    accept = SpeculativeDecoder._accept  # nothing public accepts a wrong draft

    def accept_all(self, state, targets, q_lens):
        count, active = accept(self, state, targets, q_lens)
        return torch.where(active, q_lens, count), active

    monkeypatch.setattr(SpeculativeDecoder, "_accept", accept_all)
    result = demo()
    assert result.exit_code == 1
    assert "identical tokens: NO" in result.stdout
