"""Reinforcement-learning maths on plain tensors: advantages, losses, calibration, instruments.

What: every algorithm of the project as functions from tensors to tensors. Nothing here imports
`torch.distributed`, Megatron-Core or TransformerEngine, so any framework can call it.

The layout is *flat and packed*. A batch is the concatenation of the tokens of many sequences (any subset, in
any order: a micro-batch) and every per-token tensor is 1-D of shape [T]:

- `sequence_ids` int64 [T]: index 0..N-1 of the token's sequence within this batch.
- `response_mask` bool [T]: True for the tokens that the policy generated. A mask, not a length, so that tool
  output inside a response can be left out. What lies outside it (even NaN or inf) influences nothing and gets
  a zero gradient.

Every loss is a weighted sum, `loss = (loss_weights * token_loss).sum()`, whose weights hold denominators
counted over the GLOBAL mini-batch (`aggregation.loss_weights`). Sums add up over micro-batches and ranks, so
the loss does not depend on packing, on gradient accumulation or on the number of data-parallel ranks.

Left out on purpose: re-exports. Import from the module that defines a name.
"""
