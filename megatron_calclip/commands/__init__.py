"""The commands of `megatron-calclip`, one module each: `add_arguments(parser)` and `run(arguments)`."""
