"""Writes docs/api.md, the reference of the Python API, from the signatures and docstrings of what is public: what the
package's and the operators' modules list in `__all__`.

    python tools/api_reference.py            write it
    python tools/api_reference.py --check    exit code 1 if it is not what would be written
"""

from __future__ import annotations

import argparse
import logging
import re
import sys

import griffe
from lint import PYTHON_NAMES, ROOT

PAGES = {python: op for op, python in PYTHON_NAMES.items()} | {"qk_norm_rope": "rope", "swiglu": "glu"}
PAGE = ROOT / "docs" / "api.md"
WIDTH = 100
BEGIN = """\
# Python API

Written by `python tools/api_reference.py` from the docstrings. The C API is described in
[`include/bastile.h`](../include/bastile.h), the command line in [commands](commands.md); each operator's formula,
accuracy and speed are on its own page. Tensors' descriptions begin with their shape; `...` stands for any leading
dimensions.
"""


def signature(thing: griffe.Function | griffe.Class) -> str:
    """As one would write it, over several lines where one is too long."""
    parameters, kind = [], None
    for p in thing.parameters:
        if p.name in ("self", "cls"):
            continue
        if p.kind is griffe.ParameterKind.keyword_only and kind not in (p.kind, griffe.ParameterKind.var_positional):
            parameters.append("*")
        kind = p.kind
        stars = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}.get(kind, "")
        text = f"{stars}{p.name}" + (f": {p.annotation}" if p.annotation else "")
        if p.default is not None and not stars:
            text += f" = {p.default}" if p.annotation else f"={p.default}"
        parameters.append(text)
    returns = f" -> {thing.returns}" if isinstance(thing, griffe.Function) and thing.returns else ""
    line = f"{thing.name}({', '.join(parameters)}){returns}"
    if len(line) > WIDTH:
        line = f"{thing.name}(\n" + "".join(f"    {p},\n" for p in parameters) + f"){returns}"
    return f"```python\n{line}\n```\n"


def described(items: list, head: str, name) -> str:
    lines = [f"- {name(item)}" + " ".join(item.description.split()) for item in items]
    return f"{head}\n\n" + "\n".join(lines) + "\n"


def text_of(thing: griffe.Object) -> str:
    """The docstring's parts, as Markdown."""
    if not thing.docstring:
        raise SystemExit(f"{thing.path} is public and has no docstring")
    out = []
    for part in thing.docstring.parse("google", returns_multiple_items=False, returns_named_value=False):
        if part.kind is griffe.DocstringSectionKind.text:
            out.append(part.value.strip() + "\n")
        elif part.kind in (griffe.DocstringSectionKind.parameters, griffe.DocstringSectionKind.attributes):
            head = "Parameters:" if part.kind is griffe.DocstringSectionKind.parameters else "Attributes:"
            out.append(described(part.value, head, lambda p: f"`{p.name}`: "))
        elif part.kind is griffe.DocstringSectionKind.raises:
            out.append(described(part.value, "Raises:", lambda p: f"`{p.annotation}`: "))
        elif part.kind is griffe.DocstringSectionKind.returns:
            # As written: the parser takes what stands before the first colon for a type.
            written = re.search(r"^Returns:\n((?: {4}.*\n?)+)", thing.docstring.value, re.M)
            out.append("Returns: " + " ".join(written[1].split()) + "\n")
        else:
            raise SystemExit(f"{thing.path}: no form for a docstring's part of the kind {part.kind.value}")
    return "\n".join(out)


def public(module: griffe.Module) -> list[griffe.Object]:
    named = [module.members[name] for name in module.exports or ()]
    found = [m.final_target if m.is_alias else m for m in named]
    return [m for m in found if isinstance(m, griffe.Function | griffe.Class)]


def entry(thing: griffe.Object) -> str:
    out = [f"### {thing.name}\n", signature(thing), text_of(thing)]
    if isinstance(thing, griffe.Class):
        for method in thing.members.values():
            if isinstance(method, griffe.Function) and method.docstring and not method.name.startswith("_"):
                out += [f"#### {thing.name}.{method.name}\n", signature(method), text_of(method)]
    return "\n".join(out)


def page() -> str:
    logging.getLogger("griffe").setLevel(logging.ERROR)
    package = griffe.load("bastile", search_paths=[ROOT / "python"])
    operators = package["ops"]
    # The package's optim is made of the operators': its page speaks of both.
    modules = [package, package["optim"], package["integrations"]] + [
        m for name, m in sorted(operators.modules.items()) if not name.startswith("_")
    ]
    out = [BEGIN]
    for module in modules:
        things = public(module)
        if not things:
            raise SystemExit(f"{module.path} has no __all__, or nothing in it")
        out.append(f"## {module.path}\n")
        own = ROOT / "docs" / f"{PAGES.get(module.name, module.name)}.md"
        link = f" [Formula, accuracy, speed]({own.name})." if own.exists() else ""
        out.append(module.docstring.value.split("\n\n")[0].strip() + link + "\n")
        out += [entry(thing) for thing in things]
    return "\n".join(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    text = page()
    if not options.check:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        print("docs/api.md is not what the docstrings say; run: python tools/api_reference.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
