"""What is packed, and what it says of itself: version, licences, types, the wheel's tag and the symbols behind it, and
whether the source that is published is whole. Nothing is built here; what a wheel holds is read from the installed
package (`make install`)."""

import base64
import csv
import hashlib
import importlib.metadata
import io
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution
from pathlib import Path

import pytest
import yaml

import bastile
from bastile import _library

ROOT = Path(__file__).resolve().parents[2]
# What every manylinux system has, of what a C library may ask for (PEP 600).
SYSTEM_LIBRARIES = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "libgcc_s.so.1"}


class Elf:
    """As much of a 64-bit little-endian library as these tests ask for."""

    def __init__(self, path: Path) -> None:
        self.data = path.read_bytes()
        assert self.data[:6] == b"\x7fELF\x02\x01"
        (offset,) = struct.unpack_from("<Q", self.data, 40)
        size, count = struct.unpack_from("<HH", self.data, 58)
        headers = [struct.unpack_from("<IIQQQQIIQQ", self.data, offset + i * size) for i in range(count)]
        self.sections = {kind: (start, length, headers[link][4]) for _, kind, _, _, start, length, link, *_ in headers}

    def name(self, at: int) -> str:
        return self.data[at : self.data.index(b"\0", at)].decode()

    def symbols(self, exported: bool) -> set[str]:
        start, length, names = self.sections[11]  # SHT_DYNSYM
        symbols = (struct.unpack_from("<IBBH", self.data, at) for at in range(start, start + length, 24))
        return {self.name(names + name) for name, _, _, section in symbols if name and bool(section) == exported}

    def needed(self) -> set[str]:
        start, length, names = self.sections[6]  # SHT_DYNAMIC
        entries = (struct.unpack_from("<QQ", self.data, at) for at in range(start, start + length, 16))
        return {self.name(names + value) for tag, value in entries if tag == 1}  # DT_NEEDED

    def glibc(self) -> tuple[int, int]:
        """The newest version of glibc's symbols that is asked for."""
        at, _, names = self.sections[0x6FFFFFFE]  # SHT_GNU_verneed
        found = []
        while True:
            _, count, _, aux, following = struct.unpack_from("<HHIII", self.data, at)
            entry = at + aux
            for _ in range(count):
                _, _, _, name, after = struct.unpack_from("<IHHII", self.data, entry)
                found.append(self.name(names + name))
                entry += after
            if not following:
                return max((int(m[1]), int(m[2])) for m in (re.match(r"GLIBC_(\d+)\.(\d+)", f) for f in found) if m)
            at += following


@pytest.fixture(scope="module")
def installed() -> Distribution:
    try:
        return importlib.metadata.distribution("bastile")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("bastile is not installed here, but run from its source")


@pytest.fixture(scope="module")
def packed(installed: Distribution) -> Elf:
    return Elf(Path(str(installed.locate_file("bastile/libbastile.so"))))


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("mesonpy", reason="meson-python is not installed")
    monkeypatch.syspath_prepend(ROOT / "tools")
    import build_backend

    return build_backend


def git(*arguments: str) -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("this tree is not under git")
    run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return run.stdout.splitlines()


# ---- the version ---------------------------------------------------------------------------------------------------


def test_the_version_stands_in_the_header_alone() -> None:
    header = (ROOT / "include/bastile.h").read_text()
    numbers = re.findall(r"^#define BST_VERSION_(?:MAJOR|MINOR|PATCH) +(\d+)$", header, re.M)
    assert len(numbers) == 3
    stated = ".".join(numbers)
    assert stated not in header
    assert bastile.__version__ == _library.version() == stated
    major, minor, patch = map(int, numbers)
    assert _library.library.bst_version_number() == 10000 * major + 100 * minor + patch
    for name in ("meson.build", "pyproject.toml", "python/bastile/__init__.py"):
        assert stated not in (ROOT / name).read_text(), f"{name} states the version once more"


def test_the_package_has_the_version_of_the_library(installed: Distribution) -> None:
    assert installed.version == bastile.__version__


# ---- what is installed ---------------------------------------------------------------------------------------------


def test_the_wheel_is_for_every_python(installed: Distribution) -> None:
    tag = re.search(r"^Tag: (.*)$", installed.read_text("WHEEL"), re.M)[1]
    assert re.fullmatch(r"py3-none-(manylinux_\d+_\d+|linux)_\w+", tag)
    assert installed.metadata["Requires-Python"] == ">=3.10"


def test_the_library_needs_no_more_than_the_tag_promises(installed: Distribution, packed: Elf) -> None:
    tag = re.search(r"^Tag: .*-manylinux_(\d+)_(\d+)_", installed.read_text("WHEEL"), re.M)
    if not tag:
        pytest.skip("this system's C library is not glibc")
    assert packed.glibc() <= (int(tag[1]), int(tag[2]))
    # What scanf and strtol become where glibc is 2.38 or newer: four versions beyond all else.
    assert not [name for name in packed.symbols(exported=False) if name.startswith("__isoc23_")]
    assert {name for name in packed.needed() if not name.startswith("ld-linux")} <= SYSTEM_LIBRARIES


