"""Graph -> plan: order, lifetimes, and one arena for everything that does not outlive the step."""

from ttrain.plan.plan import Plan, build_plan

__all__ = ["Plan", "build_plan"]
