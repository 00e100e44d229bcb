"""FP8 reinforcement learning for LLMs on Megatron-Core, kept stable by calibrated clipping.

Importing the package imports neither torch nor Megatron: configuration must be checkable on a machine (or in a second)
that has neither at hand. Import what you need from its modules.

Public are the names, commands, settings and files that docs/api.md lists, among them `config.Config`, `config_file.load_config`,
`errors.UserError`, `algorithms` (`calibration.ClipCalibrator`, `statistics.RatioStatistics`, the losses and instruments),
`rewards.RewardSample`, `weights.stream.stream_hf` and `integrations.controller.ClipController`. They change with a minor version
(0.x), after one that warns. Everything else may change at any time.
"""

__version__ = "0.1.0"
