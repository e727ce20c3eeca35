"""Builds the wheel and the sdist, and runs the demo from each in an environment of its own, without the network.

    python -m tests.release    # `make release-check`; the archives are in dist/

Dependencies come from the environment that runs this. The checkout is on no path of the new ones.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHIPPED = ("py.typed", "serving/page.html", "explanation/picture.svg")
STRAY = re.compile(r"(^|/)(__pycache__|build|dist|site|\.[^/]+)/|\.(pyc|so|o)$")


def version() -> str:
    """The version, from its one place."""
    match = re.search(r'^__version__ = "(.+)"$', (ROOT / "mla_compile/__init__.py").read_text(), re.MULTILINE)
    assert match is not None
    return match[1]


def names_in(archive: Path) -> list[str]:
    """The files of a wheel or an sdist; an sdist's without its top folder."""
    if archive.suffix == ".whl":
        return zipfile.ZipFile(archive).namelist()
    with tarfile.open(archive) as opened:
        return [name.partition("/")[2] for name in opened.getnames()]


def faults(archive: Path) -> list[str]:
    """What an archive lacks, or should not have."""
    names = names_in(archive)
    tracked = subprocess.run(
        ["git", "ls-files", "mla_compile"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    wanted = {*tracked, *(f"mla_compile/{name}" for name in SHIPPED)}
    found = [f"lacks {name}" for name in sorted(wanted - set(names))]
    metadata = f"mla_compile-{version()}.dist-info/"
    if archive.suffix == ".whl":
        found += [f"has {name}" for name in names if not name.startswith(("mla_compile/", metadata))]
        license = f"{metadata}licenses/LICENSE"
    else:
        top = set(
            tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"][
                "sdist"
            ]["only-include"]
        )
        top |= {"PKG-INFO", ".gitignore"}
        found += [f"has {name}" for name in names if name.partition("/")[0] not in top]
        license = "LICENSE"
    found += [f"has {name}" for name in names if STRAY.search(name)]
    return found + [f"lacks {license}"] * (license not in names)


def apart() -> list[str]:
    """The prefix of a command that runs it without a network; empty where the system has none."""
    prefix = ["unshare", "--net", "--map-root-user"]
    if shutil.which(prefix[0]) and subprocess.run([*prefix, "true"], capture_output=True).returncode == 0:
        return prefix
    print("no `unshare` here: pip is kept from the network, the demo is not", flush=True)
    return []


def try_out(archive: Path) -> None:
    """Install an archive into a new environment and run the demo there."""
    print(f"== {archive.name}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary).resolve()
        environment = {
            key: value
            for key, value in os.environ.items()
            if key not in ("PYTHONPATH", "VIRTUAL_ENV", "MLA_COMPILE_API_KEY") and not key.startswith("PIP_")
        } | {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}

        def run(*command: str | Path) -> str:
            done = subprocess.run(
                [*prefix, *command], cwd=place, env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
            return done.stdout

        prefix = apart()
        run(sys.executable, "-m", "venv", place / "env")
        python = place / "env/bin/python"
        site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        # Paths of a .pth file are searched last, and the .pth files there, such as the checkout's, are not read.
        (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        # The checkout's own entry there is neither an installed version nor to be removed.
        options = (
            "--no-deps",
            "--no-build-isolation",
            "--ignore-installed",
            "--disable-pip-version-check",
            "-q",
        )
        run(python, "-m", "pip", "install", *options, archive)
        program = "import mla_compile; print(mla_compile.__file__); print(mla_compile.__version__)"
        file, found = run(python, "-c", program).split()
        assert Path(file).is_relative_to(site), f"imported {file}, which is not the installed package"
        assert found == version(), f"the version is {found}, not {version()}"
        print(run(place / "env/bin/mla-compile", "demo"), flush=True)


def main() -> None:
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(ROOT / "dist"), str(ROOT)]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
    archives = sorted((ROOT / "dist").iterdir())
    stem = f"mla_compile-{version()}"
    assert [file.name for file in archives] == [f"{stem}-py3-none-any.whl", f"{stem}.tar.gz"], archives
    for archive in archives:
        if found := faults(archive):
            sys.exit(f"{archive.name}: " + "; ".join(found[:10]))
        print(f"{archive.name}: {len(names_in(archive))} files, {archive.stat().st_size / 1e6:.1f} MB")
    for archive in archives:
        try_out(archive)


if __name__ == "__main__":
    main()
