"""Conversion of whole checkpoints between Hugging Face and Megatron-Core, in one process on a CPU, for any size.

`checkpoints` opens either kind as tensors under HF names; `conversion` streams one kind into the other; `verification`
compares two; `command_line` is what the scripts in `tools/convert` share. Everything rests on the tables of
`weights/mapping.py`; architectures without one go through Megatron-Bridge (`bridge`), where it is installed.
"""
