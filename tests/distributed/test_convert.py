"""Conversion against Megatron's own forward pass, and of a real model.

`verify.py --logits` loads the converted checkpoint with Megatron's loader into Megatron's model, so a mistake that conversion
makes in both directions shows. The real model is SmolLM2-135M (`tools/fetch_smollm2.py`): set MEGATRON_CALCLIP_SMOLLM2 to its
folder.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import launching
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

TOOLS = launching.ROOT / "tools" / "convert"
TIMEOUT_SECONDS = 600  # a hang is a failure
LAYOUTS = [("--tp", "1"), ("--pp", "2"), ("--tp", "3")]
SMOLLM2 = os.environ.get("MEGATRON_CALCLIP_SMOLLM2")


def tool(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / name), *map(str, arguments)]
    return subprocess.run(
        command, env=launching.environment(), capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )


def converted(*arguments: object) -> None:
    result = tool(*arguments)  # type: ignore[arg-type]
    assert result.returncode == 0, result.stderr


def test_logits_are_transformers_and_a_swap_is_found(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=150,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "hf")
    converted("hf_to_megatron.py", "--hf-model", tmp_path / "hf", "--megatron-path", tmp_path / "megatron", "--tp", 2)
    arguments = ("--logits", "1,5,7,22,140", "--tolerance", 1e-5)
    same = tool("verify.py", tmp_path / "hf", tmp_path / "megatron", *arguments)
    assert same.returncode == 0 and "logits of 5 tokens" in same.stdout, same.stdout + same.stderr

    up, gate = model.model.layers[1].mlp.up_proj.weight, model.model.layers[1].mlp.gate_proj.weight
    up.data, gate.data = gate.data, up.data
    model.save_pretrained(tmp_path / "swapped")
    different = tool("verify.py", tmp_path / "swapped", tmp_path / "megatron", *arguments)
    assert different.returncode == 1 and "NOT the same" in different.stdout, different.stdout + different.stderr


@pytest.mark.integration
@pytest.mark.skipif(importlib.util.find_spec("mbridge") is None, reason="mbridge is not installed")
def test_mbridge_exports_the_same() -> None:
    output = launching.run(Path(__file__).with_name("check_mbridge.py"), num_processes=1, timeout=TIMEOUT_SECONDS)
    assert "Qwen3MoEBridge: 87 tensors compared" in output


@pytest.mark.slow
@pytest.mark.skipif(SMOLLM2 is None, reason="MEGATRON_CALCLIP_SMOLLM2 names no folder with SmolLM2-135M")
def test_real_model(tmp_path: Path) -> None:
    assert SMOLLM2 is not None
    for layout in LAYOUTS:
        name = "".join(layout).strip("-")
        megatron, again = tmp_path / name, tmp_path / f"{name}_hf"
        converted("hf_to_megatron.py", "--hf-model", SMOLLM2, "--megatron-path", megatron, *layout)
        converted("megatron_to_hf.py", megatron, "--hf-path", again)
        same = tool("verify.py", SMOLLM2, again)
        assert same.returncode == 0 and "the same, bit for bit: 272 tensors" in same.stdout, same.stdout + same.stderr
    same = tool("verify.py", SMOLLM2, tmp_path / "tp3", "--logits", "The capital of France is")
    assert same.returncode == 0, same.stdout + same.stderr
    refused = tool("hf_to_megatron.py", "--hf-model", SMOLLM2, "--megatron-path", tmp_path / "tp2", "--tp", 2)
    assert refused.returncode == 2 and "num_attention_heads is 9, which tp=2 does not divide" in refused.stderr
    assert not (tmp_path / "tp2").exists()
    answers = [greedy_answer(folder) for folder in (SMOLLM2, str(again))]
    assert answers[0] == answers[1] and "Paris" in answers[0]


def greedy_answer(folder: str) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    answer: str = tokenizer.decode(model.generate(**inputs, max_new_tokens=8, do_sample=False)[0])
    return answer
