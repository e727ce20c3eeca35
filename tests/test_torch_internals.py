"""The private API of torch is listed, and a version without it is refused by name; ranks listen on loopback only."""

import ast
import inspect
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mla_compile import MLAError, torch_internals
from mla_compile.torch_internals import COMPILER_APIS, WORKING_TORCH, check_torch

OPTIONAL = ("torch._C", "torch.distributed", "torch.cuda", "torch.fx.experimental.symbolic_shapes")
"""What only some builds have, or only GPUs use; `torch._C` has no submodules to import."""


def names_in_the_source() -> set[str]:
    """All that `torch_internals` reads of torch's private modules, in dotted form, but for `OPTIONAL`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(inspect.getsource(torch_internals))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
    private = {name for name in found if re.match(r"torch\.(\w+\.)*_[a-z]", name)}
    at_import = ("torch._logging._internal", "torch._subclasses", "torch.utils._pytree")
    public = {"torch._check"}
    return {name for name in private - public if not name.startswith((*OPTIONAL, *at_import))}


def test_every_private_name_is_listed() -> None:
    listed = {name.replace(":", ".") for name in COMPILER_APIS}
    modules = {name.partition(":")[0] for name in COMPILER_APIS}
    prefixes = {
        ".".join(name.split(".")[:end]) for name in listed | modules for end in range(1, name.count(".") + 2)
    }
    assert names_in_the_source() <= prefixes, "list it in COMPILER_APIS"
    assert listed <= names_in_the_source(), "no longer used: remove it from COMPILER_APIS"


@pytest.mark.long
def test_this_torch_has_them_all() -> None:
    check_torch.__wrapped__()


def test_a_missing_one_is_named_with_the_versions_that_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_internals, "COMPILER_APIS", ("torch._guards:TracingContext.no_such",))
    monkeypatch.setattr("mla_compile.backend.check_torch", check_torch.__wrapped__)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x + 1, backend="mla")
    expected = (
        f"torch: expected a version with torch._guards.TracingContext.no_such, got {torch.__version__}; "
    )
    with pytest.raises(MLAError, match=re.escape(expected)) as caught:
        compiled(torch.zeros(2))
    assert WORKING_TORCH in str(caught.value)


@pytest.mark.long
def test_one_that_is_missing_at_import_is_named_too() -> None:
    program = "import torch._subclasses; del torch._subclasses.FakeTensor; import mla_compile.torch_internals"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "cannot import name 'FakeTensor'" in done.stderr
    assert "MLAError: torch: expected a version with trace_structured, FakeTensor" in done.stderr
    assert WORKING_TORCH in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one loopback address")
def test_only_loopback_reaches_the_ranks_meeting_place() -> None:
    store = torch_internals.meeting_place(1)
    assert torch_internals.meeting_place(1, store.port).add("ranks", 1) == 1
    # All of 127.0.0.0/8 is this machine's: a socket of all interfaces would answer here.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), timeout=5)
    listening = Path("/proc/net/tcp6").read_text() if Path("/proc/net/tcp6").exists() else ""
    assert f":{store.port:04X} " not in "".join(line for line in listening.splitlines() if " 0A " in line)


def test_gloo_listens_on_loopback_unless_an_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    torch_internals.keep_gloo_on_loopback()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    torch_internals.keep_gloo_on_loopback()
    assert os.environ["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
