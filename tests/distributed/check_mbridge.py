"""mbridge's export of a model against ours, bit for bit: an independent writer of the same tables.

    python tests/distributed/check_mbridge.py

mbridge maps full Megatron tensors (those of TP 1) to HF tensors; ours are joined from a random HF checkpoint, so both
exports must give that checkpoint back. Needs mbridge, which no longer gets releases: install it without its dependencies.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from tiny_learners import SIZES
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from megatron_calclip.config import Config, PrecisionConfig
from megatron_calclip.learner import runtime
from megatron_calclip.weights.mapping import ModelShape, mapped_tensors

MOE: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=16)
CONFIGS = {
    "LLaMABridge": LlamaConfig(**SIZES),
    "Qwen2Bridge": Qwen2Config(**SIZES),
    "Qwen3Bridge": Qwen3Config(**SIZES, head_dim=16),
    "Qwen3MoEBridge": Qwen3MoeConfig(**SIZES, **MOE),
}


def main() -> int:
    """Compare all architectures; 0 when equal."""
    runtime.start(Config(precision=PrecisionConfig(params_dtype="fp32")))  # mbridge asks Megatron for its groups
    import mbridge.models

    num_wrong = 0
    for name, config in CONFIGS.items():
        bridge = getattr(mbridge.models, name)(config, dtype=torch.float32)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        shape = ModelShape.from_hf_config(config)
        generator = torch.Generator().manual_seed(0)
        compared = set()
        for tensor in mapped_tensors(shape):
            parts = [torch.randn(hf.shape, generator=generator) for hf in tensor.hf]
            full = tensor.join(parts)
            names, values = bridge._weight_to_hf_format(tensor.te_name, full)
            exported = dict(zip(names, values, strict=True))
            for hf, part in zip(tensor.hf, parts, strict=True):
                value = exported[hf.name][: len(part)]  # mbridge does not know of our vocabulary padding
                if not torch.equal(value, part):
                    num_wrong += 1
                    print(f"FAIL {name} {hf.name}")
                compared.add(hf.name)
        kinds = {key for key in model.state_dict() if ".mlp.experts." not in key}
        missing = kinds - compared
        num_wrong += len(missing)
        print(f"{name}: {len(compared)} tensors compared, {len(missing)} of transformers' left out")
    runtime.stop()
    return min(num_wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
