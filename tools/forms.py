"""Lists the forms of code in a release of Transformers beside those that are known, so that a new release shows what is
new in it. Nothing of the release is imported.

usage: python tools/forms.py [FOLDER] [--kind KIND] [--new] [--code]
    FOLDER  where the release's package `transformers` is; without it, the installed one
    --kind  only norm, mlp, rotary, attention, layer, experts or head
    --new   only what is not known
    --code  each form's code, too"""

import argparse
import ast
import importlib.util
import re
import sys
from collections import defaultdict
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "python"))  # where no package is installed

from bastile.models.forms import Code, Source
from bastile.models.known import KNOWN

#: Names of classes and functions by the kind of form that they may be.
KINDS = {
    "norm": r"Norm$",
    "mlp": r"MLP$|FeedForward$",
    "rotary": r"^apply_.*rotary",
    "attention": r"Attention$",
    "layer": r"DecoderLayer$",
    "experts": r"Experts$",
    "head": r"ForCausalLM$",
}


def installed() -> Path:
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        sys.exit("forms.py: Transformers is not installed; give the folder of a release")
    return Path(spec.origin).parent


def pieces(source: Source) -> list[tuple[str, Code]]:
    """Every class's forward and every function of a file."""
    found = [(name, source.function(name)) for name in source.functions]
    forwards = ((name, source.method(name, "forward")) for name in source.classes)
    return found + [(name, code) for name, code in forwards if code is not None]


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--new", action="store_true")
    parser.add_argument("--code", action="store_true")
    options = parser.parse_args()
    folder = options.folder or installed()
    files = sorted(folder.glob("models/*/modeling_*.py")) or sorted(folder.glob("transformers/models/*/modeling_*.py"))
    if not files:
        sys.exit(f"forms.py: {folder} holds no transformers/models")
    forms: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    shown: dict[str, Code] = {}
    for file in files:
        for name, code in pieces(Source(file.read_text(encoding="utf-8"))):
            known = KNOWN.get(code.fingerprint)
            kind = known.kind if known else next((k for k, names in KINDS.items() if re.search(names, name)), None)
            if kind is not None:
                forms[kind][code.fingerprint].append(f"{file.parent.name}.{name}")
                shown[code.fingerprint] = code
    for kind in [options.kind] if options.kind else KINDS:
        where = forms[kind]
        served = sum(len(names) for fingerprint, names in where.items() if fingerprint in KNOWN)
        print(f"{kind}: {sum(map(len, where.values()))} pieces of {len(where)} forms; known are {served}")
        for fingerprint, names in sorted(where.items(), key=lambda item: -len(item[1])):
            known = KNOWN.get(fingerprint)
            if known is not None and options.new:
                continue
            what = known.formula if known is not None else "not known"
            print(f"  {fingerprint}  {len(names):4}  {what}: {', '.join(names[:4])}{' ...' if len(names) > 4 else ''}")
            if options.code:
                print("\n".join(f"        {line}" for line in ast.unparse(shown[fingerprint].node).splitlines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
