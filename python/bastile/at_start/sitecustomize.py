"""What Python runs when it begins, in every process that `bastile run` has begun: as soon as Transformers has been
imported, bastile.apply() is called.

Until then nothing of Bastile or PyTorch is imported, for most of a command's processes train nothing. A sitecustomize
of the environment's own, which this one hides, runs as ever."""

import atexit
import importlib.machinery
import importlib.util
import json
import os
import sys

_WATCHED = "transformers"


class _Finder:
    """First of those that find modules: of Transformers it says what the others do, but for who executes it."""

    def find_spec(self, name, path=None, target=None):
        if name != _WATCHED:
            return None
        finders = [finder for finder in sys.meta_path if finder is not self]
        spec = next((found for finder in finders if (found := finder.find_spec(name, path, target))), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(self, spec.loader)
        return spec


class _Loader:
    """Executes a module as another loader does, and has Bastile put into it what it has asked for."""

    def __init__(self, finder, loader):
        self._finder, self._loader = finder, loader

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
            _apply()


def _apply():
    asked = json.loads(os.environ["BASTILE_RUN"])
    try:
        import bastile
    except ImportError as error:
        raise ImportError(
            f"bastile run: {sys.executable}, which runs this program, cannot import bastile ({error}). Install it "
            f"there, or give `bastile run` a command of the environment that has it"
        ) from error
    bastile.apply(**asked["apply"])
    if asked["report"] and int(os.environ.get("LOCAL_RANK") or 0) == 0:
        atexit.register(_report, bastile)


def _report(bastile):
    report = bastile.report()
    if report.lines:  # a launcher has none
        print(report, file=sys.stderr)


def _run_hidden():
    here = os.path.dirname(os.path.abspath(__file__))
    others = [folder for folder in sys.path if os.path.abspath(folder or os.curdir) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if "BASTILE_RUN" in os.environ:
    sys.meta_path.insert(0, _Finder())
_run_hidden()
