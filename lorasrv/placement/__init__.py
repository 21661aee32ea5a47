"""Choose which of several replicas answers a request; simulator and routers use the same objects. Torch-free."""
