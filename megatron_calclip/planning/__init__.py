"""What a run needs, from its configuration alone: parameters, bytes, FLOPs, seconds. Builds nothing and needs no GPU."""