def test_the_library_exports_its_own_names_and_no_others(packed: Elf) -> None:
    headers = "".join(path.read_text() for path in (ROOT / "include").rglob("*.h"))
    declared = re.findall(r"^BST_(?:API|EXPORT) [^;]*?\b(bst_\w+)[(\[;]", headers, re.M)  # functions and counters
    assert packed.symbols(exported=True) == set(declared)


def test_the_package_is_typed_and_carries_its_licences(installed: Distribution) -> None:
    files = {str(file) for file in installed.files}
    assert "bastile/py.typed" in files
    assert installed.metadata["License-Expression"] == "MIT AND Apache-2.0"
    for name in ("LICENSE", "third_party/dlpack/LICENSE"):
        assert name in installed.metadata.get_all("License-File")
        assert installed.read_text(f"licenses/{name}") == (ROOT / name).read_text()


def test_every_python_file_is_installed(installed: Distribution) -> None:
    ours = {name.removeprefix("python/") for name in git("ls-files", "python")}
    theirs = {str(file) for file in installed.files if file.parts[0] == "bastile" and file.suffix != ".pyc"}
    assert theirs == ours | {"bastile/libbastile.so"}


def test_an_editable_install_finds_its_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """There the library is no neighbour of the Python files; the package's loader knows where it lies."""
    monkeypatch.delenv("BASTILE_LIBRARY", raising=False)
    monkeypatch.setattr(_library, "files", lambda package: tmp_path)
    with pytest.raises(ImportError, match="BASTILE_LIBRARY"):
        _library._path()
    (tmp_path / "libbastile.so").touch()
    assert _library._path() == tmp_path / "libbastile.so"


# ---- the build backend ---------------------------------------------------------------------------------------------


def names_table(*versions: str) -> bytes:
    return b"\0".join([b"\x7fELF", b"dlopen", *(v.encode() for v in versions), b"libc.so.6", b""])


@pytest.mark.parametrize(
    ("platform", "versions", "tag"),
    [
        ("linux_x86_64", ["GLIBC_2.2.5", "GLIBC_2.34", "GLIBC_2.4"], "py3-none-manylinux_2_34_x86_64"),
        ("linux_aarch64", ["GLIBC_2.17", "GLIBC_2.25"], "py3-none-manylinux_2_25_aarch64"),
        ("linux_x86_64", ["GLIBC_2.2.5"], "py3-none-manylinux_2_17_x86_64"),  # older is promised by nobody
        ("linux_x86_64", [], "py3-none-linux_x86_64"),  # musl
        ("macosx_14_0_arm64", [], "py3-none-macosx_14_0_arm64"),
    ],
)
def test_the_tag_follows_from_the_symbols(backend, platform: str, versions: list[str], tag: str) -> None:
    assert backend.wheel_tag(platform, names_table(*versions)) == tag


def test_the_backend_reads_the_library_as_the_linker_does(backend) -> None:
    library = _library._path()
    assert backend.glibc_needed(library.read_bytes()) == Elf(library).glibc()


def test_a_wheel_gets_its_tag_and_stays_whole(backend, tmp_path: Path) -> None:
    files = {
        "bastile/libbastile.so": names_table("GLIBC_2.28"),
        "bastile-1.2.3.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp311-cp311-linux_x86_64",
    }

    def row(name: str, data: bytes) -> str:
        return (
            f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}"
        )

    record = "bastile-1.2.3.dist-info/RECORD"
    files[record] = "\r\n".join([*(row(name, data) for name, data in files.items()), f"{record},,", ""]).encode()
    wheel = tmp_path / "bastile-1.2.3-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)

    assert backend.retag(wheel) == tmp_path / "bastile-1.2.3-py3-none-manylinux_2_28_x86_64.whl"

    (found,) = tmp_path.iterdir()
    with zipfile.ZipFile(found) as archive:
        assert archive.namelist() == list(files)
        assert b"\nTag: py3-none-manylinux_2_28_x86_64" in archive.read("bastile-1.2.3.dist-info/WHEEL")
        for line in csv.reader(io.StringIO(archive.read(record).decode())):
            assert line == [record, "", ""] or ",".join(line) == row(line[0], archive.read(line[0]))


# ---- the source ----------------------------------------------------------------------------------------------------


def test_nothing_that_a_build_reads_is_ignored_by_git() -> None:
    """`meson dist` packs what is committed; a file that .gitignore swallowed would be missing from it alone. What tools
    leave, in folders of their own, is nobody's."""
    ignored = git(
        "ls-files", "--others", "--ignored", "--exclude-standard", "src", "include", "python", "tools", "tests"
    )
    assert [name for name in ignored if not re.search(r"(^|/)(__pycache__|\.[^/]+)/", name)] == []


def test_the_source_is_packed_whole() -> None:
    """`meson dist` packs what `git archive` does: no attribute may leave a file out."""
    listed = git("ls-files")
    left_out = [
        line for line in git("check-attr", "export-ignore", "--", *listed) if not line.endswith(": unspecified")
    ]
    assert left_out == []
    needed = {"pyproject.toml", "meson.build", "meson.options", "tools/build_backend.py", "tools/embed.py", "LICENSE"}
    assert needed | {"third_party/dlpack/LICENSE", "python/bastile/py.typed"} <= set(listed)


