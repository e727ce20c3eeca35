"""The CUDA graphs that torch's compiler has recorded, for modules that are compiled without an engine."""

import torch


def num_recorded() -> int:
    """The number of CUDA graphs that Inductor has recorded on the current device."""
    from torch._inductor import cudagraph_trees  # nothing public counts them

    manager = cudagraph_trees.get_container(torch.cuda.current_device()).tree_manager
    pending = [] if manager is None else [node for nodes in manager.roots.values() for node in nodes]
    count = 0
    while pending:
        node, count = pending.pop(), count + 1
        pending += [child for children in node.children.values() for child in children]
    return count
