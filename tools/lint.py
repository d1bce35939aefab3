"""Format, style, and the rules of the house that a program can check. Exit code 1 where one is broken.

- clang-format and ruff find nothing to change;
- every row of src/ops.def has its room, its Python file, its two tests (all chips in that of C), its document, its rows
  in the bench and a word in CHANGELOG.md, and no room lacks a row;
- no source file is longer than 600 lines, and no line than 120 columns;
- every kernel file states its bytes in its head, and PTX stands in src/cuda/device alone;
- the emulator has the words of ptx.cuh, and a kernel or another word uses each of them;
- the header declares what the rooms describe and define, and nothing else;
- every operator function has a reference for the fuzzer, or is named among those without; or, of lists, its own calls;
- the operators in Python import nothing from above them;
- the shared library's public prefix is the only one the header declares;
- mypy finds no fault in the package;
- docs/api.md says what the docstrings say.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Python modules that are named as users of earlier versions know them.
PYTHON_NAMES = {"linear_cross_entropy": "fused_linear_cross_entropy", "norm": "rms_norm"}
#: Operators that have no function in Python but are among what another one calls.
CALLED_BY = {"segment_attention": "masked_attention"}
#: What the bench times of an operator, where that has another name.
BENCH_NAMES = {
    "norm": "rms_norm",
    "glu": "swiglu",
    "linear_cross_entropy": "fused_linear_cross_entropy",
    "moe": "moe_experts",
    "optim": "adamw",
}
#: Timed as a part of runs that have 4-bit weights (tools/trl_lora.py), or batches with padding or packing.
NOT_IN_BENCH = {"dequantize_4bit", "segment_attention"}
#: Of the C API; the last is PyTorch's entry.
HEADERS = (
    "include/bastile.h",
    *(
        f"include/bastile/{name}.h"
        for name in ("attention", "causal_conv1d", "gated_delta_rule", "gated_rms_norm", "moe", "optim", "torch")
    ),
)
#: Operators without a backward function, and so without one that is called forward.
NOT_DIFFERENTIABLE = {"optim", "low_rank"}
#: What these need for themselves.
PTX_ALONE = {
    *("BST_ARCH", "BST_BARRIER_WAIT", "BST_PRODUCT", "BST_BY_TYPE", "BST_TILES", "BST_WORDS"),
    *(f"BST_SUMS_{count}" for count in (8, 32, 64, 128)),
    *(f"BST_{what}_{columns}" for what in ("OF", "KEPT") for columns in (64, 128, 256)),
    *(f"BST_LIST_{count}" for count in (32, 64, 128)),
}
MOST_LINES = 600
#: clang-format sees to it in code, ruff in Python; comments in C it leaves as they are.
MOST_COLUMNS = 120
#: What the operators in Python may import of the package.
BELOW_OPERATORS = ("_library", "ops", "recompute")


def tracked(*endings: str) -> list[Path]:
    """The project's files: what git knows, and what it would know after `git add`."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    paths = [ROOT / name for name in listed if name.endswith(endings)]
    return [p for p in paths if p.is_file() and p.name != "dlpack.h"]


def tool(name: str) -> str | None:
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


def formatting() -> list[str]:
    faults = []
    clang_format = tool("clang-format")
    if clang_format:
        files = [str(p) for p in tracked(".c", ".h", ".cu", ".cuh")]
        run = subprocess.run(
            [clang_format, "--dry-run", "-Werror", *files], capture_output=True, text=True, check=False
        )
        if run.returncode:
            faults.append("clang-format would change files (run: clang-format -i):\n" + run.stderr[:2000])
    ruff = tool("ruff")
    for command in (["check"], ["format", "--check"]) if ruff else ():
        run = subprocess.run([ruff, *command, str(ROOT)], capture_output=True, text=True, check=False)
        if run.returncode:
            faults.append(f"ruff {' '.join(command)}:\n" + (run.stdout + run.stderr)[:3000])
    mypy = tool("mypy")
    if mypy:
        run = subprocess.run([mypy, "--no-error-summary"], cwd=ROOT, capture_output=True, text=True, check=False)
        if run.returncode:
            faults.append("mypy:\n" + (run.stdout + run.stderr)[:3000])
    for name, found in (("clang-format", clang_format), ("ruff", ruff), ("mypy", mypy)):
        if not found:
            print(f"lint: {name} is not installed; its checks are left out")
    return faults


