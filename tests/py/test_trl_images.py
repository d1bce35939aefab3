"""TRL's trainers with models of images after bastile.apply(): real trainers, a real processor and pictures of several
sizes; the numbers of stock, and which operators ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import bastile
from graphing import allow_graphs

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
Image = pytest.importorskip("PIL.Image")
pil = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
import trl_runs  # noqa: E402
from test_trl import near, newest, quiet  # noqa: E402, F401  (a fixture)

pytestmark = newest

START, IMAGE, END, VIDEO = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}" + f"{START} {IMAGE} {END} " + "{% else %}{{ part['text'] }} {% endif %}"
    "{% endfor %}</s> {% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)


def processor() -> Any:
    from transformers import ProcessorMixin, Qwen2_5_VLProcessor

    class WithoutVideos(Qwen2_5_VLProcessor):
        """Videos' own part wants torchvision."""

        def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
            self.image_token, self.video_token = IMAGE, VIDEO
            self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids([IMAGE, VIDEO])
            ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    words = trl_runs.tokenizer()
    words.add_special_tokens({"additional_special_tokens": [START, IMAGE, END, VIDEO]})
    size = {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}
    images = pil.Qwen2VLImageProcessorPil(patch_size=14, merge_size=2, temporal_patch_size=2, size=size)
    return WithoutVideos(images, words, chat_template=_TEMPLATE)


def model_for(processor: Any) -> Any:
    """A tower of two layers, of which one attends within windows, and a text model of two."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    words = processor.tokenizer
    start, end = words.convert_tokens_to_ids([START, END])
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(
        text_config={**trl_runs.SIZES, "vocab_size": len(words), "rope_parameters": rope},
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32,
            "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        image_token_id=processor.image_token_id, video_token_id=processor.video_token_id,
        vision_start_token_id=start, vision_end_token_id=end,
        pad_token_id=0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    model = Qwen2_5_VLForConditionalGeneration(config)
    for parameter in model.parameters():
        parameter.data.mul_(2)
    return model


def picture(n: int) -> Any:
    height, width = 56 + 28 * (n % 3), 56 + 28 * ((n + 1) % 2)
    generator = torch.Generator().manual_seed(n)
    return Image.fromarray(torch.randint(255, (height, width, 3), generator=generator, dtype=torch.uint8).numpy())


def said(role: str, seed: int, count: int, *before: dict[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": [*before, {"type": "text", "text": trl_runs.words(seed, count)}]}]


def rows(kind: str) -> list[dict[str, Any]]:
    made = []
    for n in range(8):
        asked, told = said("user", n, 4, {"type": "image"}), said("assistant", n + 50, 3 + n % 3)
        parts: dict[str, Any] = {
            "sft": {"messages": asked + told},
            "dpo": {"prompt": asked, "chosen": told, "rejected": said("assistant", n + 90, 4)},
            "grpo": {"prompt": asked},
        }[kind]
        made.append({"images": [picture(n)], **parts})
    return made


def _length(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(set(c[0]["content"].split()))) + 0.1 * len(c[0]["content"]) for c in completions]


def run(kind: str, folder: Path, **options: Any) -> tuple[list[dict[str, float]], Counter[str]]:
    """What a trainer logs, and how often operators ran."""
    from datasets import Dataset

    trainer, config = (getattr(trl, kind.upper() + part) for part in ("Trainer", "Config"))
    adapters = options.pop("adapters", False)
    own = {**trl_runs.GENERATION, "beta": 0.0} if kind == "grpo" else {"max_length": None}
    arguments = config(**{"output_dir": str(folder), **trl_runs.USUAL, **own, **options})
    given: dict[str, Any] = {"reward_funcs": _length} if kind == "grpo" else {}
    if adapters:
        given["peft_config"] = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    of_images = processor()
    if kind == "dpo":
        given["ref_model"] = model_for(of_images)
        with torch.no_grad():  # where the two agree, rounding alone says which of a pair is ahead
            weight = given["ref_model"].lm_head.weight
            weight.add_(0.1 * torch.eye(*weight.shape))
    torch.manual_seed(1)
    made = trainer(
        model=model_for(of_images),
        args=arguments,
        train_dataset=Dataset.from_list(rows(kind)),
        processing_class=of_images,
        **given,
    )
    bastile.report(reset=True)
    made.train()
    ran: Counter[str] = Counter()
    for line in bastile.report():
        ran[line.operator] += line.ran
        assert not line.aside or line.operator not in ("linear_logprobs", "chunked_attention")
    return trl_runs.numbers_of(made), ran


@pytest.mark.parametrize(
    ("kind", "options", "chunked", "losses"),
    [
        ("sft", {}, 8, 2),  # twice a tower of two layers in each step, whose layers are checkpointed
        ("sft", {"gradient_checkpointing": False}, 4, 2),
        ("sft", {"adapters": True}, 8, 2),
        ("dpo", {}, 12, 4),  # and once for the model that it is compared with
        ("grpo", {}, 12, 2),  # and once where it generates
    ],
    ids=["sft", "sft not checkpointed", "sft lora", "dpo", "grpo"],
)
def test_the_numbers_of_stock(
    kind: str, options: dict[str, Any], chunked: int, losses: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow_graphs(monkeypatch, "cpu")
    stock, nothing = run(kind, tmp_path, **options)
    assert not nothing
    bastile.apply()
    ours, ran = run(kind, tmp_path, **options)
    assert len(ours) == len(stock) == 3
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine == {name: near(value) for name, value in theirs.items()}
    assert (ran["chunked_attention"], ran["linear_logprobs"]) == (chunked, losses)


def test_with_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same pictures again and again: the tower's layers and the text's become graphs."""
    allow_graphs(monkeypatch, "cpu")
    monkeypatch.setattr(f"{__name__}.rows", _of_one(rows))
    options = {"max_steps": 6, "gradient_checkpointing": False}
    stock, _ = run("sft", tmp_path, **options)
    bastile.apply()
    ours, ran = run("sft", tmp_path, **options)
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine == {name: near(value) for name, value in theirs.items()}
    assert ran["cuda_graphs"] > 0


def _of_one(rows: Callable[[str], list[dict[str, Any]]]) -> Callable[[str], list[dict[str, Any]]]:
    return lambda kind: rows(kind)[:1] * 8
