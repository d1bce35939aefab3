"""Text that a model generates by Transformers' own loop, as trainers of GRPO do where no other engine generates for
them: the calls for one token each are captured as a CUDA graph (bastile.graphs.decoding), everything else of the loop
stays. A model's call for one token launches as many kernels as a training step's forward pass, and each of them is done
long before the host has launched the next one."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from bastile.graphs import conditions
from bastile.graphs.caches import NAMES, given_in
from bastile.graphs.decoding import Decoding, shelf_of
from bastile.models import running_ahead
from bastile.models.rebind import as_keywords, parameter_names
from bastile.models.running_ahead import run_ahead
from bastile.models.sites import ModelFile, Site
from bastile.report import Tally

FILE = "transformers.generation.utils"
#: Tokens of a text below which a graph is not worth its capture.
_FEWEST = 16


#: Caches that `generate` has made, and nobody else has. In early releases it leaves that to the model: there text is
#: generated as ever.
_of_generate: weakref.WeakSet[Any] = weakref.WeakSet()


def sites(file: ModelFile) -> Iterator[Site]:
    cls = file.scope.get("GenerationMixin")
    if file.name != FILE or not isinstance(cls, type) or not {"_sample", _MAKES_CACHE} <= vars(cls).keys():
        return
    sample = partial(_sample, Tally.of("cuda_graphs", f"{FILE}.GenerationMixin"))
    places: list[tuple[Any, str, Any]] = [(cls, "_sample", sample), (cls, _MAKES_CACHE, _prepare_cache)]
    check = file.scope.get("StopCheck")  # in newer releases
    if isinstance(check, type) and {"__call__", "finish"} <= vars(check).keys():
        places += [(check, "__call__", running_ahead.check), (check, "finish", running_ahead.finish)]
    for owner, name, made in places:
        yield Site("cuda_graphs", f"{owner.__name__}.{name}", owner, name, made, (), made)


_MAKES_CACHE = "_prepare_cache_for_generation"


def _prepare_cache(original: Any) -> Any:
    names = parameter_names(original)

    @functools.wraps(original)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        of_model = as_keywords(names, args, kwargs).get("model_kwargs", {})
        is_given = given_in(of_model) is not None
        result = original(self, *args, **kwargs)
        if not is_given and (made := given_in(of_model)) is not None:
            _of_generate.add(made)
        return result

    return prepare


def _sample(tally: Tally, original: Any) -> Any:
    @functools.wraps(original)
    def sample(
        self: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **kwargs: Any,
    ) -> Any:
        loop = partial(
            original,
            self,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer,
        )
        recorder = conditions.recorder_for(input_ids.device)
        most = (generation_config.max_length or 0) - input_ids.shape[1]
        if recorder is None or most < _FEWEST or _mode_of(self) is False:
            return loop(**kwargs)
        name = next((name for name in NAMES if kwargs.get(name) is not None), "")
        usual: Any = kwargs.get(name)
        reason = _SYNCED if synced_gpus else _why_not(self, generation_config, usual)
        if reason is not None:
            tally.step_aside(reason, is_usual=True)
            return loop(**kwargs)
        from bastile.models.roomy_cache import RoomyCache

        cache = RoomyCache(usual, most)
        decoding = Decoding(self, cache, name, shelf_of(self, recorder), tally)
        called = logits_processor, stopping_criteria
        longest = generation_config.max_length
        with _calls(self, decoding), run_ahead(input_ids.device, longest, *called, streamer=streamer):
            return loop(**{**kwargs, name: cache})

    return sample


def _mode_of(model: nn.Module) -> Any:
    from bastile.models import graphs

    return next((graphs.of_models[m] for m in model.modules() if m in graphs.of_models), graphs.everywhere)


_SYNCED = "several processes that generate in step, of shards"


def _why_not(model: Any, config: Any, cache: Any) -> str | None:
    if config.return_dict_in_generate:
        return "more than tokens is asked for (return_dict_in_generate)"
    if cache not in _of_generate or config.cache_implementation is not None:
        return "no cache, or one that was given or asked for"
    if config.compile_config is not None or getattr(config, "prefill_chunk_size", None) is not None:
        return "compile_config or prefill_chunk_size, which say how the model is to be called"
    if model.config.is_encoder_decoder or not getattr(model, "_can_compile_fullgraph", False):
        return f"{type(model).__name__} is not said to be free of decisions by numbers that the device has"
    if model.config._attn_implementation not in ("sdpa", "eager"):
        return f"attention by {model.config._attn_implementation}"
    files = {type(module).__module__ for module in model.modules()}
    if any("StaticCache" in vars(sys.modules.get(name, sys)) for name in files):
        return "code that looks for Transformers' own static cache"
    reason = conditions.against_this_step() or conditions.against_this_model(model)
    if reason is None:
        from bastile.models.roomy_cache import why_not

        reason = why_not(cache, config.max_length)
    return reason


@contextmanager
def _calls(model: Any, decoding: Decoding) -> Iterator[None]:
    """Transformers' loop calls what `get_compiled_call` returns, where a model is to be compiled."""
    own = vars(model)
    own["_valid_auto_compile_criteria"] = lambda *_, **__: True
    own["get_compiled_call"] = lambda *_, **__: decoding
    try:
        yield
    finally:
        del own["_valid_auto_compile_criteria"], own["get_compiled_call"]
