"""The learner: forward and backward passes of the policy, its loss, and its optimizer step, on Megatron-Core."""
