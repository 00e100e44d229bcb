"""`megatron-calclip diagnose`: its passes on two ranks, and the command from a HF folder to its files, each in processes of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launching import environment, run

SCRIPT = Path(__file__).with_name("check_diagnosis.py")
TIMEOUT_SECONDS = 600  # a hang is a failure


def test_two_ranks(tmp_path: Path) -> None:
    run(SCRIPT, str(tmp_path), num_processes=2, timeout=TIMEOUT_SECONDS)


def make_model(folder: Path) -> Path:
    """A HF folder of random weights with a tokenizer of characters."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from megatron_calclip.hf import character_tokenizer

    tokenizer = character_tokenizer("0123456789+-*=")
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("text", [False, True], ids=["sampled", "given"])
def test_the_command(tmp_path: Path, text: bool) -> None:
    """On the tiny configuration, one process; the tables are on stdout, the numbers in the files."""
    rows = [{"prompt": f"{a}+{b}=", "answer": f"{a + b}"} for a in range(3, 6) for b in range(2)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [
        *(
            sys.executable,
            "-c",
            "from megatron_calclip.cli import main; main()",
            "diagnose",
            str(make_model(tmp_path / "model")),
        ),
        *("--config", "tiny_cpu", "--prompts", str(prompts), "--num-prompts", "6"),
        *("--set", "eval.sets=[]", "--set", "train.num_steps=1", "--set", "train.prompts_per_step=4"),
        *("--recipe", "tensorwise", "--recipe", "rowwise:first_last_layers_bf16=1", "--lr", "1e-4,1e-3"),
        *("--json", str(tmp_path / "noise.json"), "--plot", str(tmp_path / "noise.svg")),
        *(["--text"] if text else []),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "noise.json").read_text())
    assert found["num_sequences"] == 6
    if text:
        assert found["num_tokens"] == 6  # one digit each
    tensorwise, rowwise = found["recipes"]
    assert [len(recipe["layers"]["one_layer"]) for recipe in (tensorwise, rowwise)] == [3, 3]
    assert rowwise["layers"]["one_layer"][0] == rowwise["layers"]["one_layer"][2] == 0  # these stay in BF16
    assert tensorwise["unmoved"]["mean_abs_dlogp"] > rowwise["unmoved"]["mean_abs_dlogp"] > 0
    assert [update["lr"] for update in tensorwise["updates"]] == [1e-4, 1e-3]
    assert "Importance ratios of an update" in done.stdout and "first_last_layers_bf16" in done.stdout
    assert "<svg" in (tmp_path / "noise.svg").read_text()
