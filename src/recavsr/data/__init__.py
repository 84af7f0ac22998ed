"""Training data: degradation, packs, clips, and the pool that feeds training."""
