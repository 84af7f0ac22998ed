"""Training: the loop, losses, self-rollout, and the recipes of nano."""
