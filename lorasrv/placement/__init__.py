"""Which of several replicas answers a request; the simulator and a router run the same objects. Torch-free."""