# ---- the library for C programs ------------------------------------------------------------------------------------


def configure(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """`meson setup`, which is quick; nothing is compiled."""
    pytest.importorskip("mesonbuild", reason="meson is not installed")
    if not shutil.which(os.environ.get("CC", "cc").split()[0]):
        pytest.skip("no C compiler")
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "mesonbuild.mesonmain", "setup", str(folder), str(ROOT), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_static_library_says_what_it_is_linked_with(tmp_path: Path) -> None:
    run = configure(tmp_path, "-Ddefault_library=static")
    assert run.returncode == 0, run.stdout
    targets = json.loads((tmp_path / "meson-info/intro-targets.json").read_text())
    (library,) = [t for t in targets if t["installed"]]
    assert (library["name"], library["type"]) == ("bastile", "static library")
    described = (tmp_path / "meson-private/bastile.pc").read_text()
    assert re.search(r"^Libs: .*-lbastile\b.* -lm$", described, re.M)
    assert f"\nVersion: {bastile.__version__}\n" in described
    # Whoever packages this has another compiler, which may warn of something else.
    options = json.loads((tmp_path / "meson-info/intro-buildoptions.json").read_text())
    assert {o["name"]: o["value"] for o in options}["werror"] is False


def libraries(build: Path) -> list[str]:
    targets = json.loads((build / "meson-info/intro-targets.json").read_text())
    return [Path(name).name for t in targets if t["installed"] for name in t["filename"]]


def test_a_shared_library_has_the_version_of_its_interface(tmp_path: Path) -> None:
    major, minor, _ = bastile.__version__.split(".")
    interface = f"0.{minor}" if major == "0" else major
    assert configure(tmp_path / "c").returncode == 0
    assert libraries(tmp_path / "c") == [f"libbastile.so.{bastile.__version__}"]
    assert f"-Wl,-soname,libbastile.so.{interface}\n" in (tmp_path / "c/build.ninja").read_text().replace(" ", "\n")
    # The Python package opens one file by its path.
    assert configure(tmp_path / "python", "-Dpackage=true").returncode == 0
    assert libraries(tmp_path / "python") == ["libbastile.so"]


# ---- the header ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("language", ["c", "c++"])
@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("return bst_scale(0, 0, 0) == BST_INVALID && BST_VERSION_NUMBER >= 100 && sizeof BST_VERSION > 5;", None),
        ("bst_scale(0, 0, 0); return 0;", "unused-result"),
        ("int64_t padding = 0; bst_cross_entropy_options o = {sizeof o, padding}; return !o.size;", "int64_t"),
    ],
    ids=["right", "a status not looked at", "ignore_index without its address"],
)
def test_compilers_find_what_the_header_lets_them_find(tmp_path: Path, language: str, body: str, fault) -> None:
    compiler = shutil.which({"c": "cc", "c++": "c++"}[language])
    if not compiler:
        pytest.skip(f"no compiler of {language}")
    program = f"#include <bastile.h>\nint main(void) {{ {body} }}\n"
    standard = {"c": "c17", "c++": "c++20"}[language]
    run = subprocess.run(
        [compiler, "-x", language, f"-std={standard}", "-Werror", f"-I{ROOT}/include", "-c", "-o", "/dev/null", "-"],
        input=program, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (run.returncode == 0) == (fault is None), run.stderr
    assert fault is None or fault in run.stderr


def test_an_emulated_gpu_cannot_be_packaged(tmp_path: Path) -> None:
    run = configure(tmp_path, "-Demulate=true", "-Dpackage=true")
    assert run.returncode != 0
    assert "cannot be packaged" in run.stdout


# ---- the recipes that no test runs ---------------------------------------------------------------------------------


def test_the_image_installs_what_the_commands_need() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 brings it")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installs = re.search(r'^RUN pip install --no-cache-dir ((?:"[^"]+" ?)+)$', (ROOT / "Dockerfile").read_text(), re.M)
    assert sorted(re.findall(r'"([^"]+)"', installs[1])) == sorted(extras["cli"] + extras["finetune"])


def test_the_workflow_names_what_exists() -> None:
    text = (ROOT / ".github/workflows/wheels.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    for step in steps:
        assert ("run" in step) != ("uses" in step)
        assert re.fullmatch(r"[\w./-]+@v\d+\.\d+\.\d+", step.get("uses", "a/b@v1.2.3")), "pinned to one release"
    for job in jobs.values():
        needs = job.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= set(jobs)

    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    commands = re.findall(r"\bmake ([a-z -]+)", "\n".join(json.dumps(job) for job in jobs.values()))
    assert commands
    assert {word for command in commands for word in command.split()} <= targets
    for name in re.findall(r"requirements/[\w]+\.txt", text):
        assert (ROOT / name).exists()
    for group in re.findall(r"tests/py/test_\{([\w,]+)\}\.py", text):
        assert all((ROOT / f"tests/py/test_{name}.py").exists() for name in group.split(","))
