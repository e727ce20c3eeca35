"""`Parallel`: the part that a process has of a model that several processes share."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from mla_compile.errors import MLAError
from mla_compile.ops.collectives.collectives import all_gather
from mla_compile.ranks import Ranks

if dist.is_available():
    # Its functions bind the default group at import as a default argument. If transformers imported it while a
    # checkpoint is loaded, they would keep the group past `destroy_process_group`: gloo's threads would still run when
    # the interpreter ends, and might abort the process with "terminate called".
    import torch.distributed.nn.functional  # noqa: F401


@dataclass(frozen=True)
class Parallel:
    """This process's place among those that share a model by tensor parallelism, each with a GPU of its own.

    rank: 0 to `size - 1`.
    size: number of processes, all those of torch.distributed's default group.
    expert_parallel: each process has whole routed experts, not a part of each one's intermediate width.
    ranks: the link among the processes, apart from their collectives; None without processes, as for a model on the
        meta device.
    """

    rank: int
    size: int
    expert_parallel: bool = False
    ranks: Ranks | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of_processes(cls, *, expert_parallel: bool = False) -> "Parallel":
        """This process's place in torch.distributed's default group; every process of the group calls this.

        From now on the processes watch each other: if one exits, the others end within 30 seconds, with a line on
        stderr that names it.

        Args:
            expert_parallel: see `Parallel`.

        Raises:
            MLAError: there is no such group yet; `expert_parallel` is not a boolean.
        """
        if type(expert_parallel) is not bool:
            raise MLAError("expert_parallel", "True or False", f"{expert_parallel!r:.80}")
        if not (dist.is_available() and dist.is_initialized()):
            hint = "start the program with torchrun, and call torch.distributed.init_process_group() first"
            raise MLAError("Parallel", "a process group of torch.distributed", "none", hint)
        group = dist.group.WORLD
        if group not in _made:
            _made[group] = Ranks()
        ranks = _made[group]
        return cls(ranks.rank, ranks.size, expert_parallel, ranks)

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """All processes leave the block together, all with an error if one has an error: none waits for a failed one.

        Raises:
            MLAError: another process has failed; the message has its rank and error.
        """
        failed: Exception | None = None
        try:
            yield
        except Exception as error:
            failed = error
        assert self.ranks is not None, "see `check_parallel`"
        errors = self.ranks.all_gather("" if failed is None else f"{failed}" or type(failed).__name__)
        if failed is not None:
            raise failed
        for rank, what in enumerate(errors):
            if what:
                expected = "all processes to load their parts"
                raise MLAError("parallel", expected, f"from process {rank}: {what}")


def check_parallel(parallel: object) -> None:
    """Raises `MLAError` unless `parallel` is what `Parallel.of_processes` returns."""
    if not isinstance(parallel, Parallel) or parallel.ranks is None:
        raise MLAError("parallel", "what Parallel.of_processes() returns, or None", f"{parallel!r:.80}")


def gathered(logits: Tensor, parallel: Parallel | None) -> Tensor:
    """The logits `[..., columns]` of all processes, joined along columns, so that all choose from the same bits."""
    if parallel is None:
        return logits
    whole = all_gather(logits.flatten(0, -2), parallel.size)
    return whole.view(*logits.shape[:-1], whole.shape[1])


_made: "WeakKeyDictionary[object, Ranks]" = WeakKeyDictionary()
"""By default group of torch.distributed, one each: all engines share its gloo groups."""
