"""Makes `torch.compile(backend="mla")` work wherever `mla_compile` was imported, installed or not, torch loaded or not.

torch finds backends by entry points of installed packages, when it is first asked for one that it does not know. From
a source tree there is no installed package, so importing ours adds one to what `importlib.metadata` finds. Where torch
has looked already, the entry point is given to it directly. Neither imports torch.
"""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # this runs before the command can handle Ctrl-C, so it imports next to nothing
    from importlib.metadata import Distribution, DistributionFinder
    from pathlib import Path

GROUP, NAME, VALUE = "torch_dynamo_backends", "mla", "mla_compile.backend:mla"
"""As in pyproject.toml, for the installed package."""


class SourceTree:
    """A finder of one distribution: ours, with the entry point. It comes last, so an installed one goes before it."""

    def __init__(self, version: str) -> None:
        self._version = version

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """No module is found here."""

    def find_distributions(self, context: "DistributionFinder.Context") -> Iterator["Distribution"]:
        from importlib.metadata import Distribution
        from pathlib import Path

        version = self._version

        class SourceDistribution(Distribution):
            def read_text(self, filename: str) -> str | None:
                files = {
                    "METADATA": f"Metadata-Version: 2.1\nName: mla-compile\nVersion: {version}\n",
                    "entry_points.txt": f"[{GROUP}]\n{NAME} = {VALUE}\n",
                }
                return files.get(filename)

            def locate_file(self, path: object) -> "Path":
                return Path(__file__).parents[1] / str(path)

        if context.name is None or context.name.lower().replace("_", "-") == "mla-compile":
            yield SourceDistribution()


def register_backend(version: str) -> None:
    """Let torch find the backend by name; it is imported when it is first used."""
    sys.meta_path.append(SourceTree(version))
    registry = sys.modules.get("torch._dynamo.backends.registry")
    if registry is not None:
        from importlib.metadata import EntryPoint

        registry._BACKENDS.setdefault(NAME, EntryPoint(NAME, VALUE, GROUP))
