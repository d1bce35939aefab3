"""Which modules hold the code of models, and what looks at them when they are imported.

Model files of Transformers are looked at when they are imported, by a finder before all others in sys.meta_path; other
modules, of users and of checkpoints with code of their own, when a model of theirs has been built: then all its classes
are there. Nothing is imported for it."""

import functools
import importlib
import logging
import pkgutil
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from torch import nn

from bastile.models import between_steps

_FILE = re.compile(r"transformers\.models\.(?!auto\.)\w+\.modeling_\w+")
LINEAR = "torch.nn.modules.linear"
_TORCHS = frozenset({LINEAR, "torch.nn.modules.normalization"})
#: Where the modules of a sentence's vector are run, in releases from 5.4 on and before.
_SENTENCES = frozenset({"sentence_transformers.base.model", "sentence_transformers.SentenceTransformer"})
_OF_ANY_TYPE = (
    _TORCHS
    | _SENTENCES
    | {
        "peft.tuners.lora.layer",
        "peft.tuners.lora.bnb",
        "transformers.generation.utils",
        "transformers.trainer",
    }
)
_LOSSES = frozenset(
    {
        "nemo_rl.distributed.model_utils",
        "prime_rl.trainer.models.layers.lm_head",
        "trl.experimental.gkd.gkd_trainer",
        "trl.experimental.gold.gold_trainer",
        "trl.kernels.chunked_divergence",
        "trl.kernels.chunked_logprob",
        "trl.trainer.sft_trainer",
        "trl.trainer.utils",
        "verl.utils.experimental.torch_functional",
    }
)
_BASE = "transformers.modeling_utils"  # of all models
#: Packages whose modules are no code of models.
_NOT_MODELS = frozenset(
    {"torch", "transformers", "bastile", "peft", "accelerate", "deepspeed", "trl", "verl", "nemo_rl", "builtins"}
)
_MARK = "_bastile_watched"

Classes = dict[str, set[type]]  # by the name of their module


def is_model_file(name: str) -> bool:
    """Of Transformers, or of layers and losses that models of any type may have."""
    return is_of_any_type(name) or _FILE.fullmatch(name) is not None


def is_of_any_type(name: str) -> bool:
    """PEFT's layers, PyTorch's norms, losses and optimisers of trainers, the loop that generates text, what runs the
    modules of a sentence's vector."""
    return name in _OF_ANY_TYPE or is_of_losses(name)


def is_of_sentences(name: str) -> bool:
    return name in _SENTENCES


def is_of_losses(name: str) -> bool:
    """What trainers call for models of any type."""
    return name in _LOSSES


def is_torchs(name: str) -> bool:
    """PyTorch's linear layers and norms: whose model they are in, nobody can tell."""
    return name in _TORCHS


def model_files() -> list[str]:
    """Those that this process has imported."""
    return [name for name, module in list(sys.modules.items()) if is_model_file(name) and module is not None]


def classes_of(model: nn.Module) -> Classes:
    """The classes of a model's modules whose code is looked at."""
    found: Classes = defaultdict(set)
    for cls in {base for kind in {type(module) for module in model.modules()} for base in kind.__mro__}:
        is_looked_at = is_model_file(cls.__module__) or cls.__module__.partition(".")[0] not in _NOT_MODELS
        if is_looked_at and issubclass(cls, nn.Module):
            found[cls.__module__].add(cls)
    return found


def other_classes() -> Classes:
    """The modules outside of Transformers that define a model, as far as they are imported."""
    found: Classes = defaultdict(set)
    base = getattr(sys.modules.get(_BASE), "PreTrainedModel", None)
    for cls in _subclasses(base) if base is not None else ():
        if cls.__module__.partition(".")[0] not in _NOT_MODELS:
            found[cls.__module__].add(cls)
    return found


def _subclasses(cls: Any) -> Iterator[Any]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)


# ---- model types -----------------------------------------------------------------------------------------------------


