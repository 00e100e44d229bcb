"""The main job on pretrained BF16 weights whose FP32 masters are spread as in the middle of training.

    python -m examples.study.smollm2_train CONFIG [section.key=value ...]

A fresh run's masters are the BF16 weights themselves: each lies in the middle of what rounds to it, so that the first small updates
change no BF16 weight, while FP8 codes, made from the masters, do change. The BF16 ratios of such a run would be 1 and every clip
of FP8 a false one. So the masters are spread over their rounding intervals first (`diagnosis.between_boundaries`); BF16 weights, and
with them the sampler's, stay what they were. A resumed run has masters of its own.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

from megatron_calclip.config_file import load_config
from megatron_calclip.errors import UserError


def main(argv: Sequence[str]) -> None:
    """Train.

    Args:
        argv: configuration, overrides.

    Raises:
        SystemExit: for what a user can mend, in one line.
    """
    try:
        config = load_config(argv[0], list(argv[1:]))
        warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
        from megatron_calclip.learner import cpu, runtime

        cpu.install()  # before anything else imports Megatron
        from megatron_calclip.diagnosis_passes import read_masters, set_masters, with_spread_masters
        from megatron_calclip.trainer import Trainer
        from megatron_calclip.weights.load import HFSource

        trainer = Trainer(config, runtime.start(config))
        if trainer.step == 0:
            assert config.model.hf is not None
            spread = with_spread_masters(HFSource.from_folder(config.model.hf), seed=config.train.seed)
            set_masters(trainer.learner, read_masters(trainer.learner, spread))
        trainer.run()
        runtime.stop()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main(sys.argv[1:])
