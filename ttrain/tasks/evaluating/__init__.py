"""What task=eval measures, and how models are opened for it."""