def operators() -> list[str]:
    faults = []
    rows = re.findall(r"^BST_OP\((\w+)\)", (ROOT / "src/ops.def").read_text(), re.M)
    calls, changes = (ROOT / "tests/py/every_operator.py").read_text(), (ROOT / "CHANGELOG.md").read_text()
    for op in rows:
        python = PYTHON_NAMES.get(op, CALLED_BY.get(op, op))
        room = f"src/ops/{op}/{op}"
        needed = [f"{room}{end}" for end in (".c", "_cpu.c", ".cu", "_args.h")]
        needed += [
            f"python/bastile/ops/{python}.py",
            f"tests/c/test_{op}.c",
            f"tests/py/test_{python}.py",
            f"docs/{op}.md",
        ]
        faults += [
            f"src/ops.def has a row {op}, but there is no {name}" for name in needed if not (ROOT / name).exists()
        ]
        faults += unmeasured(op) + unbuilt(op)
        if op not in NOT_DIFFERENTIABLE | NOT_IN_BENCH and f'    "{BENCH_NAMES.get(op, op)}": ' not in calls:
            faults.append(f"tests/py/every_operator.py has no call of the operator {op}")
        if (ROOT / f"{room}_args.h").exists() and "static_assert(sizeof(" not in (ROOT / f"{room}_args.h").read_text():
            faults.append(f"{room}_args.h does not state the size of its structs")
        if (ROOT / f"tests/c/test_{op}.c").exists() and "RUN(kernels_compile_for_every_chip)" not in "".join(
            p.read_text() for p in (ROOT / "tests/c").glob(f"test_{op}*.c")
        ):
            faults.append(f"tests/c/test_{op}.c does not compile the kernels for every chip")
        if not re.search(rf"\b({op}|{python})\b", changes):
            faults.append(f"CHANGELOG.md says nothing of the operator {op}")
    for room in (ROOT / "src/ops").iterdir():
        if room.name not in rows:
            faults.append(f"{room.relative_to(ROOT)} has no row in src/ops.def")
    return faults


def unmeasured(op: str) -> list[str]:
    """Where the bench has no row for an operator."""
    name = BENCH_NAMES.get(op, op)
    rows = {
        "python/bastile/bench/cases.py": rf'^ *(return )?Case\("{name}"',
        "python/bastile/bench/operators.py": rf'^    "{name}": ',
        "python/bastile/peers/operators.py": rf'^    "{name}": ',
        "tests/py/test_bench.py": rf'^    "{name}": \(',
    }
    return [
        f"{file} has no row {name}, of the operator {op}"
        for file, row in rows.items()
        if op not in NOT_IN_BENCH and not re.search(row, (ROOT / file).read_text(), re.M)
    ]


def unbuilt(op: str) -> list[str]:
    """Parts of a room that have a file of their own, which the build does not know."""
    build, endings = (ROOT / "meson.build").read_text(), (".c", "_cpu.c", ".cu")
    parts = [p for p in (ROOT / "src/ops" / op).glob(f"{op}*") if p.suffix in (".c", ".cu", ".cuh")]
    return [
        f"meson.build does not list the ending {ending} of {op}{ending}"
        for ending in sorted(p.name.removeprefix(op) for p in parts)
        if ending not in endings and f"'{ending}'" not in build
    ]


def words() -> list[str]:
    """Words that a header with PTX has for NVRTC alone, or for the emulator alone, or that nothing uses."""
    return [fault for name in ("ptx.cuh", "warpgroup.cuh") for fault in _words_of(name)]


def _words_of(name: str) -> list[str]:
    paths = [ROOT / "src/cuda/device" / name, ROOT / "tests/emu/device" / name]
    texts = [path.read_text() for path in paths]
    kinds = r"^#define (\w+)|^(?:BST_DEVICE|static inline) [^(=;]*?\b(\w+)\(|^BST_BARRIER_WAIT\((\w+),"
    of = [{w for found in re.findall(kinds, t, re.M) for w in found if w[:4].lower() == "bst_"} for t in texts]
    used = texts[0] + "".join(p.read_text() for p in tracked(".cu", ".cuh", ".h") if p not in paths)
    every = (of[0] | of[1]) - PTX_ALONE
    return [
        f"{path.relative_to(ROOT)} lacks the word {word}"
        for path, known in zip(paths, of, strict=True)
        for word in sorted(every - known)
    ] + [
        f"src/cuda/device/{name} has the word {word}, which nothing uses"
        for word in sorted(every)
        if len(re.findall(rf"\b{word}\b", used)) < 2
    ]


