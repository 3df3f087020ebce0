"""The measures of task=eval, and the opening of models for it."""
