"""Which part of a model a process has, where several processes share one: `Parallel`."""

from dataclasses import dataclass

import torch.distributed as dist

from mla_compile.errors import MLAError

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
    """

    rank: int
    size: int
    expert_parallel: bool = False

    @classmethod
    def of_processes(cls, *, expert_parallel: bool = False) -> "Parallel":
        """All processes of torch.distributed's default group.

        Args:
            expert_parallel: see `Parallel`.

        Raises:
            MLAError: there is no such group yet; `expert_parallel` is no boolean.
        """
        if type(expert_parallel) is not bool:
            raise MLAError("expert_parallel", "True or False", f"{expert_parallel!r:.80}")
        if not (dist.is_available() and dist.is_initialized()):
            mend = "start the program with torchrun, and call torch.distributed.init_process_group() first"
            raise MLAError("Parallel", "a process group of torch.distributed", "none", mend)
        return cls(dist.get_rank(), dist.get_world_size(), expert_parallel)

    def check(self) -> None:
        """Raises `MLAError` where this is not the place that the process has."""
        here = Parallel.of_processes(expert_parallel=self.expert_parallel)
        if here != self:
            raise MLAError("parallel", f"this process's place, {here}", self, "use Parallel.of_processes()")