def described() -> set[str]:
    """The names of the functions in src/ops, which stand there as text or under a name."""
    names = set()
    for room in (ROOT / "src/ops").iterdir():
        text = "\n".join(p.read_text() for p in sorted(room.glob("*.[ch]")))
        for name in re.findall(r"^ *\.name = (\w+|\"\w+\"),", text, re.M):
            named = re.search(rf"\b{name}(?:\[\] =| ) *(\"\w+\")", text)
            names.add((named.group(1) if named else name).strip('"'))
    return names


def defined() -> set[str]:
    """The functions of the C API that the rooms define."""
    code = "\n".join(p.read_text() for room in (ROOT / "src/ops").iterdir() for p in sorted(room.glob("*.c")))
    return set(re.findall(r"^bst_status bst_([a-z]\w*)\(const bst_exec ", code, re.M))


def declared() -> list[str]:
    """Functions that the rooms describe or define, and the header does not declare; and the other way round."""
    header = "".join((ROOT / name).read_text() for name in HEADERS[:-1])
    known = set(re.findall(r"^BST_API bst_status bst_([a-z]\w*)\(const bst_exec ", header, re.M))
    functions = described() | defined()
    return [f"include/bastile.h does not declare bst_{name}" for name in sorted(functions - known)] + [
        f"include/bastile.h declares bst_{name}, which no room has" for name in sorted(known - functions)
    ]


def references() -> list[str]:
    text = (ROOT / "tests/fuzz/reference.c").read_text()
    tables = text[text.index("fuzz_references[]") :]
    known, functions = set(re.findall(r'"(\w+)"', tables)), described()
    lists = (ROOT / "tests/fuzz/lists.c").read_text()
    unfuzzed = [name for name in sorted(defined() - functions) if f'"{name}"' not in lists]
    return (
        [f"{name}, which has no description, is not drawn in tests/fuzz/lists.c" for name in unfuzzed]
        + [f"{name} has no reference in tests/fuzz/reference.c" for name in sorted(functions - known)]
        + [
            f"tests/fuzz/reference.c knows {name}, which src/ops does not describe"
            for name in sorted(known - functions)
        ]
    )


def sources() -> list[str]:
    faults = []
    for path in tracked(".c", ".h", ".cu", ".cuh", ".py"):
        text, name = path.read_text(), str(path.relative_to(ROOT))
        lines = text.count("\n")
        if lines > MOST_LINES:
            faults.append(f"{name} has {lines} lines; {MOST_LINES} is the most")
        for number, line in enumerate(text.split("\n"), 1):
            if len(line) > MOST_COLUMNS and path.suffix != ".py":
                faults.append(f"{name}:{number} has {len(line)} columns; {MOST_COLUMNS} is the most")
        for header in re.findall(r'^#include "((?:core|cuda|ops|torch)/[^"]+)"', text, re.M):
            if not (ROOT / "src" / header).exists():
                faults.append(f"{name} includes {header}, which is not there")
        if path.suffix == ".cu" and name.startswith("src/") and not re.search(r"Bytes", text.split("*/")[0]):
            faults.append(f"{name}: its head does not state the bytes it moves")
        if path.suffix == ".cu" and name.startswith("src/") and re.search(r"\basm\b", text):
            faults.append(f"{name}: PTX belongs in src/cuda/device")
        if name.startswith("python/bastile/ops/"):
            faults += [
                f"{name} imports {module}, which is above the operators"
                for module in imported(text)
                if re.match(r"bastile\b", module) and f"{module}.".split(".")[1] not in BELOW_OPERATORS
            ]
    for header in HEADERS:
        names = re.findall(r"^BST_(?:API|EXPORT) .*?(\w+)\(", (ROOT / header).read_text(), re.M)
        faults += [f"{header} declares {name}, which has not the prefix bst_" for name in names if name[:4] != "bst_"]
    return faults


def imported(text: str) -> list[str]:
    """The modules that this code imports, wherever it does; `from a import b` is a.b, for b may be one."""
    modules = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules += [f"{node.module}.{alias.name}" for alias in node.names]
    return modules


def reference() -> list[str]:
    if not importlib.util.find_spec("griffe"):
        print("lint: griffelib is not installed; docs/api.md is not checked")
        return []
    command = [sys.executable, ROOT / "tools" / "api_reference.py", "--check"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return [run.stdout + run.stderr] if run.returncode else []


def main() -> int:
    faults = formatting() + operators() + words() + declared() + references() + sources() + reference()
    for fault in faults:
        print(f"lint: {fault}")
    print(f"lint: {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
