"""The main job: reinforcement learning of a language model on Megatron-Core.

    torchrun [...] examples/grpo_fp8.py CONFIG [section.key=value ...] [--dry-run]

CONFIG is the path of a YAML file or the name of a shipped one. `--dry-run` checks the configuration against its
`cluster` section, prints it resolved, and stops before anything is built. Exit codes: 0 done, 1 failed, 2 wrong
usage or configuration.
"""

from megatron_calclip.launch import main

if __name__ == "__main__":
    main()
