"""How old the committed results are: the commits since then that touched the code that a result measures.

    python -m benchmarks.age

A line for each file of benchmarks/results, the oldest first: the commit that its oldest row measured, its date, and the
number of commits since then in the part of the package that it times. Results of whole models and engines count all of
it. Rows of vLLM and of stock transformers do not count: no commit of this package changes them.
"""

import json
import subprocess

from benchmarks.tables import RESULTS, ROOT

ATTENTION = ("mla_compile/ops/attention", "mla_compile/ops/paging.py", "mla_compile/latents.py")
CODE = {
    "decode": ATTENTION,
    "decode_choice": ATTENTION,
    "prefill": ATTENTION,
    "fp8_latents.kernels": ATTENTION,
    "sparse_attention.kernels": ATTENTION,
    "sampling": ("mla_compile/ops/sampling",),
    "collectives": ("mla_compile/ops/collectives",),
    "loading.cpu": ("mla_compile/models",),
    "families": ("mla_compile/models", "mla_compile/integrations"),
}
"""What a result times, where that is not the whole package."""
OTHERS = {"system": ("vllm",), "variant": ("stock_dynamic", "stock_static_inductor")}
"""Rows that time other software, by the field that says so."""


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def ages() -> list[tuple[int, str, str, str]]:
    """Commits since, the name of a result, the commit of its oldest row and its date; the oldest first."""
    found = []
    for path in RESULTS.glob("*.json"):
        code = CODE.get(path.stem, ("mla_compile",))
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        commits = {
            row["commit"]
            for row in rows
            if "stock" not in row and not any(row.get(field) in names for field, names in OTHERS.items())
        }
        since, oldest = max(
            (int(git("rev-list", "--count", f"{one}..HEAD", "--", *code)), one) for one in commits
        )
        found.append((since, path.stem, oldest, git("log", "-1", "--format=%cs", oldest)))
    return sorted(found, reverse=True)


def main() -> None:
    print("commits since  result                       commit   date")
    for since, name, commit, date in ages():
        print(f"{since:>13}  {name:<27}  {commit}  {date}")


if __name__ == "__main__":
    main()
