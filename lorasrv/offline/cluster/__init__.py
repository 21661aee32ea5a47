"""Many simulated servers (`planner`) behind routers: placements, failures, one storage, prefill and decode apart."""
