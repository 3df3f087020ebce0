"""What a step will cost in time before it runs: a model of the Wormhole chip, and rates of this machine's kernels."""
