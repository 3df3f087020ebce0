"""Optimizers, clipping and schedules: all that turns gradients into new parameters, recorded as ops."""
