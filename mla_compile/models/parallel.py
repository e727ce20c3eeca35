"""Which part of a model a process has, where several processes share one: `Parallel`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch.distributed as dist

from mla_compile.errors import MLAError
from mla_compile.ranks import Ranks

if dist.is_available():
    # Its functions take as default arguments what the default group is when it is imported. Were that done by
    # transformers, when a checkpoint is loaded, they would keep the group past `destroy_process_group`: gloo's threads
    # would still run when the interpreter ends, and might end the process by "terminate called".
    import torch.distributed.nn.functional  # noqa: F401


@dataclass(frozen=True)
class Parallel:
    """This process's place among those that share a model by tensor parallelism, each with a GPU of its own.

    rank: 0 to `size - 1`.
    size: how many processes there are, all those of torch.distributed's default group.
    expert_parallel: routed experts are divided by whole ones, not each by its intermediate width.
    ranks: how the processes reach each other beside their collectives; None where there is no such process, as of a
        model on the meta device.
    """

    rank: int
    size: int
    expert_parallel: bool = False
    ranks: Ranks | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of_processes(cls, *, expert_parallel: bool = False) -> "Parallel":
        """All processes of torch.distributed's default group, each of which calls this.

        From now on they look after each other: where one is gone, the others end within 30 seconds, with a line on
        stderr that names it.

        Args:
            expert_parallel: see `Parallel`.

        Raises:
            MLAError: there is no such group yet; `expert_parallel` is no boolean.
        """
        if type(expert_parallel) is not bool:
            raise MLAError("expert_parallel", "True or False", f"{expert_parallel!r:.80}")
        if not (dist.is_available() and dist.is_initialized()):
            hint = "start the program with torchrun, and call torch.distributed.init_process_group() first"
            raise MLAError("Parallel", "a process group of torch.distributed", "none", hint)
        ranks = _ranks(dist.group.WORLD)
        return cls(ranks.rank, ranks.size, expert_parallel, ranks)

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """All processes leave the block together, and with an error if one of them does: none goes on to wait for it.

        Raises:
            MLAError: another process has failed; which one, and how.
        """
        failed: Exception | None = None
        try:
            yield
        except Exception as error:
            failed = error
        assert self.ranks is not None, "see `check_parallel`"
        of_all = self.ranks.of_all("" if failed is None else f"{failed}" or type(failed).__name__)
        if failed is not None:
            raise failed
        for rank, what in enumerate(of_all):
            if what:
                raise MLAError(
                    "parallel", "all processes to load their parts", f"from process {rank}: {what}"
                )


def check_parallel(parallel: object) -> None:
    """Raises `MLAError` for what is no place of this process."""
    if not isinstance(parallel, Parallel) or parallel.ranks is None:
        raise MLAError("parallel", "what Parallel.of_processes() returns, or None", f"{parallel!r:.80}")


_made: "WeakKeyDictionary[object, Ranks]" = WeakKeyDictionary()
"""For a default group of torch.distributed, while there is one."""


def _ranks(of_group: object) -> Ranks:
    """Made once for a default group: its groups are those of all engines."""
    if of_group not in _made:
        _made[of_group] = Ranks()
    return _made[of_group]
