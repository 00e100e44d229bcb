"""FP8, real and emulated, behind one interface; the BF16 shadow pass."""
