"""FP8 reinforcement learning for LLMs on Megatron-Core, kept stable by calibrated clipping.

Importing the package imports neither torch nor Megatron: configuration must be checkable on a machine (or in a second)
that has neither at hand. Import what you need from its modules.
"""

__version__ = "0.1.0"
