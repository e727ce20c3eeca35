"""The place in the user's code that a node comes from."""

import re

from torch import fx


def module_path(node: fx.Node) -> str:
    """The innermost module that the node comes from, `layers.0.self_attn`; the class name for the outermost module;
    empty outside any module."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return ""
    # Dynamo writes L['function'].layers[0].self_attn or L['self']._modules['layers']._modules['0'].
    path = re.sub(r"^L\[[^\]]*\]\.?", "", stack[-1][0])
    path = re.sub(r"\[['\"]?([^'\"\]]*)['\"]?\]", r".\1", path.replace("_modules", ""))
    return re.sub(r"\.{2,}", ".", path).strip(".") or str(getattr(stack[-1][1], "__name__", stack[-1][1]))


def where(node: fx.Node) -> str:
    """`layers.0.self_attn (model.py:86, in forward)`: the module and the innermost line outside torch, if known."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', node.meta.get("stack_trace") or "")
    lines = [frame for frame in frames if "/site-packages/torch/" not in frame[0]]
    module = module_path(node)
    if not lines:
        return module or node.name
    file, number, function = lines[-1]
    line = f"{file.rsplit('/', 1)[-1]}:{number}, in {function}"
    return f"{module} ({line})" if module else line
