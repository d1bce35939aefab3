"""The build backend that pyproject.toml names: meson-python's, but for the wheel's tag.

meson-python takes a library that lies beside Python files for an extension module of the Python that builds
(cp311-cp311-linux_x86_64). Ours is plain C, opened by its path: any Python 3 can, and what it needs of the system is
glibc, of some release or a later one. So the wheel is py3-none-manylinux_X_Y_<machine>, X.Y being the newest symbol of
glibc that the library asks for. That follows the glibc of the machine that builds; on musl the tag is
py3-none-linux_<machine>.
"""

from __future__ import annotations

import base64
import hashlib
import re
import zipfile
from pathlib import Path

import mesonpy
from mesonpy import (
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
]

#: The glibc of manylinux2014: nothing older is promised, whatever the symbols say.
OLDEST_GLIBC = (2, 17)


def glibc_needed(library: bytes) -> tuple[int, int] | None:
    """The newest glibc that a library asks for, None where it asks for none. Its table of names holds the version of
    each symbol as a string of its own."""
    versions = re.findall(rb"\0GLIBC_(\d+)\.(\d+)(?:\.\d+)?(?=\0)", library)
    return max((int(major), int(minor)) for major, minor in versions) if versions else None


def wheel_tag(platform: str, library: bytes) -> str:
    """The tag of a wheel with this library. `platform` is that of meson-python's tag: linux_x86_64, say."""
    glibc = glibc_needed(library)
    if glibc and platform.startswith("linux_"):
        major, minor = max(glibc, OLDEST_GLIBC)
        platform = f"manylinux_{major}_{minor}_{platform.removeprefix('linux_')}"
    return f"py3-none-{platform}"


def retag(wheel: Path) -> Path:
    """Puts a wheel with its right tag, which stands in its name and in two of its files, in the place of this one."""
    name, version, _, _, platform = wheel.stem.split("-")
    about = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(wheel) as old:
        tag = wheel_tag(platform, old.read(f"{name}/lib{name}.so"))
        stated = re.sub(rb"(?m)^Tag: .*$", f"Tag: {tag}".encode(), old.read(f"{about}/WHEEL"))
        sha256 = base64.urlsafe_b64encode(hashlib.sha256(stated).digest()).rstrip(b"=").decode()
        row = f"{about}/WHEEL,sha256={sha256},{len(stated)}"
        record = re.sub(rf"(?m)^{re.escape(about)}/WHEEL,[^\r\n]*", row, old.read(f"{about}/RECORD").decode())
        changed = {f"{about}/WHEEL": stated, f"{about}/RECORD": record.encode()}
        right = wheel.with_name(f"{name}-{version}-{tag}.whl")
        if right == wheel:
            return wheel
        with zipfile.ZipFile(right, "w", zipfile.ZIP_DEFLATED) as new:
            for entry in old.infolist():
                new.writestr(entry, changed.get(entry.filename) or old.read(entry))
    wheel.unlink()
    return right


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    name = mesonpy.build_wheel(wheel_directory, config_settings, metadata_directory)
    return retag(Path(wheel_directory) / name).name
