"""Objectives: what a model learns from. Each says which fields a batch has, and how a loss follows from them."""
