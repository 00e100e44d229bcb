"""`torchrun -m megatron_calclip CONFIG ...`: the main job from an installed wheel, as examples/grpo_fp8.py is from a checkout."""

from megatron_calclip.launch import main

if __name__ == "__main__":
    main()
