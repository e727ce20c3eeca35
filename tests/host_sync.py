"""A dispatch-level check that fails on everything that would make the host wait for the device."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
_READS_VALUES = {
    aten._local_scalar_dense,
    aten.item,
    aten.is_nonzero,
    aten.equal,
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.bincount,
}


class HostSyncError(AssertionError):
    pass


class NoHostSync(TorchDispatchMode):
    """Raises on reads of values (`.item()`, `nonzero`, boolean indexing ...) and on copies between devices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        boolean_index = func.overloadpacket in (aten.index, aten.index_put, aten.index_put_) and any(
            isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in tree_leaves(args[1])
        )
        data_dependent_size = func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
        if func.overloadpacket in _READS_VALUES or boolean_index or data_dependent_size:
            raise HostSyncError(f"{func} reads values on the host")
        out = func(*args, **kwargs)
        devices = {t.device for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)}
        if len(devices) > 1:
            raise HostSyncError(f"{func} moves data between {sorted(map(str, devices))}")
        return out
