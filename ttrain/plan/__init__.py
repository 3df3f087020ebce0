"""Graph -> plan: order, lifetimes, and one arena for everything that does not outlive the step."""

from ttrain.plan.build import build_plan
from ttrain.plan.plan import Plan
