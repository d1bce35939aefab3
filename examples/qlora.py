"""QLoRA with Transformers' Trainer and Bastile: adapters on a base in 4 bits.

    pip install 'bastile[models]' accelerate peft bitsandbytes
    python examples/qlora.py --model Qwen/Qwen3-0.6B --text notes.txt --save adapters

Two lines are Bastile's: apply(), and the report of what ran."""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, Trainer, TrainingArguments

import bastile


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="a folder, or a name on the Hugging Face hub")
    parser.add_argument("--text", type=Path, required=True, help="a text in UTF-8")
    parser.add_argument("--save", type=Path, default=Path("adapters"))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--sequence", type=int, default=512)
    options = parser.parse_args()

    bastile.apply()

    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    place = {"": "cuda" if torch.cuda.is_available() else "cpu"}
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.bfloat16, quantization_config=four_bits, device_map=place
    )
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.print_trainable_parameters()

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    ids = tokenizer(options.text.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"][0]
    pieces = ids[: len(ids) // options.sequence * options.sequence].view(-1, options.sequence)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(options.save / "run"),
            max_steps=options.steps,
            per_device_train_batch_size=2,
            learning_rate=2e-4,
            bf16=True,  # PEFT's adapters are float32, and meant to run under autocast
            use_cpu=not torch.cuda.is_available(),
            logging_steps=10,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=[{"input_ids": piece, "labels": piece} for piece in pieces],
    )
    trainer.train()
    model.save_pretrained(options.save)
    print(bastile.report())


if __name__ == "__main__":
    main()