def import_type(model_type: str) -> list[str]:
    """The modules with the code of a model type, which are imported; none for what is no type."""
    from transformers.models.auto import configuration_auto as auto

    if model_type in auto.CONFIG_MAPPING_NAMES:
        package = importlib.import_module(auto.CONFIG_MAPPING[model_type].__module__.rpartition(".")[0])
        files = [f"{package.__name__}.{file.name}" for file in pkgutil.iter_modules(package.__path__)]
        own = [importlib.import_module(name).__name__ for name in files if is_model_file(name)]
        return own or _modules_of_models(auto.CONFIG_MAPPING[model_type])
    with suppress(KeyError):
        config_class = auto.CONFIG_MAPPING[model_type]  # which somebody has registered
        base = importlib.import_module(_BASE).PreTrainedModel
        return sorted({cls.__module__ for cls in _subclasses(base) if cls.config_class is config_class})
    return []


def _modules_of_models(config_class: type) -> list[str]:
    """Where the models of a type are that has a config of its own and another type's code."""
    from transformers.models.auto import modeling_auto as auto

    found = (mapping.get(config_class, None) for mapping in (auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_MAPPING))
    return sorted({cls.__module__ for cls in found if isinstance(cls, type)})


def known_types() -> list[str]:
    """All model types of the installed Transformers."""
    from transformers.models.auto import configuration_auto as auto

    return sorted(auto.CONFIG_MAPPING_NAMES)


def transformers_version() -> str:
    """Of the installed release. RuntimeError where it is too old."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError("patching models needs Hugging Face Transformers: pip install transformers") from error
    from packaging.version import Version  # comes with Transformers

    if Version(transformers.__version__) < Version(OLDEST):
        raise RuntimeError(f"bastile needs transformers >= {OLDEST}; installed is {transformers.__version__}")
    return transformers.__version__


OLDEST = "5.0.0"
NEWEST = "5.24.0"  # that the tests run with


def is_untried(name: str) -> bool:
    """Whether this is a model file of a later release than any that the tests ran with."""
    transformers = sys.modules.get("transformers")
    if transformers is None or _FILE.fullmatch(name) is None:
        return False
    from packaging.version import Version

    return Version(transformers.__version__).release[:2] > Version(NEWEST).release[:2]


# ---- watching --------------------------------------------------------------------------------------------------------


class _Finder:
    """Finds what the others find, and adds a look at the module to its execution."""

    def __init__(self, imported: Callable[[str], None]) -> None:
        self.imported = imported

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if not is_model_file(name) and name not in between_steps.MODULES:
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            self.imported(module.__name__)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this spec's own loader
        return spec


class Watch:
    """While it is on, `look` gets the name of each model file after its import, and the classes of each new model that
    are from elsewhere."""

    def __init__(self, look: Callable[[str, Iterable[type]], None]) -> None:
        self._look = look
        self._finder = _Finder(self._imported)
        self._seen: set[type] = set()

    def start(self) -> None:
        if self._finder not in sys.meta_path:
            sys.meta_path.insert(0, self._finder)
            for name in between_steps.MODULES:
                between_steps.put_into(name)
            if _BASE in sys.modules:
                self._watch_models()

    def stop(self) -> None:
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        self._seen.clear()
        base = getattr(sys.modules.get(_BASE), "PreTrainedModel", None)
        own = getattr(base, "post_init", None)
        if getattr(own, _MARK, None) is own and own is not None:
            base.post_init = own.__wrapped__  # type: ignore[union-attr]
        between_steps.take_out()

    def _imported(self, name: str) -> None:
        if name in between_steps.MODULES:
            between_steps.put_into(name)
        if name == _BASE:
            self._watch_models()
        elif is_model_file(name):
            self._guarded(name, ())

    def _watch_models(self) -> None:
        """Every model calls post_init when it has been built."""
        base = sys.modules[_BASE].PreTrainedModel
        original = base.post_init
        if getattr(original, _MARK, None) is original:
            return

        @functools.wraps(original)
        def post_init(model: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(model, *args, **kwargs)
            new = {type(module) for module in model.modules()} - self._seen
            if new:
                self._seen |= new
                for name, classes in classes_of(model).items():
                    if not is_model_file(name):  # which has been looked at
                        self._guarded(name, classes)
            return result

        setattr(post_init, _MARK, post_init)
        base.post_init = post_init

    def _guarded(self, name: str, classes: Iterable[type]) -> None:
        """Nobody's import or model fails for what this does."""
        try:
            self._look(name, classes)
        except Exception:
            logging.getLogger("bastile").exception("%s stays stock: it could not be looked at", name)
