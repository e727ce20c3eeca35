"""What torch has compiled, by its own counters."""

from torch._dynamo.utils import counters


def compile_counters() -> dict[str, int]:
    """Since the last `torch._dynamo.reset`: the graphs compiled, and the graphs for which torch skipped CUDA graphs."""
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "cudagraph_skips": counters["inductor"]["cudagraph_skips"],
    }
