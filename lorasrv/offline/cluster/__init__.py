"""Many simulated servers (`planner`) behind routers: placements, failures, shared storage, prefill machines."""
